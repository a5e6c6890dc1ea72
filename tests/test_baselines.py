"""baselines.py against float64 oracles in explicit loops, and what its docstrings promise at initialisation."""
import math

import pytest
import reference
import torch

import baselines
from model import GPT, RESIDUALS, Cache, GPTConfig, Sources

V, D, T = 11, 8, 5
N = baselines.STREAMS
ABLATIONS = ['no_key_norm', 'sigmoid', 'input_query', 'heads', 'window']  # drive the sources of AttnRes
OWN_SOURCES = ABLATIONS[:-1]  # and have a class of their own for them
OTHERS = ['static', 'denseformer', 'hc', 'mhc', 'highway', 'ddl']
RULES = ABLATIONS + OTHERS
PLAIN = [*ABLATIONS, 'static', 'denseformer', 'hc']  # start as the plain residual

pytestmark = pytest.mark.filterwarnings('ignore:.*computes something else than the kernels')


def build(rule, n_layer=3, dtype=torch.float64, **keys):
    keys = dict(n_ctx=7, vocab_size=V, n_head=2, n_embd=D, norm_eps=0.02, kernel='reference', residual_blocks=2) | keys
    return GPT(GPTConfig(n_layer=n_layer, residual=rule, **keys)).to(dtype)


def randomise(model, scale=0.5):
    """Gives every parameter a random value that matters, gains around 1. -> model"""
    with torch.no_grad():
        for name, p in model.named_parameters():
            unit = name.endswith(('ln_1.weight', 'ln_2.weight', 'ln_f.weight', 'residual.gain', 'residual.key_gain'))
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * scale + unit)
    return model


def tokens(B=2, T=T):
    return torch.randint(V, (B, T))


def close(a, b, tolerance=1e-10):
    return bool((a - b).norm() <= tolerance * b.norm())


# ---------------------------------------------------------------------------------------------------------------------
# the oracles: oracle(embedding, sublayers, p, eps) -> what the final norm reads; p: the rule's parameters by name.
# A stream, a source, a matrix entry at a time; each (B, T, D), gates (B, T, 1).

def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def tanh(x):
    return 1 - 2 / (1 + torch.exp(2 * x))


def dot(x, w):
    return (x * w).sum(-1, keepdim=True)


def norm(x, eps):
    return x / torch.sqrt(reference.mean(x * x) + eps)


def static(v0, fs, p, eps):
    """h_l = sum_{i <= l} alpha_{i->l} v_i, alpha_{.->l} a softmax of l + 1 learned numbers"""
    v = [v0]
    for l in range(len(fs) + 1):
        alpha = reference.softmax([p['logit'][l, i] for i in range(l + 1)])
        h = sum(alpha[i] * v[i] for i in range(l + 1))
        if l < len(fs):
            v.append(fs[l](h))
    return h


