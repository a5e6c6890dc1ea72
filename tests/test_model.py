"""model.py against the float64 oracle in reference.py, and one test for each thing that goes wrong in such models."""
import math
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import reference
import torch

import kernels
from model import GPT, RESIDUALS, Cache, GPTConfig, Sources, pick
from weights import load_checkpoint, model_config

V, D, T = 11, 8, 5
MODES = [('standard', 1), ('full', 1), ('block', 1), ('block', 2), ('block', 3), ('block', 4), ('block', 6)]  # L = 6
ATTNRES = MODES[1:]


def config(residual='standard', residual_blocks=1, **keys):
    """A tiny GPTConfig; eps is large enough to be seen."""
    keys = dict(n_ctx=7, vocab_size=V, n_layer=3, n_head=2, n_embd=D, norm_eps=0.02, kernel='reference') | keys
    return GPTConfig(residual=residual, residual_blocks=residual_blocks, **keys)


def randomise(model, scale=0.5):
    """Gives every parameter, biases, gains and queries too, random values that matter. -> model"""
    with torch.no_grad():
        for name, p in model.named_parameters():
            unit = name.endswith(('ln_1.weight', 'ln_2.weight', 'ln_f.weight', 'key_gain'))
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * scale + unit)
    return model


def tiny(residual='standard', residual_blocks=1, dtype=torch.float64, **keys):
    return randomise(GPT(config(residual, residual_blocks, **keys)).to(dtype))


def tokens(T=T, B=2):
    return torch.randint(V, (B, T))


def gradients(model, idx, targets):
    """logits, {name: gradient} of one backward pass"""
    model.zero_grad(set_to_none=True)
    logits, loss = model(idx, targets)
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def reads(rule):
    """A list that fills with (w, v, alpha, h) of every read of a rule on the reference path, in order."""
    seen = []

    class Recorder(rule.Sources):
        def read(self, l):
            h = super().read(l)
            seen.append((self.w[l], tuple(self.v), self.weights(l), h))
            return h
    rule.Sources = Recorder
    return seen


def sources_of(v, w, eps):
    """Sources on the reference path that hold v; w (R, D)."""
    sources = Sources(w, eps)
    for x in v:
        sources.push(x)
    return sources


def close(a, b, tolerance=1e-10):
    return bool((a - b).norm() <= tolerance * b.norm())


# ---------------------------------------------------------------------------------------------------------------------
# the oracle, checked by numbers from outside

GOLD = [([[1., 0, 0, 0], [0, 1, 0, 0]], [2., 0, 0, 0], [0.9820137900, 0.0179862100, 0, 0]),
        ([[1., 2, 3, 4], [4, -3, 2, -1], [.5, .5, -.5, 10]], [.3, -.2, .1, .4],
         [1.7188453455, -0.0694017430, 1.3911580507, 4.7312895086])]


@pytest.mark.parametrize('sources, u, h', GOLD)
def test_golden_vectors(sources, u, h):
    sources = [torch.tensor(v, dtype=torch.float64) for v in sources]
    u, h = torch.tensor(u, dtype=torch.float64), torch.tensor(h, dtype=torch.float64)
    assert torch.allclose(reference.attend(sources, u, 0.0), h, rtol=0, atol=1e-10)
    here = sources_of([v.view(1, 1, -1) for v in sources], u.view(1, -1), 0.0).read(0)
    assert torch.allclose(here.view(-1), h, rtol=0, atol=1e-10)


def test_golden_weights():
    sources = [torch.tensor(v, dtype=torch.float64).view(1, 1, -1) for v in GOLD[1][0]]
    alpha = sources_of(sources, torch.tensor([GOLD[1][1]], dtype=torch.float64), 0.0).weights(0)
    assert alpha.shape == (3, 1, 1)
    expected = torch.tensor([0.3247218012, 0.3018526985, 0.3734255002], dtype=torch.float64)
    assert torch.allclose(alpha.view(-1), expected, rtol=0, atol=1e-10)


def test_oracle_partition():
    assert reference.index_sets(6, 1) == [[0], [1], [2], [3], [4], [5]]
    assert reference.index_sets(7, 3) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize('L, S', [(1, 1), (5, 1), (6, 2), (7, 3), (8, 3), (4, 9)])
def test_the_papers_two_phase_computation_is_the_rule(L, S):
    """Algorithm 1: a residual block reads the finished ones at once, then merges its own sum in by a sigmoid."""
    h = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    u = (3 * torch.randn(L + 1, D, dtype=torch.float64)).requires_grad_()
    matrices = torch.randn(L, D, D, dtype=torch.float64)
    sublayers = [lambda x, W=W: torch.tanh(x @ W) for W in matrices]
    phased, plain = (f(h, sublayers, u, S, 0.02) for f in (reference.two_phase, reference.depth_attention))
    assert close(phased, plain, 1e-13)
    grads, expected = (torch.autograd.grad(out.sin().sum(), [h, u]) for out in (phased, plain))
    assert all(close(a, b, 1e-12) for a, b in zip(grads, expected, strict=True))


