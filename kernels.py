"""
The sources at full speed: what model.Sources computes, for any rule that drives them.

Read l mixes the present sources v_i of one token by w_l = pseudo-query * key gain:

    z_il = r_i (v_i . w_l),   r_i = 1 / rms(v_i)
    alpha_il = exp(z_il - lse_l),   lse_l = log sum_i exp(z_il)
    h_l = sum_i alpha_il v_i

The arithmetic is trifling. What costs is moving rows of D numbers, and plain autograd moves too
many: for every source it adds up, in memory, what each of its reads has to say. Here the backward
goes by source and not by read. When it reaches source i, the gradient dh_l of every later read is
known, and one visit finds all there is to know:

    delta_l = dh_l . h_l                                    one number for a token
    dz_il   = alpha_il (dh_l . v_i - delta_l)               back through the softmax
    dv_i    = sum_l (alpha_il dh_l + dz_il r_i w_l) - v_i r_i^2 / D sum_l dz_il z_il
    dw_l    = sum_i dz_il r_i v_i

How does dh_l get to source i? The steps of a forward pass form a chain in autograd's graph, and a
*tape* runs through it: tensors without content in the forward, whose gradients are what the
backward has gathered so far.

PyTorch does the arithmetic below, on any device; triton_kernels.py does it on CUDA. T is the number
of tokens (all leading dimensions together), D the width, R the number of reads.
"""
import functools
import warnings

import torch
from torch import Tensor

import triton_kernels

KERNELS = ('auto', 'reference', 'torch', 'triton')
NONE = -1  # in place of the number of a row or a read: there is none


def choose(kernel, h):
    """ What runs for tensors like h: 'reference' (model.Sources), 'torch' or 'triton'.

    auto is triton on CUDA where it can run, else torch. ValueError if the kernel cannot run here.
    """
    if kernel == 'auto':
        return 'triton' if h.is_cuda and triton_kernels.refusal(h) is None else 'torch'
    if kernel == 'triton' and (why := triton_kernels.refusal(h)):
        raise ValueError(f'kernel={kernel!r}: cannot run here: {why}; auto picks one that can')
    return kernel


def sources(kernel, plain, w, eps, h):
    """ New sources for tensors like h. w (R, D): pseudo-query * key gain of each read. """
    path = choose(kernel, h)
    if path == 'reference':
        return plain(w, eps)
    decoding = h.numel() == h.size(-1) and not torch.is_grad_enabled()
    if path == 'torch' and decoding and not torch.is_autocast_enabled(h.device.type):
        return OneToken(w, eps)
    return Sources(w, eps, path)


def for_sources(kernel, plain):
    """ kernel, or 'reference' if the class `plain` computes something else than the kernels here.

    So whoever edits model.Sources, or gives a rule sources of its own, gets what they wrote.
    """
    if kernel == 'reference' or same_function(plain):
        return kernel
    name = plain.__qualname__
    if kernel != 'auto':
        raise ValueError(f'kernel={kernel!r}: must be auto or reference, because {name} computes '
                         'something else than the kernels do')
    warnings.warn(f'{name} computes something else than the kernels do: kernel=reference runs',
                  stacklevel=2)
    return 'reference'


def same_function(plain):
    """ Whether sources of the class `plain` compute what those here do.

    A subclass is meant to be different. A class with verbs of its own needs its own objects.
    """
    verbs = {name for name in vars(plain) if not name.startswith('_')}
    if plain.__bases__ != (object,) or not verbs <= {*dir(Sources), 'score'}:
        return False
    return example_agrees(plain, *filter(callable, vars(plain).values()))


@functools.cache
def example_agrees(plain, *functions):
    """ The same, found out by an example: anew if one of the functions of `plain` was replaced. """
    R, D = 12, 3
    numbers = torch.arange(R * (2 * D + D), dtype=torch.float64, device='cpu').sin()

    def example(new_sources):
        w = numbers[:R * D].view(R, D).clone().requires_grad_()
        ys = [y.clone().requires_grad_() for y in numbers[R * D:].view(R, 1, 2, D)]
        v, out = new_sources(w, 0.1), []
        for l, y in enumerate(ys):
            if l in (2, 3):
                v.add(y)
            else:
                v.push(y)
            if l == 9:
                v.drop(1)
            out += [v.weights(l).detach(), v.read(l)]
        loss = sum((h * h.detach().cos()).sum() for h in out[1::2])
        return [*out, *torch.autograd.grad(loss, [w, *ys])]

    with torch.enable_grad():
        ours, theirs = example(functools.partial(Sources, path='torch')), example(plain)
    pairs = zip(ours, theirs, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs)


