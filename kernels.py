"""
Depth attention, fast: what the rules in model.py compute, without copying or normalising a source for every read.

Read l mixes the sources v_0 .. v_l of one token, and of that token alone (R = L + 1 reads, the last for the output),
by q_l, the pseudo-query times the key gain (w[l] in model.py):

    z_il = r_i (v_i . q_l),   r_i = rsqrt(mean v_i^2 + eps),   alpha_il = exp(z_il - lse_l),   h_l = sum_i alpha_il v_i

Written as it stands (stack, norm, scores, softmax, sum) each read copies and normalises all its sources again, and
autograd keeps the copies. The arithmetic is trifling; moving rows of D numbers is not, so cost is counted in u, one
(tokens, D) tensor read or written once. Three ideas save most of it. Nothing is approximated.

1. A source is scored when it is born, or while it passes by for its sum: the queries do not depend on the input. No
   source is ever normalised in memory.

2. The backward goes by source, not by read. Once the gradient has come down to source i, the gradient dh_l of every
   later read is known, and one visit finds everything there is to know about v_i:

       delta_l = dh_l . h_l                                                (one number per token, when dh_l arrives)
       dz_il   = alpha_il (dh_l . v_i - delta_l)                           (softmax)
       dv_i    = sum_l (alpha_il dh_l + dz_il r_i q_l) - v_i r_i^2 / D sum_l dz_il z_il
       dq_l    = sum_i dz_il r_i v_i

   Nothing flows back from a read to each of its sources, so nothing has to be summed there. How dh_l gets to source i:
   the nodes of autograd's graph hand on a *tape*, tensors without content whose gradients are what the backward has
   gathered so far. No state outlives a pass.

3. Reads come in chunks. The first of CHUNK reads passes over the older sources once, for all of them (phase 1). Each
   read then merges what was born since (phase 2): the chunk's own sources (Full) or the sum in progress (Block). One
   more source merged into a finished softmax is a sigmoid. The backward mirrors it.

Two implementations follow. on_torch runs anywhere: matrix products over whole tensors. on_triton runs on CUDA, with two
kernels. If you have never seen Triton: a kernel is a function that runs in thousands of copies, each with its own
program_id, in the forward one for each token, in the backward one for a run of tokens. tl.load fetches a row into
registers, arithmetic is elementwise, tl.sum adds a row up, tl.store writes it back. `tl.constexpr` is known when the
kernel is compiled, and so are the length of a tuple and whether an argument is None. No sum depends on an order left to
chance: the same bits every run.
"""
import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

KERNELS = ('auto', 'reference', 'torch', 'triton')
CHUNK = 5  # reads that go over the older sources together; on Triton in Block mode a multiple of S near it


def refusal(h):
    """ Why the Triton kernels cannot take tensors like h here; None if they can. """
    if triton is None:
        return 'the package triton is not installed'
    if not h.is_cuda and os.environ.get('TRITON_INTERPRET') != '1':
        return f'tensors are on {h.device.type}; it needs CUDA (or, slowly, TRITON_INTERPRET=1)'
    if h.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f'tensors are {h.dtype}; it takes float32, bfloat16 and float16'
    return None


def choose(kernel, h):
    """ The path of depth attention for tensors like h: 'reference' (the rules in model.py), 'torch' or 'triton'.

    auto is triton on CUDA where it can run, else torch. ValueError if what is asked for cannot run here.
    """
    if kernel == 'auto':
        return 'triton' if h.is_cuda and refusal(h) is None else 'torch'
    if kernel == 'triton' and (why := refusal(h)):
        raise ValueError(f'kernel={kernel!r}: cannot run here: {why}; auto picks one that can')
    return kernel


def depth_attention(h, sublayers, query, S, eps, path):
    """ The output of Full (S = 1) or Block AttnRes over the L sublayers: the same function as the rules in model.py.

    h (..., D) is the embedding; sublayers are callables (..., D) -> (..., D); query (L + 1, D) is query * key gain.
    path: 'torch' or 'triton'. Gradients reach h, query and whatever the sublayers use; a second derivative raises.
    """
    return {'torch': on_torch, 'triton': on_triton}[path](h, sublayers, query, S, eps)


