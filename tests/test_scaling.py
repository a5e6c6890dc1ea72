""" compare.py sweep and scaling: power laws, compute advantage and its interval, grids of runs, refusals, pictures. """
import json
import os

import numpy as np
import pytest

import compare
from experiments import common, jobs, pictures, runs, scaling, sweep
from experiments.runs import RunsConfig
from train import Diverged, TrainConfig

SMALL = ['--n_ctx=16', '--batch_size=2', '--max_iters=2', '--eval_iters=1', '--workers=1', '--kernel=reference',
         '--warmup_iters=1']
C = np.array([1.0, 3.0, 10.0, 30.0])


def fake(seen, loss):
    """ A train() that trains nothing and notes its calls. """
    def train(cfg, report):
        seen.append(cfg)
        os.makedirs(cfg.out_dir)
        return {'final_loss': loss(cfg), 'stopped': None}
    return train


def test_fit_of_an_exact_power_law():
    A, alpha = scaling.fit(C, 1.9 * C**-0.057)
    assert A == pytest.approx(1.9) and alpha == pytest.approx(0.057)


def test_advantage_of_the_papers_fits():
    """ The paper's rounded fits give 1.254 at 5.5974 PFLOP/s-days. """
    points = np.array([0.6916, 1.0405, 1.6937, 3.3528, 5.5974])
    got = scaling.advantage(points, 1.891 * points**-0.057, 1.870 * points**-0.058)
    assert got == pytest.approx((1.891 / (1.870 * 5.5974**-0.058)) ** (1 / 0.057) / 5.5974, rel=1e-9)
    assert got == pytest.approx(1.254, abs=0.01)


def test_equal_losses_have_no_advantage():
    assert scaling.advantage(C, 2 * C**-0.1, 2 * C**-0.1) == pytest.approx(1)
    assert np.isnan(scaling.advantage(C, 2 * C**0.1, 2 * C**-0.1))


def losses(rng, factor, noise, seeds=3):
    """ A base and a rule that is `factor` better, pairs sharing most of their noise. """
    shared = noise * rng.standard_normal((4, seeds))
    base = 2 * C[:, None] ** -0.1 + shared
    return base, base * factor + noise / 10 * rng.standard_normal((4, seeds))


def told(loss):
    """ What is fitted to {label: (sizes, seeds)}, and said of it. """
    fits = scaling.analyse(C, loss, 'standard')
    lists = {label: values.tolist() for label, values in loss.items()}
    return fits, scaling.verdicts({'fits': fits, 'base': 'standard', 'final_loss': lists})


def test_the_interval_holds_the_truth_and_tells_noise_from_gain():
    rng, held = np.random.default_rng(1), 0
    for _ in range(100):
        base, rule = losses(rng, 0.98, 0.02)
        low, high = scaling.interval(C, base, rule)
        held += low <= 0.98**-10 <= high
    assert held >= 90  # of 100: 95 % in the long run
    says = told({'standard': base, 'full': rule, 'same': losses(rng, 1.0, 0.02)[1]})[1]
    assert 'not resolved' in says[2] and 'not resolved' not in says[1] and "C'/C" not in says[0]
    d, half = common.paired(rule[-1].tolist(), base[-1].tolist())
    assert says[1].endswith(f'; measured at the largest C, full - standard: {d:+.4f} +- {half:.4f}')


def test_one_seed_gives_no_interval():
    fits, says = told({'standard': 2 * C[:, None]**-0.1, 'full': 1.9 * C[:, None]**-0.1})
    assert fits['full']['interval'] is None and 'one seed' in says[1]


def test_fits_too_flat_for_an_advantage_are_not_resolved_and_leave_json_whole():
    rng = np.random.default_rng(0)
    base, rule = (2 * C[:, None]**0.001 + 0.05 * rng.standard_normal((4, 3)) for _ in range(2))
    fits, says = told({'standard': base, 'full': rule})
    assert fits['full']['interval'] is None and 'not resolved' in says[1]
    rising, says = told({'standard': 2 * C[:, None]**0.1, 'full': 2 * C[:, None]**-0.1})
    assert rising['full']['advantage'] is None and "C'/C = none" in says[1]
    json.dumps([fits, rising], allow_nan=False)


def test_the_ladder():
    """ One dial: width, heads, steps and rate follow from the number of blocks. """
    cfg = scaling.ScalingConfig(sizes='4,8', max_iters=100, learning_rate=0.01, min_lr=0.001)
    assert cfg.ladder[8] == dict(n_layer=8, n_embd=128, n_head=4, max_iters=200, eval_interval=50,
                                 learning_rate=pytest.approx(0.005), min_lr=pytest.approx(0.0005))
    assert cfg.compute(8) == 6 * 12 * 8 * 128**2 * 200 * cfg.batch_size * cfg.n_ctx