# -----------------------------------------------------------------------------
# The chain. A step of it writes a row and takes the read that follows. Either may be missing.

class Sources:
    """ The sources of model.Sources. Reads come in ascending order, each once.

    A row is one state of a source. push writes a row, and so does add, because the backward pass
    still needs the sum as it was before. `live` lists the rows that a read sees, the oldest first.
    """
    def __init__(self, w, eps, path):
        self.w, self.eps, self.triton = w, eps, path == 'triton'
        self.live, self.n_rows, self.next_read, self.on_read = [], 0, 0, None
        self.waiting = None  # a row that is not written yet: (y, the row that y is added to)
        self.ended = []  # rows that no read sees from now on
        self.handles = {}  # row -> two tensors, whose gradients will tell what came after the row

    def __len__(self):
        return len(self.live)

    def push(self, y):
        self._new_row(y, NONE)
        self.live.append(self.n_rows - 1)

    def add(self, y):
        self._new_row(y, self.live[-1])
        self.ended.append(self.live[-1])
        self.live[-1] = self.n_rows - 1

    def drop(self, i):
        self._write()
        self.ended.append(self.live.pop(i))

    def weights(self, l):
        self._write()
        with torch.no_grad(), torch.autocast(self.v.device.type, enabled=False):
            scores = torch.cat([_score(self.v[i], self.w[l:l + 1], self.eps)[0] for i in self.live])
            return scores.softmax(0).view(-1, *self.shape[:-1])

    def read(self, l):
        most = len(self.w) - 1
        if not self.next_read <= l <= most:
            raise ValueError(f'read({l}): must be from {self.next_read} to {most}: the kernels '
                             'take reads in ascending order, each once; kernel=reference takes any')
        h = self._step(l)
        self.next_read = l + 1
        if self.on_read:
            self.on_read(l, self.weights(l))
        return h

    def _new_row(self, y, base):
        self._write()
        if self.n_rows == 0:
            self._allocate(y)
        elif y.shape != self.shape:
            raise ValueError(f'a source of shape {tuple(y.shape)}: must be {tuple(self.shape)}, '
                             'like the first one')
        elif self.n_rows == len(self.v):  # more rows than a rule usually needs
            self.v = torch.cat([self.v, torch.empty_like(self.v)])
            self.scores = torch.cat([self.scores, torch.empty_like(self.scores)])
        self.waiting = y, base
        self.n_rows += 1

    def _allocate(self, h):
        R, D = self.w.shape
        T = h.numel() // D
        self.shape = h.shape
        self.v = h.new_empty(R, T, D)
        self.scores = self.w.new_empty(0 if self.triton else R, R, T)  # [row, read], for PyTorch
        zero, wide_zero = h.new_zeros(()), self.w.new_zeros(())
        self.tape = (zero.expand(R, T, D), wide_zero.expand(2, R, T), wide_zero.expand(R, D),
                     torch.zeros(()))

    def _write(self):
        if self.waiting:
            self._step(NONE)

    def _step(self, l):
        y, base = self.waiting or (None, NONE)
        row = NONE if y is None else self.n_rows - 1
        base_carry = None if base == NONE else self.handles[base][1]
        ended = [self.handles[i][0] for i in self.ended]
        plan = (row, base, l, self.next_read, tuple(self.live), len(ended), self.eps, self.triton,
                self.shape)
        h, missed, carry, *self.tape = _Step.apply(plan, self.v, self.scores, y, self.w, base_carry,
                                                   *ended, *self.tape)
        self.handles[row] = missed, carry
        self.waiting, self.ended = None, []
        return h


