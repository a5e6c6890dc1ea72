"""
The sources at full speed: what model.Sources computes, for any rule that drives them.

Read l mixes the present sources v_i of one token, and of that token alone, by w_l = pseudo-query * key gain:

    z_il = r_i (v_i . w_l),   r_i = 1 / rms(v_i),   alpha_il = exp(z_il - lse_l),   h_l = sum_i alpha_il v_i

The arithmetic is trifling. What costs is moving rows of D numbers, and plain autograd moves them too often: for every
source it adds up, in memory, what each of its reads has to say. Here the backward goes by source and not by read. When
it reaches source i, the gradient dh_l of every later read is known, and one visit finds all there is to know:

    delta_l = dh_l . h_l                                            one number for a token, known when dh_l arrives
    dz_il   = alpha_il (dh_l . v_i - delta_l)                       back through the softmax
    dv_i    = sum_l (alpha_il dh_l + dz_il r_i w_l) - v_i r_i^2 / D sum_l dz_il z_il
    dw_l    = sum_i dz_il r_i v_i

How does dh_l get to source i? The steps of a forward pass form a chain in autograd's graph, and a *tape* runs through
it: tensors that are empty in the forward, and whose gradients are what the backward has gathered so far.

PyTorch does the arithmetic on any device, two Triton kernels do it on CUDA. T is the number of tokens (all leading
dimensions together), D the width, R the number of reads. Where a row or a read is missing its number is -1.
"""
import functools
import os
import warnings

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

KERNELS = ('auto', 'reference', 'torch', 'triton')


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


def choose(kernel, h):
    """ The path that runs for tensors like h: 'reference' (model.Sources), 'torch' or 'triton'.

    auto is triton on CUDA where it can run, else torch. ValueError if what is asked for cannot run here.
    """
    if kernel == 'auto':
        return 'triton' if h.is_cuda and refusal(h) is None else 'torch'
    if kernel == 'triton' and (why := refusal(h)):
        raise ValueError(f'kernel={kernel!r}: cannot run here: {why}; auto picks one that can')
    return kernel


def sources(kernel, plain, w, eps, h):
    """ Empty sources that run where tensors like h do; w (R, D): pseudo-query * key gain of every read. """
    path = choose(kernel, h)
    if path == 'reference':
        return plain(w, eps)
    exact = not torch.is_grad_enabled() and not torch.is_autocast_enabled(h.device.type)
    if path == 'torch' and exact and h.numel() == h.size(-1):
        return OneToken(w, eps)
    return Sources(w, eps, path)


def for_sources(kernel, plain):
    """ kernel, or 'reference' where these kernels compute something else than `plain`, a class like model.Sources.

    Whoever edits model.Sources, or gives a rule sources of its own, gets what they wrote.
    """
    if kernel == 'reference' or same_function(plain):
        return kernel
    if kernel != 'auto':
        raise ValueError(f'kernel={kernel!r}: must be auto or reference: {plain.__qualname__} was changed, and the '
                         'kernels compute what it was')
    warnings.warn(f'{plain.__qualname__} computes something else than the kernels: kernel=reference runs', stacklevel=2)
    return 'reference'


@functools.cache
def same_function(plain):
    """ Whether the sources here compute what those of the class `plain` do: a small example is tried. """
    numbers = torch.arange(48, dtype=torch.float64, device='cpu').sin().view(8, 2, 3)

    def example(empty_sources):
        w, *ys = (t.clone().requires_grad_() for t in (numbers[:3].reshape(6, 3), *numbers[2:]))
        v, reads = empty_sources(w), []
        for l, y in enumerate(ys):
            if l in (2, 3):
                v.add(y)
            else:
                v.push(y)
            reads.append(v.read(l))
        loss = sum((h * h.detach().cos()).sum() for h in reads)
        return [*reads, *torch.autograd.grad(loss, [w, *ys])]

    with torch.enable_grad():
        ours, theirs = example(lambda w: Sources(w, 0.1, 'torch')), example(lambda w: plain(w, 0.1))
    return all(map(torch.allclose, ours, theirs))


# -----------------------------------------------------------------------------
# The chain. One step of it writes a row and takes the read that follows; either may be missing.