# -----------------------------------------------------------------------------
# PyTorch, any device. What lives from forward to backward: the sources, a number per pair (source, read), one a source.
# In Block mode the sum in progress after each sublayer is a source too, of a single read; it is finished, and open to
# all later reads, after every S-th sublayer. So row i of `source` is what the first i sublayers left behind, finished
# if i is a multiple of S. T tokens (all leading dimensions together), D width, R reads, C = CHUNK.

def on_torch(h, sublayers, query, S, eps):
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
        h, *tape = _TorchRead.apply(h, query, source, alpha, rstd, far, l, S, eps, *tape)
        if l < L:
            h = sublayers[l](h)
    return h


def _one(h, sublayers, query, S, eps):
    """ The same for one token, in as few operations as possible: in decoding, launching them is all the cost.

    Row i of `long` is source v_i with sqrt(D eps) behind it, so its norm is sqrt(D) / r_i; query carries that sqrt(D).
    Every read is of all rows: those without a source yet score minus infinity, which costs less than a view.
    """
    L, D, shape, dtype = len(sublayers), h.size(-1), h.shape, h.dtype
    N, wide = 1 + -(-L // S), torch.promote_types(dtype, torch.float32)
    long = h.new_full((N, D + 1), (D * eps) ** 0.5, dtype=wide)
    v, norm, query, y, n = long[:, :D], h.new_ones(N, dtype=wide), (query.to(wide) * D ** 0.5).unbind(), h, -1
    each_long, each_v, each_norm, v_t = long.unbind(), v.view(N, *shape).unbind(), norm.unbind(), v.t()
    unborn = h.new_full((N, N), -torch.inf, dtype=wide).triu(1).unbind()
    for l in range(L + 1):
        if l == 0 or (l - 1) % S == 0:
            n += 1
            into = each_v[n].copy_(y)  # the newest source, or the sum in progress
        else:
            into += y
        torch.linalg.vector_norm(each_long[n], out=each_norm[n])
        if l > 0:  # read 0 sees the embedding alone: h stays
            a = torch.addmv(unborn[n], v, query[l]).div_(norm).softmax(0)  # (N,)
            h = torch.mv(v_t, a).view(shape)
            h = h if h.dtype == dtype else h.to(dtype)
        if l < L:
            y = sublayers[l](h)
    return h


# Two steps do all the work: _torch_read for a source that is born, _torch_source for a gradient that has come back.

def _start(i, R, S):
    """ Row of alpha where the pairs (i, l) begin, l = i .. R - 1, or only l = i if source i stays unfinished. """
    finished = -(-i // S)  # how many of the sources before i are
    return i + finished * (R - 1) - S * finished * (finished - 1) // 2


def _torch_read(y: Tensor, query: Tensor, source: Tensor, alpha: Tensor, rstd: Tensor,
                far: Tensor, l: int, S: int, eps: float) -> Tensor:
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
        return [_start(i, R, S) + l - i for i in sources]

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
        h.addcmul_(source[i], a_i.unsqueeze(1))
    if old:
        h.addcmul_(far[:, l - first], a[:len(old)].sum(0).unsqueeze(1))
    return h.to(source.dtype)


def _torch_source(dh: Tensor, h: Tensor, query: Tensor, source: Tensor, alpha: Tensor,
                  rstd: Tensor, dots: Tensor, far: Tensor, dq: Tensor, later: Tensor | None, l: int,
                  S: int) -> Tensor:
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
    d = torch.bmm(v.unsqueeze(1), source[l + 1:near].to(v.dtype).permute(1, 2, 0))  # (T, 1, reads)
    dots[c, l + 1:near] = d[:, 0].t()
    dz = (dots[c, l:end] - dots[CHUNK, l:end]).mul_(a).mul_(rstd[l])  # (reads, T), times r
    dq[l:end].addmm_(dz, v)
    dv = dz.t() @ query[l:end].to(v.dtype)
    dv.addcmul_(v, (v * dv).sum(-1, keepdim=True).mul_(r).mul_(r).mul_(-1 / D))
    row.copy_(dh)
    for i in range(l, near):
        dv.addcmul_(source[i], a[i - l].unsqueeze(1))
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
_torch_read_op = torch.library.custom_op('attnres::torch_read', _torch_read,
                                         mutates_args=('source', 'alpha', 'rstd', 'far'))
_torch_source_op = torch.library.custom_op('attnres::torch_source', _torch_source,
                                           mutates_args=('source', 'dots', 'far', 'dq'))
_torch_read_op.register_fake(lambda y, query, source, *_: torch.empty_like(source[0]))
_torch_source_op.register_fake(lambda dh, h, query, source, alpha, *_: torch.empty_like(dh, dtype=alpha.dtype))


class _TorchRead(torch.autograd.Function):
    """ Source l in, h_l out: node l of a chain. The last node makes the tape's gradients, every node adds to them.

    The tape is expanded zeros, so it has no memory of its own; and nodes run in order even where a sublayer cuts the
    gradient. In a pass whose graph is not retained, dh_l takes the place of source l.
    """
    @staticmethod
    def forward(ctx, y, query, source, alpha, rstd, far, l, S, eps, *tape):
        step = _torch_read_op if torch.compiler.is_compiling() else _torch_read
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
        step = _torch_source_op if torch.compiler.is_compiling() else _torch_source
        with torch.autocast(own.device.type, enabled=False):
            dv = step(dh, h.view(T, D), query, source, alpha, rstd, dots, far, dq, later, l, S)
        return (dv.view(h.shape).to(ctx.dtype), dq.to(query.dtype) if l == 0 else None, *[None] * 7,
                source, dots, far, dq, dv if l > 0 and (l - 1) % S else None)


# -----------------------------------------------------------------------------
# Triton, CUDA. `_read_kernel` passes over the sources once and keeps, per query, a running weighted sum; several
# queries may look on, and a mean found earlier joins like a source whose score is its lse. The sum in progress and the
# LayerNorm that follows are done in passing. `_source_kernel`: gradients of a few sources in one pass over all dh.

GROUP = 4           # backward: sources that share a pass over the gradients of later reads
PROGRAMS = 512      # backward: programs in a launch; each adds up the gradients of query, weight, bias over its rows
traffic = None      # set to a list, it collects (what, bytes read and written) of every launch


if triton is not None:
    @triton.jit
    def _pick(t, i):
        """ t[i] for an i known only at run time, where a tuple takes constants only; a few selects, so for short t """
        p = t[0]
        for k in tl.static_range(1, len(t)):
            p = tl.where(i == k, t[k], p)
        return p

    @triton.jit
    def _put(t, k: tl.constexpr, x):
        """ a copy of t with t[k] = x """
        return t[:k] + (x,) + t[k + 1:]

    @triton.jit
    def _row(p, where, mask):
        """ a row in float32, zero beyond D """
        return tl.load(p + where, mask=mask, other=0.).to(tl.float32)

    @triton.jit
    def _normed(x, mask, eps, D: tl.constexpr):
        """ (x - mean) / std and 1 / std """
        x = tl.where(mask, x - tl.sum(x, 0) / D, 0.)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        return x * rstd, rstd

    @triton.jit(do_not_specialize=["T", "n"], do_not_specialize_on_alignment=["mean_lse", "lse"])
    def _read_kernel(v, new, q, mean, mean_lse, weight, bias, total, h, lse, y, T, n, eps, norm_eps,
                     Q: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
        """ h[k] = mean of n sources, and of mean[k], by query k < Q;  total = v[n-1] + new;  y = LayerNorm(h[0]) """
        r, T, d = tl.program_id(0).to(tl.int64), tl.cast(T, tl.int64), tl.arange(0, TILE_D)
        mask, row = d < D, r * D + d                                # 64 bits: T * D may exceed 2^31
        m, s, a = (), (), ()                # per query: the score taken as zero, sum of exp(z - m), and of exp(z - m) v
        for k in tl.static_range(Q):
            m += (float("-inf") if mean is None else tl.load(mean_lse + k * T + r),)
            s += (0. if mean is None else 1.,)
            a += (tl.zeros([TILE_D], tl.float32) if mean is None else _row(mean[k], row, mask),)
        for b in tl.static_range(0, len(v), 8):
            for i in range(b, tl.minimum(b + 8, n)):
                x = _row(_pick(v[b:b + 8], i - b), row, mask)
                if new is not None:                                 # the last source grows, rounded as it is stored
                    last = d < tl.where(i == n - 1, D, 0)
                    x = (x + _row(new, row, last)).to(total.dtype.element_ty)
                    tl.store(total + row, x, mask=last)
                    x = x.to(tl.float32)
                rms = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
                for k in tl.static_range(Q):
                    z = tl.sum(_row(q, k * D + d, mask) * x, 0) * rms
                    if z - m[k] > 20.:                              # float32 reaches e^88: no need for every maximum
                        fade = tl.exp(m[k] - z)
                        m, s, a = _put(m, k, z), _put(s, k, s[k] * fade), _put(a, k, a[k] * fade)
                    w = tl.exp(z - m[k])
                    s, a = _put(s, k, s[k] + w), _put(a, k, a[k] + w * x)
        for k in tl.static_range(Q):
            tl.store(lse + k * T + r, m[k] + tl.log(s[k]))
            tl.store(h[k] + row, (a[k] / s[k]).to(h[k].dtype.element_ty), mask=mask)
        if y is not None:
            x = (a[0] / s[0]).to(y.dtype.element_ty).to(tl.float32)  # the norm sees h as it is stored
            x = _normed(x, mask, norm_eps, D)[0] * _row(weight, d, mask)
            if bias is not None:
                x += _row(bias, d, mask)
            tl.store(y + row, x.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _pairs(x, rms, g, t, q, dh, lse, delta, N: tl.constexpr):
        """ what one read says of N sources: dv and sum_l dz z so far, with its share; dz r """
        c = ()
        for i in tl.static_range(N):
            z = tl.sum(q * x[i], 0) * rms[i]
            alpha = tl.exp(z - lse)
            dz = alpha * (tl.sum(dh * x[i], 0) - delta)
            c += (dz * rms[i],)
            g, t = _put(g, i, g[i] + alpha * dh + c[i] * q), _put(t, i, t[i] + dz * z)
        return g, t, c

    @triton.jit(do_not_specialize=["T", "M", "ROWS"],
                do_not_specialize_on_alignment=["stats", "coef", "lse", "own_stats"])
    def _source_kernel(v, found, dv, q, dh, stats, coef, dy, h, lse, weight, own_dh, own_stats, sums, T, M, ROWS, eps,
                       norm_eps, N: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
        """
        dv[i] = found[i] + what M reads say of source i < N.   stats [M, 2, T]: lse, delta.   coef [N, M, T]: dz r.
        With dy, the event's own read comes first: own_dh from dy, then sums[program] = its dq, and dweight and dbias.
        Without lse that read had one source and returned it.
        """
        pid, T, d = tl.program_id(0).to(tl.int64), tl.cast(T, tl.int64), tl.arange(0, TILE_D)
        mask, zero = d < D, tl.zeros([TILE_D], tl.float32)
        one: tl.constexpr = 1 if dy is not None else 0              # rows of q before the later reads'
        dq, dw, db = zero, zero, zero
        for r in range(pid * ROWS, tl.minimum(pid * ROWS + ROWS, T)):
            row = r * D + d
            if dy is not None:                                      # dh of the event's own read
                dl, hl = _row(dy, row, mask), _row(h, row, mask)
                if weight is not None:                              # back through y = LayerNorm(h)
                    hat, rstd = _normed(hl, mask, norm_eps, D)
                    dw += dl * hat
                    db += dl
                    dl *= _row(weight, d, mask)
                    dl = tl.where(mask, rstd * (dl - tl.sum(dl, 0) / D - hat * (tl.sum(dl * hat, 0) / D)), 0.)
                    tl.store(own_dh + row, dl.to(own_dh.dtype.element_ty), mask=mask)
                    dl = dl.to(own_dh.dtype.element_ty).to(tl.float32)
                delta = tl.sum(dl * hl, 0)
            x, rms, g, t = (), (), (), ()                           # per source: v, r, dv and sum of dz z so far
            for i in tl.static_range(N):
                x += (_row(v[i], row, mask),)
                rms += (tl.rsqrt(tl.sum(x[i] * x[i], 0) / D + eps),)
                g += (zero if found is None else _row(found[i], row, mask),)
                t += (0.,)
            if lse is not None:
                own_lse = tl.load(lse + r)
                tl.store(own_stats + r, own_lse)
                tl.store(own_stats + T + r, delta)
                g, t, c = _pairs(x, rms, g, t, _row(q, d, mask), dl, own_lse, delta, N)
                for i in tl.static_range(N):
                    dq += c[i] * x[i]
            elif dy is not None:
                g = _put(g, 0, g[0] + dl)
            if dh is not None:
                for b in tl.static_range(0, len(dh), 8):
                    for l in range(b, tl.minimum(b + 8, M)):
                        ql, dl = _row(q, (l + one) * D + d, mask), _row(_pick(dh[b:b + 8], l - b), row, mask)
                        stat = stats + 2 * l * T + r
                        g, t, c = _pairs(x, rms, g, t, ql, dl, tl.load(stat), tl.load(stat + T), N)
                        for i in tl.static_range(N):
                            tl.store(coef + (i * M + l) * T + r, c[i])
            for i in tl.static_range(N):
                gi = g[i] - t[i] * rms[i] * rms[i] / D * x[i]
                tl.store(dv[i] + row, gi.to(dv[i].dtype.element_ty), mask=mask)
        if dy is not None:
            tl.store(sums + pid * 3 * D + d, dq, mask=mask)
            tl.store(sums + (pid * 3 + 1) * D + d, dw, mask=mask)
            tl.store(sums + (pid * 3 + 2) * D + d, db, mask=mask)


def _geometry(x):
    """ T tokens, tokens per program of the backward, what is compiled in; up to 1024 columns a warp: no barriers """
    T, D, tile = x.numel() // x.shape[-1], x.shape[-1], triton.next_power_of_2(x.shape[-1])
    return T, max(8, -(-T // PROGRAMS)), dict(D=D, TILE_D=tile, num_warps=max(1, tile // 1024))


def _launch(kernel, programs, *args, **compiled):
    """ None for what is empty; a tuple for a list, of length 1, 2, 4 or 8 n: few variants to compile """
    def given(a):
        if isinstance(a, list) and a:
            return (*a, *a[-1:] * (-len(a) % min(8, triton.next_power_of_2(len(a)))))
        return None if isinstance(a, list) or torch.is_tensor(a) and not a.numel() else a
    if not isinstance(args[0][0], FakeTensor):                      # torch.compile asks for shapes only
        with torch.cuda.device_of(args[0][0]):                      # Triton launches on the current device
            kernel[(programs,)](*map(given, args), **compiled)


def _op(function):
    """ a custom op, for torch.compile an opaque node whose outputs have the shapes that function itself allocates """
    op = torch.library.custom_op("attnres::" + function.__name__, function, mutates_args=())
    op.register_fake(function)
    return op


@_op
def read(v: list[Tensor], new: Tensor | None, q: Tensor, mean: list[Tensor], mean_lse: Tensor | None,
         weight: Tensor | None, bias: Tensor | None, eps: float, norm_eps: float) -> list[Tensor]:
    """ lse [Q, T], v[-1] + new, LayerNorm(h of the first query), h per query; empty what there is no input for """
    (T, _, compiled), x, Q = _geometry(v[0]), v[0], len(q)
    h, lse = [torch.empty_like(x) for _ in range(Q)], x.new_empty(Q, T, dtype=torch.float32)
    total, y = (x.new_empty(0 if t is None else x.shape) for t in (new, weight))
    _launch(_read_kernel, T, v, new, q, mean, mean_lse, weight, bias, total, h, lse, y, T, len(v), eps, norm_eps,
            Q=Q, **compiled)
    return [lse, total, y, *h]


@_op
def source(v: list[Tensor], found: list[Tensor], q: Tensor, dh: list[Tensor], stats: Tensor | None, dy: Tensor | None,
           h: Tensor | None, lse: Tensor | None, weight: Tensor | None, eps: float, norm_eps: float) -> list[Tensor]:
    """ coef, sums, then stats and dh of the event's own read, dv per source; empty what there is no input for """
    (T, rows, compiled), x, N, M = _geometry(v[0]), v[0], len(v), len(dh)
    programs = -(-T // rows)
    coef, sums, own_stats = (x.new_empty(shape, dtype=torch.float32) for shape in (
        (N, M, T), (programs * (dy is not None), 3, x.shape[-1]), (1 * (lse is not None), 2, T)))
    own_dh, dv = x.new_empty(0 if weight is None else x.shape), [torch.empty_like(x) for _ in v]
    _launch(_source_kernel, programs, v, found, dv, q, dh, stats, coef, dy, h, lse, weight, own_dh, own_stats,
            sums, T, M, rows, eps, norm_eps, N=N, **compiled)
    return [coef, sums, own_stats, own_dh, *dv]


@_op
def query_grad(coef: Tensor, v: list[Tensor]) -> Tensor:
    """ dq [M, D] = sum_i coef[i] [M, T] @ v_i [T, D], accumulated in float32 """
    dq = coef.new_zeros(coef.shape[1], v[0].shape[-1])
    for c, x in zip(coef, v, strict=True):
        x = x.view(-1, x.shape[-1])
        if x.is_cuda and x.dtype != torch.float32:                  # scaled, lest a coefficient underflow in half
            scale = c.abs().amax(1, keepdim=True).clamp_min(1e-30)
            dq += torch.mm((c / scale).to(x.dtype), x, out_dtype=torch.float32) * scale
        else:
            dq += c @ x.float()
    return dq


def _counted(op, *args):
    out = op(*args)
    if traffic is not None:
        flat = [t for a in (*args, out) for t in (a if isinstance(a, (list, tuple)) else [a]) if torch.is_tensor(t)]
        traffic.append((getattr(op, "_name", "sum"), sum(t.nbytes for t in {id(t): t for t in flat}.values())))
    return out


def _read(v, new, q, mean, mean_lse, weight, bias, *eps):
    """ lse, last source with new in it, y, *h: read in as many launches as q needs """
    if len(q) > CHUNK:
        lse, last, y, *h = _read(v, new, q[:CHUNK], mean, mean_lse, weight, bias, *eps)
        more_lse, _, _, *more = _read([*v[:-1], last], None, q[CHUNK:], mean, mean_lse, None, None, *eps)
        return torch.cat([lse, more_lse]), last, y, *h, *more
    lse, last, y, *h = _counted(read, v, new, q, mean, mean_lse, weight, bias, *eps)
    return lse, v[-1] if new is None else last, y, *h


class _Event(torch.autograd.Function):
    """
    The birth of a source and read l after it, as autograd sees them; forward only hands on what is computed already.

    Backward needs dh of every later read, and autograd itself carries them. Beside its result an event returns a tape
    for each later read, tensors without content that go to the next event. Their *gradients* are those dh: an event
    receives them, puts its own in front and returns the list to the event before. It returns its source, too: whoever
    takes that later returns what it found of its gradient. No state outlives the graph.
    """
    @staticmethod
    def forward(ctx, plan, out, h, lse, own, query, weight, bias, y, *tensors):
        l, later, pending, carry, n, *_ = ctx.plan = plan           # tensors: n sources, then the tapes: stats, dh
        ctx.save_for_backward(h, lse, query, weight, bias, own, *tensors[carry:n])
        ctx.set_materialize_grads(False)
        tapes = tensors[n + 2:] if l else [h.new_empty(()).expand(h.shape) for _ in range(later)]
        return out, own, query.new_empty(()).expand(later, 2, h.numel() // h.shape[-1]), *tapes

    @staticmethod
    def backward(ctx, dy, found, stats, *dh):
        l, later, pending, carry, n, *eps = ctx.plan
        h, lse, query, weight, bias, *v = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy.contiguous()
        dv = [] if found is None else [found.contiguous(), *map(torch.zeros_like, v[1:])]
        part = query[l:], [t for t in dh[:pending] if t is not None], stats
        coef, sums, own_stats, own_dh, *dv = _counted(source, v, dv, *part, dy, h, lse, weight, *eps)
        sums = _counted(torch.sum, sums, 0)                         # over programs: dq of the own read, dweight, dbias
        dq = torch.cat([sums[:1], _counted(query_grad, coef, v)]) if coef.numel() else sums[:1]
        dq = torch.nn.functional.pad(dq, (0, 0, l, later + 1 - len(dq)))
        dweight, dbias = (None if t is None else sums[i].to(t.dtype) for i, t in ((1, weight), (2, bias)))
        grads = None, None, None, None, None, dq, dweight, dbias, dv[0]
        if l == 0:
            return grads
        stats = query.new_zeros(later, *own_stats.shape[1:]) if stats is None else stats
        return *grads, *dv[:carry], *dv[1:], torch.cat([own_stats, stats]), dy if weight is None else own_dh, *dh


def _group(k, slots):
    """ which older sources event slots[k] serves besides its own; how many later reads its own has yet to see """
    last, none = k // GROUP * GROUP + GROUP - 1, slice(0, 0)
    if last >= len(slots) or slots[-1] - slots[last] < 3:           # too few reads to share
        return none, slots[-1] - slots[k]
    return (slice(last + 1 - GROUP, k), slots[-1] - slots[k]) if k == last else (none, slots[last] - 1 - slots[k])


def on_triton(h, sublayers, query, S, eps):
    """ See depth_attention. Where a sublayer has .norm (a LayerNorm) and .body, the norm is computed with the read. """
    L = len(sublayers)
    if (why := refusal(h)) or not 0 < h.shape[-1] <= 2**14 or not h.numel():
        raise ValueError(f"kernel='triton': cannot take h {tuple(h.shape)}: " + (why or 'must be (..., D), D to 16384'))
    if query.shape != (L + 1, h.shape[-1]) or query.device != h.device or not 1 <= S <= max(L, 1):
        raise ValueError(f'query {tuple(query.shape)} on {query.device}, S={S}: must be {(L + 1, h.shape[-1])} on '
                         f'{h.device}, and S from 1 (Full) to {L}')
    query, grad = query.float().contiguous(), torch.is_grad_enabled()
    slots = [min(k * S, L) for k in range(-(-L // S) + 1)]          # the read at which each source is finished
    y, v, tapes, means, lses, shared, end = h, (), (), (), None, 0, 0
    for l in range(L + 1):
        norm = getattr(sublayers[l], "norm", None) if l < L else None
        weight, bias, norm_eps = (None, None, 0.) if norm is None else (norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            data, new, carry = [t.detach() for t in v], y.detach().contiguous(), l > 0 and (l - 1) % S != 0
            if not carry:                                           # y is a new source, else it joins the last one
                data, new = [*data, new], None
            first, queries, mean, mean_lse, h, lse = 0, 1, [], None, data[0].detach(), None
            if l == end:                                            # a chunk of reads begins: phase 1, if that saves u
                start, c = l, min(max(S, CHUNK // S * S), L + 1 - l)
                end, shared = l + c, len(data) if len(data) * (c - 1) > 2 * c - 1 else 0
                queries = c if shared else 1
            elif shared:                                            # phase 2
                first, mean, mean_lse = shared, means[l - start:l - start + 1], lses[l - start:l - start + 1]
            if l > 0 or weight is not None:
                found = _read(data[first:], new, query[l:l + queries], mean, mean_lse, weight, bias, eps, norm_eps)
                new_lse, data[-1], y_norm, *hs = found
                if queries > 1:
                    means, lses = hs, new_lse
            if l > 0:                                               # read 0 has one source and returns it
                h, lse = hs[0], new_lse[:1]
            out = h.view_as(h) if weight is None else y_norm
        if grad:
            others, pending = v[-1:] if carry else (), 0
            if l in slots:
                older, pending = _group(slots.index(l), slots)
                others += v[older]
            plan = l, L - l, pending, carry, len(others), eps, norm_eps
            out, data[-1], *tapes = _Event.apply(plan, out, h, lse, data[-1], query, weight, bias, y, *others, *tapes)
        v = (*v[:len(data) - 1], data[-1])
        if l < L:
            y = sublayers[l](out) if weight is None else sublayers[l].body(out)
            if y.shape != out.shape or y.dtype != out.dtype or y.device != out.device:
                raise ValueError(f'sublayer {l} returned {y.dtype} {tuple(y.shape)} on {y.device}: must be like its '
                                 f'input, {out.dtype} {tuple(out.shape)} on {out.device}')
    return out
