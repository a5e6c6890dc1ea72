"""The fast sources in PyTorch against the float64 oracle: values, every gradient, what autograd may do with them."""
import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import reference
import torch
from drive import follow, gradients, run, script
from torch.utils.checkpoint import checkpoint

import kernels
import model
import triton_kernels
from experiments import measure
from model import GPT, GPTConfig

EPS = 1e-6
SHAPES = [(1, 1), (2, 1), (4, 1), (5, 1), (6, 1), (11, 1), (24, 1),  # (L, S)
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
        return (f or fast)(self.h, self.sublayers, self.query, S, EPS)

    def grads(self, out, **keys):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return torch.autograd.grad((out * weight).sum(), self.leaves, **keys)


def fast(h, sublayers, query, S, eps, path='torch'):
    """The rule on the PyTorch kernels; as in AttnRes.sources, w is float32 or wider."""
    w = query.to(torch.promote_types(h.dtype, torch.float32))
    return run(path, h, sublayers, w, S, eps)


def agree(a, b, tol):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).abs().max() <= tol * max(1, y.double().abs().max())


@pytest.mark.parametrize('L, S', SHAPES)
def test_equals_the_oracle(L, S, nan_in_new_memory):
    net = Net(L)
    out, want = net.run(S), net.run(S, reference.depth_attention)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)
    with torch.no_grad():
        agree([net.run(S)], [want], 1e-12)


@pytest.mark.parametrize('L, S', SHAPES)
@pytest.mark.parametrize('tokens', [1, 3])
def test_one_token_or_a_few(L, S, tokens, nan_in_new_memory):
    net = Net(L, shape=(tokens, 1))
    out, want = net.run(S), net.run(S, reference.depth_attention)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)
    with torch.no_grad():
        agree([net.run(S)], [want], 1e-12)


@pytest.mark.parametrize('grad, autocast, tokens, kind', [
    (False, False, 1, kernels.OneToken), (True, False, 1, kernels.FastSources), (False, True, 1, kernels.FastSources),
    (False, False, 2, kernels.FastSources)])
def test_one_token_without_gradient_has_sources_of_its_own(grad, autocast, tokens, kind):
    h, w = torch.randn(1, tokens, 8), torch.randn(3, 8)
    with torch.set_grad_enabled(grad), torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        assert type(kernels.new_sources('torch', model.Sources, w, EPS, h)) is kind
        assert type(kernels.new_sources('auto', model.Sources, w, EPS, h)) is kind
        assert type(kernels.new_sources('reference', model.Sources, w, EPS, h)) is model.Sources


