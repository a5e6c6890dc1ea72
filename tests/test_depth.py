"""compare.py depth: the matrices against what sublayers really read, the files, the errors."""
import json
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import baselines  # noqa: F401 - registers the rules
import compare
import train as trainer
from experiments.depth import mixing, observe, watch
from model import GPT, RESIDUALS, FullAttnRes, GPTConfig

V, D, T = 11, 16, 6
MODES = [('standard', 1), ('full', 1), ('block', 1), ('block', 3), ('block', 4)] \
    + [(rule, 1) for rule in RESIDUALS if rule not in ('standard', 'full', 'block')]
WITH_MATRIX = [m for m in MODES if m[0] not in ('ddl', 'heads')]  # a matrix for each head is no matrix
KEYS = ['config/shakespeare_char_cpu.toml', '--n_layer=3', '--n_embd=16', '--n_head=2', '--n_ctx=16', '--batch_size=2',
        '--max_iters=3', '--eval_interval=3', '--eval_iters=1', '--device=cpu']


def build(mode, N=1, random=True, **keys):
    keys = dict(n_ctx=8, vocab_size=V, n_layer=3, n_head=2, n_embd=D) | keys
    model = GPT(GPTConfig(residual=mode, residual_blocks=N, **keys)).eval()
    if random:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * torch.randn_like(p)
    return model


def batch():
    return torch.randint(V, (2, T)), torch.randint(V, (2, T))


def observed(model):
    """M (L + 1, L + 1, B, T), sources (L + 1, B, T, D), reads (L + 1, B, T, D) of one pass"""
    seen = watch(model)
    model(*batch())
    v, h = torch.stack(seen.sources).detach(), torch.stack(seen.reads).detach()
    return mixing(model.residual, seen), v, h


@pytest.mark.parametrize('n_embd', [16, 4])  # 4 channels: fewer than the 7 sources, so several passes
@pytest.mark.parametrize('mode, N', WITH_MATRIX)
def test_matrix_gives_back_what_was_read(mode, N, n_embd):
    M, v, h = observed(build(mode, N, n_embd=n_embd))
    rebuilt = torch.zeros_like(h)
    for l in range(7):
        for i in range(7):
            rebuilt[l] += M[l, i].unsqueeze(-1) * v[i]
            assert i <= l or (M[l, i] == 0).all(), 'nothing reads the future'
        assert (rebuilt[l] - h[l]).norm() < 1e-5 * h[l].norm()