class Sources:
    """ The sources of model.Sources. Reads come in ascending order, each once.

    A row is one state of a source: push writes a row and so does add, because the sum before it is needed in the
    backward pass. `live` lists the rows that a read sees, the oldest first.
    """
    def __init__(self, w, eps, path):
        self.w, self.eps, self.triton = w, eps, path == 'triton'  # w (R, D)
        self.live, self.n_rows, self.next_read, self.on_read = [], 0, 0, None
        self.waiting = None  # the newest row before it is written: (y, the row that y is added to or -1)
        self.ending = []  # rows that no later read sees
        self.handles = {}  # of each row: a tensor whose gradient will tell when the row ended

    def __len__(self):
        return len(self.live)

    def push(self, y):
        self._new_row(y, -1)
        self.live.append(self.n_rows - 1)

    def add(self, y):
        self._new_row(y, self.live[-1])
        self.ending.append(self.live[-1])
        self.live[-1] = self.n_rows - 1

    def drop(self, i):
        self._write()
        self.ending.append(self.live.pop(i))

    def weights(self, l):
        self._write()
        with torch.no_grad(), torch.autocast(self.v.device.type, enabled=False):
            z = torch.cat([_score(self.v[row], self.w[l:l + 1], self.eps)[0] for row in self.live])
            return z.softmax(0).view(-1, *self.shape[:-1])

    def read(self, l):
        if not self.next_read <= l < len(self.w):
            raise ValueError(f'read({l}): must be from {self.next_read} to {len(self.w) - 1}: the kernels take reads '
                             'in ascending order, each once; kernel=reference takes any')
        if self.on_read:
            self.on_read(l, self.weights(l))
        h = self._step(l)
        self.next_read = l + 1
        return h

    def _new_row(self, y, base):
        self._write()
        if self.n_rows == 0:
            self._allocate(y)
        elif self.n_rows == len(self.v):  # more rows than a rule usually needs
            self.v = torch.cat([self.v, torch.empty_like(self.v)])
            self.z = torch.cat([self.z, torch.empty_like(self.z)])
        self.waiting = y, base
        self.n_rows += 1

    def _allocate(self, h):
        R, D = self.w.shape
        T = h.numel() // D
        self.shape = h.shape
        self.v = h.new_empty(R, T, D)  # the rows
        self.z = self.w.new_empty(0 if self.triton else R, R, T)  # [row, read]: scores, for PyTorch
        zero = self.w.new_zeros(())
        self.tape = (zero.to(h.dtype).expand(R, T, D), zero.expand(2, R, T), zero.expand(R, D),
                     zero.to(h.dtype).expand(T, D), torch.zeros(()))

    def _write(self):
        if self.waiting:
            self._step(-1)

    def _step(self, l):
        y, base = self.waiting or (None, -1)
        row = -1 if y is None else self.n_rows - 1
        ended = [self.handles[r] for r in self.ending]
        plan = row, base, l, self.next_read, tuple(self.live), len(ended), self.eps, self.triton, self.shape
        h, self.handles[row], *self.tape = _Step.apply(plan, self.v, self.z, y, self.w, *ended, *self.tape)
        self.waiting, self.ending = None, []
        return h


class _Step(torch.autograd.Function):
    """ Writes y (..., D) into a row of v (rows, T, D) and returns h_l (..., D).

    The tape is: dh (R, T, D); lse and delta of every read (2, R, T); dw (R, D) so far; the gradient that the newest row
    has from the row after it, which is itself + y; how many of the last reads take no part in this backward pass.
    Numbers that are gradients mean nothing at zero, since autograd may put zeros in place of what is not there.
    """
    @staticmethod
    def forward(ctx, plan, v, z, y, w, *handles_and_tape):
        row, base, l, first, live, n_ended, eps, use_triton, shape = plan
        run = _forward_op if torch.compiler.is_compiling() else _forward
        flat = None if y is None else y.reshape(v[0].shape)
        h, lse = run(v, z, flat, w, live, row, base, l, eps, use_triton)
        ctx.save_for_backward(h, lse, w)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.v, ctx.y_dtype = plan, v, v.dtype if y is None else y.dtype
        tape = [t.detach() for t in handles_and_tape[n_ended:]]
        return None if l < 0 else h.view(shape), torch.zeros(()), *tape

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh_l, missed, dh, stats, dw, carry, skipped):
        (h, lse, w), v = ctx.saved_tensors, ctx.v
        row, base, l, first, live, n_ended, eps, use_triton, shape = ctx.plan
        R, T, D = len(w), *v[0].shape
        if not (torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()):
            ctx.v = None
        if dh is None:  # this backward pass begins here
            dh, stats, dw = v.new_empty(R, T, D), w.new_empty(2, R, T), torch.zeros_like(w)
            skipped = torch.tensor(float(R - max(first, l + 1)))
        if l >= 0:
            dh_l = torch.zeros_like(h) if dh_l is None else dh_l.reshape(T, D)
        run = _backward_op if torch.compiler.is_compiling() else _backward
        with torch.autocast(v.device.type, enabled=False):
            dv = run(v, dh_l, h, lse, w, carry, missed, skipped, dh, stats, dw, row, l, first, eps, use_triton)
        dy = None
        if row >= 0:
            dy = dv.view(shape).to(ctx.y_dtype)
            carry = None if base < 0 else dv
        ended = torch.tensor(float(R - first))  # so many reads came after the rows that ended here
        return None, None, None, dy, dw if row == 0 else None, *[ended] * n_ended, dh, stats, dw, carry, skipped