class _Step(torch.autograd.Function):
    """ Writes y (..., D) as a row of v (rows, T, D) and returns h_l (..., D).

    The gradients of the tape, from the last step to the first:
        dh (R, T, D)        of the reads so far
        stats (2, R, T)     lse and delta of these reads
        dw (R, D)           the sum so far
        skipped ()          how many of the last reads take no part in this backward pass
    The gradients of a row's two handles, from the steps that came after it:
        missed ()           how many reads did not see the row because it had ended
        carry (T, D)        the gradient of the row that was made from it by adding to it
    Each of these is 0 where nothing is known, since autograd may turn no gradient into zeros.
    """
    @staticmethod
    def forward(ctx, plan, v, scores, y, w, base_carry, *ended_and_tape):
        row, base, l, first, live, n_ended, eps, use_triton, shape = plan
        run = _forward_op if torch.compiler.is_compiling() else _forward
        y_flat = None if y is None else y.reshape(v[0].shape)
        with torch.autocast(v.device.type, enabled=False):
            h, lse = run(v, scores, y_flat, w, live, row, base, l, eps, use_triton)
        ctx.save_for_backward(h, lse, w)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.v, ctx.y_dtype = plan, v, v.dtype if y is None else y.dtype
        missed, carry = torch.zeros(()), v.new_zeros(()).expand(v[0].shape)
        tape = [t.detach() for t in ended_and_tape[n_ended:]]
        return None if l == NONE else h.view(shape), missed, carry, *tape

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh_l, missed, carry, dh, stats, dw, skipped):
        (h, lse, w), v = ctx.saved_tensors, ctx.v
        row, base, l, first, live, n_ended, eps, use_triton, shape = ctx.plan
        R, T, D = len(w), *v[0].shape
        compiling = torch.compiler.is_compiling()
        if not (compiling or torch._C._autograd._get_current_graph_task_keep_graph()):
            ctx.v = None  # the graph is not retained: the rows may go
        if dh is None:  # this backward pass begins here
            dh, stats, dw = v.new_empty(R, T, D), w.new_empty(2, R, T), torch.zeros_like(w)
            skipped = torch.tensor(float(R - max(first, l + 1)))
        if l != NONE:
            dh_l = torch.zeros_like(h) if dh_l is None else dh_l.reshape(T, D)
        run = _backward_op if compiling else _backward
        with torch.autocast(v.device.type, enabled=False):
            dv = run(v, dh_l, h, lse, w, carry, missed, skipped, dh, stats, dw, row, l, first, eps,
                     use_triton)
        dy = None if row == NONE else dv.view(shape).to(ctx.y_dtype)
        whole_dw = dw if row == 0 else None
        base_carry = None if base == NONE else dv
        ended = [torch.tensor(float(R - first))] * n_ended
        return None, None, None, dy, whole_dw, base_carry, *ended, dh, stats, dw, skipped


def _forward(v: Tensor, scores: Tensor, y: Tensor | None, w: Tensor, live: list[int], row: int,
             base: int, l: int, eps: float, use_triton: bool) -> tuple[Tensor, Tensor]:
    """ Writes y, plus row `base`, into `row` of v. Returns h_l (T, D) and its lse (T,). """
    if use_triton and row != NONE and l != NONE:
        return triton_kernels.read(v, y, w, live, row, base, l, eps)
    if row != NONE:
        if base == NONE:
            v[row].copy_(y)
        else:
            torch.add(v[base], y, out=v[row])
        if not use_triton:  # queries do not depend on the input: one product serves all reads
            scores[row] = _score(v[row], w, eps)[0]
    if l == NONE:
        return v.new_empty(0), w.new_empty(0)
    if use_triton:  # a read without a new row is rare
        return _torch_read(v, torch.cat([_score(v[i], w[l:l + 1], eps)[0] for i in live]), live)
    return _torch_read(v, scores[live, l], live)


def _backward(v: Tensor, dh_l: Tensor | None, h: Tensor, lse: Tensor, w: Tensor,
              carry: Tensor | None, missed: Tensor | None, skipped: Tensor, dh: Tensor,
              stats: Tensor, dw: Tensor, row: int, l: int, first: int, eps: float,
              use_triton: bool) -> Tensor:
    """ Puts dh_l on the tape. Returns the gradient of the row, (T, D), and adds its part to dw. """
    last = len(w) - max(int(skipped), 0 if missed is None else int(missed))
    if l > first:  # reads that were left out
        dh[first:l] = stats[1, first:l] = 0
        stats[0, first:l] = torch.inf
    if use_triton and row != NONE and l != NONE:
        return triton_kernels.visit(v[row], dh_l, h, lse, w, carry, dh, stats, dw, l, last,
                                    eps)
    if l != NONE:
        dh[l].copy_(dh_l)
        stats[0, l].copy_(lse)
        torch.sum(dh_l * h, -1, dtype=w.dtype, out=stats[1, l])
    if row == NONE:
        return h.new_empty(0)
    reads = slice(first, last)  # those that saw the row
    return _torch_visit(v[row], w[reads], carry, dh[reads], *stats[:, reads], dw[reads], eps)


