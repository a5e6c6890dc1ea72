"""The Triton kernels against the float64 oracle: on a CPU in Triton's interpreter, on a GPU as they are.

How much a low-precision result may err follows from how much the plain rule errs in the same precision.
"""
import os
import re
from contextlib import contextmanager

import numpy
import pytest
import reference
import torch
from torch.utils.checkpoint import checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # read when triton is imported
from drive import follow, gradients, run, script  # noqa: E402

import kernels  # noqa: E402
import model  # noqa: E402
import triton_kernels  # noqa: E402
from experiments import measure  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'
DEVICE = 'cpu' if INTERPRET else 'cuda'
EPS = 1e-3  # large enough to be seen


def unfit():
    """Why these tests cannot run here; empty if they can."""
    def version(module):
        return tuple(map(int, re.findall(r'\d+', module.__version__)[:2]))
    if triton_kernels.triton is None:
        return 'triton is not installed'
    if not INTERPRET and not torch.cuda.is_available():
        return 'no CUDA device, and TRITON_INTERPRET is not 1'
    if INTERPRET and version(triton_kernels.triton) < (3, 7) and version(numpy) >= (2, 4):
        return 'the interpreter of triton < 3.7 fails with numpy >= 2.4'
    return ''


pytestmark = pytest.mark.skipif(bool(unfit()), reason=unfit())


def on_triton(h, sublayers, query, S, eps):
    return run('triton', h, sublayers, query, S, eps)


def attend(u, v):
    """The rule in the precision of its sources throughout, which sets the measure for low precision."""
    s = torch.stack([(x @ u.to(x.dtype)) * (x.square().mean(-1) + EPS).rsqrt() for x in v])
    return v[0] if len(v) == 1 else (s.softmax(0).unsqueeze(-1) * torch.stack(v)).sum(0)


def plain_rule(h, sublayers, query, S, eps):
    v = (h,)
    for l, f in enumerate(sublayers):
        y = f(attend(query[l], v))
        v = (*v, y) if l % S == 0 else (*v[:-1], v[-1] + y)
    return attend(query[-1], v)


def make_leaves(L, D, shape=(2,), dtype=torch.float32, scale=2., strided=False):
    """[h, query, then a and b of each sublayer]. strided: h is every second column of a tensor"""
    h = torch.randn(*shape, D * (1 + strided), device=DEVICE).to(dtype)[..., ::1 + strided]
    rest = [torch.randn(L + 1, D) * scale / D ** .5]  # scores of size scale
    for _ in range(L):
        rest += [1 + .5 * torch.randn(D), torch.randn(D)]
    return [t.to(DEVICE).requires_grad_() for t in (h.detach(), *rest)]


def make_sublayers(leaves):
    """f(h) = tanh(a h) + b: cheap, and no two columns are alike"""
    def sublayer(a, b):
        return lambda h: torch.tanh(h * a.to(h.dtype)) + b.to(h.dtype)
    return [sublayer(*leaves[i:i + 2]) for i in range(2, len(leaves), 2)]


def outcome(rule, leaves, S, w):
    """[result, gradient of sum(w * result) by each leaf]"""
    out = rule(leaves[0], make_sublayers(leaves), leaves[1], S, EPS)
    return [out.detach(), *torch.autograd.grad(out, leaves, w.to(out.dtype), allow_unused=True, materialize_grads=True)]


def check(got, plain, want, floor=1e-5):
    """got may err twice as much as plain, and in the last place: plain may be right by luck, and the interpreter cuts
    bfloat16 off where a GPU rounds"""
    last_place = max(torch.finfo(t.dtype).eps for t in got)
    for i, (g, p, t) in enumerate(zip(got, plain, want, strict=True)):
        error, allowed, size = ((x.double() - y).norm().item() for x, y in ((g, t), (p, t), (t, 0 * t)))
        allowed = 2 * allowed + max(last_place, floor) * size + 1e-6
        assert error <= allowed, f'tensor {i} of size {size:.2e}: error {error:.2e}, allowed {allowed:.2e}'
        assert g.dtype == p.dtype and g.shape == p.shape


def compare(L, S, D, **keys):
    leaves = make_leaves(L, D, **keys)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    want = outcome(reference.depth_attention, [t.detach().double().requires_grad_() for t in leaves], S, w)
    check(outcome(on_triton, leaves, S, w), outcome(plain_rule, leaves, S, w), want)


