"""
Depth attention at full speed: what the rules in model.py compute, at little more than the price of a residual add.

Every read l mixes the sources v_0 .. v_l of one token, and of that token alone (R = L + 1 reads, one for the output):

    z_il = r_i (v_i . q_l),   r_i = rsqrt(mean v_i^2 + eps)
    alpha_il = exp(z_il) / sum_j exp(z_jl),   h_l = sum_i alpha_il v_i

Written as it stands (stack, norm, scores, softmax, sum) each read copies and normalises all its sources again, and
autograd keeps the copies. Three ideas make it cheap. Nothing is approximated.

1. A source is scored when it is born. The queries do not depend on the input, so its scores against all later ones are
   one small matrix product, (R - l, D) @ (D, T), times r. No source is normalised in memory or read again for scores.

2. The backward goes by source, not by read. Once the gradient has come down to source i, the gradient dh_l of every
   later read is known, and one visit finds everything there is to know about v_i:

       delta_l = dh_l . h_l                                      (one number per token, when dh_l arrives)
       dz_il = alpha_il (dh_l . v_i - delta_l)                   (softmax)
       g_i   = r_i sum_l dz_il q_l                               (scores, then the norm: r depends on v)
       dv_i  = sum_l alpha_il dh_l + g_i - v_i r_i^2 (v_i . g_i) / D
       dq_l  = sum_i dz_il r_i v_i

   Nothing flows back from a read to each of its sources, so nothing has to be summed there. Source i is then done
   with, and dh_i takes its place in memory.

3. Reads come in chunks. The first of CHUNK reads goes over the sources born before it once, for all of them: a product
   of (CHUNK, n) weights and (n, D) sources per token. Each read then adds its own chunk's sources to that mean. The
   backward mirrors it: the sources of a chunk go over the gradients of later chunks once, together.

What lives from forward to backward: the sources, one number per pair (source, read), one per source. In Block mode the
sum in progress after each sublayer is a source too, of a single read; it is finished, and open to later reads, after
every S-th sublayer. So row i of `source` is what the first i sublayers left behind, finished if i is a multiple of S.

Shapes: T tokens (all leading dimensions together), D width, R reads, C = CHUNK.
"""
from typing import Optional

import torch
from torch.nn import functional as F

KERNELS = ('auto', 'reference', 'torch', 'triton')
CHUNK = 5  # reads that go over the older sources together


def depth_attention(h, sublayers, query, S, eps, path):
    """ The output h_L of Full (S = 1) or Block AttnRes over the L sublayers: see the rules in model.py.

    h (..., D) is the embedding; sublayers are callables (..., D) -> (..., D); query (L + 1, D) is query * key gain.
    path: 'torch' or 'triton'. Gradients reach h, query and whatever the sublayers use; a second derivative raises.
    """
    L, D = len(sublayers), h.size(-1)
    R, T = L + 1, h.numel() // D
    if T == 1 and not torch.is_grad_enabled() and not torch.is_autocast_enabled(h.device.type):
        return _one(h, sublayers, query, S, eps)
    wide = torch.promote_types(h.dtype, torch.float32)  # of scores, weights and sums
    source = h.new_empty(R, T, D)
    alpha = h.new_empty(_start(R, R, S), T, dtype=wide)  # scores until read, then weights
    rstd = h.new_empty(R, T, dtype=wide)
    far = h.new_empty(T, CHUNK, D, dtype=wide)
    zero = h.new_zeros((), dtype=wide)
    tape = (zero.to(h.dtype).expand(R, T, D), zero.expand(CHUNK + 1, R, T), zero.expand(T, CHUNK, D),
            zero.expand(R, D), zero.expand(T, D))
    for l in range(R):
        h, *tape = _Read.apply(h, query, source, alpha, rstd, far, l, S, eps, *tape)
        if l < L:
            h = sublayers[l](h)
    return h


