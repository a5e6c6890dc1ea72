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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # read when triton is imported
import kernels  # noqa: E402

INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'
DEVICE = 'cpu' if INTERPRET else 'cuda'
EPS = 1e-3  # large enough to be seen


def unfit():
    """Why these tests cannot run here; empty if they can."""
    def version(module):
        return tuple(map(int, re.findall(r'\d+', module.__version__)[:2]))
    if kernels.triton is None:
        return 'triton is not installed'
    if not INTERPRET and not torch.cuda.is_available():
        return 'no CUDA device, and TRITON_INTERPRET is not 1'
    if INTERPRET and version(kernels.triton) < (3, 7) and version(numpy) >= (2, 4):
        return 'the interpreter of triton < 3.7 fails with numpy >= 2.4'
    return ''


pytestmark = pytest.mark.skipif(bool(unfit()), reason=unfit())


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


class Sublayer:
    """f(h) = tanh(a norm(h)) + b: cheap, and no two columns are alike"""
    def __init__(self, weight, bias, a, b):
        self.norm, self.a, self.b = Norm(weight, bias), a, b

    def body(self, x):
        return torch.tanh(x * self.a.to(x.dtype)) + self.b.to(x.dtype)

    def __call__(self, h):
        return self.body(self.norm(h))


class Norm:
    def __init__(self, weight, bias):
        self.weight, self.bias, self.eps = weight, bias, 1e-2

    def __call__(self, h):
        weight, bias = (None if t is None else t.to(h.dtype) for t in (self.weight, self.bias))
        return torch.nn.functional.layer_norm(h, weight.shape, weight, bias, self.eps)


def make_leaves(L, D, shape=(2,), dtype=torch.float32, scale=2., strided=False):
    """[h, query, then weight, bias, a, b of each sublayer]. strided: h is every second column of a tensor"""
    h = torch.randn(*shape, D * (1 + strided), device=DEVICE).to(dtype)[..., ::1 + strided]
    rest = [torch.randn(L + 1, D) * scale / D ** .5]  # scores of size scale
    for _ in range(L):
        rest += [1 + .2 * torch.randn(D), .2 * torch.randn(D), 1 + .5 * torch.randn(D), torch.randn(D)]
    return [t.to(DEVICE).requires_grad_() for t in (h.detach(), *rest)]


def make_sublayers(leaves, visible='all'):
    """visible: which norms the kernels may see and compute, all, some or none. Every third norm has no bias."""
    fs = [Sublayer(w, None if i % 12 == 8 else b, a, c) for i in range(0, len(leaves) - 2, 4)
          for w, b, a, c in [leaves[2 + i:6 + i]]]
    return [f if visible == 'all' or visible == 'some' and i % 2 else lambda h, f=f: f(h) for i, f in enumerate(fs)]


def outcome(rule, leaves, S, w, visible='all'):
    """[result, gradient of sum(w * result) by each leaf]"""
    out = rule(leaves[0], make_sublayers(leaves, visible), leaves[1], S, EPS)
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


def compare(L, S, D, visible='all', **keys):
    leaves = make_leaves(L, D, **keys)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    want = outcome(reference.depth_attention, [t.detach().double().requires_grad_() for t in leaves], S, w)
    check(outcome(kernels.on_triton, leaves, S, w, visible), outcome(plain_rule, leaves, S, w), want)


# ---------------------------------------------------------------------------------------------------------------------
# single reads

def read_once(v, q, dh):
    """[h, lse, gradient of each source, gradient of q] of one read over the sources v, straight from the kernels"""
    lse, _, _, h = kernels._read(v, None, q, [], None, None, None, EPS, 0.)
    stats, grads, dq = torch.stack([lse[0], (dh.float() * h.float()).sum(-1)])[None], [], 0
    for i in range(0, len(v), kernels.GROUP):
        part = v[i:i + kernels.GROUP]
        coef, _, _, _, *dv = kernels.source(part, [], q, [dh], stats, None, None, None, None, EPS, 0.)
        grads, dq = grads + dv, dq + kernels.query_grad(coef, part)
    return [h, lse[0], *grads, dq]