def test_scaling_runs(tmp_path, capsys):
    data = compare.main(['scaling', 'config/scaling_cpu.toml', '--sizes=2,4', '--modes=standard,full,block:4',
                         *SMALL, f'--out_dir={tmp_path}'])
    loss = data['final_loss']
    assert np.shape(loss['full']) == (2, 2) and loss['block:4'][0] == loss['full'][0]  # 4 sublayers: the same function
    assert loss['standard'][0] != loss['full'][0] and data['fits']['full']['alpha'] != 0
    assert json.loads((tmp_path / 'scaling.json').read_text())['fits'] == data['fits']
    assert (tmp_path / 'scaling.png').stat().st_size > 10_000
    assert capsys.readouterr().out.splitlines()[-1].startswith('wrote scaling.json and scaling.png')


def test_sweep_runs(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(jobs, 'train', fake(seen, lambda c: c.learning_rate + c.seed % 2 + c.min_lr
                                            + (c.residual == 'full')))
    args = ['sweep', 'config/compare_cpu.toml', '--vary=learning_rate=1,2', '--modes=standard,full', '--min_lr=1',
            '--learning_rate=10', '--seed=2', *SMALL, f'--out_dir={tmp_path}']
    data = compare.main(args)
    assert len(seen) == 8 and {(c.learning_rate, c.min_lr) for c in seen} == {(1.0, 0.1), (2.0, 0.2)}
    assert data['final_loss'] == {'standard': {'1': [1.1, 2.1], '2': [2.2, 3.2]},
                                  'full': {'1': [2.1, 3.1], '2': [3.2, 4.2]}}
    compare.main(args)
    assert len(seen) == 8  # kept
    assert (tmp_path / 'sweep.png').stat().st_size > 10_000


def test_a_sweep_goes_on_where_a_run_diverges_and_a_comparison_does_not(tmp_path, monkeypatch, capsys):
    seen, finite = [], fake([], lambda c: c.learning_rate)

    def diverging(c, **keys):
        seen.append(c)
        if c.learning_rate == 2 and c.residual == 'standard':
            os.makedirs(c.out_dir, exist_ok=True)
            raise Diverged('loss nan at step 3')
        return finite(c, **keys)
    monkeypatch.setattr(jobs, 'train', diverging)
    args = ['config/compare_cpu.toml', '--modes=full,standard', *SMALL, f'--out_dir={tmp_path}']
    for _ in range(2):
        data = compare.main(['sweep', '--vary=learning_rate=1,2', '--learning_rate=4', '--min_lr=2', *args])
        assert len(seen) == 8  # what diverged is kept, too
    assert data['final_loss'] == {'full': {'1': [1.0, 1.0], '2': [2.0, 2.0]},
                                  'standard': {'1': [1.0, 1.0], '2': [None, None]}}
    assert sweep.cells(data)[2] == ('standard', '1.0000', 'diverged')
    assert sweep.cells(data, full=True)[1][2] == '2.0000 (sd 0.0000), none (diverged)'
    assert 'standard is at its best with learning_rate 1 ' in sweep.verdicts(data)[0]
    assert json.loads((tmp_path / 'sweep.json').read_text(), parse_constant=pytest.fail)['final_loss']
    capsys.readouterr()
    assert (tmp_path / 'sweep.png').stat().st_size > 10_000
    with pytest.raises(SystemExit) as stop:
        compare.main([*args, '--learning_rate=2', '--min_lr=1', '--noise=false'])  # the same runs
    assert stop.value.code == 1 and 'loss nan at step 3' in capsys.readouterr().err and len(seen) > 8


def test_sweep_compares_each_mode_at_its_best():
    data = {'base': 'standard', 'vary': 'learning_rate=1,2',
            'final_loss': {'standard': {'1': [3.0, 3.0], '2': [2.0, 2.0]}, 'full': {'1': [1.5, 1.7], '2': [2.5, 2.5]}}}
    first, second = sweep.verdicts(data)
    assert 'learning_rate 2 (an end of what was tried): 2.0000' in first
    for part in ('best with learning_rate 1 (an end of what was tried): 1.6000', 'there -1.4000',
                 'at the best of standard +0.5000',
                 'each at its own best -0.4000 +- 1.2710 (optimistic'):
        assert part in second
    data['final_loss']['full']['2'] = [1.0, 1.2]  # both at their best with the same value
    assert sweep.verdicts(data)[1].endswith('tried): 1.1000; full - standard there -0.9000 +- 1.2710')
    data['final_loss']['full']['2'] = [2.5, 2.5]
    assert sweep.cells(data)[:2] == [('learning_rate:', '1', '2'), ('standard', '3.0000', '2.0000')]
    assert sweep.cells(data, full=True)[2][1] == '1.6000 (sd 0.1414), -1.4000 +- 1.2710'


def test_a_sweep_takes_several_keys_at_once():
    cfg = sweep.SweepConfig(vary='n_layer,n_embd=6:132,12: 96', n_head=4, bias=False)
    assert cfg.points == {'6:132': {'n_layer': 6, 'n_embd': 132}, '12: 96': {'n_layer': 12, 'n_embd': 96}}
    cfg = sweep.SweepConfig(vary='learning_rate,beta2=1e-3:0.9', learning_rate=4e-3, min_lr=4e-4)
    assert cfg.points['1e-3:0.9'] == {'learning_rate': 1e-3, 'beta2': 0.9, 'min_lr': pytest.approx(1e-4)}
    data = {'base': 'standard', 'vary': 'n_layer,n_embd=6:132,12:96',
            'final_loss': {'standard': {'6:132': [3.0], '12:96': [2.0]}}}
    assert sweep.verdicts(data) == ['standard is at its best with n_layer,n_embd 12:96: 2.0000']


@pytest.mark.parametrize('args, says', [
    (['sweep', '--vary=n_layer,n_embd=6'], 'vary='), (['sweep', '--vary=n_layer=6:4'], 'vary='),
    (['sweep', '--vary=n_layer,n_layer=6:6'], 'vary='), (['sweep', '--vary=n_layer,=6:6'], 'vary='),
    (['sweep', '--vary=lr=1'], 'vary='), (['sweep', '--vary=learning_rate'], 'vary='),
    (['sweep', '--vary=learning_rate=1,1'], 'twice'), (['sweep', '--vary=learning_rate=x'], 'learning_rate='),
    (['sweep', '--vary=residual=full'], 'vary='), (['sweep', '--vary=n_layer=0'], 'n_layer=0'),
    (['scaling', '--sizes=4'], 'sizes='), (['scaling', '--sizes=4,5'], 'sizes='),
    (['scaling', '--sizes=8,4'], 'sizes='), (['scaling', '--aspect=8'], 'aspect=8'),
    (['scaling', '--n_embd=8'], 'n_embd=8'), (['scaling', '--max_iters=0'], 'max_iters=0'),
    (['scaling', '--sizes=2,4', '--modes=block:8'], 'residual_blocks=8'), (['--workers=-1'], 'workers=-1'),
    (['--data_seed=-1'], 'data_seed=-1'),
    (['--patience=1'], 'patience=1'), (['scaling', '--eval_interval=5'], 'eval_interval=5')])
def test_bad_input_is_one_line(args, says, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(args)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count('\n') == 1 and says in err


def test_equal_runs_are_trained_once_and_results_keep_their_order(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(jobs, 'train', fake(seen, lambda c: c.seed))
    cfg = RunsConfig(out_dir=str(tmp_path), workers=1, n_layer=1, n_embd=12, n_ctx=8)
    todo = [('a', cfg.plain(seed=2)), ('b', cfg.plain(seed=1)), ('c', cfg.plain(seed=2))]
    assert [r['final_loss'] for r in runs.run_all(todo, cfg)] == [2, 1, 2] and [c.seed for c in seen] == [2, 1]


def test_what_defines_a_run():
    """ Another order of batches is another run, another folder is not; block with S = 1 is full. """
    def key(**keys):
        return runs.run_key(TrainConfig(**keys), {})
    assert len({key(), key(data_seed=1), key(seed=2), key(residual='full'), key(nonfinite='skip')}) == 5
    assert key(residual_blocks=4) == key()  # nothing to the standard residual
    assert key(residual='block', residual_blocks=6) == key(residual='block', residual_blocks=7) != key(residual='full')
    assert key(out_dir='x') == key() and key(residual='block', residual_blocks=12, n_layer=6) == key(
        residual='full', n_layer=6)


def test_statistics_are_students():
    assert common.T95[0] == pytest.approx(12.706, abs=0.01) and common.T95[3] == pytest.approx(2.776, abs=0.01)


def test_pictures(tmp_path):
    data = {'vary': 'scale_proj_init=true,false', 'base': 'standard',
            'final_loss': {'standard': {'true': [1.0], 'false': [2.0]}}}
    pictures.sweep(data, tmp_path / 'a.png')
    assert (tmp_path / 'a.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