@contextmanager
def counted():
    """A list of (kernel, bytes) of the launches inside."""
    try:
        triton_kernels.traffic = launches = []
        yield launches
    finally:
        triton_kernels.traffic = None


# ---------------------------------------------------------------------------------------------------------------------
# single reads

@pytest.mark.parametrize('n', [1, 2, 3, 9, 33, 129])
def test_number_of_sources(n):
    rows = [torch.randn(2, 10, device=DEVICE) for _ in range(n)]
    w = torch.randn(2, 10, device=DEVICE)
    leaves = [t.requires_grad_() for t in (w, *rows)]
    verbs = [('push', None)] * n + [('read', 0), ('read', 1)]
    outputs = [lambda _, x=x: x for x in rows]
    with counted() as launches:
        got = follow('triton', verbs, outputs, w, EPS)
    assert [name for name, _ in launches] == ['_read_kernel']  # the second read has no new row
    want = reference.follow(verbs, outputs, w, EPS)
    for a, b in zip([*got, *gradients(got, leaves)], [*want, *gradients(want, leaves)], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('D', [1, 7, 48, 65, 129, 768])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_width_and_dtype(D, dtype):
    compare(3, 2, D, dtype=dtype)


@pytest.mark.parametrize('order', ['rising', 'falling', 'random'])
@pytest.mark.parametrize('scale', [50., 1e4])
def test_huge_scores(scale, order):
    """the softmax neither overflows nor forgets, whichever source has the largest score"""
    v = torch.randn(6, 3, 20, device=DEVICE)
    q = torch.randn(1, 20, device=DEVICE)
    if order != 'random':
        key = (v @ q[0]) * (v.square().mean(-1) + EPS).rsqrt()
        v = v.gather(0, key.argsort(0, descending=order == 'falling')[..., None].expand_as(v))
    h, lse = triton_kernels.read(v.clone(), v[5], scale * q, [*range(6)], 5, -1, 0, EPS)
    torch.testing.assert_close(h.double(), reference.attend(list(v), scale * q[0], EPS), rtol=2e-3, atol=2e-3)
    assert lse.isfinite().all()


def test_one_source_is_returned_exactly():
    leaves = make_leaves(2, 9)
    heard = []
    out = on_triton(leaves[0], [lambda h: heard.append(h) or h * 2, torch.tanh], leaves[1], 1, EPS)
    assert torch.equal(heard[0], leaves[0])
    grad, = torch.autograd.grad(out.sum(), leaves[1])
    assert not grad[0].any() and grad[1].any() and grad[2].any()


def test_zero_query_averages():
    h = torch.randn(2, 12, device=DEVICE)
    out = on_triton(h, [torch.sin, torch.cos], torch.zeros(3, 12, device=DEVICE), 1, EPS)
    v = [h, h.sin()]
    v.append(((v[0] + v[1]) / 2).cos())
    torch.testing.assert_close(out, sum(v) / 3)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs

@pytest.mark.parametrize('S', [1, 2, 3, 4])
def test_whole_run(S):
    compare(4, S, D=6)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_whole_run_in_low_precision(dtype):
    compare(6, 1, D=40, dtype=dtype)


def test_a_deeper_one():
    compare(11, 1, D=5, shape=(1,))


def test_blocks_the_last_one_shorter():
    compare(14, 3, D=5, shape=(1,))


def test_inputs_with_gaps_and_more_dimensions():
    compare(3, 2, D=6, shape=(2, 1, 2), strided=True)


@pytest.mark.slow
@pytest.mark.parametrize('L,S', [(L, S) for L in (1, 2, 3, 5, 7) for S in range(1, L + 1)]
                         + [(13, 6), (14, 3), (20, 7)])
def test_every_S(L, S):
    compare(L, S, D=5, shape=(1,))


@pytest.mark.slow
@pytest.mark.parametrize('L', [32, 64])
def test_deep_full(L):
    compare(L, 1, D=4, shape=(1,))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('S', [1, 3])
def test_low_precision_at_full_width(S, dtype):
    compare(9, S, D=768, dtype=dtype)


@pytest.mark.parametrize('seeds', [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
def test_any_order_of_the_verbs(seeds, nan_in_new_memory):
    """Rows pushed, added to and dropped, several at once or none, and reads left out; also of a part of the reads."""
    for seed in seeds:
        verbs = script(seed)
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(7, 5, generator=g).to(DEVICE).requires_grad_()
        rows = [torch.randn(2, 1, 5, generator=g).to(DEVICE).requires_grad_()
                for verb, _ in verbs if verb in ('push', 'add')]
        outputs = [lambda h, x=x: x if h is None else x + h.sin() for x in rows]
        want = follow('reference', verbs, outputs, w, EPS)
        for n in {len(want), (len(want) + 1) // 2} - {0}:
            got = follow('triton', verbs, outputs, w, EPS)
            expected = gradients(want[:n], [w, *rows], retain_graph=True)
            for a, b in zip([*got, *gradients(got[:n], [w, *rows])], [*want, *expected], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_same_bits_every_run():
    leaves = make_leaves(3, 7, shape=(9,))
    w = torch.randn(9, 7, device=DEVICE)
    first, second = (outcome(on_triton, leaves, 2, w) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ---------------------------------------------------------------------------------------------------------------------
# autograd, weights, compilation

def test_checkpointed_sublayers_and_overlapping_passes():
    leaves = make_leaves(5, 6)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    want = outcome(on_triton, leaves, 2, w)
    fs = [lambda h, f=f: checkpoint(f, h, use_reentrant=False) for f in make_sublayers(leaves)]
    on_triton(leaves[0], fs, leaves[1], 2, EPS)  # a forward without a backward
    outs = [on_triton(x, fs, leaves[1], 2, EPS) for x in (leaves[0], 2 * leaves[0])]
    for _ in range(2):  # the graph may be run twice
        check(torch.autograd.grad(outs[0], leaves, w, retain_graph=True, materialize_grads=True, allow_unused=True),
              want[1:], [t.double() for t in want[1:]])


def test_gradient_of_a_read_in_the_middle(nan_in_new_memory):
    """later reads take no part, and a sublayer that ignores what it is given gives no gradient"""
    leaves, heard = make_leaves(5, 6), []
    fs = make_sublayers(leaves)
    taps = [lambda h, f=f: heard.append(h) or f(h) for f in fs[:4]]
    on_triton(leaves[0], [*taps, fs[4]], leaves[1], 3, EPS)
    got = torch.autograd.grad(heard[3].sum(), leaves[:6])
    plain_rule(leaves[0], [*taps, fs[4]], leaves[1], 3, EPS)
    want = torch.autograd.grad(heard[7].sum(), leaves[:6])
    check(got, want, [t.double() for t in want])
    deaf = [fs[0], lambda h: leaves[0] * 2, fs[2]]
    got, want = (torch.autograd.grad(rule(leaves[0], deaf, leaves[1][:4], 1, EPS).sum(), leaves[:4])
                 for rule in (on_triton, plain_rule))
    check(got, want, [t.double() for t in want])


def test_frozen_inputs():
    leaves = make_leaves(4, 6)
    fs, frozen = make_sublayers(leaves), [t.detach() for t in leaves]
    for h, query in ((frozen[0], frozen[1]), (leaves[0], frozen[1]), (frozen[0], leaves[1])):
        got, want = (torch.autograd.grad(rule(h, fs, query, 2, EPS).sum(), leaves[4:8])
                     for rule in (on_triton, plain_rule))
        check(got, want, [t.double() for t in want])


def test_without_gradient_a_launch_a_read():
    leaves = make_leaves(6, 6)
    fs, want = make_sublayers(leaves), on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS)
    with torch.no_grad(), counted() as launches:
        got = on_triton(leaves[0], fs, leaves[1], 1, EPS)
    assert torch.equal(got, want)
    assert len(launches) == 7 and not got.requires_grad


def test_double_backward_raises():
    leaves = make_leaves(3, 6)
    out = on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS)
    grad, = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()


@pytest.mark.parametrize('S', [1, 3])
def test_memory_is_linear(S):
    """A row for each source and the h that the sublayer's own norm keeps anyway; an lse for each read."""
    for L in (6, 12):
        leaves = make_leaves(L, 64, shape=(1,))
        with measure.Created() as created:
            out = on_triton(leaves[0], [lambda h: 2 * h] * L, leaves[1], S, EPS)
        tables = 4 * (L + 1) * (L + 2)  # what _table holds, at most
        assert created.alive(but=[out, *leaves]) <= (2 * (L + 1) + 0.5) * 64 * 4 + 8 * (L + 1) + tables


@pytest.mark.parametrize('S', [1, 3])
def test_weights_and_a_hook_that_changes_no_bit(S):
    leaves = make_leaves(4, 6, shape=(2, 1))
    w = torch.randn(leaves[0].shape, device=DEVICE)
    heard = {}

    def listening(path):
        def rule(h, sublayers, query, S, eps):
            v = kernels.new_sources(path, model.Sources, query, eps, h)
            v.on_read = lambda l, alpha: heard.setdefault(path, []).append((l, alpha))
            v.push(h)
            for l, f in enumerate(sublayers):
                y = f(v.read(l))
                (v.add if l % S else v.push)(y)
            return v.read(len(sublayers))
        return rule
    silent, spoken = outcome(on_triton, leaves, S, w), outcome(listening('triton'), leaves, S, w)
    assert all(map(torch.equal, silent, spoken))
    outcome(listening('reference'), leaves, S, w)
    for (l, alpha), (m, expected) in zip(heard['triton'], heard['reference'], strict=True):
        assert l == m and alpha.dtype == torch.float32 and not alpha.requires_grad
        torch.testing.assert_close(alpha, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(alpha.sum(0), torch.ones(2, 1, device=DEVICE))


def test_a_read_repeated_is_refused():
    h = torch.randn(2, 6, device=DEVICE)
    v = kernels.new_sources('triton', model.Sources, torch.randn(3, 6, device=DEVICE), EPS, h)
    v.push(h)
    v.read(1)
    for l in (1, 0, 3):
        with pytest.raises(ValueError, match=rf'^read\({l}\): must be from 2 to 2: '):
            v.read(l)


@pytest.mark.parametrize('S', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled(S):
    leaves = make_leaves(3, 6)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(on_triton, fullgraph=True, backend='aot_eager' if INTERPRET else 'inductor')
    got, want = (outcome(rule, leaves, S, w) for rule in (compiled, on_triton))
    check(got, want, [t.double() for t in want], floor=1e-6 if INTERPRET else 1e-4)


def test_opcheck():
    R, T, D = 3, 2, 6

    def x(*shape):
        return torch.randn(*shape, device=DEVICE)
    utils = ['test_schema', 'test_autograd_registration', 'test_faketensor']
    zero = torch.zeros(())
    for base in (-1, 1):
        args = x(R, T, D), x(0, R, T), x(T, D), x(R, D), [0, 2], 2, base, 1, EPS, True
        torch.library.opcheck(kernels._forward_op, args, test_utils=utils)
        carry = None if base < 0 else x(T, D)
        args = (x(R, T, D), x(T, D), x(T, D), x(T), x(R, D), carry, zero, zero, x(R, T, D), x(2, R, T), x(R, D), 2, 1,
                1, EPS, True)
        torch.library.opcheck(kernels._backward_op, args, test_utils=utils)


@pytest.mark.parametrize('residual', ['full', 'block'])
def test_a_whole_model_under_autocast(residual):
    """kernel=triton through GPT, in bfloat16, is as near to float64 as the reference path, or nearly."""
    def result(kernel, dtype):
        torch.manual_seed(3)
        net = GPT(GPTConfig(n_ctx=2, vocab_size=11, n_layer=2, n_head=2, n_embd=12, norm_eps=1e-3, residual=residual,
                            residual_blocks=2, kernel=kernel))
        torch.nn.init.normal_(net.residual.query)
        net = net.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
        idx = torch.arange(2, device=DEVICE).view(1, 2)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = net(idx, idx)[1]
        loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters())]
    exact, plain, ours = (result(*args) for args in (('reference', torch.float64), ('reference', torch.bfloat16),
                                                     ('triton', torch.bfloat16)))
    errors = [sum((a.double() - e).square().sum().item() for a, e in zip(x, exact, strict=True)) for x in (plain, ours)]
    assert errors[1] <= 2.5 ** 2 * errors[0]  # the interpreter cuts bfloat16 off where a GPU rounds
    single = result('triton', torch.float32)
    for a, e in zip(single, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# launches: what they move, what is compiled, what can go wrong

class Stub:
    """Takes the place of a kernel: notes the arguments, computes nothing."""
    def __init__(self, kernel, seen):
        self.__name__, self.seen = kernel.__name__, seen

    def __getitem__(self, grid):
        def launch(*args, **constants):
            """What a compiled variant depends on: dtypes, alignment, what is None, constants."""
            kinds = [(a.dtype, a.data_ptr() % 16) if torch.is_tensor(a) else type(a) for a in args]
            self.seen.add((self.__name__, *kinds, *sorted(constants.items())))
        return launch


@pytest.mark.parametrize('residual, launched, most, variants', [('full', 825, 960, 2), ('block', 473, 610, 3)])
def test_traffic_and_variants_of_gpt2(residual, launched, most, variants, monkeypatch):
    """24 sublayers under bfloat16 autocast, in units of u: a (tokens, D) tensor in bfloat16, once.

    Each launch counts whole rows, so the number of tokens and the width cancel. A row is read again for the product
    that makes dw. On top comes that each of the 25 norms moves 5 u.
    """
    seen = set()
    for name in ('_read_kernel', '_visit_kernel'):
        monkeypatch.setattr(triton_kernels, name, Stub(getattr(triton_kernels, name), seen))
    config = GPTConfig(n_ctx=16, vocab_size=11, n_head=2, n_embd=16, residual=residual, kernel='triton')
    with counted() as launches, torch.autocast(DEVICE, torch.bfloat16):
        net = GPT(config).to(DEVICE)
        net(torch.zeros(2, 16, dtype=torch.long, device=DEVICE))[0].sum().backward()
    u = 2 * 16 * 16 * 2
    assert len(launches) == 3 * 25  # a read, a visit and the product that makes dw
    moved = sum(size for _, size in launches) / u
    assert moved == launched and moved + 5 * 25 <= most
    assert len(seen) == variants


def test_traffic_counts_what_it_should():
    """L = 1. Reads: y in, v and h out; the second has one source more in.

    Visits: v, dh_1 and h in, dh and dv out; the second has the gradient of a later read in.
    """
    leaves = make_leaves(1, 8, shape=(2,))
    with counted() as launches:
        on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS).sum().backward()
    u = 2 * 8 * 4
    assert [(name, size / u) for name, size in launches] == [
        ('_read_kernel', 3), ('_read_kernel', 4), ('_visit_kernel', 5), ('dw', 1), ('_visit_kernel', 6), ('dw', 1)]


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch):
    happened = []

    @contextmanager
    def device_of(x):
        happened.append(x)
        yield
        happened.append('back')
    monkeypatch.setattr(torch.cuda, 'device_of', device_of)
    x = torch.zeros(3, 5)
    triton_kernels._launch({(3,): lambda *args, **constants: happened.append((args, constants))}, 1, x, 'a', 'b')
    assert happened == [x, (('a', 'b'), dict(D=5, TILE=8, num_warps=1)), 'back']


@pytest.mark.parametrize('D, tile, warps', [(1, 1, 1), (768, 1024, 1), (1024, 1024, 1), (1025, 2048, 2),
                                            (8000, 8192, 8)])
def test_a_row_is_a_tile_and_a_warp_takes_1024_columns(D, tile, warps):
    seen = []
    kernel = {(2,): lambda *args, **constants: seen.append(constants)}
    triton_kernels._launch(kernel, 1, torch.empty(2, D))
    assert seen == [dict(D=D, TILE=tile, num_warps=warps)]


def test_a_failing_kernel_is_one_clear_line(monkeypatch):
    class Broken:
        __name__ = '_read_kernel'

        def __getitem__(self, grid):
            raise OSError('out of resources:\n  shared memory\n' + 999 * 'x')
    monkeypatch.setattr(triton_kernels, '_read_kernel', Broken())
    leaves = make_leaves(1, 4)
    with pytest.raises(RuntimeError) as e:
        on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS)
    message = str(e.value)
    assert message.startswith(f'kernel=triton failed on {leaves[0].device} (OSError: out of resources: shared memory x')
    assert message.endswith('; kernel=torch does without it') and '\n' not in message and len(message) < 300
    assert isinstance(e.value.__cause__, OSError)


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(triton_kernels, 'triton', None)
    with pytest.raises(ValueError, match='package triton is not installed'):
        on_triton(torch.zeros(2, 4), [], torch.zeros(1, 4), 1, EPS)


def test_cpu_without_interpreter_is_named(monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(ValueError, match='on cpu; it needs CUDA'):
        on_triton(torch.zeros(2, 4), [], torch.zeros(1, 4), 1, EPS)