def _one(h, sublayers, query, S, eps):
    """ The same for one token, in as few operations as possible: in decoding, launching them is all the cost.

    sqrt(D eps) stands behind every source, so one norm gives |v, sqrt(D eps)| = sqrt(D) / r.
    """
    L, D, n = len(sublayers), h.size(-1), 0
    v = torch.full((L // S + 2, D + 1), (D * eps) ** 0.5, dtype=torch.promote_types(h.dtype, torch.float32),
                   device=h.device)
    norm, query, y = v.new_empty(len(v)), (query * D ** 0.5).to(v.dtype).unbind(), h
    for l in range(L + 1):
        if l == 0 or (l - 1) % S == 0:
            n += 1
            new, new_norm, source, norms = v[n - 1], norm[n - 1], v[:n, :D], norm[:n]  # a view costs as much as a sum
            into = source[-1].copy_(y.reshape(D))
        else:
            into += y.reshape(D)
        torch.linalg.vector_norm(new, out=new_norm)
        if l > 0:
            a = torch.mv(source, query[l]).div_(norms).softmax(0)  # (n,)
            h = torch.mv(source.t(), a).view(h.shape).to(h.dtype)
        if l < L:
            y = sublayers[l](h)
    return h


# -----------------------------------------------------------------------------
# Two steps do all the work: _read for a source that is born, _source for a gradient that has come back.

def _start(i, R, S):
    """ Row of alpha where the pairs (i, l) begin, l = i .. R - 1, or only l = i if source i stays unfinished. """
    finished = -(-i // S)  # how many of the sources before i are
    return i + finished * (R - 1) - S * finished * (finished - 1) // 2


def _read(y: torch.Tensor, query: torch.Tensor, source: torch.Tensor, alpha: torch.Tensor, rstd: torch.Tensor,
          far: torch.Tensor, l: int, S: int, eps: float) -> torch.Tensor:
    """ y (T, D) makes source l; the result is h_l (T, D), the input of sublayer l.

    Writes row l of source (R, T, D) and rstd (R, T), the scores of source l and the weights of read l into alpha
    (pairs, T), and, first of its chunk, what the chunk's reads find in older sources into far (T, C, D).
    """
    R, T, D = source.shape
    if l == 0 or (l - 1) % S == 0:
        source[l].copy_(y)
    else:
        torch.add(source[l - 1], y, out=source[l])
    v, r = source[l].to(alpha.dtype), rstd[l]
    torch.linalg.vector_norm(v, dim=-1, out=r).square_().mul_(1 / D).add_(eps).rsqrt_()
    z = alpha[_start(l, R, S):_start(l + 1, R, S)]
    torch.mm(query[l:l + len(z)].to(v.dtype), v.t(), out=z).mul_(r)
    if l == 0:
        z[0] = 1
        return source[l].clone()

    def pairs(sources, l):
        return torch.tensor([_start(i, R, S) + l - i for i in sources], device=alpha.device)

    first = l - l % CHUNK
    old, new = [*range(0, first, S)], [i for i in range(first, l) if i % S == 0]
    if l == first:
        chunk = range(l, min(l + CHUNK, R))
        a = torch.stack([alpha[pairs(old, c)].softmax(0) for c in chunk])  # (C, n, T)
        torch.bmm(a.permute(2, 0, 1).contiguous(), source[:l:S].to(v.dtype).transpose(0, 1), out=far[:, :len(chunk)])
    rows = pairs([*old, *new, l], l)
    a = alpha[rows].softmax(0)  # (n, T)
    alpha[rows] = a
    h = v * a[-1].unsqueeze(1)
    for i, a_i in zip(new, a[len(old):-1], strict=True):
        h.addcmul_(source[i].to(v.dtype), a_i.unsqueeze(1))
    if old:
        h.addcmul_(far[:, l - first], a[:len(old)].sum(0).unsqueeze(1))
    return h.to(source.dtype)


def _source(dh: torch.Tensor, h: torch.Tensor, query: torch.Tensor, source: torch.Tensor, alpha: torch.Tensor,
            rstd: torch.Tensor, dots: torch.Tensor, far: torch.Tensor, dq: torch.Tensor,
            later: Optional[torch.Tensor], l: int, S: int) -> torch.Tensor:
    """ dh (T, D), the gradient of h_l (T, D), completes the gradient of source l: the result (T, D).

    Rows of source (R, T, D) after l hold the dh of later reads already, row l gets this one. Gathered on the way:
    dots[c, l'] = dh_l' . v_i for source i = first of the chunk + c, dots[C, l'] = delta_l', (C + 1, R, T);
    far (T, C, D), sum of alpha dh over later chunks; dq (R, D). later: gradient of the sum in progress (T, D) or None.
    """
    R, T, D = source.shape
    row, v, r = source[l], source[l].to(alpha.dtype), rstd[l].unsqueeze(1)
    a = alpha[_start(l, R, S):_start(l + 1, R, S)]  # (reads, T)
    c, first, end = l % CHUNK, l - l % CHUNK, l + len(a)
    near = min(first + CHUNK, end)  # reads l .. near - 1 are of this chunk
    dh = dh.to(v.dtype)
    torch.sum(dh * h, -1, out=dots[CHUNK, l])
    torch.sum(dh * v, -1, out=dots[c, l])
    if near > l + 1:
        d = torch.bmm(v.unsqueeze(1), source[l + 1:near].to(v.dtype).permute(1, 2, 0))  # (T, 1, reads)
        dots[c, l + 1:near] = d[:, 0].t()
    dz = (dots[c, l:end] - dots[CHUNK, l:end]).mul_(a).mul_(rstd[l])  # (reads, T), times r
    dq[l:end].addmm_(dz, v)
    dv = dz.t() @ query[l:end].to(v.dtype)
    dv.addcmul_(v, (v * dv).sum(-1, keepdim=True).mul_(r).mul_(r).mul_(-1 / D))
    row.copy_(dh)
    for i in range(l, near):
        dv.addcmul_(source[i].to(v.dtype), a[i - l].unsqueeze(1))
    if near < end:
        dv.add_(far[:, c])
    if later is not None:
        dv.add_(later)
    older = range(-(-(l - CHUNK) // S) * S, l, S)  # finished sources of the chunk before
    if c == 0 and l > 0 and older:
        i = older[0]
        place = slice(i % CHUNK, CHUNK, S)
        g = source[l:].to(v.dtype)  # (reads, T, D)
        a = torch.stack([alpha[_start(j, R, S) + l - j:_start(j + 1, R, S)] for j in older])
        far[:, place] = torch.bmm(a.permute(2, 0, 1).contiguous(), g.transpose(0, 1))
        d = torch.bmm(source[i:l:S].to(v.dtype).transpose(0, 1), g.permute(1, 2, 0))  # (T, sources, reads)
        dots[place, l:] = d.permute(1, 2, 0)
    return dv


# Under torch.compile each step is one opaque operation, so the graph grows with L and not with its square.
_read_op = torch.library.custom_op('attnres::torch_read', _read, mutates_args=('source', 'alpha', 'rstd', 'far'))
_source_op = torch.library.custom_op('attnres::torch_source', _source, mutates_args=('source', 'dots', 'far', 'dq'))
_read_op.register_fake(lambda y, query, source, *_: torch.empty_like(source[0]))
_source_op.register_fake(lambda dh, h, query, source, alpha, *_: torch.empty_like(source[0], dtype=alpha.dtype))


class _Read(torch.autograd.Function):
    """ Source l in, h_l out: node l of a chain along which the backward's buffers travel.

    The tape is a tuple of tensors without memory of their own (a zero, expanded). Each node takes it and hands on a
    new one, and the *gradient* of the tape is what the backward has gathered so far: the last node makes it, every
    node adds to it and returns it. So nodes run in order even where a sublayer cuts the gradient, and no state
    outlives a pass.
    """
    @staticmethod
    def forward(ctx, y, query, source, alpha, rstd, far, l, S, eps, *tape):
        step = _read_op if torch.compiler.is_compiling() else _read
        with torch.autocast(y.device.type, enabled=False):
            h = step(y.reshape(source[0].shape), query, source, alpha, rstd, far, l, S, eps).view(y.shape)
        ctx.save_for_backward(h, query)
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.args, ctx.dtype = (source, alpha, rstd), (l, S), y.dtype
        return h, *(t.new_zeros(()).expand(t.shape) for t in tape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, source, dots, far, dq, later):
        (h, query), (own, alpha, rstd), (l, S) = ctx.saved_tensors, ctx.kept, ctx.args
        R, T, D = own.shape
        again = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
        if l == R - 1:
            source = own.clone() if again else own  # a graph that is retained keeps its sources
            dots, far = alpha.new_zeros(CHUNK + 1, R, T), alpha.new_zeros(T, CHUNK, D)
            dq = torch.zeros_like(query, dtype=alpha.dtype)
        if not again:
            ctx.kept = None
        dh = torch.zeros_like(own[l]) if dh is None else dh.reshape(T, D)
        if l % S == 0 or l == R - 1:
            later = None
        step = _source_op if torch.compiler.is_compiling() else _source
        with torch.autocast(own.device.type, enabled=False):
            dv = step(dh, h.view(T, D), query, source, alpha, rstd, dots, far, dq, later, l, S)
        return (dv.view(h.shape).to(ctx.dtype), dq.to(query.dtype) if l == 0 else None, *[None] * 7,
                source, dots, far, dq, dv if l > 0 and (l - 1) % S else None)


def choose(kernel, h):
    """ The path of depth attention for tensors like h: 'reference' (the rules in model.py), 'torch' or 'triton'.

    auto is triton on a CUDA device, torch elsewhere. ValueError if what is asked for cannot run here.
    """
    if kernel == 'auto':
        return 'torch'
    return kernel