def test_a_merge_of_one_more_source_is_a_sigmoid():
    """Phase 2 needs no new softmax: h + sigmoid(s - lse) (v - h)."""
    v, u = [torch.randn(D, dtype=torch.float64) for _ in range(4)], torch.randn(D, dtype=torch.float64)
    first, second = (reference.attend_with_stats([u], x, 0.02)[0] for x in (v[:3], v[3:]))
    h, lse = first[0] / first[2], first[1] + first[2].log()
    merged = h + torch.sigmoid(second[1] - lse) * (v[3] - h)
    assert close(reference.merge(first, second), merged, 1e-14) and close(merged, reference.attend(v, u, 0.02), 1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# exact: logits and gradients

EVERY = [pytest.param(kernel, n, mode, N, marks=[pytest.mark.slow] if kernel == 'triton' else [])
         for kernel in kernels.KERNELS if kernel != 'auto' for n in (1, 2, 3, 4)
         for mode, N in [('standard', 1), ('full', 1), *(('block', N) for N in range(1, 2 * n + 1))]
         if mode != 'standard' or kernel == 'reference'  # standard has no depth attention
         if kernel != 'triton' or n == 1 or n == 4 and N <= 4]  # slow; more than 4 of 8 blocks are S = 1 or 2 again


@pytest.mark.parametrize('kernel, n_layer, mode, N', EVERY)
def test_logits_and_all_gradients_equal_the_oracle(kernel, n_layer, mode, N):
    dtype, tolerance, device = torch.float64, 1e-10, 'cpu'
    if kernel == 'triton':
        dtype, tolerance, device = torch.float32, 1e-4, 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        kernels.choose(kernel, torch.zeros(2, T, D, dtype=dtype, device=device))
    except ValueError as e:
        pytest.skip(f'{kernel} cannot run here: {e}')
    bias = (n_layer + N) % 2 == 0
    model = tiny(mode, N, dtype, n_layer=n_layer, bias=bias, kernel=kernel).to(device)
    idx, targets = tokens(), tokens()
    logits, grads = gradients(model, idx.to(device), targets.to(device))

    leaves = {name: p.detach().cpu().double().requires_grad_() for name, p in model.named_parameters()}
    expected, loss = reference.logits_and_loss(leaves, asdict(model.config), idx, targets)
    loss.backward()
    assert logits.shape == (2, T, V) and close(logits.cpu(), expected.detach(), tolerance)
    for name, p in leaves.items():
        assert close(grads[name].cpu(), p.grad, tolerance), name
        assert p.grad.abs().max() > 0, f'{name}: a gradient of zero proves nothing'


def test_loss_is_the_oracles_and_targets_of_minus_one_do_not_count():
    model, idx, targets = tiny(), tokens(), tokens()
    _, expected = reference.logits_and_loss(model.state_dict(), asdict(model.config), idx, targets)
    assert math.isclose(model(idx, targets)[1].item(), expected.item(), rel_tol=1e-12)
    assert model(idx)[1] is None
    half = targets.clone()
    half[1] = -1
    _, expected = reference.logits_and_loss(model.state_dict(), asdict(model.config), idx[:1], targets[:1])
    assert math.isclose(model(idx, half)[1].item(), expected.item(), rel_tol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('n_layer', [1, 3])
def test_full_is_block_of_one_to_the_last_bit(dtype, n_layer):
    full, block = tiny('full', n_layer=n_layer, dtype=dtype), tiny('block', 2 * n_layer, n_layer=n_layer, dtype=dtype)
    block.load_state_dict(full.state_dict())
    idx, targets = tokens(), tokens()
    a, grads_a = gradients(full, idx, targets)
    b, grads_b = gradients(block, idx, targets)
    assert torch.equal(a, b)
    assert all(torch.equal(grads_a[name], grads_b[name]) for name in grads_a)


# ---------------------------------------------------------------------------------------------------------------------
# at initialisation

def test_all_modes_are_one_function_at_initialisation():
    idx = tokens()
    out = {}
    for mode in MODES:
        torch.manual_seed(0)
        out[mode] = GPT(config(*mode, norm_eps=0)).double()(idx)[0]
    expected = out['standard', 1]
    assert expected.std() > 1e-3
    for mode, logits in out.items():
        assert (logits - expected).abs().max() < 1e-12, mode


def test_first_loss_is_the_same_in_float32_with_the_default_eps():
    losses = []
    idx, targets = torch.randint(65, (4, 32)), torch.randint(65, (4, 32))
    for mode in MODES:
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_ctx=32, vocab_size=65, n_layer=3, n_head=2, n_embd=32, residual=mode[0],
                              residual_blocks=mode[1]))
        losses.append(model(idx, targets)[1].item())
    assert max(losses) - min(losses) < 5e-5 and abs(losses[0] - math.log(65)) < 0.1


@pytest.mark.parametrize('mode', ATTNRES)
def test_one_seed_gives_every_mode_the_same_weights(mode):
    states = []
    for m in (('standard', 1), mode):
        torch.manual_seed(5)
        states.append((GPT(config(*m)).state_dict(), torch.get_rng_state()))
    (standard, rng), (other, rng_other) = states
    assert all(torch.equal(standard[name], other[name]) for name in standard)
    assert torch.equal(rng, rng_other)  # nothing more was drawn: dropout and data go on alike


def hear(rule):
    """A list that fills with (l, alpha) of every read of the rule, in order."""
    heard = []
    rule.on_read = lambda l, alpha: heard.append((l, alpha))
    return heard


@pytest.mark.parametrize('kernel', ['reference', 'torch'])
@pytest.mark.parametrize('mode', ATTNRES)
def test_every_depth_weight_is_one_over_n_after_construction(mode, kernel):
    model = GPT(config(*mode, kernel=kernel))
    heard = hear(model.residual)
    model(tokens())
    assert [l for l, _ in heard] == list(range(2 * model.config.n_layer + 1))
    for l, alpha in heard:
        n = 1 + math.ceil(l / model.residual.S)
        assert alpha.shape == (n, 2, T) and alpha.dtype == torch.float32 and not alpha.requires_grad
        assert (alpha == 1 / n).all()
    assert (model.residual.query == 0).all() and (model.residual.key_gain == 1).all()


@pytest.mark.parametrize('mode', ATTNRES)
def test_every_read_is_the_mean_of_its_sources_after_construction(mode):
    model = GPT(config(*mode))
    seen = reads(model.residual)
    model(tokens())
    assert len(seen) == 2 * model.config.n_layer + 1
    for _, v, _, h in seen:
        assert torch.allclose(h, sum(v) / len(v), atol=1e-6)