def denseformer(v0, fs, p, eps):
    """X_0 = embedding, X_i = block_i(Y_{i-1}), Y_0 = X_0, Y_i = sum_{j <= i} a_ij X_j"""
    X, Y = [v0], v0
    for i in range(1, len(fs) // 2 + 1):
        middle = Y + fs[2 * i - 2](Y)
        X.append(middle + fs[2 * i - 1](middle))
        Y = sum(p['weight'][i - 1, j] * X[j] for j in range(i + 1))
    return Y


def highway(v0, fs, p, eps):
    """h_l = prod_j (1 - g_j) v_0 + sum_i g_i prod_{j > i} (1 - g_j) f_i(h_i): the recurrence written out"""
    y, g = [], []
    for l in range(len(fs) + 1):
        terms = []
        for i in range(-1, l):
            term = v0 if i < 0 else g[i] * y[i]
            for j in range(i + 1, l):
                term = term * (1 - g[j])
            terms.append(term)
        h = sum(terms)
        if l < len(fs):
            g.append(sigmoid(dot(h, p['gate'][l]) + p['bias'][l]))
            y.append(fs[l](h))
    return h


def hc(v0, fs, p, eps):
    """h = A_m^T H, H <- A_r^T H + B^T f(h); A_r, A_m, B = static + s tanh(norm(H) W); the code keeps A_r transposed"""
    H = [v0] * N
    for l, f in enumerate(fs):
        W, (s_a, s_b) = p['dynamic'][l], p['scale'][l]
        key = [norm(H[k], eps) for k in range(N)]
        h = sum((p['static_m'][l, k] + s_a * tanh(dot(key[k], W[:, N]))) * H[k] for k in range(N))
        y, new = f(h), []
        for to in range(N):
            out = (p['static_b'][l, to] + s_b * tanh(dot(key[to], W[:, N + 1]))) * y
            for k in range(N):
                out = out + (p['static_r'][l, to, k] + s_a * tanh(dot(key[k], W[:, to]))) * H[k]
            new.append(out)
        H = new
    return sum(H)


def doubly_stochastic(M, steps):
    """Sinkhorn-Knopp on positive numbers M[row][column]: divide by column sums, then by row sums, `steps` times"""
    n = len(M)
    for _ in range(steps):
        columns = [sum(M[i][j] for i in range(n)) for j in range(n)]
        M = [[M[i][j] / columns[j] for j in range(n)] for i in range(n)]
        rows = [sum(M[i]) for i in range(n)]
        M = [[M[i][j] / rows[i] for j in range(n)] for i in range(n)]
    return M


def mhc(v0, fs, p, eps):
    """x <- H_res x + H_post^T f(H_pre x), the three from x' = RMSNorm(vec x)"""
    x = [v0] * N
    for l, f in enumerate(fs):
        key = norm(torch.cat(x, dim=-1), eps) * p['gain'][l]
        a_pre, a_post, a_res = p['gate'][l]
        phi = p['phi'][l]
        pre = [sigmoid(a_pre * dot(key, phi[:, k]) + p['pre'][l, k]) for k in range(N)]
        post = [2 * sigmoid(a_post * dot(key, phi[:, N + k]) + p['post'][l, k]) for k in range(N)]
        res = [[torch.exp(a_res * dot(key, phi[:, 2 * N + N * i + j]) + p['res'][l, i, j]) for j in range(N)]
               for i in range(N)]
        res = doubly_stochastic(res, 20)
        y = f(sum(pre[k] * x[k] for k in range(N)))
        x = [sum(res[i][j] * x[j] for j in range(N)) + post[i] * y for i in range(N)]
    return sum(x)


def ddl(v0, fs, p, eps):
    """x <- (I - b k k^T) x + b k v, the matrix written out; k = f(x) / |f(x)|"""
    x = v0
    for l, f in enumerate(fs):
        y = f(x)
        k = y / torch.sqrt((y * y).sum(-1, keepdim=True) + D * eps)
        b = 2 * sigmoid(dot(norm(x, eps), p['beta'][l]) + p['bias'][l, 0])
        v = 4 * sigmoid(dot(x, p['value'][l]) + p['bias'][l, 1])
        A = torch.eye(D, dtype=x.dtype) - b.unsqueeze(-1) * k.unsqueeze(-1) * k.unsqueeze(-2)  # (B, T, D, D)
        x = torch.stack([dot(A[..., i, :], x).squeeze(-1) for i in range(D)], dim=-1) + b * k * v
    return x


def ablation(oracle, **keys):
    """An oracle of reference.py in the shape of those above."""
    def run(v0, fs, p, eps):
        return oracle(v0, fs, p['query'] * p['key_gain'], eps, **keys)
    return run


def heads(v0, fs, p, eps):
    return ablation(reference.heads, H=4, S=len(fs) // 2)(v0, fs, p, eps)  # residual_blocks=2


ORACLES = {'no_key_norm': ablation(reference.no_key_norm), 'sigmoid': ablation(reference.sigmoid_weights),
           'input_query': ablation(reference.input_query), 'heads': heads,
           'window': ablation(reference.window, size=8),
           'static': static, 'denseformer': denseformer, 'hc': hc, 'mhc': mhc, 'highway': highway, 'ddl': ddl}


def test_every_registered_rule_has_an_oracle():
    assert set(RULES) == set(ORACLES) == set(RESIDUALS) - {'standard', 'full', 'block'}


@pytest.mark.parametrize('rule, n_layer', [*((rule, n) for rule in RULES for n in (1, 3)), ('window', 6)])
def test_logits_and_all_gradients_equal_the_oracle(rule, n_layer):
    model = randomise(build(rule, n_layer))
    idx, targets = tokens(), tokens()
    logits, loss = model(idx, targets)
    loss.backward()

    p = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
    wte, wpe = p['transformer.wte.weight'], p['transformer.wpe.weight']
    h = torch.stack([torch.stack([wte[token] + wpe[t] for t, token in enumerate(row)]) for row in idx.tolist()])
    own = {name.removeprefix('residual.'): x for name, x in p.items() if name.startswith('residual.')}
    fs = reference.sublayers_of(p, {'n_layer': n_layer, 'n_head': 2, 'norm_eps': 0.02})
    h = ORACLES[rule](h, fs, own, 0.02)
    h = reference.layer_norm(h, p['transformer.ln_f.weight'], p['transformer.ln_f.bias'], 0.02)
    expected = h @ wte.T
    reference.cross_entropy(expected, targets).backward()
    assert close(logits.detach(), expected.detach())
    for name, x in model.named_parameters():
        assert close(x.grad, p[name].grad), name
        assert x.grad.abs().max() > 0, f'{name}: a gradient of zero proves nothing'


# ---------------------------------------------------------------------------------------------------------------------
# initialisation

@pytest.mark.parametrize('rule', PLAIN)
def test_starts_as_the_plain_residual(rule):
    """The same seed, norm_eps 0: the same logits, and the same gradients of all that the two share."""
    idx, targets, grads = tokens(), tokens(), []
    for mode in ('standard', rule):
        torch.manual_seed(3)
        model = build(mode, norm_eps=0.0)
        logits, loss = model(idx, targets)
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if 'residual.' not in name}
                     | {'logits': logits.detach()})
    assert all(close(grads[1][name], g, 1e-11) for name, g in grads[0].items())