def compare_read(n, D, dtype=torch.float32, scale=2., rows=2):
    def wanted(v, q, attend):
        s = torch.stack([(x @ q[0].to(x.dtype)) * (x.square().mean(-1) + EPS).rsqrt() for x in v])
        h = attend(v, q[0], EPS)
        grads = torch.autograd.grad(h, [*v, q], dh.to(h.dtype), allow_unused=True, materialize_grads=True)
        return [h.detach(), s.logsumexp(0).detach().to(torch.promote_types(s.dtype, torch.float32)), *grads]
    v = [torch.randn(rows, D, device=DEVICE).to(dtype) for _ in range(n)]
    q = torch.randn(1, D, device=DEVICE) * scale / D ** .5
    dh = torch.randn(rows, D, device=DEVICE).to(dtype)
    low, high = ([t.detach().to(d or t.dtype).requires_grad_() for t in (*v, q)] for d in (None, torch.float64))
    plain = wanted(low[:-1], low[-1], lambda v, u, eps: attend(u, v))
    check(read_once(v, q, dh), plain, wanted(high[:-1], high[-1], reference.attend))


@pytest.mark.parametrize('n', [1, 2, 3, 8, 9, 17, 33, 65, 129])
def test_number_of_sources(n):
    compare_read(n, D=10)


@pytest.mark.parametrize('D', [1, 7, 48, 65, 129, 768])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_width_and_dtype(D, dtype):
    compare_read(5, D, dtype)


@pytest.mark.parametrize('order', ['rising', 'falling', 'random'])
@pytest.mark.parametrize('scale', [50., 1e4])
def test_huge_scores(scale, order):
    """the softmax neither overflows nor forgets, whichever source has the largest score"""
    v = torch.randn(6, 3, 20, device=DEVICE)
    q = torch.randn(1, 20, device=DEVICE)
    if order != 'random':
        key = (v @ q[0]) * (v.square().mean(-1) + EPS).rsqrt()
        v = v.gather(0, key.argsort(0, descending=order == 'falling')[..., None].expand_as(v))
    lse, _, _, h = kernels._read(list(v), None, scale * q, [], None, None, None, EPS, 0.)
    torch.testing.assert_close(h.double(), reference.attend(list(v), scale * q[0], EPS), rtol=2e-3, atol=2e-3)
    assert lse.isfinite().all()


def test_one_source_is_returned_exactly():
    leaves = make_leaves(2, 9)
    heard = []
    out = kernels.on_triton(leaves[0], [lambda h: heard.append(h) or h * 2, torch.tanh], leaves[1], 1, EPS)
    assert torch.equal(heard[0], leaves[0])
    grad, = torch.autograd.grad(out.sum(), leaves[1])
    assert not grad[0].any() and grad[1].any() and grad[2].any()


def test_zero_query_averages():
    h = torch.randn(2, 12, device=DEVICE)
    out = kernels.on_triton(h, [torch.sin, torch.cos], torch.zeros(3, 12, device=DEVICE), 1, EPS)
    v = [h, h.sin()]
    v.append(((v[0] + v[1]) / 2).cos())
    torch.testing.assert_close(out, sum(v) / 3)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs

@pytest.mark.parametrize('S', [1, 2, 3, 4])
def test_whole_run(S):
    compare(4, S, D=6)


@pytest.mark.parametrize('visible', ['some', 'none'])
def test_opaque_sublayers(visible):
    compare(4, 2, D=6, visible=visible)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_whole_run_in_low_precision(dtype):
    compare(6, 1, D=40, dtype=dtype)


def test_phase_1_in_full():
    compare(11, 1, D=5, shape=(1,))  # chunks 0-4, 5-9, 10-11; groups 0-3, 4-7, 8-11


def test_phase_1_in_blocks():
    compare(14, 3, D=5, shape=(1,))  # a ragged last block; groups b_0-b_3, and b_4, b_5 by themselves


def test_inputs_with_gaps_and_more_dimensions():
    compare(3, 2, D=6, shape=(2, 1, 2), strided=True)


def test_rows_beyond_one_program():
    compare(1, 1, D=3, shape=(9,))


@pytest.mark.slow
@pytest.mark.parametrize('L,S', [(L, S) for L in (1, 2, 3, 5, 7) for S in range(1, L + 1)]
                         + [(13, 6), (14, 3), (20, 7)])
def test_every_S(L, S):
    compare(L, S, D=5, shape=(1,), visible=('all', 'some', 'none')[(L + S) % 3])


@pytest.mark.slow
@pytest.mark.parametrize('L', [32, 64])
def test_deep_full(L):
    compare(L, 1, D=4, shape=(1,))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('S', [1, 3])
def test_low_precision_at_full_width(S, dtype):
    compare(9, S, D=768, dtype=dtype)


def test_more_queries_than_a_launch_takes(monkeypatch):
    monkeypatch.setattr(kernels, 'CHUNK', 3)
    compare(12, 4, D=5, shape=(1,))


