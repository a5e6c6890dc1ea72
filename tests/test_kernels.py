"""kernels.depth_attention against the float64 oracle: values, every gradient, and what autograd may do with it."""
import gc
import weakref
from types import SimpleNamespace

import pytest
import reference
import torch
from torch.utils.checkpoint import checkpoint

import kernels
from model import GPT, GPTConfig

EPS = 1e-6
SHAPES = [(1, 1), (2, 1), (4, 1), (5, 1), (6, 1), (11, 1), (24, 1),  # (L, S): chunks of 5 reads, exact and ragged
          (2, 2), (4, 2), (7, 3), (8, 3), (12, 5), (13, 6), (24, 3), (9, 9), (11, 20)]


class Net:
    """L sublayers tanh(h W_l) and random queries, all leaves that want gradients"""
    def __init__(self, L, D=7, dtype=torch.float64, shape=(2, 5)):
        g = torch.Generator().manual_seed(L)
        self.h = torch.randn(*shape, D, generator=g, dtype=torch.float64)
        self.query = torch.randn(L + 1, D, generator=g, dtype=torch.float64)
        self.W = [torch.randn(D, D, generator=g, dtype=torch.float64) / D**0.5 for _ in range(L)]
        self.leaves = [t.to(dtype).requires_grad_() for t in (self.h, self.query, *self.W)]
        self.h, self.query, *self.W = self.leaves
        self.sublayers = [lambda x, W=W: torch.tanh(x @ W.to(x.dtype)) for W in self.W]

    def run(self, S, f=None):
        f = f or (lambda *a: kernels.depth_attention(*a, 'torch'))
        return f(self.h, self.sublayers, self.query, S, EPS)

    def grads(self, out, **kw):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return torch.autograd.grad((out * weight).sum(), self.leaves, **kw)


def agree(a, b, tol):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).abs().max() <= tol * max(1, y.double().abs().max())


@pytest.mark.parametrize('L, S', SHAPES)
def test_equals_the_oracle(L, S):
    net = Net(L)
    out, want = net.run(S), net.run(S, reference.depth_attention)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)
    with torch.no_grad():
        agree([net.run(S)], [want], 1e-12)


@pytest.mark.parametrize('L, S', SHAPES)
@pytest.mark.parametrize('tokens', [1, 3])
def test_one_token_or_a_few(L, S, tokens):
    net = Net(L, shape=(tokens, 1))
    out, want = net.run(S), net.run(S, reference.depth_attention)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)
    with torch.no_grad():
        agree([net.run(S)], [want], 1e-12)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_the_rule_written_out(S, dtype):
    """The error against float64 is at most twice that of the obvious code in the same dtype."""
    L = 12
    def obvious(h, sublayers, query, S, eps):
        def attend(u, v):
            V = torch.stack(v).float()
            a = ((V * u).sum(-1) * torch.rsqrt(V.square().mean(-1) + eps)).softmax(0)
            return (a.unsqueeze(-1) * V).sum(0).to(h.dtype)
        v = (h,)
        for l, f in enumerate(sublayers):
            y = f(attend(query[l], v)) if l else f(h)
            v = (*v, y) if l % S == 0 else (*v[:-1], v[-1] + y)
        return attend(query[L], v)

    net, exact = Net(L, 48, dtype, (4, 33)), Net(L, 48, shape=(4, 33))
    with torch.no_grad():
        net.query.mul_(0.3)  # sharper softmaxes amplify rounding, by chance more here or there
        for x, y in zip(exact.leaves, net.leaves, strict=True):
            x.copy_(y)
    runs = [n.run(S, f) for n, f in ((exact, reference.depth_attention), (net, None), (net, obvious))]
    assert runs[1].dtype == dtype
    exact, fast, plain = [[out.detach(), *n.grads(out)] for n, out in zip((exact, net, net), runs, strict=True)]
    with torch.no_grad():  # each token alone, as in decoding
        tokens = [kernels.depth_attention(h, net.sublayers, net.query, S, EPS, 'torch')
                  for h in net.h.view(-1, 48).split(1)]
    assert tokens[0].dtype == dtype
    alone = torch.cat(tokens).view(4, 33, 48)
    for e, a, b in zip([exact[0], *exact], [alone, *fast], [plain[0], *plain], strict=True):
        def error(x, e=e):
            return (x.double() - e).norm()
        assert error(a) <= 2 * error(b) + torch.finfo(dtype).eps * e.norm()


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('tokens', [1, 3])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_the_result(dtype, tokens, S):
    """Sources whose sums are exact in any dtype: scores and weights are float32, so only h is rounded, once."""
    g = torch.Generator().manual_seed(5)
    v = torch.randint(-3, 4, (13, tokens, 48), generator=g).double()
    query = torch.randn(13, 48, generator=g).to(dtype).double()

    def run(dtype, f):
        return f(v[0].to(dtype), [lambda h, y=y: y.to(dtype) for y in v[1:]], query.to(dtype), S, EPS)
    with torch.no_grad():
        out = run(dtype, lambda *a: kernels.depth_attention(*a, 'torch'))
        want = run(torch.float64, reference.depth_attention)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize('S', [1, 3])