def _forward(v: Tensor, z: Tensor, y: Tensor | None, w: Tensor, live: list[int], row: int, base: int, l: int,
             eps: float, use_triton: bool) -> tuple[Tensor, Tensor]:
    """ Writes y, plus row `base`, into `row` of v. Returns h_l (T, D) and its lse (T,). """
    if use_triton and row >= 0 and l >= 0:
        return _triton_read(v, y, w, live, row, base, l, eps)
    if row >= 0:
        if base < 0:
            v[row].copy_(y)
        else:
            torch.add(v[base], y, out=v[row])
        if not use_triton:  # the queries do not depend on the input: one product scores a row for all reads
            z[row] = _score(v[row], w, eps)[0]
    if l < 0:
        return v.new_empty(0), w.new_empty(0)
    scores = torch.cat([_score(v[i], w[l:l + 1], eps)[0] for i in live]) if use_triton else z[live, l]
    return _torch_read(v, scores, live)


def _backward(v: Tensor, dh_l: Tensor | None, h: Tensor, lse: Tensor, w: Tensor, carry: Tensor | None,
              missed: Tensor | None, skipped: Tensor, dh: Tensor, stats: Tensor, dw: Tensor, row: int, l: int,
              first: int, eps: float, use_triton: bool) -> Tensor:
    """ Puts dh_l on the tape. Returns the gradient of the row (T, D) from the reads that saw it, and adds to dw. """
    last = len(w) - max(int(skipped), 0 if missed is None else int(missed))
    if use_triton and row >= 0 and l >= 0:
        return _triton_visit(v[row], dh_l, h, lse, w, carry, dh, stats, dw, l, last, eps)
    if l >= 0:
        dh[l].copy_(dh_l)
        stats[0, l].copy_(lse)
        torch.sum(dh_l * h, -1, dtype=w.dtype, out=stats[1, l])
    if row < 0:
        return h.new_empty(0)
    reads = slice(first, last)
    return _torch_visit(v[row], w[reads], carry, dh[reads], *stats[:, reads], dw[reads], eps)


# Under torch.compile each of the two is one opaque operation, so the graph grows with L and not with its square.
_forward_op = torch.library.custom_op('attnres::forward', _forward, mutates_args=('v', 'z'))
_backward_op = torch.library.custom_op('attnres::backward', _backward, mutates_args=('dh', 'stats', 'dw'))
_forward_op.register_fake(lambda v, z, y, w, *_: (torch.empty_like(v[0]), w.new_empty(v.size(1))))
_backward_op.register_fake(lambda v, *_: torch.empty_like(v[0]))


# -----------------------------------------------------------------------------
# The arithmetic in PyTorch.

def _score(v, w, eps):
    """ z (M, T) = w . RMSNorm(v) of M reads, and 1 / rms(v) (T,), from v (T, D) and w (M, D). """
    v = v.to(w.dtype)
    rstd = torch.linalg.vector_norm(v, dim=-1).square_().mul_(1 / v.size(-1)).add_(eps).rsqrt_()
    return torch.mm(w, v.t()).mul_(rstd), rstd