@pytest.mark.parametrize('kernel', ['reference', 'torch'])
@pytest.mark.parametrize('mode, N', [('full', 1), ('block', 2), ('block', 3), ('block', 4)])
def test_attnres_matrix_is_the_weights_the_model_used(mode, N, kernel):
    """ The weight of a block sum belongs to each sublayer in it; the weights are the reference path's. """
    model, plain, alphas = build(mode, N, kernel=kernel), build(mode, N), []
    plain.load_state_dict(model.state_dict())
    plain.residual.kernel = 'reference'
    plain.residual.on_read = lambda l, alpha: alphas.append(alpha)
    seen, tokens = watch(model), batch()
    with torch.no_grad():
        model(*tokens)
        plain(*tokens)
    S, M = model.residual.S, mixing(model.residual, seen)
    for l, alpha in enumerate(alphas):
        assert len(alpha) == 1 + math.ceil(l / S)
        assert (alpha.sum(0) - 1).abs().max() < 1e-5
        assert (M[l, 0] - alpha[0]).abs().max() < 1e-5
        for i in range(l):
            assert (M[l, i + 1] - alpha[1 + i // S]).abs().max() < 1e-5


def test_a_rule_of_ones_own_is_measured_as_it_runs():
    """ A window: the embedding and the last two outputs. The rule forgets a source, the matrix shows it. """
    class Window(FullAttnRes):
        def forward(self, h, sublayers):
            v = self.sources(h)
            for l, f in enumerate(sublayers):
                v.push(f(v.read(l)))
                if len(v) > 3:
                    v.drop(1)
            return v.read(self.L)
    model = build('full')
    model.residual.__class__ = Window
    M, _, _ = observed(model)
    assert (M[6, 1:5] == 0).all() and (M[6, [0, 5, 6]] > 0).all()
    assert model.residual.kernel == 'auto'  # as before


def test_other_sums_than_were_read_are_no_matrix():
    model = build('full')
    seen = watch(model)
    model(*batch())
    seen.reads[-1] = seen.reads[-1].flip(0)
    assert mixing(model.residual, seen) is None


class NoFloat64(TorchFunctionMode):
    """ A device that has no float64, like a Mac's GPU: only what was copied to the CPU may be widened. """
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = getattr(func, '__name__', '')
        if name == 'cpu':
            out = out.detach()
            out.is_on_the_cpu = True
        if name == 'double' and not getattr(args[0], 'is_on_the_cpu', False):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return out


@pytest.mark.parametrize('mode', ['block', 'mhc'])
def test_a_device_without_float64(mode):
    with NoFloat64():
        assert observe(build(mode), [batch()])['matrix']
        with pytest.raises(TypeError):
            torch.zeros(1).double()


def test_standard_is_all_ones():
    M, _, _ = observed(build('standard'))
    assert torch.equal(M.mean((2, 3)), torch.ones(7, 7).tril())


def test_highway_rows_sum_to_one_and_follow_the_product_formula():
    M, _, _ = observed(build('highway'))
    assert (M.sum(1) - 1).abs().max() < 1e-5
    for l in range(1, 6):  # the next row: g on the newest output, the rest scaled by 1 - g
        g = M[l + 1, l + 1]
        assert (M[l + 1, :l + 1] - (1 - g) * M[l, :l + 1]).abs().max() < 1e-5


def test_ddl_has_no_matrix():
    assert observed(build('ddl'))[0] is None
    m = observe(build('ddl'), [batch()])
    assert m['matrix'] is None and m['entropy'] is None and len(m['gradient']) == 6


@pytest.mark.parametrize('mode, N', [('full', 1), ('static', 1), ('block', 3)])
def test_untrained_entropy_is_log_n(mode, N):
    m = observe(build(mode, N, random=False), [batch()])
    S = {'block': 2}.get(mode, 1)
    assert m['entropy'] == pytest.approx([math.log(1 + math.ceil(l / S)) for l in range(7)], abs=1e-6)
    assert m['entropy'] == pytest.approx(m['most'], abs=1e-6)
    assert max(map(max, m['spread'])) < 1e-3


def test_only_weights_that_sum_to_one_have_an_entropy():
    assert all(observe(build(mode), [batch()])['entropy'] is None for mode in ('standard', 'hc', 'mhc', 'denseformer'))


def test_dynamics():
    """rms of outputs, reads and gradients, by hand; two batches weigh by their size."""
    model = build('block', 3).double()
    big, small = batch(), tuple(x[:1] for x in batch())
    m = observe(model, [big, small])
    seen = watch(model)
    v, h = seen.sources, seen.reads
    total = 0
    for idx, targets in (big, small):
        loss = model(idx, targets)[1] * idx.numel()
        grads = torch.autograd.grad(loss, v[1:])
        rows = [v[1:], h, [v[1], v[1] + v[2], v[3], v[3] + v[4], v[5], v[5] + v[6]], grads]
        total = [a + b for a, b in zip(total or [0] * 4, [torch.stack([x.detach().square().sum() for x in r])
                                                          for r in rows], strict=True)]
    for key, x in zip(('output', 'read', 'stream', 'gradient'), total, strict=True):
        assert m[key] == pytest.approx((x / (3 * T * D)).sqrt().tolist(), rel=1e-9)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    for mode in ('standard', 'block', 'mhc', 'ddl'):
        trainer.main([*KEYS, f'--residual={mode}', '--residual_blocks=2', f'--out_dir={root / mode}'])
    return root


SMALL = ['--batch_size=2', '--eval_iters=2', '--device=cpu']


def test_one_directory(runs, capsys):
    data = compare.main(['depth', str(runs / 'block'), *SMALL])
    assert {'depth.json', 'depth.png', 'dynamics.png'} <= {p.name for p in (runs / 'block').iterdir()}
    m = json.loads((runs / 'block' / 'depth.json').read_text())['modes']['block:2']
    assert m == data['modes']['block:2'] and len(m['matrix']) == len(m['spread']) == 7 and m['S'] == 3
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith('wrote depth.json') and max(map(len, out[-5:-1])) <= 80


def test_several_modes(runs, tmp_path, capsys):
    folders = [str(runs / mode) for mode in ('standard', 'block', 'mhc', 'ddl', 'block')]
    modes = compare.main(['depth', *folders, *SMALL, f'--out={tmp_path}'])['modes']
    assert list(modes) == ['standard', 'block:2', 'mhc', 'ddl', f'block:2 ({runs / "block"})']
    for name in ('depth.png', 'dynamics.png'):
        assert (tmp_path / name).read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    out = capsys.readouterr().out.splitlines()
    assert next(line for line in out if line.startswith('ddl')).count('none') == 4


def test_a_mode_without_a_matrix_shows_its_dynamics(runs):
    compare.main(['depth', str(runs / 'ddl'), *SMALL])
    assert (runs / 'ddl' / 'dynamics.png').exists() and not (runs / 'ddl' / 'depth.png').exists()


@pytest.mark.parametrize('argv, names', [
    ([], 'CHECKPOINT_DIR'), (['a', 'b'], '--out'), (['no/such/folder'], 'no/such/folder'), (['.'], 'ckpt.pt'),
    (['a', '--batch_size=0'], 'batch_size'), (['a', '--batches=1'], 'batches'), (['a', '--device=abacus'], 'device')])
def test_bad_input_is_one_line(argv, names, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(['depth', *argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count('\n') == 1 and names in err
