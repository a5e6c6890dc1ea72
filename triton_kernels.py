"""
The arithmetic of kernels.py in two Triton kernels, for CUDA: a read, and a visit in the backward.

If you have never seen Triton: a kernel is a function that runs once for each token, each time as a
program of its own. tl.load fetches a row into registers, arithmetic is elementwise, tl.sum adds a
row up and tl.store writes it back. A `tl.constexpr` is known when the kernel is compiled, and so is
whether an argument is None. Sums are float32, and none depends on an order left to chance: every
run gives the same bits. The equations and the names are those of kernels.py.
"""
import functools
import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

traffic = None  # set to a list, it collects (kernel, bytes read and written) of every launch


def refusal(h):
    """ Why the Triton kernels cannot take tensors like h here; None if they can. """
    if triton is None:
        return 'the package triton is not installed'
    if not h.is_cuda and os.environ.get('TRITON_INTERPRET') != '1':
        return f'tensors are on {h.device.type}; it needs CUDA (or, slowly, TRITON_INTERPRET=1)'
    if h.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f'tensors are {h.dtype}; it takes float32, bfloat16 and float16'
    if h.is_cuda and torch.cuda.get_device_capability(h.device) < (7, 5):
        return 'the GPU is too old; it needs compute capability 7.5'
    return None


if triton is not None:
    @triton.jit
    def _load(p, where, mask):
        """ A row in float32, zero beyond D. """
        return tl.load(p + where, mask=mask, other=0.).to(tl.float32)

    @triton.jit(do_not_specialize=['T', 'row', 'base', 'n', 'l'])
    def _read_kernel(v, y, others, w, h, lse, T, row, base, n, l, eps,
                     D: tl.constexpr, TILE: tl.constexpr):
        """ Writes v[row] = y, plus v[base] if base >= 0. Reads it and n other rows into h. """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask, here, T = d < D, token * D + d, tl.cast(T, tl.int64)
        q = _load(w + l * D, d, mask)
        x = _load(y, here, mask)
        if base >= 0:
            x += _load(v + base * T * D, here, mask)
        stored = x.to(v.dtype.element_ty)
        tl.store(v + row * T * D + here, stored, mask=mask)
        a = stored.to(tl.float32)
        m = tl.sum(q * a, 0) * tl.rsqrt(tl.sum(a * a, 0) / D + eps)  # the largest score so far
        s = 1.  # the sum of exp(z - m); a is that of exp(z - m) v
        for i in range(n):
            x = _load(v + tl.load(others + i).to(tl.int64) * T * D, here, mask)
            z = tl.sum(q * x, 0) * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            top = tl.maximum(m, z)
            fade, weight = tl.exp(m - top), tl.exp(z - top)
            m, s, a = top, s * fade + weight, a * fade + weight * x
        tl.store(lse + token, m + tl.log(s))
        tl.store(h + here, (a / s).to(h.dtype.element_ty), mask=mask)

    @triton.jit
    def _contribution(x, r, q, dh, lse, delta):
        """ What one read says of a row x: its share of dv, its dz z and its dz r. """
        z = tl.sum(q * x, 0) * r
        alpha = tl.exp(z - lse)
        dz = alpha * (tl.sum(dh * x, 0) - delta)
        return alpha * dh + dz * r * q, dz * z, dz * r

    @triton.jit(do_not_specialize=['T', 'R', 'l', 'last'])
    def _visit_kernel(v, w, dh_l, h, lse, carry, dh, stats, coef, dv, T, R, l, last, eps,
                      D: tl.constexpr, TILE: tl.constexpr):
        """ dv, the gradient of a row v from reads l .. last - 1, and coef [read, T] = dz r.

        Read l is the row's own. Its gradient dh_l, lse and delta go on the tape, dh [R, T, D] and
        stats [lse or delta, R, T], where those of the later reads are already.
        """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask, here, T = d < D, token * D + d, tl.cast(T, tl.int64)
        x, g = _load(v, here, mask), _load(dh_l, here, mask)
        r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        own_lse, own_delta = tl.load(lse + token), tl.sum(g * _load(h, here, mask), 0)
        tl.store(dh + l * T * D + here, g.to(dh.dtype.element_ty), mask=mask)
        tl.store(stats + l * T + token, own_lse)
        tl.store(stats + (R + l) * T + token, own_delta)
        q = _load(w + l * D, d, mask)
        g, t, c = _contribution(x, r, q, g, own_lse, own_delta)  # t becomes the sum of dz z
        tl.store(coef + token, c)
        for i in range(l + 1, last):
            q, dh_i = _load(w + i * D, d, mask), _load(dh + i * T * D, here, mask)
            lse_i, delta_i = tl.load(stats + i * T + token), tl.load(stats + (R + i) * T + token)
            g_i, t_i, c = _contribution(x, r, q, dh_i, lse_i, delta_i)
            g, t = g + g_i, t + t_i
            tl.store(coef + (i - l) * T + token, c)
        g -= t * r * r / D * x
        if carry is not None:
            g += _load(carry, here, mask)
        tl.store(dv + here, g.to(dv.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=4096)
def _table(rows, device):
    """ The numbers of some rows, on the device. A rule asks for the same ones in every step. """
    return torch.tensor(rows or (0,), dtype=torch.int32, device=device)


def _launch(kernel, moved, x, *args):
    """ Runs a program for each token of x (T, D). In all it moves `moved` tensors like x. """
    D = x.size(-1)
    tile = triton.next_power_of_2(D)
    warps = max(1, tile // 1024)  # a warp takes up to 1024 columns: its sums need no barrier
    try:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            kernel[(len(x),)](*args, D=D, TILE=tile, num_warps=warps)
    except Exception as e:  # of Triton's compiler, of its driver or of the GPU
        fault = ' '.join(f'{type(e).__name__}: {e}'.split())[:200]
        raise RuntimeError(f'kernel=triton failed on {x.device} ({fault}); '
                           'kernel=torch does without it') from e
    if traffic is not None:
        traffic.append((kernel.__name__, moved * x.nbytes))


def read(v, y, w, live, row, base, l, eps):
    """ kernels._forward for a step with a row and a read: h (T, D) and lse (T,). """
    h, lse = torch.empty_like(v[0]), w.new_empty(v.size(1))
    others = tuple(i for i in live if i != row)
    moved = len(others) + 3 + (base >= 0)
    _launch(_read_kernel, moved, h, v, y.contiguous(), _table(others, v.device), w, h, lse, len(h),
            row, base, len(others), l, eps)
    return h, lse


def visit(v, dh_l, h, lse, w, carry, dh, stats, dw, l, last, eps):
    """ kernels._backward for such a step, v (T, D) being its row: dv (T, D). Adds to dw. """
    dv, coef = torch.empty_like(v), w.new_empty(last - l, len(v))
    moved = last - l + 4 + (carry is not None)
    _launch(_visit_kernel, moved, v, v, w, dh_l.contiguous(), h, lse, carry, dh, stats, coef, dv,
            len(v), len(w), l, last, eps)
    if v.dtype == torch.bfloat16:  # as autocast computes the gradient of every weight
        dw[l:last] += coef.bfloat16() @ v
    else:
        dw[l:last] += coef @ v.float()
    return dv