def _torch_read(v, scores, live):
    """ h (T, D), the mean of the n rows `live` weighted by the softmax of scores (n, T), and its lse (T,). """
    lse = scores.logsumexp(0)
    alpha = (scores - lse).exp_().unsqueeze(-1)
    h = v[live[0]] * alpha[0]
    for a, i in zip(alpha[1:], live[1:], strict=True):
        h.addcmul_(v[i], a)
    return h.to(v.dtype), lse


def _torch_visit(v, w, carry, dh, lse, delta, dw, eps):
    """ The gradient of a row v (T, D) that M reads saw: w, dw (M, D), dh (M, T, D), lse, delta (M, T). Adds to dw. """
    dtype, v = v.dtype, v.to(w.dtype)
    z, rstd = _score(v, w, eps)
    alpha = z.sub_(lse).exp_()
    dz_r = torch.empty_like(alpha)
    for i, g in enumerate(dh):
        torch.sum(g * v, -1, out=dz_r[i])
    dz_r.sub_(delta).mul_(alpha).mul_(rstd)
    dw.addmm_(dz_r, v)
    dv = dz_r.t() @ w
    dv.addcmul_(v, (v * dv).sum(-1).mul_(rstd).mul_(rstd).mul_(-1 / v.size(-1)).unsqueeze(1))
    for a, g in zip(alpha, dh, strict=True):
        dv.addcmul_(g, a.unsqueeze(1))
    return (dv if carry is None else dv.add_(carry)).to(dtype)


class OneToken:
    """ The sources of one token without gradient, as in decoding, where the number of operations is what costs.

    Row i of `long` is v_i and behind it sqrt(D eps), so its length is sqrt(D) / r_i; w carries that sqrt(D). A read goes
    over all rows, since a view of some would be one more operation: rows without a source score minus infinity.
    """
    def __init__(self, w, eps):
        R, D = w.shape
        self.w, self.n, self.on_read = (w * D ** 0.5).unbind(), 0, None
        self._keep(w.new_full((R, D + 1), (D * eps) ** 0.5))

    def _keep(self, long):
        v, length, n = long[:, :-1], torch.linalg.vector_norm(long, dim=1), len(long)
        self.long, self.v, self.v_t, self.length = long, v, v.t(), length
        self.rows = [*zip(v.unbind(), long.unbind(), length.unbind(), strict=True)]
        self.missing = long.new_full((n, n), -torch.inf).triu(1).unbind()

    def __len__(self):
        return self.n

    def push(self, y):
        if self.n == len(self.rows):  # more sources than a rule usually has
            self._keep(self.long.repeat(2, 1))
        self.shape, self.dtype, self.n = y.shape, y.dtype, self.n + 1
        v, long, length = self.rows[self.n - 1]
        v.copy_(y.view(-1))
        torch.linalg.vector_norm(long, out=length)

    def add(self, y):
        v, long, length = self.rows[self.n - 1]
        v += y.view(-1)
        torch.linalg.vector_norm(long, out=length)

    def drop(self, i):
        self.n -= 1
        self._keep(torch.cat([self.long[:i], self.long[i + 1:], self.long[i:i + 1]]))

    def _alpha(self, l):
        return torch.addmv(self.missing[self.n - 1], self.v, self.w[l]).div_(self.length).softmax(0)

    def weights(self, l):
        return self._alpha(l)[:self.n].view(-1, *(1 for _ in self.shape[:-1]))

    def read(self, l):
        if self.on_read:
            self.on_read(l, self.weights(l))
        h = torch.mv(self.v_t, self._alpha(l)).view(self.shape)
        return h if h.dtype == self.dtype else h.to(self.dtype)


# -----------------------------------------------------------------------------
# The arithmetic in Triton, on CUDA. If you have never seen Triton: a kernel is a function that runs once for each
# token, each time as a program of its own. tl.load fetches a row into registers, arithmetic is elementwise, tl.sum adds
# a row up and tl.store writes it back. A `tl.constexpr` is known when the kernel is compiled, and so is whether an
# argument is None. Sums are float32, and none depends on an order left to chance: the same bits every run.

traffic = None  # set to a list, it collects (kernel, bytes read and written) of every launch