def test_autocast_and_mixed_dtypes(S):
    """Scores stay float32 under autocast; sublayers may answer in another dtype than the embedding has."""
    net = Net(7, 16, torch.float32)
    net.sublayers = [lambda x, W=W: torch.tanh(x @ W) for W in net.W]
    with torch.no_grad():
        net.query.mul_(0.3)
    with torch.autocast('cpu', torch.bfloat16):
        out = net.run(S)
        gradients = net.grads(out)  # the backward inside the context, too
    want = net.run(S)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients)
    agree([out, *gradients], [want, *net.grads(want)], 0.05)

    plain = Net(7, 16, torch.float32)
    plain.sublayers = [lambda x: 0 * x] * 7  # nothing for autocast to round: the read itself must not be
    with torch.autocast('cpu', torch.bfloat16):
        low = plain.run(S)
        low = [low, *plain.grads(low, allow_unused=True)[:2]]
    high = plain.run(S)
    for a, b in zip(low, [high, *plain.grads(high, allow_unused=True)[:2]], strict=True):
        assert torch.equal(a, b)
    one = Net(7, 16, torch.float32, (1, 1))
    one.sublayers = [lambda x: -x] * 7
    with torch.no_grad():
        with torch.autocast('cpu', torch.bfloat16):
            low = one.run(S)
        agree([low], [one.run(S)], 1e-4)  # float32 rounding differs by processor; bfloat16's would be 4e-3


@pytest.mark.parametrize('L, S', [(3, 1), (7, 1), (7, 3)])
def test_gradcheck(L, S):
    net = Net(L, 3, shape=(2, 1))

    def f(h, query, *W):
        sublayers = [lambda x, w=w: torch.tanh(x @ w) for w in W]
        return kernels.depth_attention(h, sublayers, query, S, EPS, 'torch')
    assert torch.autograd.gradcheck(f, net.leaves, fast_mode=True)