def test_same_bits_every_run():
    leaves = make_leaves(3, 7, shape=(9,))
    w = torch.randn(9, 7, device=DEVICE)
    first, second = (outcome(kernels.on_triton, leaves, 2, w) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ---------------------------------------------------------------------------------------------------------------------
# autograd, compilation, bookkeeping

def test_checkpointed_sublayers_and_overlapping_passes():
    leaves = make_leaves(5, 6)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    want = outcome(kernels.on_triton, leaves, 2, w)
    fs = [lambda h, f=f: checkpoint(f, h, use_reentrant=False) for f in make_sublayers(leaves)]
    kernels.on_triton(leaves[0], fs, leaves[1], 2, EPS)  # a forward without a backward
    outs = [kernels.on_triton(x, fs, leaves[1], 2, EPS) for x in (leaves[0], 2 * leaves[0])]
    for _ in range(2):  # the graph may be run twice
        check(torch.autograd.grad(outs[0], leaves, w, retain_graph=True, materialize_grads=True, allow_unused=True),
              want[1:], [t.double() for t in want[1:]])


def test_gradient_of_a_read_in_the_middle():
    """later reads take no part, and a sublayer that ignores what it is given gives no gradient"""
    leaves, heard = make_leaves(5, 6), []
    fs = make_sublayers(leaves, 'none')
    taps = [lambda h, f=f: heard.append(h) or f(h) for f in fs[:4]]
    kernels.on_triton(leaves[0], [*taps, fs[4]], leaves[1], 3, EPS)
    got = torch.autograd.grad(heard[3].sum(), leaves[:6])
    plain_rule(leaves[0], [*taps, fs[4]], leaves[1], 3, EPS)
    want = torch.autograd.grad(heard[7].sum(), leaves[:6])
    check(got, want, [t.double() for t in want])
    deaf = [fs[0], lambda h: leaves[0] * 2, fs[2]]
    got, want = (torch.autograd.grad(rule(leaves[0], deaf, leaves[1][:4], 1, EPS).sum(), leaves[:6])
                 for rule in (kernels.on_triton, plain_rule))
    check(got, want, [t.double() for t in want])


def test_frozen_inputs():
    leaves = make_leaves(4, 6)
    fs, frozen = make_sublayers(leaves), [t.detach() for t in leaves]
    for h, query in ((frozen[0], frozen[1]), (leaves[0], frozen[1]), (frozen[0], leaves[1])):
        got, want = (torch.autograd.grad(rule(h, fs, query, 2, EPS).sum(), leaves[6:10])
                     for rule in (kernels.on_triton, plain_rule))
        check(got, want, [t.double() for t in want])


def test_without_gradient_a_launch_a_read():
    leaves = make_leaves(12, 6)
    fs, want = make_sublayers(leaves), kernels.on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS)
    try:
        kernels.traffic = launches = []
        with torch.no_grad():
            got = kernels.on_triton(leaves[0], fs, leaves[1], 1, EPS)
    finally:
        kernels.traffic = None
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(launches) == 13 and not got.requires_grad


def test_double_backward_raises():
    leaves = make_leaves(3, 6)
    out = kernels.on_triton(leaves[0], make_sublayers(leaves), leaves[1], 1, EPS)
    grad, = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match='backward'):
        torch.autograd.grad(grad.sum(), leaves[0])


