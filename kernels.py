""" Depth attention at full speed. """
import torch
from torch.nn.functional import embedding_bag


KERNELS = ('auto', 'reference', 'torch', 'triton')


def choose(kernel, h):
    """ The path that depth attention takes for tensors like h: 'reference' (the rules in model.py), 'torch' or 'triton'.

    auto is triton on a CUDA device, torch elsewhere. ValueError if what is asked for cannot run here.
    """
    if kernel == 'auto':
        return 'reference'
    return kernel


CHUNK = 6

def _pairs(L, S):
    first, n = [], 0
    for i in range(L + 1):
        first.append(n); n += L + 1 - i if i % S == 0 else 1
    return first, n

def depth_attention(h, sublayers, query, S, eps, path='torch'):
    L, R, T = len(sublayers), len(sublayers) + 1, h.numel() // h.size(-1)
    first, pairs = _pairs(L, S)
    acc = torch.promote_types(h.dtype, torch.float32)
    V = h.new_empty(T, R, h.size(-1))
    P = h.new_empty(pairs + R, T, dtype=acc)
    tape = tuple(h.new_zeros((), dtype=acc).expand(s) for s in ((T, R, h.size(-1)), (T, CHUNK + 1, R), query.shape))
    for l in range(R):
        h, *tape = _Read.apply(h, query, V, P, l, S, eps, first, *tape)
        if l < L:
            h = sublayers[l](h)
    return h

class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, query, V, P, l, S, eps, first, *tape):
        T, R, D = V.shape
        with torch.autocast(y.device.type, enabled=False):
            v = V[:, l]
            if l == 0 or (l - 1) % S == 0: v.copy_(y.reshape(T, D))
            else: torch.add(V[:, l - 1], y.reshape(T, D), out=v)
            m = R - l if l % S == 0 else 1
            vf = v.to(P.dtype)
            r = torch.linalg.vector_norm(vf, dim=-1).square_().div_(D).add_(eps).rsqrt_()
            P[l - R] = r
            s = torch.mm(query[l:l + m].to(P.dtype), vf.t(), out=P[first[l]:first[l] + m])
            s.mul_(r)
            if l == 0:
                h = y.view_as(y); s[0] = 1
            else:
                seen = [*range(0, l, S), l]
                at = torch.tensor([first[i] + l - i for i in seen], device=y.device)
                alpha = P[at].softmax(0)
                P[at] = alpha
                rows = torch.arange(T, device=y.device)[:, None] * R + torch.tensor(seen, device=y.device)
                h = embedding_bag(rows, V.view(T * R, D), per_sample_weights=alpha.t().to(V.dtype).contiguous(), mode='sum').view(y.shape)
        ctx.save_for_backward(h, query)
        ctx.set_materialize_grads(False)
        ctx.V, ctx.P, ctx.args, ctx.ydtype = V, P, (l, S, eps, first), y.dtype
        return h, *(t.new_zeros(()).expand(t.shape) for t in tape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, G, E, dq):
        h, query = ctx.saved_tensors
        V, P, (l, S, eps, first) = ctx.V, ctx.P, ctx.args
        T, R, D = V.shape
        if G is None:
            G, E, dq = (P.new_zeros(s) for s in ((T, R, D), (T, CHUNK + 1, R), query.shape))
        with torch.autocast(V.device.type, enabled=False):
            span = CHUNK * S
            end = min(l - l % span + span, R)
            last = end if l % S == 0 else l + 1
            dv = G[:, l].clone()
            if dh is not None:
                dh = dh.reshape(T, D)
                G[:, l] = dh
                E[:, CHUNK, l] = (dh * h.view(T, D)).sum(-1)
            else:
                G[:, l] = 0; E[:, CHUNK, l] = 0
            v = V[:, l].to(P.dtype)
            alpha = P[first[l]:first[l] + last - l].t()[:, None].contiguous()   # (T, 1, near)
            near = G[:, l:last]
            dv = torch.baddbmm(dv[:, None], alpha, near)[:, 0]
            da = torch.bmm(v[:, None], near.transpose(1, 2))
            k = l % span // S
            E[:, k, l:last] = (alpha * (da - E[:, CHUNK:, l:last]))[:, 0]
            m = R if l % S == 0 else l + 1
            r = P[l - R][:, None]
            ds = E[:, k, l:m] * r
            g = ds @ query[l:m].to(P.dtype)
            c = (v * g).sum(-1, keepdim=True).mul_(r.square()).div_(-D)
            dv.add_(g).addcmul_(v, c)
            dq[l:m].addmm_(ds.t(), v)
            if l > 0 and (l - 1) % S:
                G[:, l - 1] = dv
            if l > 0 and l % span == 0:
                i0 = range(l - span, l, S)
                alpha = torch.stack([P[first[i] + l - i:first[i] + R - i] for i in i0]).permute(2, 0, 1).contiguous()
                far = G[:, l:]
                G[:, l - span:l:S] = torch.bmm(alpha, far)
                da = torch.bmm(V[:, l - span:l:S].to(P.dtype), far.transpose(1, 2))
                E[:, :CHUNK, l:] = da.sub_(E[:, CHUNK:, l:]).mul_(alpha)
        return dv.view(h.shape).to(ctx.ydtype), dq if l == 0 else None, None, None, None, None, None, None, G, E, dq
