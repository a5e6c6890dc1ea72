"""Rules of one's own: whoever edits a rule or the sources gets what they wrote, on every kernel and in the trainer."""
import math
import os
import random
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # read when triton is imported
import test_triton  # noqa: E402

import kernels  # noqa: E402
import model  # noqa: E402
import train as T  # noqa: E402
from data import prepare as P  # noqa: E402
from model import GPT, BlockAttnRes, FullAttnRes, GPTConfig, Sources  # noqa: E402


class Uneven(BlockAttnRes):
    """Residual blocks that begin where a list says"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            y = f(v.read(l))
            if l in (0, 2, 5, 11):
                v.push(y)
            else:
                v.add(y)
        return v.read(self.L)


class Window(FullAttnRes):
    """The embedding and the last 4 outputs"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            v.push(f(v.read(l)))
            if len(v) > 5:
                v.drop(1)
        return v.read(self.L)


class TwoEmbeddings(FullAttnRes):
    """A second embedding before the first read: L + 2 sources"""
    def sources(self, h):
        v = super().sources(h)
        v.push(h.sin() * 3)
        return v


class TwoParts(FullAttnRes):
    """Two rows for each output"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            y = f(v.read(l))
            v.push(y.cos())
            v.push(y.sin())
        return v.read(self.L)


class Forgetful(FullAttnRes):
    """Halfway, several sources are forgotten at once, and the newest is followed by one that adds to an older one"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            v.push(f(v.read(l)))
            if l == 6:
                v.drop(0)
                v.drop(len(v) - 1)
                v.drop(1)
                v.add(h.cos())
        return v.read(self.L)