def saved_bytes(L, S):
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    leaves = make_leaves(L, 64, shape=(1,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kernels.on_triton(leaves[0], [lambda h: 2 * h] * L, leaves[1], S, EPS).sum()
    return sum(storages.values()) - leaves[1].nbytes


@pytest.mark.parametrize('S', [1, 3])
def test_memory_is_linear(S):
    u = 64 * 4  # a source and a read each, and one number per token
    assert saved_bytes(6, S) <= 2 * 7 * u + 7 * 8 and saved_bytes(12, S) <= 2 * 13 * u + 13 * 8


@pytest.mark.parametrize('S', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled(S):
    leaves = make_leaves(4, 6)
    w = torch.randn(leaves[0].shape, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(kernels.on_triton, fullgraph=True, backend='aot_eager' if INTERPRET else 'inductor')
    got, want = (outcome(rule, leaves, S, w) for rule in (compiled, kernels.on_triton))
    check(got, want, [t.double() for t in want], floor=1e-6 if INTERPRET else 1e-4)


OPCHECKS = ['test_schema', 'test_autograd_registration', 'test_faketensor']


def test_opcheck():
    def x(*shape):
        return torch.randn(*shape, device=DEVICE)
    v, q = [x(2, 6), x(2, 6)], x(3, 6)
    for args in ((v, x(2, 6), q, [], None, x(6), None, EPS, EPS),
                 (v, None, q[:1], [x(2, 6)], x(1, 2), x(6), x(6), EPS, EPS)):
        torch.library.opcheck(kernels.read, args, test_utils=OPCHECKS)
    for args in ((v, v, q, v, x(2, 2, 2), x(2, 6), x(2, 6), x(1, 2), x(6), EPS, EPS),
                 (v, [], q, v, x(2, 2, 2), None, None, None, None, EPS, EPS),
                 (v[:1], [], q, [], None, x(2, 6), x(2, 6), None, None, EPS, EPS)):
        torch.library.opcheck(kernels.source, args, test_utils=OPCHECKS)
    torch.library.opcheck(kernels.query_grad, (x(2, 3, 2), v), test_utils=OPCHECKS)


def count(L, S, D=768, tokens=12 * 1024):
    """u per token of a whole forward and backward in bfloat16, at full size: no number is computed"""
    u = tokens * D * 2
    with FakeTensorMode():
        h = torch.empty(tokens, D, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        query = torch.empty(L + 1, D, device=DEVICE, requires_grad=True)
        fs = [Sublayer(*torch.empty(4, D, device=DEVICE, requires_grad=True)) for _ in range(L)]
        try:
            kernels.traffic = launches = []
            out = kernels.on_triton(h, fs, query, S, EPS)
            forward = sum(size for _, size in launches)
            out.backward(torch.empty_like(out))
        finally:
            kernels.traffic = None
    return forward / u, (sum(size for _, size in launches) - forward) / u


@pytest.mark.parametrize('name,S,most', [('Full', 1, 520), ('Block, N = 8', 3, 440)])
def test_traffic_of_gpt2(name, S, most):
    forward, backward = count(24, S)
    print(f'{name}: {forward:.1f} u forward, {backward:.1f} u backward, and 5 u for the final norm')
    assert 24 * 4 < forward and forward + backward + 5 <= most


def test_traffic_counts_what_it_should():
    forward, backward = count(1, 1)
    assert 6 <= forward < 6.1     # read 0: v in, h, y out; read 1: two sources in, h out
    assert 11 <= backward < 13    # event 1: dy, h, v in, dv out; event 0: dy, v, dh_1 in, dh_0, dv out, v for dq; sums


@pytest.mark.parametrize('change,message', [
    (dict(h=torch.zeros(2, 4, dtype=torch.float64)), 'float64.*float32, bfloat16 and float16'),
    (dict(h=torch.zeros(0, 4)), r'\(0, 4\).*must be'),
    (dict(h=torch.zeros(2, 2 ** 14 + 1)), '16385.*must be.*16384'),
    (dict(query=torch.zeros(2, 4)), r'\(2, 4\).*must be \(3, 4\)'),
    (dict(S=0), 'S=0: must be .*S from 1'),
    (dict(S=3), 'S=3: must be .* to 2'),
    (dict(sublayers=[torch.relu, lambda h: h.double()]), 'sublayer 1 returned torch.float64.*must be'),
    (dict(sublayers=[lambda h: h[:1], torch.relu]), r'sublayer 0 returned .*\(1, 4\).*must be'),
])
def test_unsupported_input_is_named(change, message):
    inputs = dict(h=torch.zeros(2, 4), sublayers=[torch.relu] * 2, query=torch.zeros(3, 4), S=1, eps=EPS) | change
    inputs = {k: t.to(DEVICE) if torch.is_tensor(t) else t for k, t in inputs.items()}
    with pytest.raises(ValueError, match=message):
        kernels.on_triton(**inputs)


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch):
    happened = []

    @contextmanager
    def device_of(x):
        happened.append(x)
        yield
        happened.append('back')
    monkeypatch.setattr(torch.cuda, 'device_of', device_of)
    x = torch.zeros(1)
    kernels._launch({(1,): lambda *args: happened.append('launch')}, 1, [x])
    assert happened == [x, 'launch', 'back']


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(kernels, 'triton', None)
    with pytest.raises(ValueError, match='package triton is not installed'):
        kernels.on_triton(torch.zeros(2, 4), [], torch.zeros(1, 4), 1, EPS)


def test_cpu_without_interpreter_is_named(monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(ValueError, match='on cpu; it needs CUDA'):
        kernels.on_triton(torch.zeros(2, 4), [], torch.zeros(1, 4), 1, EPS)