# torch.compile sees each of the two as one operation, so its graph grows with L, not with L^2.
_forward_op = torch.library.custom_op('attnres::forward', _forward, mutates_args=('v', 'scores'))
_backward_op = torch.library.custom_op('attnres::backward', _backward,
                                       mutates_args=('dh', 'stats', 'dw'))


@_forward_op.register_fake
def _forward_shapes(v, scores, y, w, *_):
    return torch.empty_like(v[0]), w.new_empty(v.size(1))


@_backward_op.register_fake
def _backward_shape(v, *_):
    return torch.empty_like(v[0])


# -----------------------------------------------------------------------------
# The arithmetic in PyTorch.

def _score(v, w, eps):
    """ w . RMSNorm(v) of M reads (M, T), and 1 / rms(v) (T,), from v (T, D) and w (M, D). """
    v = v.to(w.dtype)
    r = torch.linalg.vector_norm(v, dim=-1).square_().mul_(1 / v.size(-1)).add_(eps).rsqrt_()
    return torch.mm(w, v.t()).mul_(r), r


def _torch_read(v, scores, live):
    """ The mean of the rows `live`, (T, D), by the softmax of scores (n, T), and its lse (T,). """
    lse = scores.logsumexp(0)
    alpha = (scores - lse).exp_().unsqueeze(-1)
    h = v[live[0]] * alpha[0]
    for a, i in zip(alpha[1:], live[1:], strict=True):
        h.addcmul_(v[i], a)
    return h.to(v.dtype), lse


def _torch_visit(v, w, carry, dh, lse, delta, dw, eps):
    """ The gradient of a row v (T, D), seen by M reads: w, dw (M, D), dh (M, T, D), lse (M, T). """
    dtype, v = v.dtype, v.to(w.dtype)
    z, r = _score(v, w, eps)
    alpha = z.sub_(lse).exp_()
    dz_r = torch.empty_like(alpha)  # dz times r
    for i, g in enumerate(dh):
        torch.sum(g * v, -1, out=dz_r[i])
    dz_r.sub_(delta).mul_(alpha).mul_(r)
    dw.addmm_(dz_r, v)
    dv = dz_r.t() @ w
    through_norm = (v * dv).sum(-1).mul_(r).mul_(r).mul_(-1 / v.size(-1))
    dv.addcmul_(v, through_norm.unsqueeze(1))
    for a, g in zip(alpha, dh, strict=True):
        dv.addcmul_(g, a.unsqueeze(1))
    return (dv if carry is None else dv.add_(carry)).to(dtype)


class OneToken:
    """ The sources of one token without gradient: in decoding, each operation costs the same.

    Row i of `long` is v_i and behind it sqrt(D eps), so its length is sqrt(D) / r_i; w carries that
    sqrt(D). A read goes over all rows, since a view of some of them would be one operation more:
    rows that hold no source score minus infinity.
    """
    def __init__(self, w, eps):
        R, D = w.shape
        self.w, self.n, self.on_read = (w * D ** 0.5).unbind(), 0, None
        self._keep(w.new_full((R, D + 1), (D * eps) ** 0.5))

    def _keep(self, long):
        n, v, length = len(long), long[:, :-1], torch.linalg.vector_norm(long, dim=1)
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
        scores = torch.addmv(self.missing[self.n - 1], self.v, self.w[l]).div_(self.length)
        return scores.softmax(0)

    def weights(self, l):
        return self._alpha(l)[:self.n].view(-1, *(1 for _ in self.shape[:-1]))

    def read(self, l):
        if self.on_read:
            self.on_read(l, self.weights(l))
        h = torch.mv(self.v_t, self._alpha(l)).view(self.shape)
        return h if h.dtype == self.dtype else h.to(self.dtype)