class Parallel(FullAttnRes):
    """Attention and MLP of a transformer block read the same sources: a read without a new row"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l in range(0, self.L, 2):
            a, b = v.read(l), v.read(l + 1)
            v.push(sublayers[l](a) + sublayers[l + 1](b))
        return v.read(self.L)


class NoFinalRead(FullAttnRes):
    """The head reads the plain sum of the last output and its input"""
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            read = v.read(l)
            y = f(read)
            v.push(y)
        return read + y


class Skipping(FullAttnRes):
    """Every third sublayer reads the newest source alone and leaves its own query unused"""
    def forward(self, h, sublayers):
        v, y = self.sources(h), h
        for l, f in enumerate(sublayers):
            y = f(y if l % 3 == 2 else v.read(l))
            v.push(y)
        return v.read(self.L)


RULES = [Uneven, Window, TwoEmbeddings, TwoParts, Forgetful, Parallel, NoFinalRead, Skipping]


def loss_and_gradients(rule, monkeypatch, kernel, dtype=torch.float64, backend=None, n_layer=None):
    monkeypatch.setitem(model.RESIDUALS, 'mine', rule)
    torch.manual_seed(3)
    n_layer = n_layer or (6 if issubclass(rule, BlockAttnRes) else 4)
    net = GPT(GPTConfig(n_ctx=2, vocab_size=11, n_layer=n_layer, n_head=2, n_embd=8, norm_eps=1e-3, residual='mine',
                        residual_blocks=4, kernel=kernel))
    for p in net.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.5)
    device = test_triton.DEVICE if kernel == 'triton' else 'cpu'
    net = net.to(device, dtype)
    idx = torch.tensor([[3, 1]], device=device)
    torch._dynamo.reset()
    run = torch.compile(net, backend=backend, fullgraph=True) if backend else net
    loss = run(idx, idx.flip(1))[1]
    loss.backward()
    zero = torch.zeros(())  # a query that nothing reads has no gradient
    found = {'loss': loss.detach()} | {n: zero if p.grad is None else p.grad for n, p in net.named_parameters()}
    return {name: t.cpu() for name, t in found.items()}


def same(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * (1 + b[name].abs().max()), name


def cases(quick):
    """One case of each rule; those that are not named take long."""
    return [pytest.param(rule, marks=[] if rule in quick else pytest.mark.slow) for rule in RULES]


@pytest.mark.skipif(bool(test_triton.unfit()), reason=test_triton.unfit())
@pytest.mark.parametrize('rule', cases([Uneven, Window, TwoEmbeddings]))
def test_an_edited_rule_runs_on_triton(rule, monkeypatch, nan_in_new_memory):
    expected = loss_and_gradients(rule, monkeypatch, 'reference')
    same(loss_and_gradients(rule, monkeypatch, 'triton', torch.float32), expected, 2e-4)


@pytest.mark.parametrize('kernel', ['torch', 'auto'])
@pytest.mark.parametrize('rule', RULES)
def test_an_edited_rule_is_the_rule_that_runs(rule, kernel, monkeypatch, nan_in_new_memory):
    expected = loss_and_gradients(rule, monkeypatch, 'reference')
    same(loss_and_gradients(rule, monkeypatch, kernel), expected, 1e-10)
    unedited = loss_and_gradients(rule.__bases__[0], monkeypatch, kernel)
    assert (unedited['loss'] - expected['loss']).abs() > 1e-3


@pytest.mark.parametrize('rule', cases([Uneven]))
def test_an_edited_rule_compiles_as_one_graph(rule, monkeypatch):
    n_layer = 2 if rule in (Uneven, TwoEmbeddings, Parallel) else None
    expected = loss_and_gradients(rule, monkeypatch, 'reference', n_layer=n_layer)
    compiled = loss_and_gradients(rule, monkeypatch, 'auto', backend='aot_eager', n_layer=n_layer)
    same(compiled, expected, 1e-10)


@pytest.mark.parametrize('rule', [Uneven, Window])
def test_an_edited_rule_is_trained_by_the_trainer_as_it_is(rule, monkeypatch, tmp_path):
    text = ''.join(random.Random(1).choices('abcdefgh ', k=1200))
    (tmp_path / 'tiny.txt').write_text(text)
    P.prepare('tiny', input=tmp_path / 'tiny.txt', root=tmp_path)
    monkeypatch.setattr('data.batches.load', lambda name: P.load(name, root=tmp_path))

    def losses(rule, **keys):
        monkeypatch.setitem(model.RESIDUALS, 'mine', rule)
        keys = dict(dataset='tiny', residual='mine', n_layer=6, n_embd=16, n_head=2, n_ctx=8, batch_size=3, max_iters=3,
                    eval_interval=3, eval_iters=2, warmup_iters=0, learning_rate=0.3, min_lr=0.1, device='cpu',
                    out_dir=str(tmp_path / 'run'), overwrite=True) | keys
        seen = []
        T.train(T.TrainConfig(**keys), report=lambda state: seen.append(state['loss']))
        return [x for x in seen if x is not None]
    by_default, by_reference = losses(rule), losses(rule, kernel='reference')
    assert len(by_default) == 3 and by_default == pytest.approx(by_reference, rel=1e-3)
    assert abs(losses(rule.__bases__[0])[-1] - by_default[-1]) > 3e-3


# ---------------------------------------------------------------------------------------------------------------------
# edited sources: the kernels step aside

class Tempered(Sources):
    """Scores divided by sqrt(D)"""
    def score(self, v):
        return super().score(v) / math.sqrt(v.size(-1))


class Unnormed(Sources):
    """Keys without a norm"""
    def score(self, v):
        return torch.nn.functional.linear(v, self.w)


class Sigmoid(Sources):
    """Weights that do not compete"""
    def weights(self, l):
        return torch.stack([score[..., l] for score in self.scores]).sigmoid()


class Detached(Sources):
    """The same numbers, another gradient: no gradient into the oldest source through its score"""
    def push(self, y):
        super().push(y)
        if len(self.v) == 1:
            self.scores[0] = self.scores[0].detach()


class Chatty(Sources):
    """The same function and a verb of its own, which the kernels do not have"""
    def oldest(self):
        return self.v[0]


SOURCES = [Tempered, Unnormed, Sigmoid, Detached, Chatty]


def in_place(kind, monkeypatch):
    """Writes what a subclass overrides into model.Sources itself, as a user's editor does."""
    own = {name: value for name, value in vars(kind).items() if callable(value)}
    if kind is Tempered:
        before = Sources.score
        own['score'] = lambda self, v: before(self, v) / math.sqrt(v.size(-1))
    if kind is Detached:
        own['score'] = lambda self, v, before=Sources.score: before(self, v if self.v[1:] else v.detach())
        del own['push']
    for name, value in own.items():
        monkeypatch.setattr(Sources, name, value, raising=False)


def grads_with(kernel, rule=FullAttnRes):
    torch.manual_seed(3)
    net = rule(GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=3, n_ctx=4, norm_eps=1e-3, kernel=kernel)).double()
    torch.nn.init.normal_(net.query)
    h = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    out = net(h, [torch.sin, torch.cos, torch.tanh, torch.sin])
    return net.kernel, [out.detach(), *torch.autograd.grad(out.sin().sum(), [h, net.query])]