@pytest.mark.parametrize('rule, n_layer', [('mhc', 3), ('highway', 3), ('ddl', 3), ('window', 5)])
def test_the_others_do_not(rule, n_layer):
    idx, logits = tokens(), []
    for mode in ('standard', rule):
        torch.manual_seed(3)
        logits.append(build(mode, n_layer, norm_eps=0.0)(idx)[0])
    assert not close(logits[1], logits[0], 1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# the ablations as rules that drive sources

@pytest.mark.parametrize('rule', OWN_SOURCES)
def test_own_sources_run_as_they_are_written(rule):
    """auto takes the plain path and says so; the kernels, which compute something else, are refused."""
    with pytest.warns(UserWarning, match='computes something else than the kernels'):
        assert build(rule, kernel='auto').residual.kernel == 'reference'
    with pytest.raises(ValueError, match="kernel='torch'"):
        build(rule, kernel='torch')


def test_the_window_runs_on_the_kernels():
    idx, targets, seen = tokens(), tokens(), []
    for kernel in ('reference', 'torch'):
        torch.manual_seed(3)
        model = randomise(build('window', 6, kernel=kernel))
        loss = model(idx, targets)[1]
        loss.backward()
        seen.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert build('window', kernel='auto').residual.kernel == 'auto'
    assert all(close(b, a) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize('rule, n_layer, counts', [
    ('window', 6, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9]),  # 1 + 8 at most
    ('heads', 3, [1, 2, 2, 2, 3, 3, 3]),  # two residual blocks of three
    ('sigmoid', 2, [1, 2, 3, 4, 5]),
    ('no_key_norm', 2, [1, 2, 3, 4, 5]),
    ('input_query', 2, [1, 2, 3, 4, 5]),
])
def test_weights_can_be_watched(rule, n_layer, counts):
    """on_read is called for each read in order with (n, B, T): weights that sum to 1, or a sigmoid's."""
    model, seen = randomise(build(rule, n_layer)), []
    model.residual.on_read = lambda l, alpha: seen.append((l, alpha))
    model(tokens())
    assert [l for l, _ in seen] == list(range(2 * n_layer + 1))
    assert [alpha.shape for _, alpha in seen] == [(n, 2, T) for n in counts]
    for _, alpha in seen:
        assert not alpha.requires_grad and alpha.min() >= 0 and alpha.max() <= 1
        assert ((alpha.sum(0) - 1).abs().max() < 1e-12) == (rule != 'sigmoid')


def test_weights_of_heads_are_their_mean():
    w, ys = torch.randn(3, D), torch.randn(2, 1, T, D)
    v, parts = baselines.HeadSources(w, 0.1), []
    for k in range(4):
        parts.append(Sources(w[:, 2 * k:2 * k + 2], 0.1))
    for y in ys:
        v.push(y)
        for k, part in enumerate(parts):
            part.push(y[..., 2 * k:2 * k + 2])
    expected = sum(part.weights(1) for part in parts) / 4
    assert torch.allclose(v.weights(1), expected) and not torch.allclose(expected, parts[0].weights(1))


@pytest.mark.parametrize('rule', ABLATIONS)
def test_an_ablation_is_not_what_it_was_made_from(rule):
    """The same weights, Full or Block in place of the rule: other logits."""
    idx, parent = tokens(), 'block' if rule == 'heads' else 'full'
    model = randomise(build(rule, 6))
    state = model.state_dict()
    if rule == 'input_query':  # the query that its matrix makes of (1, 1, ...)
        state['residual.query'] = state['residual.query'].sum(-1)
        state['residual.key_gain'] = state['residual.key_gain'].expand(-1, -1, D).diagonal(dim1=1, dim2=2)
    other = build(parent, 6)
    other.load_state_dict(state)
    assert not close(model(idx)[0], other(idx)[0], 1e-3)


def run(rule, v0, ys, **keys):
    """Reads h_0 .. h_L of a rule at initialisation whose sublayers put out ys."""
    h, model = [], build(rule, len(ys) // 2, **keys)
    h.append(model.residual(v0, [lambda x, y=y: h.append(x) or y for y in ys]))
    return h


def sources(L=6):
    return [torch.randn(2, T, D, dtype=torch.float64) for _ in range(L + 1)]


def test_highway_starts_by_keeping_h():
    v0, *ys = sources()
    h = run('highway', v0, ys)
    g = 1 / (1 + math.exp(2))
    for l in range(6):
        assert close(h[l + 1], (1 - g) * h[l] + g * ys[l], 1e-12)


def test_ddl_starts_with_a_step_of_one_towards_two():
    """b = 1 and v = 2: afterwards h lies 2 along the direction of f(h), and is unchanged across it."""
    v0, *ys = sources()
    h = run('ddl', v0, ys, norm_eps=0.0)
    for l in range(6):
        k = ys[l] / ys[l].norm(dim=-1, keepdim=True)
        assert close(dot(h[l + 1], k), torch.full((2, T, 1), 2, dtype=torch.float64), 1e-12)
        across = [x - dot(x, k) * k for x in h[l:l + 2]]
        assert close(across[1], across[0], 1e-12)


def test_mhc_starts_close_to_the_residual():
    """Reads sigmoid(1) of its own stream and sigmoid(-1) of the others, adds twice that; streams hardly mix."""
    v0, *ys = sources()
    h = run('mhc', v0, ys)
    one, other = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    x = [v0] * N
    for l in range(6):
        own = l % N
        assert close(h[l], sum((one if k == own else other) * x[k] for k in range(N)), 3e-3)  # exp(-8) of the others
        x = [x[k] + 2 * (one if k == own else other) * ys[l] for k in range(N)]
    assert close(h[6], sum(x), 1e-10)  # what streams exchange cancels in their sum: columns sum to 1


@pytest.mark.parametrize('scale', [1.0, 3.0])
def test_h_res_is_doubly_stochastic(scale):
    M = baselines.ManifoldHyperConnections.sinkhorn(scale * torch.randn(50, N, N, dtype=torch.float64))
    assert (M > 0).all()
    assert (M.sum(-1) - 1).abs().max() < 1e-12  # normalised last
    assert (M.sum(-2) - 1).abs().max() < (1e-5 if scale == 1 else 0.1)
    huge = baselines.ManifoldHyperConnections.sinkhorn(1e4 * torch.randn(50, N, N))
    assert huge.isfinite().all()


@pytest.mark.parametrize('rule', RULES)
def test_draws_nothing(rule):
    """The same seed gives the same sublayers in every mode, and leaves the generator where standard leaves it."""
    torch.manual_seed(5)
    plain, after = build('standard', bias=False).state_dict(), torch.rand(1)
    torch.manual_seed(5)
    model = build(rule, bias=False)
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in plain.items())
    assert {name for name in model.state_dict() if name not in plain} \
        == {name for name, _ in model.named_parameters() if name.startswith('residual.')} != set()


def test_names_and_shapes_of_parameters_stay():
    """Checkpoints of these rules exist: L = 6, D = 8, n = 4."""
    expected = {
        'static': {'logit': (7, 7)},
        'denseformer': {'weight': (3, 4)},
        'highway': {'gate': (6, 8), 'bias': (6,)},
        'hc': {'static_m': (6, 4), 'static_r': (6, 4, 4), 'static_b': (6, 4), 'dynamic': (6, 8, 6), 'scale': (6, 2)},
        'mhc': {'phi': (6, 32, 24), 'gain': (6, 32), 'gate': (6, 3), 'pre': (6, 4), 'post': (6, 4), 'res': (6, 4, 4)},
        'ddl': {'beta': (6, 8), 'value': (6, 8), 'bias': (6, 2)},
        'input_query': {'query': (7, 8, 8), 'key_gain': (7, 8, 1)},
    } | {rule: {'query': (7, 8), 'key_gain': (7, 8)} for rule in ABLATIONS if rule != 'input_query'}
    for rule in RULES:
        assert {name: tuple(p.shape) for name, p in build(rule).residual.named_parameters()} == expected[rule], rule


@pytest.mark.parametrize('rule', RULES)
def test_nothing_of_a_rule_is_decayed(rule):
    model = build(rule)
    own = {id(p) for p in model.residual.parameters()}
    decayed, free = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert decayed['weight_decay'] == 0.1 and free['weight_decay'] == 0
    assert not own & {id(p) for p in decayed['params']} and own <= {id(p) for p in free['params']}


# ---------------------------------------------------------------------------------------------------------------------
# in use

@pytest.mark.parametrize('rule', RULES)
def test_causal(rule):
    model, idx = randomise(build(rule)), tokens()
    other = idx.clone()
    other[:, 3] = (idx[:, 3] + 1) % V
    a, b = model(idx)[0], model(other)[0]
    assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3:], b[:, 3:])