if triton is not None:
    @triton.jit
    def _load(p, where, mask):
        """ A row in float32, zero beyond D. """
        return tl.load(p + where, mask=mask, other=0.).to(tl.float32)

    @triton.jit(do_not_specialize=['T', 'row', 'base', 'n', 'l'])
    def _read_kernel(v, y, others, w, h, lse, T, row, base, n, l, eps, D: tl.constexpr, TILE: tl.constexpr):
        """ v[row] = y, plus v[base] if that is not -1. h = the softmax-weighted mean of it and of n other rows. """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask, here, T = d < D, token * D + d, tl.cast(T, tl.int64)
        q = _load(w + l * D, d, mask)
        x = _load(y, here, mask)
        if base >= 0:
            x += _load(v + base * T * D, here, mask)
        stored = x.to(v.dtype.element_ty)
        tl.store(v + row * T * D + here, stored, mask=mask)
        a = stored.to(tl.float32)  # sum of exp(z - m) v, where m is the largest score so far
        m = tl.sum(q * a, 0) * tl.rsqrt(tl.sum(a * a, 0) / D + eps)
        s = 1.  # sum of exp(z - m)
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
        """ What one read says of a source x: its share of dv, of sum dz z, and dz r. """
        z = tl.sum(q * x, 0) * r
        alpha = tl.exp(z - lse)
        dz = alpha * (tl.sum(dh * x, 0) - delta)
        return alpha * dh + dz * r * q, dz * z, dz * r

    @triton.jit(do_not_specialize=['T', 'R', 'l', 'last'])
    def _visit_kernel(v, w, dh_l, h, lse, carry, dh, stats, coef, dv, T, R, l, last, eps,
                      D: tl.constexpr, TILE: tl.constexpr):
        """ dv = the gradient of the row v from reads l .. last - 1. coef [read, T] = dz r, of which dw is made.

        Read l is the row's own. Its gradient dh_l, lse and delta go on the tape, where those of the others are:
        dh [R, T, D] and stats [lse or delta, R, T].
        """
        token, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
        mask, here, T = d < D, token * D + d, tl.cast(T, tl.int64)
        x, g = _load(v, here, mask), _load(dh_l, here, mask)
        r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        own_lse, delta = tl.load(lse + token), tl.sum(g * _load(h, here, mask), 0)
        tl.store(dh + l * T * D + here, g.to(dh.dtype.element_ty), mask=mask)
        tl.store(stats + l * T + token, own_lse)
        tl.store(stats + (R + l) * T + token, delta)
        g, t, c = _contribution(x, r, _load(w + l * D, d, mask), g, own_lse, delta)  # t: sum of dz z
        tl.store(coef + token, c)
        for i in range(l + 1, last):
            g_i, t_i, c = _contribution(x, r, _load(w + i * D, d, mask), _load(dh + i * T * D, here, mask),
                                        tl.load(stats + i * T + token), tl.load(stats + (R + i) * T + token))
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
    """ One program for each token of x (T, D); `moved` counts the rows of D that it reads and writes. """
    tile = triton.next_power_of_2(x.size(-1))
    warps = max(1, tile // 1024)  # up to 1024 columns a warp: sums within a warp need no barrier
    try:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            kernel[(len(x),)](*args, D=x.size(-1), TILE=tile, num_warps=warps)
    except Exception as e:  # of Triton's compiler, its driver or the GPU
        fault = f'{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ""}'
        raise RuntimeError(f'kernel=triton failed on {x.device} ({fault}); kernel=torch does without it') from e
    if traffic is not None:
        traffic.append((kernel.__name__, moved * x.nbytes))


def _triton_read(v, y, w, live, row, base, l, eps):
    """ See _forward. """
    h, lse = torch.empty_like(v[0]), w.new_empty(v.size(1))
    others = tuple(i for i in live if i != row)
    moved = len(others) + 3 + (base >= 0)
    _launch(_read_kernel, moved, h, v, y.contiguous(), _table(others, v.device), w, h, lse, len(h), row, base,
            len(others), l, eps)
    return h, lse


def _triton_visit(v, dh_l, h, lse, w, carry, dh, stats, dw, l, last, eps):
    """ See _backward; the row v (T, D) is the one of read l. """
    dv, coef = torch.empty_like(v), w.new_empty(last - l, len(v))
    moved = last - l + 4 + (carry is not None)
    _launch(_visit_kernel, moved, v, v, w, dh_l.contiguous(), h, lse, carry, dh, stats, coef, dv, len(v), len(w), l,
            last, eps)
    if v.dtype == torch.bfloat16:  # as autocast does with the gradient of every weight
        dw[l:last] += coef.bfloat16() @ v
    else:
        dw[l:last] += coef @ v.float()
    return dv