def test_first_query_gets_no_gradient():
    net = Net(6)
    assert torch.equal(net.grads(net.run(1))[1][0], torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize('S', [1, 3])
def test_huge_scores_and_non_contiguous_input(S):
    net = Net(7)
    with torch.no_grad():
        net.query.mul_(1e4)
    agree([net.run(S)], [net.run(S, reference.depth_attention)], 1e-12)
    net = Net(7)
    out = kernels.depth_attention(net.h.transpose(0, 1), net.sublayers, net.query, S, EPS, 'torch').transpose(0, 1)
    want = net.run(S)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# autograd

@pytest.mark.parametrize('S', [1, 3])
def test_two_forwards_before_a_backward_and_a_second_backward(S):
    net, want = Net(8), Net(8)
    want = want.grads(want.run(S, reference.depth_attention))
    first, second = net.run(S), net.run(S)
    agree(net.grads(first, retain_graph=True), want, 1e-12)
    agree(net.grads(second), want, 1e-12)
    agree(net.grads(first), want, 1e-12)
    with pytest.raises(RuntimeError, match='second time'):
        net.grads(first)


@pytest.mark.parametrize('S', [1, 3])
def test_used_twice_in_one_graph(S):
    def twice(f):
        net = Net(6)
        once = net.run(S, f)
        out = (f or (lambda *a: kernels.depth_attention(*a, 'torch')))(once, net.sublayers, net.query, S, EPS)
        return [out, *net.grads(out)]
    agree(twice(None), twice(reference.depth_attention), 1e-12)


@pytest.mark.parametrize('S', [1, 3])
def test_checkpointed_sublayers(S):
    net = Net(8)
    want = net.grads(net.run(S))
    net.sublayers = [lambda x, f=f: checkpoint(f, x, use_reentrant=False) for f in net.sublayers]
    agree(net.grads(net.run(S)), want, 1e-14)
    whole = checkpoint(lambda h: kernels.depth_attention(h, net.sublayers, net.query, S, EPS, 'torch'), net.h,
                       use_reentrant=False)
    agree(net.grads(whole), want, 1e-14)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('frozen', ['h', 'query', 'sublayers', 'all but one'])
def test_partly_frozen(S, frozen):
    def run(f):
        net = Net(8)
        keep = {'h': net.leaves[1:], 'query': [net.h, *net.W], 'sublayers': net.leaves[:2], 'all but one': [net.W[4]]}
        for t in net.leaves:
            t.requires_grad_(any(t is k for k in keep[frozen]))
        return torch.autograd.grad(net.run(S, f).square().sum(), keep[frozen])
    agree(run(None), run(reference.depth_attention), 1e-12)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('cut', [lambda x: x.detach(), lambda x: torch.zeros_like(x), lambda x: x])
def test_sublayers_that_cut_the_gradient_or_do_nothing(S, cut):
    def run(f):
        net = Net(8)
        for l in (0, 3, 4, 7):
            net.sublayers[l] = cut
        return net.grads(net.run(S, f), allow_unused=True)
    for a, b in zip(run(None), run(reference.depth_attention), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            agree([a], [b], 1e-12)


def test_nothing_is_left_behind():
    """An exception, a forward without backward and a backward all free their sources, the loss still being held."""
    net, refs = Net(6), []

    def watched(f):
        def call(x):
            y = f(x)
            refs.append(weakref.ref(y))
            return y
        return call
    net.sublayers = [watched(f) for f in net.sublayers]

    def fail(x):
        raise KeyError('on purpose')
    with pytest.raises(KeyError):
        kernels.depth_attention(net.h, [*net.sublayers[:5], fail], net.query, 1, EPS, 'torch')
    net.run(1)
    gc.collect()
    assert not any(r() is not None for r in refs)
    out = net.run(1)
    node = out.grad_fn
    net.grads(out)
    assert node.kept is None


def test_second_derivative_raises():
    net = Net(4)
    first = torch.autograd.grad(net.run(1).sum(), net.h, create_graph=True)[0]
    with pytest.raises(RuntimeError, match='once_differentiable'):
        first.sum().backward()


def saved_vectors(L, S, T=64, D=128):
    """Storages that the backward keeps alive, in (T, D) vectors; these sublayers save nothing but h"""
    h, query = torch.randn(T, D, requires_grad=True), torch.randn(L + 1, D, requires_grad=True)
    out = kernels.depth_attention(h, [lambda x: x * h.detach()] * L, query, S, EPS, 'torch')
    storages, todo, seen = {}, [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions]
        for t in (*getattr(node, 'saved_tensors', ()), *(getattr(node, 'kept', None) or ())):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    storages.pop(query.untyped_storage().data_ptr())
    return sum(storages.values()) / (4 * T * D)


@pytest.mark.parametrize('S', [1, 3])
def test_memory_grows_with_the_sources_not_with_the_pairs(S):
    """2 (L + 1) vectors: a source and the h that the sublayer's own norm keeps anyway; pairs are one number each."""
    for L in (6, 24):
        pairs = (L + 1) * (L + 2) / 2
        assert saved_vectors(L, S) <= 2 * (L + 1) + (pairs + L + 1) / 128 + 0.01


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and whole models

def model_grads(residual, kernel, compiled=None, dtype=torch.float64, **kw):
    torch.manual_seed(3)
    config = dict(n_ctx=8, vocab_size=11, n_layer=3, n_head=2, n_embd=12, residual=residual, kernel=kernel)
    config |= {'residual_blocks': 4} if residual == 'block' else {}
    model = GPT(GPTConfig(**config | kw)).to(dtype)
    torch.nn.init.normal_(model.residual.query)
    x = torch.randint(11, (3, 8))
    f = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
    loss = f(x, x.roll(1, 1))[1]
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize('residual', ['full', 'block'])
@pytest.mark.parametrize('recompute', [False, True])
def test_whole_model(residual, recompute):
    agree(model_grads(residual, 'torch', recompute=recompute), model_grads(residual, 'reference'), 1e-11)


@pytest.mark.parametrize('residual', ['full', 'block'])
@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compiled(residual, backend):
    kw = dict(dtype=torch.float32, n_layer=2)
    torch._dynamo.reset()
    agree(model_grads(residual, 'torch', backend, **kw), model_grads(residual, 'torch', **kw), 1e-5)


def test_operations_are_what_torch_library_expects():
    R, T, D, C = 4, 5, 6, kernels.CHUNK
    source, alpha, rstd, query = torch.randn(R, T, D), torch.randn(10, T), torch.rand(R, T), torch.randn(R, D)
    far, dots, x = torch.randn(T, C, D), torch.randn(C + 1, R, T), torch.randn(T, D)
    torch.library.opcheck(kernels._torch_read_op, (x, query, source, alpha, rstd, far, 2, 1, EPS))
    torch.library.opcheck(kernels._torch_source_op, (x, x, query, source, alpha, rstd, dots, far, query, None, 2, 1))


@pytest.mark.parametrize('device, dtype, interpret, installed, refused', [
    ('cuda', torch.float32, None, True, None), ('cuda', torch.bfloat16, None, True, None),
    ('cuda', torch.float16, '0', True, None), ('cpu', torch.float32, '1', True, None),
    ('cuda', torch.float64, None, True, 'tensors are torch.float64; it takes float32, bfloat16 and float16'),
    ('cpu', torch.float64, '1', True, 'tensors are torch.float64; it takes float32, bfloat16 and float16'),
    ('cpu', torch.float32, None, True, r'tensors are on cpu; it needs CUDA \(or, slowly, TRITON_INTERPRET=1\)'),
    ('cpu', torch.float32, '0', True, r'tensors are on cpu; it needs CUDA \(or, slowly, TRITON_INTERPRET=1\)'),
    ('cuda', torch.float32, None, False, 'the package triton is not installed'),
])
def test_a_path_is_chosen_or_the_refusal_says_why(device, dtype, interpret, installed, refused, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    if interpret:
        monkeypatch.setenv('TRITON_INTERPRET', interpret)
    monkeypatch.setattr(kernels, 'triton', True if installed else None)
    h = SimpleNamespace(is_cuda=device == 'cuda', dtype=dtype, device=torch.device(device))
    assert kernels.choose('torch', h) == 'torch' and kernels.choose('reference', h) == 'reference'
    assert kernels.choose('auto', h) == ('torch' if refused or device == 'cpu' else 'triton')
    if refused:
        message = f"^kernel='triton': cannot run here: {refused}; auto picks one that can$"
        with pytest.raises(ValueError, match=message):
            kernels.choose('triton', h)
    else:
        assert kernels.choose('triton', h) == 'triton'