@pytest.mark.parametrize('rule', RULES)
def test_cached_decoding_equals_the_full_forward(rule):
    model, idx = randomise(build(rule)).eval(), tokens(T=7)
    caches, full = [Cache(7) for _ in range(3)], model(idx)[0]
    pieces = [model(idx[:, a:b], caches=caches)[0] for a, b in ((0, 3), (3, 4), (4, 7))]
    assert close(torch.cat(pieces, dim=1), full, 1e-12)
    out = idx[:, :2]
    for new in model.stream(out, 5, temperature=0):
        assert torch.equal(new, model(out)[0][:, -1].argmax(-1, keepdim=True))
        out = torch.cat((out, new), dim=1)
    assert out.shape == (2, 7)


@pytest.mark.parametrize('rule', RULES)
def test_recomputing_changes_nothing(rule):
    model, idx, targets, grads = randomise(build(rule)), tokens(), tokens(), []
    for recompute in (False, True):
        model.config.recompute = recompute
        model.zero_grad()
        model(idx, targets)[1].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize('rule', RULES)
def test_trains_under_autocast(rule):
    model = randomise(build(rule, dtype=torch.float32), 0.2)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = model(tokens(), tokens())[1]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('rule', OTHERS)
def test_the_stream_stays_float32_under_autocast(rule):
    """Sublayers that put out nothing: what they read is the embedding, mixed, and is not rounded to bfloat16."""
    residual, h, reads = build(rule, dtype=torch.float32).residual, torch.randn(2, T, D), ([], [])
    nothing = (torch.zeros if rule != 'ddl' else torch.ones)(2, T, D, dtype=torch.bfloat16)
    for enabled, seen in zip((False, True), reads, strict=True):
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=enabled):
            seen.append(residual(h, [lambda x, seen=seen: seen.append(x) or nothing for _ in range(6)]))
    assert all(b.dtype == torch.float32 and close(b, a, 1e-5) for a, b in zip(*reads, strict=True))


@pytest.mark.parametrize('rule', RULES)
def test_learns(rule):
    """Every parameter of a rule moves, and the loss falls."""
    model, idx = build(rule, dtype=torch.float32), tokens(4, 7)
    before = [p.clone() for p in model.residual.parameters()]
    optimizer, losses = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95)), []
    for _ in range(15):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert not any(torch.equal(a, b) for a, b in zip(before, model.residual.parameters(), strict=True))


@pytest.mark.parametrize('rule', RULES)
def test_describe_is_one_line(rule):
    text = build(rule).residual.describe()
    assert text and '\n' not in text and '"' not in text
