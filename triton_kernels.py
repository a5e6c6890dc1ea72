"""
The arithmetic of kernels.py in two Triton kernels, for CUDA: a read, and a visit in the backward.

If you have never seen Triton: a kernel is a function that runs once for each token, each time as a
program of its own. tl.load fetches a row into registers, arithmetic is elementwise, tl.sum adds a
row up and tl.store writes it back. A `tl.constexpr` is known when the kernel is compiled, and so is
whether an argument is None. Sums are float32, and none depends on an order left to chance: every
run gives the same bits. The equations and names are those of kernels.py.
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


# do_not_specialize: else Triton compiles a kernel anew where one of these is 1 or a multiple of 16.

if triton is not None:
    @triton.jit
    def _load(p, where, mask):
        """ A row in float32, zero beyond D. """
        return tl.load(p + where, mask=mask, other=0.).to(tl.float32)

    @triton.jit(do_not_specialize=['T', 'row', 'base', 'n', 'l'])
    def _read_kernel(v, y, others, w, h, lse, T, row, base, n, l, eps,
                     D: tl.constexpr, TILE: tl.constexpr):
        """ Writes v[row] = y, plus v[base] if base >= 0. Reads it and n other rows into h.

        v (rows, T, D); y, h (T, D); others (n,): their row numbers; w (R, D); lse (T,).
        The softmax takes one pass: when a larger score comes, the sums so far are scaled down.
        """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask = d < D
        here = token * D + d  # where this token's row is
        T = tl.cast(T, tl.int64)  # rows * T * D may exceed 2^31
        w_l = _load(w + l * D, d, mask)
        x = _load(y, here, mask)
        if base >= 0:
            x += _load(v + base * T * D, here, mask)
        stored = x.to(v.dtype.element_ty)
        tl.store(v + row * T * D + here, stored, mask=mask)
        h_sum = stored.to(tl.float32)  # sum of exp(z_i - top) v_i, v_i as it is stored
        top = tl.sum(w_l * h_sum, 0) * tl.rsqrt(tl.sum(h_sum * h_sum, 0) / D + eps)
        total = 1.  # sum of exp(z_i - top)
        for i in range(n):
            v_i = _load(v + tl.load(others + i).to(tl.int64) * T * D, here, mask)
            z_i = tl.sum(w_l * v_i, 0) * tl.rsqrt(tl.sum(v_i * v_i, 0) / D + eps)
            new_top = tl.maximum(top, z_i)
            fade, weight = tl.exp(top - new_top), tl.exp(z_i - new_top)
            h_sum = h_sum * fade + weight * v_i
            total = total * fade + weight
            top = new_top
        tl.store(lse + token, top + tl.log(total))
        tl.store(h + here, (h_sum / total).to(h.dtype.element_ty), mask=mask)

    @triton.jit
    def _contribution(v_i, r, w_l, dh_l, lse, delta):
        """ What read l adds to the gradient of a row v_i: its part of dv_i, then dz z and dz r. """
        z = tl.sum(w_l * v_i, 0) * r
        alpha = tl.exp(z - lse)
        dz = alpha * (tl.sum(dh_l * v_i, 0) - delta)
        return alpha * dh_l + dz * r * w_l, dz * z, dz * r

    @triton.jit(do_not_specialize=['T', 'R', 'l', 'last'])
    def _visit_kernel(v_row, w, dh_l, h, lse, carry, dh, stats, dz_r, dv, T, R, l, last, eps,
                      D: tl.constexpr, TILE: tl.constexpr):
        """ dv, the gradient of the row, from reads l .. last - 1, and the dz r of each.

        v_row, dh_l, h, carry, dv (T, D); w (R, D); lse (T,); dz_r (last - l, T).
        Read l is the one of the step that wrote the row. Its dh_l, lse and delta are written into
        dh (R, T, D) and stats (2, R, T; lse, then delta), the tape of kernels.py. Those of later
        reads are there already.
        """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask = d < D
        here = token * D + d
        T = tl.cast(T, tl.int64)
        v_i = _load(v_row, here, mask)
        r = tl.rsqrt(tl.sum(v_i * v_i, 0) / D + eps)
        dh_k = _load(dh_l, here, mask)
        lse_k = tl.load(lse + token)
        delta_k = tl.sum(dh_k * _load(h, here, mask), 0)
        tl.store(dh + l * T * D + here, dh_k.to(dh.dtype.element_ty), mask=mask)
        tl.store(stats + l * T + token, lse_k)
        tl.store(stats + (R + l) * T + token, delta_k)
        w_k = _load(w + l * D, d, mask)
        dv_i, dz_z, dz_r_k = _contribution(v_i, r, w_k, dh_k, lse_k, delta_k)
        tl.store(dz_r + token, dz_r_k)
        for k in range(l + 1, last):
            dh_k = _load(dh + k * T * D, here, mask)
            lse_k = tl.load(stats + k * T + token)
            delta_k = tl.load(stats + (R + k) * T + token)
            w_k = _load(w + k * D, d, mask)
            dv_part, dz_z_part, dz_r_k = _contribution(v_i, r, w_k, dh_k, lse_k, delta_k)
            dv_i += dv_part
            dz_z += dz_z_part
            tl.store(dz_r + (k - l) * T + token, dz_r_k)
        dv_i -= dz_z * r * r / D * v_i
        if carry is not None:
            dv_i += _load(carry, here, mask)
        tl.store(dv + here, dv_i.to(dv.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=4096)
def _table(rows, device):
    """ Row numbers as a tensor on the device, kept: a rule asks for the same in every step. """
    return torch.tensor(rows or (0,), dtype=torch.int32, device=device)  # empty has no address


def _launch(kernel, moved, x, *args):
    """ Runs a program for each token of x (T, D). In all it moves `moved` tensors like x. """
    D = x.size(-1)
    tile = triton.next_power_of_2(D)
    warps = max(1, tile // 1024)  # few threads for each row: sums over a row are what takes time
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
    moved = len(others) + (3 if base < 0 else 4)  # y, base and others in; the row and h out
    _launch(_read_kernel, moved, h, v, y.contiguous(), _table(others, v.device), w, h, lse, len(h),
            row, base, len(others), l, eps)
    return h, lse


def visit(v_row, dh_l, h, lse, w, carry, dh, stats, dw, l, last, eps):
    """ kernels._backward for such a step, whose row v_row (T, D) is: dv (T, D). Adds to dw. """
    T = len(v_row)
    dv, dz_r = torch.empty_like(v_row), w.new_empty(last - l, T)
    moved = last - l + (4 if carry is None else 5)  # row, h, carry, last - l of dh in; dh, dv out
    _launch(_visit_kernel, moved, v_row, v_row, w, dh_l.contiguous(), h, lse, carry, dh, stats,
            dz_r, dv, T, len(w), l, last, eps)
    if v_row.dtype == torch.bfloat16:  # as precise as autocast's gradient of a weight, and no copy
        dw[l:last] += dz_r.bfloat16() @ v_row
    else:
        dw[l:last] += dz_r @ v_row.float()
    if traffic is not None:
        traffic.append(('dw', v_row.nbytes))
    return dv