@pytest.mark.parametrize('kernel', ['reference', 'torch'])
@pytest.mark.parametrize('mode', ATTNRES)
def test_weights_heard_are_those_that_mix_and_hearing_them_changes_no_bit(mode, kernel):
    model, idx, targets = tiny(*mode, dtype=torch.float32, kernel=kernel), tokens(), tokens()
    a, grads_a = gradients(model, idx, targets)
    heard = hear(model.residual)
    b, grads_b = gradients(model, idx, targets)
    assert torch.equal(a, b) and all(torch.equal(grads_a[name], grads_b[name]) for name in grads_a)
    plain = tiny(*mode, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    seen = reads(plain.residual)
    plain(idx)
    for (_, v, _, _), (_, alpha), w in zip(seen, heard, plain.residual.query * plain.residual.key_gain, strict=True):
        scores = torch.stack([(w * x).sum(-1) / (x.square().mean(-1) + 0.02).sqrt() for x in v])
        assert torch.allclose(alpha, scores.softmax(0), rtol=0, atol=1e-5)
        assert torch.allclose(alpha.sum(0), torch.ones(2, T), rtol=0, atol=1e-6)


@pytest.mark.parametrize('mode', ATTNRES)
def test_which_residual_gradients_are_zero(mode):
    model, idx, targets = GPT(config(*mode)).double(), tokens(), tokens()
    _, grads = gradients(model, idx, targets)
    assert (grads['residual.key_gain'] == 0).all()  # it acts as query * key_gain, and queries are zero
    assert (grads['residual.query'][0] == 0).all()  # a single source: nothing to choose
    assert (grads['residual.query'][1:].abs().amax(1) > 0).all()
    _, grads = gradients(randomise(model), idx, targets)
    assert (grads['residual.query'][0] == 0).all() and (grads['residual.key_gain'][0] == 0).all()
    assert (grads['residual.key_gain'][1:].abs().amax(1) > 0).all()


@pytest.mark.parametrize('scale', [True, False])
def test_initial_spread(scale):
    model = GPT(config(n_embd=64, n_head=2, n_layer=2, vocab_size=100, n_ctx=50, scale_proj_init=scale))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / 2 if scale and name.endswith('c_proj.weight') else 0.02  # sqrt(2 * n_layer) = 2
            assert abs(p.std().item() / std - 1) < 0.06 and abs(p.mean().item()) < 0.1 * std, name
        else:
            assert (p == (0 if name.endswith('bias') else 1)).all(), name


# ---------------------------------------------------------------------------------------------------------------------
# sources

def toy(mode, n_layer, **keys):
    """rule, embedding, sublayers and the list of their outputs, which fills as they run; float64, random queries"""
    rule = randomise(RESIDUALS[mode[0]](config(*mode, n_layer=n_layer, **keys)).double())
    outputs = []

    def sublayer(weight):
        def f(h):
            outputs.append(torch.tanh(h @ weight) * 3)
            return outputs[-1]
        return f
    sublayers = [sublayer(torch.randn(D, D).double()) for _ in range(2 * n_layer)]
    return rule, torch.randn(2, T, D).double(), sublayers, outputs


COUNTS = [  # sources at each read, the output aggregation last: worked out by hand from the paper's eq. 6
    ('full', 1, 3, [1, 2, 3, 4, 5, 6, 7]),
    ('block', 6, 3, [1, 2, 3, 4, 5, 6, 7]),
    ('block', 1, 3, [1, 2, 2, 2, 2, 2, 2]),
    ('block', 2, 3, [1, 2, 2, 2, 3, 3, 3]),  # S = 3: a boundary inside a transformer block
    ('block', 3, 3, [1, 2, 2, 3, 3, 4, 4]),
    ('block', 3, 4, [1, 2, 2, 2, 3, 3, 3, 4, 4]),  # S = 3, ragged: the last block has two
    ('block', 8, 5, [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),  # 10 / 8 is rounded up to S = 2: five blocks
    ('block', 8, 16, [1] + [n for n in range(2, 10) for _ in range(4)]),  # the paper's 32 sublayers, S = 4
]


@pytest.mark.parametrize('mode, N, n_layer, counts', COUNTS)
def test_sources_at_every_read(mode, N, n_layer, counts):
    rule, h, sublayers, outputs = toy((mode, N), n_layer)
    seen = reads(rule)
    rule(h, sublayers)
    assert [len(v) for _, v, _, _ in seen] == counts
    total = h
    for l, (w, v, _, _) in enumerate(seen):
        assert torch.equal(v[0], h)  # the embedding is its own source
        assert close(sum(v), total)  # disjoint sums: nothing twice, nothing missing
        assert all(x.abs().sum() > 0 for x in v)  # no empty partial sum
        assert torch.equal(w, rule.query[l] * rule.key_gain[l])
        total = total + outputs[l] if l < len(outputs) else total


@pytest.mark.parametrize('mode', [('full', 1), ('block', 2)])
@pytest.mark.parametrize('kernel', ['reference', 'torch'])
def test_fewer_sublayers_are_the_same_function(kernel, mode, nan_in_new_memory):
    """A rule has a query for each sublayer and the output. Of a part of a network it takes the part's."""
    rule, h, sublayers, _ = toy(mode, 3, kernel=kernel)
    for n in (0, 1, 4):
        u = (rule.query * rule.key_gain)[[*range(n), -1]]
        leaves = [h.clone().requires_grad_(), rule.query]
        out = rule(leaves[0], sublayers[:n])
        expected = reference.depth_attention(leaves[0], sublayers[:n], u, rule.S, 0.02)
        assert close(out, expected)
        grads, expected = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
        assert all(map(close, grads, expected))


@pytest.mark.parametrize('mode', [('full', 1), ('block', 2)])
def test_more_sublayers_than_queries_are_refused(mode):
    """One more repeats the read of the output, which the reference path may; the kernels may not."""
    for kernel, n, error in (('torch', 7, ValueError), ('torch', 8, ValueError), ('reference', 8, IndexError)):
        rule, h, sublayers, _ = toy(mode, 3, kernel=kernel)
        with pytest.raises(error, match='read' if kernel == 'torch' else 'out of'):
            rule(h, [sublayers[0]] * n)


@pytest.mark.parametrize('mode', [m[:3] for m in COUNTS])
def test_gradient_reaches_every_source(mode):
    *mode, n_layer = mode
    rule, h, _, _ = toy(mode, n_layer)
    leaves = [x.requires_grad_() for x in (h, *torch.randn(2 * n_layer, 2, T, D).double())]
    probe = torch.randn(2, T, D).double()
    constant = [lambda _, y=y: y for y in leaves[1:]]  # sublayers that ignore what they read
    out = rule(h, constant)
    grads = torch.autograd.grad((out * probe).sum(), leaves)
    expected = reference.depth_attention(h, constant, rule.query * rule.key_gain, rule.S, 0.02)
    assert close(out, expected)
    for a, b in zip(grads, torch.autograd.grad((expected * probe).sum(), leaves), strict=True):
        assert b.abs().max() > 1e-6 and close(a, b)


@pytest.mark.parametrize('mode', MODES)
def test_the_head_reads_more_than_the_last_block(mode):
    model = tiny(*mode)
    last = model.transformer.h[-1].mlp.c_proj
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    read = []
    model.transformer.ln_f.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    model.transformer.drop.register_forward_hook(lambda module, args, h: read.append(h))
    idx = tokens()
    logits, _ = model(idx)
    expected, _ = reference.logits_and_loss(model.state_dict(), asdict(model.config), idx)
    assert close(logits, expected)
    fixed = [lambda h: torch.zeros_like(h)] * 6  # with silent sublayers only the embedding is left
    h = read[0].detach().requires_grad_()
    grad, = torch.autograd.grad(model.residual(h, fixed).square().sum(), h)
    assert grad.abs().min() > 0


def test_the_partition_that_came_out_is_told():
    def told(*args):
        return RESIDUALS[args[0]](config(*args[:2], n_layer=args[2])).describe()
    assert told('block', 8, 5) == '10 sublayers in 5 residual blocks of 2'
    assert told('block', 3, 4) == '8 sublayers in 3 residual blocks of 3, the last of 2'
    assert told('block', 2, 4) == '8 sublayers in 2 residual blocks of 4'
    assert told('block', 1, 3) == '6 sublayers in 1 residual blocks of 6'
    assert told('full', 1, 3) == '6 sublayers in 6 residual blocks of 1'
    assert RESIDUALS['standard'](config()).describe() == 'h <- h + f(h)'


# ---------------------------------------------------------------------------------------------------------------------
# causality, precision, recomputation, dropout, compilation

@pytest.mark.parametrize('mode', MODES)
def test_no_logit_moves_before_the_token_that_changed(mode):
    model, idx = tiny(*mode), tokens()
    before = model(idx)[0]
    for t in range(T):
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % V
        moved = (model(other)[0] - before).abs().amax((0, 2))
        assert (moved[:t] < 1e-12).all() and (moved[t:] > 1e-6).all()


@pytest.mark.parametrize('mode', ATTNRES)
def test_depth_attention_is_float32_under_bfloat16_autocast(mode):
    model = tiny(*mode, dtype=torch.float32, n_embd=64)
    seen = reads(model.residual)
    with torch.autocast('cpu', torch.bfloat16):
        logits, _ = model(tokens())
        for w, v, alpha, h in seen:
            assert w.dtype == alpha.dtype == torch.float32 and {x.dtype for x in (*v, h)} == {torch.bfloat16}
            scores = torch.stack([(w.double() * x.double()).sum(-1)
                                  / (x.double().square().mean(-1) + 0.02).sqrt() for x in v])
            assert torch.allclose(alpha.double(), scores.softmax(0), rtol=0, atol=2e-6)  # bfloat16 would be off by 1e-2
            exact = reference.attend(v, w, 0.02)
            assert ((h.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()  # one rounding, the last
    assert logits.isfinite().all() and len(seen) == 7


def test_depth_attention_is_float32_in_a_bfloat16_model():
    model = tiny('block', 2, dtype=torch.bfloat16)
    seen = reads(model.residual)
    logits, _ = model(tokens())
    assert logits.dtype == torch.bfloat16 and {h.dtype for _, _, _, h in seen} == {torch.bfloat16}
    assert all(w.dtype == alpha.dtype == torch.float32 for w, _, alpha, _ in seen)


@pytest.mark.parametrize('kernel', ['reference', 'torch'])
def test_a_single_source_is_handed_through(kernel):
    rule, h, _, _ = toy(('full', 1), 1, kernel=kernel)
    heard = []
    rule(h, [lambda x: heard.append(x) or x, torch.tanh])
    assert torch.equal(heard[0], h)


@pytest.mark.parametrize('kernel', ['auto', 'reference'])
@pytest.mark.parametrize('mode', ATTNRES)
def test_a_rule_drives_the_sources_that_its_kernel_has(mode, kernel, monkeypatch):
    """The rule that is read is the rule that runs: each kernel supplies sources, and nothing else."""
    asked = []

    def sources(kernel, plain, w, eps, h):
        asked.append((kernel, plain, w.dtype, w.shape, eps, h.dtype))
        return Sources(w, eps)
    monkeypatch.setattr(kernels, 'new_sources', sources)
    model = tiny(*mode, kernel=kernel)
    seen, idx = reads(model.residual), tokens()
    model.residual.Sources = Sources
    expected, _ = reference.logits_and_loss(model.state_dict(), asdict(model.config), idx)
    assert close(model(idx)[0], expected) and seen == []
    assert asked == [(kernel, Sources, torch.float64, (7, D), 0.02, torch.float64)]


@pytest.mark.parametrize('dropout', [0.0, 0.3])
@pytest.mark.parametrize('mode', MODES)
def test_recompute_changes_no_gradient(mode, dropout):
    idx, targets = tokens(), tokens()
    plain, again = tiny(*mode, dropout=dropout), tiny(*mode, dropout=dropout, recompute=True)
    again.load_state_dict(plain.state_dict())
    results, calls = [], []
    again.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, again):
        torch.manual_seed(3)
        results.append(gradients(model, idx, targets))
    (a, grads_a), (b, grads_b) = results
    assert torch.equal(a, b)
    assert all(close(grads_b[name], grads_a[name], 1e-13) for name in grads_a)
    assert len(calls) == 2  # it really was computed twice
    again.eval()
    gradients(again, idx, targets)
    assert len(calls) == 3


@pytest.mark.parametrize('mode', MODES[:3])
def test_dropout_acts_in_training_only(mode):
    model, idx = tiny(*mode, dropout=0.4), tokens()
    expected, _ = reference.logits_and_loss(model.state_dict(), asdict(model.config), idx)
    assert not close(model(idx)[0], model(idx)[0], 1e-3)
    assert close(model.eval()(idx)[0], expected)


@pytest.mark.parametrize('place', ['drop', 'h.0.attn', 'h.0.attn.resid_dropout', 'h.0.mlp.dropout'])
def test_dropout_acts_at_each_of_its_places(place):
    model, idx = tiny(n_layer=1), tokens()
    module = model.transformer.get_submodule(place)
    assert torch.equal(model(idx)[0], model(idx)[0])
    setattr(module, 'dropout' if place == 'h.0.attn' else 'p', 0.4)
    assert not close(model(idx)[0], model(idx)[0], 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['reference', 'torch'])
@pytest.mark.parametrize('mode', MODES[:4])
def test_compiles_whole_with_equal_gradients(mode, kernel):
    torch._dynamo.reset()
    model, idx, targets = tiny(*mode, n_layer=2, kernel=kernel), tokens(), tokens()
    expected, grads_expected = gradients(model, idx, targets)
    model.zero_grad(set_to_none=True)
    logits, loss = torch.compile(model, fullgraph=True, backend='aot_eager')(idx, targets)
    loss.backward()
    assert close(logits, expected)
    for name, p in model.named_parameters():
        assert close(p.grad, grads_expected[name]), name


# ---------------------------------------------------------------------------------------------------------------------
# decoding

@pytest.mark.parametrize('chunks', [[1] * 7, [4, 1, 1, 1], [1, 3, 3], [3, 2, 2], [7]])
@pytest.mark.parametrize('mode, kernel', [*((m, 'reference') for m in MODES), *((m, 'auto') for m in ATTNRES)])
def test_cached_decoding_equals_the_full_forward(mode, kernel, chunks):
    model, idx = tiny(*mode, kernel=kernel).eval(), tokens(7)
    caches = [Cache(7) for _ in model.transformer.h]
    logits = torch.cat([model(part, caches=caches)[0] for part in idx.split(chunks, dim=1)], dim=1)
    assert close(logits, model(idx)[0], 1e-12)
    assert {cache.kv.shape for cache in caches} == {(2, 2, 2, 7, D // 2)}  # keys and values for n_ctx tokens, no more
    with pytest.raises(ValueError, match='n_ctx=7'):
        model(idx[:, :1], caches=caches)


@pytest.mark.parametrize('kernel', ['auto', 'reference'])
@pytest.mark.parametrize('mode', [('full', 1), ('block', 2)])
def test_weights_are_heard_while_decoding_and_change_no_bit(mode, kernel):
    """One token at a time has sources of its own; their weights are those of the whole text's last token."""
    model, idx = tiny(*mode, kernel=kernel).eval(), tokens(4, B=1)

    @torch.no_grad()
    def decode():
        caches = [Cache(7) for _ in model.transformer.h]
        return torch.cat([model(idx[:, t:t + 1], caches=caches)[0] for t in range(4)], dim=1)
    silent, heard = decode(), hear(model.residual)
    assert torch.equal(decode(), silent)
    whole = heard.copy()
    heard.clear()
    model(idx)
    assert len(whole) == 4 * len(heard) == 28
    for k, (l, alpha) in enumerate(whole):
        at, expected = heard[k % 7]
        assert l == at and alpha.shape == (len(expected), 1, 1) and not alpha.requires_grad
        assert close(alpha[:, :, 0], expected[:, :, k // 7], 1e-12)


def continue_slowly(model, idx, n, choose):
    """What stream promises, without a cache: a full window is cut to its last half and read anew."""
    n_ctx = model.config.n_ctx
    window, out = idx[:, -n_ctx:], []
    for _ in range(n):
        if window.size(1) > n_ctx:
            window = window[:, -max(1, n_ctx // 2):]
        out.append(choose(model(window)[0][:, -1]))
        window = torch.cat([window, out[-1]], dim=1)
    return torch.cat([idx, *out], dim=1)


@pytest.mark.parametrize('n_ctx, prompt', [(7, 1), (7, 3), (6, 6), (7, 7), (7, 10), (1, 1), (2, 3)])
@pytest.mark.parametrize('mode', [('standard', 1), ('full', 1), ('block', 2), ('block', 4)])
def test_generation_goes_on_past_the_window(mode, n_ctx, prompt):
    model, idx = tiny(*mode, n_ctx=n_ctx).eval(), tokens(prompt)
    shapes = []
    handle = model.transformer.wte.register_forward_hook(lambda module, args, out: shapes.append(args[0].size(1)))
    greedy = model.generate(idx, 3 * n_ctx + 2, temperature=0)
    handle.remove()
    assert greedy.shape == (2, prompt + 3 * n_ctx + 2)
    assert torch.equal(greedy, continue_slowly(model, idx, 3 * n_ctx + 2, lambda x: x.argmax(-1, keepdim=True)))
    first, half = min(prompt, n_ctx), max(1, n_ctx // 2)
    expected, length = [first], first
    while len(expected) < 3 * n_ctx + 2:  # tokens that each call reads: one, but for the prompt and after a full window
        expected.append(half if length == n_ctx else 1)
        length = half if length == n_ctx else length + 1
    assert shapes == expected

    def draw(logits):
        return torch.multinomial((logits.float() / 0.7).softmax(-1), 1, generator=generator)
    generator = torch.Generator().manual_seed(2)
    slow = continue_slowly(model, idx, 9, draw)
    drawn = model.generate(idx, 9, temperature=0.7, generator=torch.Generator().manual_seed(2))
    assert torch.equal(drawn, slow)


def test_stream_yields_one_column_at_a_time_without_gradients():
    model, idx = tiny('block', 2, n_layer=1).eval(), tokens(2, B=3)
    columns, tracked = [], []
    model.lm_head.register_forward_hook(lambda module, args, logits: tracked.append(logits.requires_grad))
    for column in model.stream(idx, 100, temperature=0):
        assert column.shape == (3, 1) and column.dtype == torch.int64
        columns.append(column)
        if len(columns) == 4:
            break
    assert tracked == [False] * 4  # nothing beyond was computed, and no graph kept
    assert torch.equal(torch.cat([idx, *columns], dim=1), model.generate(idx, 4, temperature=0))
    assert torch.equal(model.generate(idx, 0), idx)


def test_sampling_is_float32_in_a_bfloat16_model(monkeypatch):
    dtypes = []
    monkeypatch.setattr('model.pick', lambda logits, *cuts: dtypes.append(logits.dtype) or pick(logits, *cuts))
    tiny(dtype=torch.bfloat16).eval().generate(tokens(), 2)
    assert dtypes == [torch.float32] * 2


def allowed(logits, temperature, top_k, top_p):
    """The distribution that pick draws from, a token at a time: {id: probability}."""
    z = [x / temperature for x in logits.tolist()]
    p = [math.exp(x - max(z)) for x in z]
    ids = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    total, kept = sum(p[i] for i in ids), []
    for i in ids:
        kept.append(i)
        if top_p is not None and sum(p[j] for j in kept) / total >= top_p:
            break
    return {i: p[i] / sum(p[j] for j in kept) for i in kept}


@pytest.mark.parametrize('top_p', [None, 1.0, 0.9, 0.5, 0.3, 1e-6])
@pytest.mark.parametrize('top_k', [None, 1, 2, 4, 10, 11, 99])
@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_pick_draws_from_the_right_distribution(temperature, top_k, top_p):
    logits, n = torch.randn(2, V), 20000
    drawn = pick(logits.repeat_interleave(n, dim=0), temperature, top_k, top_p)
    assert drawn.shape == (2 * n, 1)
    for row, ids in zip(logits, drawn.view(2, n), strict=True):
        p = allowed(row, temperature, top_k, top_p)
        count = ids.bincount(minlength=V).tolist()
        for i in range(V):
            q = p.get(i, 0.0)
            assert abs(count[i] / n - q) <= 5 * math.sqrt(q * (1 - q) / n) + (i in p) * 1e-6  # never, if cut


def test_pick_defaults_and_edges():
    logits = torch.full((1000, V), -1e9)
    logits[:, 3] = logits[:, 7] = 0.0  # half and half
    assert len(pick(logits).unique()) == 2  # no cut by default
    assert len(pick(logits, temperature=0).unique()) == 1  # nothing is drawn
    assert len(pick(logits, top_p=0.5).unique()) == 1  # the first suffices
    assert len(pick(logits, top_p=0.51).unique()) == 2
    torch.manual_seed(1)
    a = pick(logits, generator=torch.Generator().manual_seed(4))
    assert torch.equal(a, pick(logits, generator=torch.Generator().manual_seed(4)))
    assert pick(torch.tensor([[1.0, 3, 2]]), temperature=0).tolist() == [[1]]
    logits = torch.randn(1000, V)
    a, b, c = (pick(logits, *t, generator=torch.Generator().manual_seed(4)) for t in ([], [1.0], [2.0]))
    assert torch.equal(a, b) and not torch.equal(a, c)  # temperature 1 by default


@pytest.mark.parametrize('temperature', [1e-3, 1e-30, 1e-40, 1e-60, 5e-324])
@pytest.mark.parametrize('cut', [{}, dict(top_k=3), dict(top_p=0.9)])
def test_a_tiny_temperature_is_greedy_and_finite(temperature, cut):
    logits = torch.randn(50, V) * 1e9
    assert torch.equal(pick(logits, temperature, **cut), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize('sampling', [dict(temperature=0), dict(temperature=9.0), dict(top_k=3), dict(top_p=0.9)])
def test_padding_of_the_vocabulary_is_never_drawn(sampling):
    model = tiny().eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + 1e3 * (torch.arange(V) >= 6))
    out = model.generate(tokens(3, B=8) % 6, 12, n_vocab=6, **sampling)
    assert out.max() < 6
    assert model.generate(tokens(3), 1, **sampling)[:, -1].min() >= 6  # without n_vocab the padding wins


def test_generate_uses_its_sampling_arguments():
    model, idx = tiny(scale_proj_init=False).eval(), tokens(2, B=64)
    greedy = model.generate(idx, 4, temperature=0)
    assert torch.equal(model.generate(idx, 4, top_k=1), greedy)
    assert torch.equal(model.generate(idx, 4, top_p=1e-9), greedy)
    assert torch.equal(model.generate(idx, 4, temperature=1e-9), greedy)
    assert not torch.equal(model.generate(idx, 4), greedy)

    def generator():
        return torch.Generator().manual_seed(1)
    torch.manual_seed(9)
    a = model.generate(idx, 4, temperature=1.0, generator=generator())
    torch.manual_seed(10)
    assert torch.equal(a, model.generate(idx, 4, generator=generator()))  # temperature 1 is the default
    assert torch.equal(a, torch.cat([idx, *model.stream(idx, 4, generator=generator())], dim=1))
    assert not torch.equal(a, model.generate(idx, 4, temperature=2.0, generator=generator()))


# ---------------------------------------------------------------------------------------------------------------------
# optimiser and names

@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('mode', MODES[:3])
def test_what_is_weight_decayed(mode, bias):
    model = GPT(config(*mode, n_layer=1, bias=bias))
    optimizer = model.configure_optimizers(weight_decay=0.3, learning_rate=0.02, betas=[0.8, 0.95])  # a list: TOML's
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g['weight_decay']: sorted(names[id(p)] for p in g['params']) for g in optimizer.param_groups}
    decayed = ['transformer.h.0.attn.c_attn.weight', 'transformer.h.0.attn.c_proj.weight',
               'transformer.h.0.mlp.c_fc.weight', 'transformer.h.0.mlp.c_proj.weight',
               'transformer.wpe.weight', 'transformer.wte.weight']
    assert groups[0.3] == decayed and set(groups) == {0.3, 0.0}
    assert groups[0.0] == sorted(set(names.values()) - set(decayed))
    assert all(g['lr'] == 0.02 and g['betas'] == (0.8, 0.95) and g['fused'] for g in optimizer.param_groups)
    assert isinstance(optimizer, torch.optim.AdamW)


NANOGPT = ['lm_head.weight', 'transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight',
           *(f'transformer.h.0.{x}.weight' for x in
             ('ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'))]
NANOGPT_BIASES = ['transformer.ln_f.bias', *(f'transformer.h.0.{x}.bias' for x in
                  ('ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'))]


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('mode', MODES[:3])
def test_state_dict_names_and_shapes(mode, bias):
    model = GPT(config(*mode, n_layer=1, bias=bias))
    state = model.state_dict()
    extra = [] if mode[0] == 'standard' else ['residual.query', 'residual.key_gain']
    assert set(state) == {*NANOGPT, *(NANOGPT_BIASES if bias else []), *extra}
    assert state['transformer.h.0.attn.c_attn.weight'].shape == (3 * D, D)  # (out, in)
    assert state['transformer.h.0.mlp.c_fc.weight'].shape == (4 * D, D)
    assert all(state[name].shape == (3, D) for name in extra)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.n_params() == sum(x.numel() for name, x in state.items() if name != 'lm_head.weight')


# ---------------------------------------------------------------------------------------------------------------------
# bad values

def test_the_defaults_are_gpt2s():
    c = GPTConfig()
    assert (c.n_ctx, c.vocab_size, c.n_layer, c.n_head, c.n_embd) == (1024, 50304, 12, 12, 768)
    assert (c.dropout, c.bias, c.norm_eps, c.residual, c.residual_blocks) == (0.0, True, 1e-10, 'standard', 8)
    assert (c.scale_proj_init, c.kernel, c.recompute) == (True, 'auto', False)


SIZES = [(key, value) for key in ('n_ctx', 'vocab_size', 'n_layer', 'n_head', 'n_embd')
         for value in (0, -1, True, '4', 4.0, math.nan, None, 2**31, 10**30)]
WRONG = [*SIZES, *(('dropout', x) for x in (-0.1, 1.0, 1, math.nan, math.inf, '0', True, None)),
         *(('norm_eps', x) for x in (-1e-5, math.nan, math.inf, '0', False, None)),
         *(('residual', x) for x in ('Full', '', 'attnres', None, 1, True)),
         *(('kernel', x) for x in ('cuda', '', None, 0)), ('bias', 1), ('bias', 'yes'), ('bias', None),
         ('scale_proj_init', 0), ('scale_proj_init', 'no'), ('recompute', 1), ('recompute', 'False'),
         ('residual_blocks', 2.0), ('residual_blocks', '2'), ('residual_blocks', True), ('residual_blocks', math.nan)]


@pytest.mark.parametrize('key, value', WRONG)
def test_a_wrong_value_is_refused_before_anything_is_built(key, value):
    with pytest.raises(ValueError) as e:
        GPTConfig(**{key: value})
    assert f'{key}={value!r}' in str(e.value) and 'must be' in str(e.value) and '\n' not in str(e.value)


def test_a_refusal_says_what_is_allowed():
    def told(**keys):
        with pytest.raises(ValueError) as e:
            GPTConfig(**keys)
        return str(e.value)
    assert all(mode in told(residual='ful') for mode in RESIDUALS)
    assert all(k in told(kernel='cuda') for k in kernels.KERNELS)
    assert 'n_embd=100' in told(n_embd=100, n_head=3) and 'n_head=3' in told(n_embd=100, n_head=3)
    assert 'int' in told(n_ctx='4') and '1' in told(n_ctx=0)
    assert 'from 1 to 2 * n_layer = 6' in told(residual='block', residual_blocks=7, n_layer=3)


@pytest.mark.parametrize('N', [-1, 0, 7])
def test_residual_blocks_has_to_fit_in_block_mode_and_to_be_a_number_of_blocks_in_all(N):
    for mode in ('standard', 'full'):
        if N > 0:
            assert GPTConfig(n_layer=3, residual=mode, residual_blocks=N).residual_blocks == N
        else:
            with pytest.raises(ValueError, match=f'residual_blocks={N}: '):
                GPTConfig(n_layer=3, residual=mode, residual_blocks=N)
    with pytest.raises(ValueError, match=f'residual_blocks={N}: '):
        GPTConfig(n_layer=3, residual='block', residual_blocks=N)
    for fine in (1, 6):
        GPTConfig(n_layer=3, residual='block', residual_blocks=fine)


def test_a_whole_number_does_for_a_fraction():
    assert GPTConfig(dropout=0, norm_eps=0) == GPTConfig(dropout=0.0, norm_eps=0.0)


def test_the_context_is_a_limit():
    model = tiny()
    assert model(tokens(7))[0].shape == (2, 7, V)
    with pytest.raises(ValueError) as e:
        model(tokens(8))
    assert 'idx' in str(e.value) and '8' in str(e.value) and 'n_ctx=7' in str(e.value)


@pytest.mark.parametrize('key, value', [
    ('max_new_tokens', -1), ('max_new_tokens', 2.5), ('max_new_tokens', '3'), ('max_new_tokens', None),
    ('temperature', -0.1), ('temperature', math.nan), ('temperature', math.inf), ('temperature', 'hot'),
    ('temperature', None), ('top_k', 0), ('top_k', -2), ('top_k', 1.5), ('top_k', '3'), ('top_k', True),
    ('top_p', 0), ('top_p', -0.5), ('top_p', 1.1), ('top_p', math.nan), ('top_p', '0.5'), ('top_p', True),
    ('n_vocab', 0), ('n_vocab', -1), ('n_vocab', V + 1), ('n_vocab', 2.0), ('n_vocab', '4'), ('n_vocab', True)])
def test_wrong_sampling_arguments(key, value):
    keys = dict(max_new_tokens=2) | {key: value}
    with pytest.raises(ValueError) as e:
        tiny().generate(tokens(), **keys)
    assert f'{key}={value!r}' in str(e.value) and 'must be' in str(e.value)


@pytest.mark.parametrize('idx', [torch.zeros(2, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long)])
def test_a_prompt_is_needed(idx):
    with pytest.raises(ValueError) as e:
        tiny().generate(idx, 1)
    assert f'idx={tuple(idx.shape)}: must be' in str(e.value)


def test_the_widest_sampling_arguments_are_taken():
    idx = tokens()
    assert tiny().eval().generate(idx, 1, temperature=1, top_k=10**6, top_p=1, n_vocab=V).shape == (2, T + 1)
    assert (tiny().eval().generate(idx, 1, n_vocab=1)[:, -1] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints

def save(path, network, **more):
    torch.save(dict(model=network.state_dict(), model_config=model_config(network.config)) | more, path)


@pytest.mark.parametrize('mode', MODES[:4])
def test_a_checkpoint_brings_the_function_back(mode, tmp_path):
    model, idx = tiny(*mode, dtype=torch.float32, dropout=0.2), tokens()
    save(tmp_path / 'x.pt', model)
    again = GPT.from_checkpoint(tmp_path / 'x.pt', kernel='reference')
    assert not again.training and again.config == model.config
    assert torch.equal(again(idx)[0], model.eval()(idx)[0])
    assert load_checkpoint(tmp_path / 'x.pt')['model'].keys() == model.state_dict().keys()


def test_the_kernel_is_not_part_of_a_checkpoint(tmp_path):
    model = tiny('full', dtype=torch.float32)
    assert model_config(model.config) == {k: v for k, v in asdict(model.config).items() if k != 'kernel'}
    save(tmp_path / 'x.pt', model)
    assert GPT.from_checkpoint(tmp_path / 'x.pt').config.kernel == 'auto'


def test_of_a_directory_the_best_is_taken_else_the_latest(tmp_path):
    best, latest = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    save(tmp_path / 'ckpt.pt', latest)
    assert torch.equal(GPT.from_checkpoint(tmp_path).lm_head.weight, latest.lm_head.weight)
    save(tmp_path / 'best.pt', best)
    assert torch.equal(GPT.from_checkpoint(tmp_path).lm_head.weight, best.lm_head.weight)


class Code:
    """Unpickled, it would write a file."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (Path(self.path), 'harm'))


def test_a_checkpoint_cannot_carry_code(tmp_path):
    model, trace = tiny(), tmp_path / 'trace'
    torch.save(Code(trace), tmp_path / 'a.pt')
    save(tmp_path / 'b.pt', model, extra=Code(trace))
    (tmp_path / 'c.pt').write_bytes(pickle.dumps(Code(trace), protocol=2))
    for name in ('a.pt', 'b.pt', 'c.pt'):
        with pytest.raises(ValueError, match=name):
            GPT.from_checkpoint(tmp_path / name)
        assert not trace.exists()
    pickle.loads((tmp_path / 'c.pt').read_bytes())
    assert trace.exists()  # the trap works


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    model = tiny('block', 2)
    save(tmp_path / 'whole.pt', model)
    whole = (tmp_path / 'whole.pt').read_bytes()
    (tmp_path / 'cut.pt').write_bytes(whole[:len(whole) // 2])
    (tmp_path / 'empty.pt').write_bytes(b'')
    (tmp_path / 'text.pt').write_text('To be, or not to be')
    torch.save({'model': model.state_dict(), 'model_args': {}}, tmp_path / 'foreign.pt')
    torch.save(model.state_dict(), tmp_path / 'bare.pt')
    torch.save([1, 2], tmp_path / 'list.pt')
    (tmp_path / 'folder').mkdir()
    for name in ('missing.pt', 'cut.pt', 'empty.pt', 'text.pt', 'foreign.pt', 'bare.pt', 'list.pt', 'folder'):
        with pytest.raises(ValueError, match=name):
            GPT.from_checkpoint(tmp_path / name)


@pytest.mark.parametrize('change', [
    dict(model_config=dict(n_layer=1, colour='red')), dict(model_config=7), dict(model={}), dict(model=3),
    dict(model={1: torch.ones(1)}), dict(model_config=dict(n_layer=-1))])
def test_a_checkpoint_that_contradicts_itself_is_named(change, tmp_path):
    save(tmp_path / 'odd.pt', tiny('block', 2), **change)
    with pytest.raises(ValueError, match='odd.pt'):
        GPT.from_checkpoint(tmp_path / 'odd.pt')