@pytest.mark.parametrize('path', ['torch', 'reference'])
@pytest.mark.parametrize('seeds', [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)])
def test_any_order_of_the_verbs(path, seeds, nan_in_new_memory):
    """Rows pushed, added to and dropped, several at once or none, and reads left out: values and gradients.

    The same for a part of the reads, as if later ones had no effect on the loss, and for one token.
    """
    for seed in seeds:
        verbs = script(seed)
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(7, 5, generator=g, dtype=torch.float64).requires_grad_()
        rows = [torch.randn(1, 2, 5, generator=g, dtype=torch.float64).requires_grad_()
                for verb, _ in verbs if verb in ('push', 'add')]
        outputs = [lambda h, x=x: x if h is None else x + h.sin() for x in rows]
        want = reference.follow(verbs, outputs, w, EPS)
        for n in {len(want), (len(want) + 1) // 2} - {0}:
            got = follow(path, verbs, outputs, w, EPS)
            agree(got, want, 1e-12)
            agree(gradients(got[:n], [w, *rows]), gradients(want[:n], [w, *rows], retain_graph=True), 1e-10)
        with torch.no_grad():
            one = follow(path, verbs, [lambda h, f=f: f(h)[:, :1] for f in outputs], w, EPS)
            agree(one, [h[:, :1] for h in want], 1e-12)


@pytest.mark.parametrize('n', [1, 2, 9, 33, 129])
def test_number_of_sources(n):
    """Any number of rows: a rule with two reads may push 129 of them. -> also without gradient, one token"""
    for shape in ((2, 3), (1, 1)):
        v = [torch.randn(*shape, 7, dtype=torch.float64) for _ in range(n)]
        leaves = [torch.randn(2, 7, dtype=torch.float64), *v]
        verbs = [('push', None)] * n + [('read', 0), ('add', None), ('read', 1)]

        def outputs(leaves):
            return [lambda _, x=x: x for x in (*leaves[1:], leaves[-1])]
        with torch.no_grad():
            agree(follow('torch', verbs, outputs(leaves), leaves[0], EPS),
                  reference.follow(verbs, outputs(leaves), leaves[0], EPS), 1e-12)
        leaves = [t.requires_grad_() for t in leaves]
        got = follow('torch', verbs, outputs(leaves), leaves[0], EPS)
        want = reference.follow(verbs, outputs(leaves), leaves[0], EPS)
        agree([*got, *gradients(got, leaves)], [*want, *gradients(want, leaves)], 1e-11)


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
    exact, ours, plain = [[out.detach(), *n.grads(out)] for n, out in zip((exact, net, net), runs, strict=True)]
    with torch.no_grad():  # each token alone, as in decoding
        tokens = [fast(h, net.sublayers, net.query, S, EPS) for h in net.h.view(-1, 48).split(1)]
    assert tokens[0].dtype == dtype
    alone = torch.cat(tokens).view(4, 33, 48)
    for e, a, b in zip([exact[0], *exact], [alone, *ours], [plain[0], *plain], strict=True):
        def error(x, e=e):
            return (x.double() - e).norm()
        assert error(a) <= 2 * error(b) + torch.finfo(dtype).eps * e.norm()


@pytest.mark.parametrize('path', ['torch', 'reference'])
@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('tokens', [1, 3])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_the_result(dtype, tokens, S, path):
    """Sources whose sums are exact in any dtype: scores and weights are float32, so only h is rounded, once."""
    g = torch.Generator().manual_seed(5)
    v = torch.randint(-3, 4, (13, tokens, 48), generator=g).double()
    query = torch.randn(13, 48, generator=g).to(dtype).double()

    def result(dtype, f, *more):
        return f(v[0].to(dtype), [lambda h, y=y: y.to(dtype) for y in v[1:]], query.to(dtype), S, EPS, *more)
    with torch.no_grad():
        out, want = result(dtype, fast, path), result(torch.float64, reference.depth_attention)
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
        low = net.grads(out)  # the backward inside the context, too
    want = net.run(S)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in low)
    agree([out, *low], [want, *net.grads(want)], 0.05)

    plain = Net(7, 16, torch.float32)
    plain.sublayers = [lambda x: 0 * x] * 7  # nothing for autocast to round: the read itself must not be
    with torch.autocast('cpu', torch.bfloat16):
        low = plain.run(S)
        low = [low, *plain.grads(low, allow_unused=True)[:2]]
    high = plain.run(S)
    for a, b in zip(low, [high, *plain.grads(high, allow_unused=True)[:2]], strict=True):
        assert torch.equal(a, b)
    one = Net(7, 16, torch.float32, (1, 1))
    one.sublayers = [torch.cos] * 7
    with torch.no_grad():
        with torch.autocast('cpu', torch.bfloat16):
            low = one.run(S)
        agree([low], [one.run(S)], 1e-4)  # float32 rounding differs by processor; bfloat16's would be 4e-3