@pytest.mark.parametrize('how', ['by a subclass', 'in place'])
@pytest.mark.parametrize('kind', SOURCES)
def test_edited_sources_run_on_the_reference_path_and_it_is_said_once(kind, how, monkeypatch):
    kernel, unedited = grads_with('auto')
    assert kernel == 'auto'

    class Mine(FullAttnRes):
        pass
    if how == 'by a subclass':
        Mine.Sources = kind
    else:
        in_place(kind, monkeypatch)
    _, expected = grads_with('reference', Mine)
    with pytest.warns(UserWarning, match=r'Sources|' + kind.__name__) as warned:
        kernel, got = grads_with('auto', Mine)
    assert len(warned) == 1 and 'kernel=reference runs' in str(warned[0].message)
    assert warned[0].filename == model.__file__  # where the rule asks for its kernel
    assert kernel == 'reference' and all(map(torch.equal, got, expected))
    if kind is not Chatty:
        assert not all(map(torch.allclose, got, unedited))
    for asked in ('torch', 'triton'):
        with pytest.raises(ValueError, match=f"^kernel='{asked}': must be auto or reference, because .*computes"):
            grads_with(asked, Mine)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert grads_with('auto')[0] == 'auto'  # what was undone is not remembered


@pytest.mark.parametrize('name, change', [
    ('drop', lambda self, i: None), ('add', lambda self, y: self.push(y)),
    ('weights', lambda self, l: torch.stack([s[..., l] for s in self.scores[-8:]]).softmax(0)),
    ('__init__', lambda self, w, eps: Sources.before(self, w, eps / 2)),
    ('read', lambda self, l: torch.cat([self.v[0], self.w])), ('push', lambda self, y: self.store(y))])
def test_any_change_of_any_verb_is_noticed(name, change, monkeypatch):
    """also one that shows with many sources only, or that fails"""
    monkeypatch.setattr(Sources, 'before', Sources.__init__, raising=False)
    monkeypatch.setattr(Sources, name, change)
    monkeypatch.delattr(Sources, 'before', raising=False) if name != '__init__' else None
    assert not kernels.same_function(Sources)


def test_a_change_that_only_the_weights_or_the_queries_show_is_noticed(monkeypatch):
    read, weights, score = Sources.read, Sources.weights, Sources.score

    def true_read(self, l):
        monkeypatch.setattr(Sources, 'weights', weights)
        h = read(self, l)
        monkeypatch.setattr(Sources, 'weights', doubled)
        return h

    def doubled(self, l):
        return 2 * weights(self, l)
    monkeypatch.setattr(Sources, 'read', true_read)
    monkeypatch.setattr(Sources, 'weights', doubled)
    assert not kernels.same_function(Sources)
    monkeypatch.undo()

    def frozen(self, v):
        w, self.w = self.w, self.w.detach() + 0 * self.w
        z = score(self, v)
        self.w = w
        return z
    monkeypatch.setattr(Sources, 'score', frozen)
    assert not kernels.same_function(Sources)


def test_a_class_made_for_other_tensors_is_different():
    class Strange:
        def __init__(self, w, eps, more):
            pass
    assert not kernels.same_function(Strange) and kernels.same_function(Sources)


def test_a_copy_of_the_sources_is_the_same_function():
    copy = type('Copy', (), {name: value for name, value in vars(Sources).items() if name != '__dict__'
                             and name != '__weakref__'})
    copy._helper = lambda self: None
    assert kernels.same_function(copy)
    copy.score = Tempered.score
    assert not kernels.same_function(copy)


def test_the_example_leaves_no_trace():
    before = torch.get_rng_state()
    kernels.same_on_an_example.cache_clear()
    with torch.no_grad():
        assert kernels.same_function(Sources) and not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('context', [lambda: torch.device('meta'), torch.inference_mode])
def test_a_model_may_be_built_anywhere(context):
    """on the meta device, to count its parameters, or where nothing is recorded"""
    kernels.same_on_an_example.cache_clear()
    with context(), warnings.catch_warnings():
        warnings.simplefilter('error')
        net = GPT(GPTConfig(residual='full', vocab_size=11, n_layer=1, n_embd=8, n_head=1))
    assert net.residual.kernel == 'auto'