@pytest.mark.parametrize('row', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('answer', [torch.float32, torch.bfloat16])
def test_a_source_in_another_dtype_gets_its_gradient_in_that_dtype(row, answer):
    h = torch.randn(2, 3, 8).to(row).requires_grad_()
    ys = [torch.randn(2, 3, 8).to(answer).requires_grad_() for _ in range(4)]
    w = torch.randn(5, 8)
    out = run('torch', h, [lambda _, y=y: y for y in ys], w, 2, EPS)
    assert out.dtype == row
    assert [g.dtype for g in torch.autograd.grad(out.sum(), [h, *ys])] == [row] + [answer] * 4


@pytest.mark.parametrize('L, S', [(3, 1), (7, 1), (7, 3)])
def test_gradcheck(L, S):
    net = Net(L, 3, shape=(2, 1))

    def f(h, query, *W):
        return fast(h, [lambda x, w=w: torch.tanh(x @ w) for w in W], query, S, EPS)
    assert torch.autograd.gradcheck(f, net.leaves, fast_mode=True)


def test_first_query_gets_no_gradient():
    net = Net(6)
    assert torch.equal(net.grads(net.run(1))[1][0], torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_a_read_of_one_source_gives_its_query_no_gradient_whatever_was_left_out(dtype):
    rows, w = [torch.randn(2, 3, 7).to(dtype).requires_grad_() for _ in range(2)], torch.randn(5, 7)
    w = w.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    for verbs in ([('push', None), ('read', 2), ('push', None), ('read', 4)],
                  [('push', None), ('read', 0), ('drop', 0), ('push', None), ('read', 3)]):
        reads = follow('torch', verbs, [lambda _, y=y: y for y in rows], w, EPS)
        grad = gradients(reads, [w])[0]
        assert (grad[:4] == 0).all() and (grad[4] != 0).any() == (verbs[-1] == ('read', 4))


@pytest.mark.parametrize('counted', [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_huge_scores_of_reads_that_take_no_part_leave_no_nan(counted, nan_in_new_memory):
    """A read that was left out, or that the loss does not see, weighs nothing, whatever its query is."""
    rows, w = [torch.randn(2, 3, 7).requires_grad_() for _ in range(4)], 1e3 * torch.randn(6, 7)
    w = w.requires_grad_()
    verbs = [('push', None), ('read', 1), ('push', None), ('push', None), ('read', 3), ('add', None), ('read', 5)]

    def grads(source):
        reads = source(verbs, [lambda _, y=y: y for y in rows], w, EPS)
        return gradients([reads[k] for k in counted], rows)
    agree(grads(lambda *a: follow('torch', *a)), grads(reference.follow), 2e-3)


@pytest.mark.parametrize('grad, tokens', [(True, 2), (False, 1)])
def test_the_newest_source_may_be_named_from_the_end(grad, tokens):
    x, w = [torch.randn(1, tokens, 8) for _ in range(4)], torch.randn(3, 8)
    with torch.set_grad_enabled(grad):
        for path in ('torch', 'reference'):
            v = kernels.new_sources(path, model.Sources, w, EPS, x[0])
            for y in x[:3]:
                v.push(y)
            v.drop(-1)
            v.drop(-2)
            v.push(x[3])
            expected = reference.attend([x[1], x[3]], w[1], EPS)
            assert len(v) == 2 and torch.allclose(v.read(1).double(), expected, atol=1e-6)


@pytest.mark.parametrize('path', ['torch', 'reference'])
@pytest.mark.parametrize('S', [1, 2])
def test_anomaly_mode_finds_nothing(S, path, nan_in_new_memory):
    """It stops at a NaN in any gradient, and what is on the tape counts as one."""
    net = Net(5)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert all(g.isfinite().all() for g in net.grads(net.run(S, lambda *a: fast(*a, path))))


@pytest.mark.parametrize('path', ['torch', 'reference'])
@pytest.mark.parametrize('S', [1, 3])
def test_huge_scores_and_non_contiguous_input(S, path):
    net = Net(7)
    with torch.no_grad():
        net.query.mul_(1e4)
    agree([net.run(S, lambda *a: fast(*a, path))], [net.run(S, reference.depth_attention)], 1e-12)
    net = Net(7)
    out = fast(net.h.transpose(0, 1), net.sublayers, net.query, S, EPS, path).transpose(0, 1)
    want = net.run(S)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 1e-12)


def test_same_bits_every_run():
    first, second = ([out, *net.grads(out)] for net in (Net(9, dtype=torch.float32), Net(9, dtype=torch.float32))
                     for out in [net.run(2)])
    assert all(map(torch.equal, first, second))


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
        out = f(net.run(S, f), net.sublayers, net.query, S, EPS)
        return [out, *net.grads(out)]
    agree(twice(fast), twice(reference.depth_attention), 1e-12)


@pytest.mark.parametrize('S', [1, 3])
def test_checkpointed_sublayers(S):
    net = Net(8)
    want = net.grads(net.run(S))
    net.sublayers = [lambda x, f=f: checkpoint(f, x, use_reentrant=False) for f in net.sublayers]
    agree(net.grads(net.run(S)), want, 1e-14)
    whole = checkpoint(lambda h: fast(h, net.sublayers, net.query, S, EPS), net.h, use_reentrant=False)
    agree(net.grads(whole), want, 1e-14)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('frozen', ['h', 'query', 'sublayers', 'all but one'])
def test_partly_frozen(S, frozen):
    def grads(f):
        net = Net(8)
        keep = {'h': net.leaves[1:], 'query': [net.h, *net.W], 'sublayers': net.leaves[:2], 'all but one': [net.W[4]]}
        for t in net.leaves:
            t.requires_grad_(any(t is k for k in keep[frozen]))
        return torch.autograd.grad(net.run(S, f).square().sum(), keep[frozen])
    agree(grads(None), grads(reference.depth_attention), 1e-12)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('cut', [lambda x: x.detach(), lambda x: torch.zeros_like(x), lambda x: x])
def test_sublayers_that_cut_the_gradient_or_do_nothing(S, cut):
    def grads(f):
        net = Net(8)
        for l in (0, 3, 4, 7):
            net.sublayers[l] = cut
        return net.grads(net.run(S, f), allow_unused=True)
    for a, b in zip(grads(None), grads(reference.depth_attention), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            agree([a], [b], 1e-12)


@pytest.mark.parametrize('S', [1, 3])
def test_gradient_of_a_read_in_the_middle(S, nan_in_new_memory):
    """Later reads take no part, and two reads may both count."""
    def grads(f, *counted):
        net, heard = Net(6), []
        taps = [lambda h, g=g: heard.append(h) or g(h) for g in net.sublayers]
        heard.append(f(net.h, taps, net.query, S, EPS))
        return gradients([heard[l] for l in counted], net.leaves)
    for counted in ([3], [1], [0], [2, 4], [1, 6]):
        agree(grads(fast, *counted), grads(reference.depth_attention, *counted), 1e-12)


def rows_of(out):
    """The buffer of rows that the graph of `out` holds; None once it is freed."""
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
            if isinstance(getattr(node, 'step', None), kernels.Step):
                return node.v


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
        fast(net.h, [*net.sublayers[:5], fail], net.query, 1, EPS)
    net.run(1)
    gc.collect()
    assert not any(r() is not None for r in refs)
    out = net.run(1)
    rows = weakref.ref(rows_of(out))
    net.grads(out, retain_graph=True)
    assert rows() is rows_of(out) is not None
    net.grads(out)
    assert rows() is None and rows_of(out) is None


def test_second_derivative_raises():
    net = Net(4)
    first = torch.autograd.grad(net.run(1).sum(), net.h, create_graph=True)[0]
    with pytest.raises(RuntimeError, match='once_differentiable'):
        first.sum().backward()


def kept_vectors(L, S, path, T=64, D=128):
    """What the backward pass keeps alive, in (T, D) vectors; these sublayers save nothing but h."""
    h, query = torch.randn(T, D, requires_grad=True), torch.randn(L + 1, D, requires_grad=True)
    factor = h.detach()
    with measure.Created() as created:
        out = run(path, h, [lambda x: x * factor] * L, query, S, EPS)
    return created.alive(but=[out, query]) / (4 * T * D)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('L', [6, 24, 48])
def test_memory_grows_with_the_sources_not_with_the_pairs(S, L):
    """A row for each source and the h that the sublayer's own norm keeps anyway; an lse for each read."""
    assert kept_vectors(L, S, 'torch') <= 2 * (L + 1) + (L + 1) / 128 + 0.1


@pytest.mark.parametrize('n_layer', [12, 24])
@pytest.mark.parametrize('residual', ['full', 'block'])
def test_bytes_kept_for_the_backward_pass_of_a_model(residual, n_layer):
    """At most 1.16 of what the standard residual connection keeps, with 24 sublayers and with 48."""
    def kept(residual):
        config = GPTConfig(n_ctx=128, vocab_size=65, n_layer=n_layer, n_head=16, n_embd=128, bias=False,
                           residual=residual, kernel='torch')
        return measure.alive_bytes(measure.Bench(config, 1, torch.device('cpu')))
    assert kept(residual) / kept('standard') <= 1.16


# ---------------------------------------------------------------------------------------------------------------------
# reads and weights

@pytest.mark.parametrize('path', ['torch', 'reference'])
def test_a_read_repeated_or_out_of_order_is_right_or_refused(path):
    h, w = torch.randn(2, 3, 8), torch.randn(4, 8)
    with torch.no_grad() if path == 'reference' else torch.enable_grad():
        v = kernels.new_sources(path, model.Sources, w, EPS, h)
        v.push(h)
        v.read(0)
        v.push(h.sin())
        first = v.read(2)
        for l in (2, 1, 0):
            if path == 'torch':
                with pytest.raises(ValueError, match=rf'^read\({l}\): must be from 3 to 3: .*kernel=reference'):
                    v.read(l)
            else:
                want = reference.attend([h, h.sin()], w[l], EPS)
                assert torch.allclose(v.read(l).double(), want, atol=1e-6)
        assert torch.allclose(first.double(), reference.attend([h, h.sin()], w[2], EPS), atol=1e-6)
        for l in (4, -1):
            with pytest.raises((ValueError, IndexError)):
                v.read(l) if path == 'torch' else v.read(4)


def test_a_refused_read_leaves_the_others_as_they_are():
    net = Net(4)
    w, want = net.query, net.run(1)
    v = kernels.new_sources('torch', model.Sources, w, EPS, net.h)
    v.push(net.h)
    for l, f in enumerate(net.sublayers):
        h = v.read(l)
        with pytest.raises(ValueError, match='read'):
            v.read(l)
        v.push(f(h))
    out = v.read(4)
    agree([out, *net.grads(out)], [want, *net.grads(want)], 0)


@pytest.mark.parametrize('path', ['torch', 'reference'])
def test_one_token_reads_in_any_order(path):
    """Without gradient a single token's reads may be repeated, as on the reference path."""
    h, w = torch.randn(1, 1, 8), torch.randn(4, 8)
    with torch.no_grad():
        v = kernels.new_sources(path, model.Sources, w, EPS, h)
        v.push(h)
        v.push(h.sin())
        for l in (2, 2, 0, 3):
            assert torch.allclose(v.read(l).double(), reference.attend([h, h.sin()], w[l], EPS), atol=1e-6)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('path, shape, grad', [('reference', (2, 3), True), ('torch', (2, 3), True),
                                               ('torch', (2, 3), False), ('torch', (1, 1), False)])
def test_weights_on_every_path(path, shape, grad, S):
    """alpha (n, B, T) as the oracle has it, float32 or wider, detached, without an effect on anything."""
    net, heard = Net(7, shape=shape), []

    def result(listening):
        v = kernels.new_sources(path, model.Sources, net.query, EPS, net.h)
        if listening:
            v.on_read = lambda l, alpha: heard.append((l, alpha))
        v.push(net.h)
        sources = [net.h]
        for l, f in enumerate(net.sublayers):
            early = v.weights(l).detach() if listening and l % 2 else None
            y = f(v.read(l))
            if early is not None:
                assert torch.allclose(early, heard[-1][1], rtol=1e-12, atol=0)
            if listening:
                check(l, sources, len(v))
            if l % S == 0:
                v.push(y)
                sources = [*sources, y]
            else:
                v.add(y)
                sources = [*sources[:-1], sources[-1] + y]
        return v.read(7)

    def check(l, sources, n):
        at, alpha = heard[-1]
        assert at == l and alpha.shape == (len(sources), *shape) and n == len(sources)
        assert not alpha.requires_grad and alpha.dtype == torch.float64
        scores = [(net.query[l] * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()).sum(-1) for x in sources]
        assert torch.allclose(alpha, torch.stack(reference.softmax(scores)), rtol=0, atol=1e-12)
        assert torch.allclose(alpha.sum(0), torch.ones(shape, dtype=torch.float64))

    with torch.set_grad_enabled(grad):
        silent, spoken = result(False), result(True)
        assert len(heard) == 8
        agree([spoken], [silent], 1e-14)
        if grad:
            agree(net.grads(spoken), net.grads(silent), 1e-13)


@pytest.mark.parametrize('path', ['torch', 'reference'])
def test_weights_are_float32_under_autocast(path):
    h, w = torch.randn(2, 3, 64).bfloat16(), torch.randn(3, 64)
    with torch.autocast('cpu', torch.bfloat16):
        v = kernels.new_sources(path, model.Sources, w, EPS, h)
        v.push(h)
        v.push(h.sin())
        alpha = v.weights(1)
    exact = kernels.new_sources('reference', model.Sources, w.double(), EPS, h.double())
    exact.push(h.double())
    exact.push(h.sin().double())
    assert alpha.dtype == torch.float32 and torch.allclose(alpha.double(), exact.weights(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize('S', [1, 3])
@pytest.mark.parametrize('shape, grad', [((2, 3), True), ((2, 3), False), ((1, 1), False)])
def test_a_hook_changes_no_bit(shape, grad, S):
    net = Net(7, shape=shape, dtype=torch.float32)

    def result(on_read):
        v = kernels.new_sources('torch', model.Sources, net.query, EPS, net.h)
        v.on_read = on_read
        v.push(net.h)
        for l, f in enumerate(net.sublayers):
            y = f(v.read(l))
            (v.add if l % S else v.push)(y)
        out = v.read(7)
        return [out, *(net.grads(out) if grad else [])]
    with torch.set_grad_enabled(grad):
        assert all(map(torch.equal, result(None), result(lambda l, alpha: None)))


@pytest.mark.parametrize('path', ['torch', 'reference'])
def test_the_number_of_sources(path):
    for tokens in (1, 2):
        with torch.no_grad():
            x, w = torch.randn(1, tokens, 8), torch.randn(2, 8)
            v = kernels.new_sources(path, model.Sources, w, EPS, x)
            lengths = [len(v)]
            for verb, *args in (('push', x), ('push', x), ('add', x), ('push', x), ('drop', 1), ('read', 0),
                                ('drop', 0)):
                getattr(v, verb)(*args)
                lengths.append(len(v))
        assert lengths == [0, 1, 2, 2, 3, 2, 2, 1]


def test_a_source_of_another_shape_is_refused():
    for shape in ((3, 2, 8), (2, 3, 4), (6, 8), (2, 1, 8)):
        v = kernels.new_sources('torch', model.Sources, torch.randn(3, 8), EPS, torch.randn(2, 3, 8))
        v.push(torch.randn(2, 3, 8))
        v.read(0)
        with pytest.raises(ValueError, match=rf'shape \({str(shape)[1:-1]}\): must be \(2, 3, 8\)'):
            v.push(torch.randn(*shape))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and whole models

def model_grads(residual, kernel, compiled=None, dtype=torch.float64, **kw):
    torch.manual_seed(3)
    config = dict(n_ctx=8, vocab_size=11, n_layer=3, n_head=2, n_embd=12, residual=residual, kernel=kernel)
    config |= {'residual_blocks': 4} if residual == 'block' else {}
    net = GPT(GPTConfig(**config | kw)).to(dtype)
    torch.nn.init.normal_(net.residual.query)
    x = torch.randint(11, (3, 8))
    f = torch.compile(net, backend=compiled, fullgraph=True) if compiled else net
    loss = f(x, x.roll(1, 1))[1]
    loss.backward()
    return [loss, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize('residual', ['full', 'block'])
@pytest.mark.parametrize('recompute', [False, True])
def test_whole_model(residual, recompute):
    agree(model_grads(residual, 'torch', recompute=recompute), model_grads(residual, 'reference'), 1e-11)


@pytest.mark.parametrize('spread', [0, 0.1])
@pytest.mark.parametrize('residual', ['full', 'block'])
def test_under_autocast_a_model_is_as_near_to_float64_as_on_the_reference_path(residual, spread):
    def grads(kernel, low):
        torch.manual_seed(0)
        net = GPT(GPTConfig(n_ctx=32, vocab_size=65, n_layer=4, n_head=4, n_embd=64, residual=residual,
                            residual_blocks=3, kernel=kernel))
        torch.nn.init.normal_(net.residual.query, std=spread)
        net = net if low else net.double()
        idx = torch.randint(65, (2, 32))
        with torch.autocast('cpu', torch.bfloat16, enabled=low):
            loss = net(idx, idx.roll(1, 1))[1]
        loss.backward()
        return {name: p.grad.double() for name, p in net.named_parameters()}
    exact, plain, ours = grads('reference', False), grads('reference', True), grads('torch', True)
    for name, e in exact.items():
        assert (ours[name] - e).norm() <= 1.5 * (plain[name] - e).norm() + 1e-3 * e.norm(), name


@pytest.mark.parametrize('residual', ['full', 'block'])
@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compiled(residual, backend):
    kw = dict(dtype=torch.float32, n_layer=2)
    torch._dynamo.reset()
    agree(model_grads(residual, 'torch', backend, **kw), model_grads(residual, 'torch', **kw), 1e-5)


@pytest.mark.parametrize('row, base, l', [(2, -1, 2), (2, 1, 2), (2, -1, -1), (-1, -1, 2)])
def test_operations_are_what_torch_library_expects(row, base, l):
    R, T, D = 4, 5, 6
    v, scores, w = torch.randn(R, T, D), torch.randn(R, R, T), torch.randn(R, D)
    y, dh_l = torch.randn(T, D) if row >= 0 else None, torch.randn(T, D) if l >= 0 else None
    live = [0, 2] if row >= 0 else [0, 1]
    checks = ['test_schema', 'test_autograd_registration', 'test_faketensor']
    if row >= 0 and l >= 0:  # else a result has no content, and two runs of it differ
        checks.append('test_aot_dispatch_dynamic')
    torch.library.opcheck(kernels._forward_op, (v, scores, y, w, live, row, base, l, EPS, False), test_utils=checks)
    h, lse = kernels._forward(v, scores, y, w, live, row, base, l, EPS, False)
    dh, stats, dw, zero = torch.randn(R, T, D), torch.randn(2, R, T), torch.randn(R, D), torch.zeros(())
    for carry in (None, torch.randn(T, D)):
        args = v, dh_l, h, lse, w, carry, zero, zero, dh, stats, dw, row, l, 2, EPS, False
        torch.library.opcheck(kernels._backward_op, args, test_utils=checks)


# ---------------------------------------------------------------------------------------------------------------------
# which path runs

@pytest.mark.parametrize('device, dtype, interpret, installed, capability, refused', [
    ('cuda', torch.float32, None, True, (9, 0), None), ('cuda', torch.bfloat16, None, True, (8, 0), None),
    ('cuda', torch.float16, '0', True, (7, 5), None), ('cpu', torch.float32, '1', True, None, None),
    ('cuda', torch.float64, None, True, (9, 0), 'tensors are torch.float64; it takes float32, bfloat16 and float16'),
    ('cpu', torch.float64, '1', True, None, 'tensors are torch.float64; it takes float32, bfloat16 and float16'),
    ('cpu', torch.float32, None, True, None, r'tensors are on cpu; it needs CUDA \(or, slowly, TRITON_INTERPRET=1\)'),
    ('cpu', torch.float32, '0', True, None, r'tensors are on cpu; it needs CUDA \(or, slowly, TRITON_INTERPRET=1\)'),
    ('cuda', torch.float16, None, True, (7, 0), 'the GPU is too old; it needs compute capability 7.5'),
    ('cuda', torch.float32, None, True, (6, 1), 'the GPU is too old; it needs compute capability 7.5'),
    ('cuda', torch.float32, None, False, (9, 0), 'the package triton is not installed'),
])
def test_a_path_is_chosen_or_a_refusal_says_why(device, dtype, interpret, installed, capability, refused, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    if interpret:
        monkeypatch.setenv('TRITON_INTERPRET', interpret)
    monkeypatch.setattr(triton_kernels, 'triton', True if installed else None)
    asked = []
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: asked.append(device) or capability)
    h = SimpleNamespace(is_cuda=device == 'cuda', dtype=dtype, device=torch.device(device, 0))
    assert kernels.choose('torch', h) == 'torch' and kernels.choose('reference', h) == 'reference'
    assert kernels.choose('auto', h) == ('torch' if refused or device == 'cpu' else 'triton')
    if refused:
        message = f"^kernel='triton': cannot run here: {refused}; auto picks one that can$"
        with pytest.raises(ValueError, match=message):
            kernels.choose('triton', h)
    else:
        assert kernels.choose('triton', h) == 'triton'
    assert set(asked) <= {h.device}


def test_the_kernels_take_what_model_sources_takes():
    """Every verb of the plain sources is a verb of the fast ones, with the same arguments."""
    verbs = [name for name in vars(model.Sources) if not name.startswith('_') and name != 'score']
    assert {'push', 'add', 'drop', 'read', 'weights'} <= {*verbs}
    for kind in (kernels.FastSources, kernels.OneToken):
        for name in (*verbs, '__len__'):
            here, there = (inspect.signature(getattr(c, name)) for c in (kind, model.Sources))
            assert [*here.parameters] == [*there.parameters], name
