""" compare.py: pairing, statistics, reuse of runs, the table, the pictures. """
import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import claims
import pytest
import torch

import compare
import config as configuration
import train as trainer
from experiments import common, jobs, measure, pictures, progress, results, runs
from experiments import loss as L
from experiments.common import table

TINY = ['config/compare_cpu.toml', '--n_layer=2', '--n_embd=16', '--n_head=2', '--n_ctx=16', '--batch_size=4',
        '--workers=1', '--max_iters=4', '--eval_interval=2', '--eval_iters=2', '--timing_rounds=1',
        '--kernel=reference']
BARE = [*TINY, '--noise=false']


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp('compare')
    data = compare.main([*TINY, '--seeds=2', '--modes=standard,full,block:2,block:4', f'--out_dir={out}'])
    return out, data


def test_one_call_trains_all_and_writes_everything(done):
    out, data = done
    assert list(data['modes']) == ['standard', 'full', 'block:2'] and data['same'] == {'block:4': 'full'}
    assert json.loads((out / 'results.json').read_text())['modes'].keys() == data['modes'].keys()
    assert (out / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    for m in data['modes'].values():
        assert len(m['final_loss']) == 2 and m['cost']['ms'] > 0 and m['cost']['bytes'] > 0
        assert [s for s, _ in m['history'][0]] == [0, 2, 4]


def test_steps_are_timed_as_training_runs_them(monkeypatch):
    asked, compiled = [], []
    monkeypatch.setattr(L, 'pick_compile', lambda wanted, device: asked.append((wanted, device.type)) or True)
    monkeypatch.setattr(torch, 'compile', lambda model: compiled.append(model) or model)
    small = trainer.TrainConfig(n_layer=1, n_embd=16, n_head=2, n_ctx=8, batch_size=2, device='cpu')
    assert L.costs({'standard': small}, 5, 1, 'standard')['standard']['ratio'] == 1.0
    assert asked == [(None, 'cpu')] and len(compiled) == 1


def test_noise_is_the_base_with_other_batches(done):
    """ Same weights at the start, another end, the same at every call. """
    _, data = done
    base, noise = data['modes']['standard'], data['noise']
    assert noise['first_loss'] == base['first_loss'] and len(noise['final_loss']) == 2
    gaps = [abs(a - b) for a, b in zip(noise['final_loss'], base['final_loss'], strict=True)]
    assert min(gaps) > 1e-6 and f'{max(gaps):.4f} away at most' in L.verdicts(data)[0]
    assert L.cells(data)[2][0] == 'other batches'


def test_depth_is_shown_at_the_end(done):
    out, data = done
    shown = json.loads((out / 'depth.json').read_text())['modes']
    assert shown.keys() == data['modes'].keys() and (out / 'dynamics.png').exists() and (out / 'depth.png').exists()


def test_runs_are_paired(done):
    """ The same seed starts every mode from the same function, another seed from another. """
    _, data = done
    first = {label: [h[0][1] for h in m['history']] for label, m in data['modes'].items()}
    for label in ('full', 'block:2'):
        assert first[label] == pytest.approx(first['standard'], abs=1e-4)
    assert abs(first['standard'][0] - first['standard'][1]) > 1e-4


def test_finished_runs_are_kept_and_overwrite_redoes_them(done, monkeypatch, capsys):
    out, data = done
    args = [*BARE, '--seeds=2', '--modes=standard,full', f'--out_dir={out}']
    trained = []
    monkeypatch.setattr(jobs, 'train', lambda cfg, report: trained.append(cfg) or trainer.train(cfg))
    assert compare.main(args)['modes']['full']['final_loss'] == data['modes']['full']['final_loss'] and not trained
    assert '4 of 4 runs are kept from an earlier call' in capsys.readouterr().out
    compare.main([*args, '--overwrite'])
    assert len(trained) == 4
    compare.main([*args, '--learning_rate=1e-3'])  # another run: not the kept one
    assert len(trained) == 8


@pytest.mark.parametrize('damage', ['', '[1]', '5', '{}', '{"commit": '])
def test_a_damaged_result_is_told_again_by_its_checkpoint(damage, tmp_path):
    args = [*BARE, '--modes=standard', f'--out_dir={tmp_path}']
    first = compare.main(args)
    path, = tmp_path.glob('runs/*/result.json')
    path.write_text(damage)
    again = compare.main(args)
    assert again['modes']['standard']['final_loss'] == first['modes']['standard']['final_loss']
    assert json.loads(path.read_text())['commit'] == first['commit'] == again['commit']


def test_other_weights_to_begin_with_are_another_run(tmp_path, monkeypatch):
    trained = []

    def fake(cfg, report):
        trained.append(cfg)
        os.makedirs(cfg.out_dir)
        return {'final_loss': 1.0, 'stopped': None}
    monkeypatch.setattr(jobs, 'train', fake)
    monkeypatch.setattr(jobs, 'forecast', lambda jobs, meta, val_tokens: {job.name: (1, 1.0) for job in jobs})
    cfg = runs.RunsConfig(dataset='shakespeare_char', out_dir=str(tmp_path / 'out'), workers=1, device='cpu',
                          init_from=str(tmp_path / 'start'))
    (tmp_path / 'start').mkdir()
    for files, new in (({'config.json': 'a', 'model.safetensors': 'b'}, 1), ({}, 1), ({'model.safetensors': 'c'}, 2),
                       ({'ckpt.pt': 'd'}, 3), ({'best.pt': 'e'}, 4), ({'ckpt.pt': 'f'}, 4), ({'best.pt': 'g'}, 5)):
        for name, text in files.items():
            (tmp_path / 'start' / name).write_text(text)
        runs.run_all([('standard', cfg.plain())], cfg)
        assert len(trained) == new, files


def test_files_where_it_is_called_define_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg, seen = runs.RunsConfig(dataset='shakespeare_char', workers=1, device='cpu'), []
    monkeypatch.setattr(runs, 'run_key', lambda c, data: seen.append(data) or 'key')
    monkeypatch.setattr(runs, 'kept', lambda folder: {'final_loss': 1.0, 'commit': ''})
    for name in ('README.md', 'best.pt', 'ckpt.pt'):
        runs.run_all([('standard', cfg.plain())], cfg)
        (tmp_path / name).write_text('a')
    assert seen == [seen[0]] * 3 and {*seen[0]} == {'train', 'val'}


@pytest.mark.parametrize('keys', [{'seed': 2**31 - 1}, {'seed': 1337, 'data_seed': 2**31 - 1 - 1337}, {'seed': 1},
                                  {'seed': 2**31 - 1, 'data_seed': 1}])
def test_other_batches_are_others(keys, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def look(todo, cfg):
        base, other = (c for _, c in todo)
        assert (other.data_seed or other.seed) != (base.data_seed or base.seed) and other.seed == base.seed
        raise Enough
    monkeypatch.setattr(L, 'run_all', look)
    with pytest.raises(Enough):
        compare.main([*TINY, '--modes=standard', *(f'--{k}={v}' for k, v in keys.items()), f'--out_dir={tmp_path}'])


def test_threads_do_not_depend_on_what_is_left_to_run(monkeypatch):
    monkeypatch.setattr(runs.os, 'sched_getaffinity', lambda pid: range(8), raising=False)
    shares = {w: runs.RunsConfig(workers=w, device='cpu').share for w in (0, 1, 2, 3, 16)}
    assert shares == {0: (8, 1), 1: (1, 8), 2: (2, 4), 3: (3, 2), 16: (16, 1)}
    used = []
    monkeypatch.setattr(torch, 'set_num_threads', used.append)
    runs.settings(runs.RunsConfig, ['config/compare_cpu.toml', '--workers=2', '--device=cpu'], 'loss', '')
    assert used == [4]


def test_costs_are_relative_to_the_base(done, monkeypatch):
    out, _ = done
    data = compare.main([*BARE, '--modes=full,standard', f'--out_dir={out}'])
    assert data['base'] == 'standard' and data['modes']['standard']['cost']['ratio'] == 1.0
    assert data['modes']['full']['cost']['ratio'] != 1.0


SHORT = {'n_layer': 1, 'n_embd': 16, 'n_head': 2, 'n_ctx': 16, 'batch_size': 2, 'dataset': 'shakespeare_char',
         'eval_iters': 3, 'device': 'cpu'}


def record(step, loss=None, message=None, max_iters=10):
    """ What train reports. """
    return {'step': step, 'max_iters': max_iters, 'loss': loss, 'val_loss': None, 'message': message}


class Screen(io.StringIO):
    """ A terminal that keeps what was written to it. """
    def isatty(self):
        return True


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
    shown = progress.Progress({'a': (10, 50.0), 'b': (10, 150.0)}, 2)
    assert capsys.readouterr().out == '2 runs, 2 at a time, 20 steps in all: about 2 minutes\n'
    for step in range(1, 11):
        now[0] += 10
        shown.update('a', record(step, loss=3 - step / 10))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0] == '3 of 20 steps, about 6 minutes left; loss: a 2.700'
    shown.update('b', record(5, loss=1.5))  # half of it is done: 50 + 75 of 200 seconds took 100
    assert shown.seconds_left() == pytest.approx(60)
    shown.finish('a', 'final loss 2.0000')
    shown.finish('b', 'final loss 1.0000')
    assert capsys.readouterr().out.splitlines() == [
        'a: final loss 2.0000 (1 of 2 runs done, about 60 seconds left)', 'b: final loss 1.0000 (2 of 2 runs done)']


def test_progress_in_a_terminal_is_one_bar(monkeypatch, capsys):
    screen = Screen()
    monkeypatch.setattr(sys, 'stderr', screen)
    shown = progress.Progress({'a': (10, 1.0), 'b': (10, 1.0)}, 1)
    shown.bar.mininterval = shown.bar.miniters = 0
    shown.update('a', record(4, loss=2.5))
    shown.update('a', record(8, loss=2.25))
    shown.close()
    assert '40%' in screen.getvalue() and '| 8 of 20 steps' in screen.getvalue() and 'a 2.250' in screen.getvalue()
    assert 'steps, about' not in capsys.readouterr().out.split('\n', 1)[1]


def test_what_is_true_of_every_run_is_said_once(capsys):
    shown = progress.Progress({'a': (10, 1.0), 'b': (10, 1.0)}, 1)
    for name in 'ab':
        for line in ('1 x cpu, float32', 'step     0: validation loss 4.1', '10 steps of 32 tokens in all, about 1 ms'):
            shown.update(name, record(0, message=line))
    assert capsys.readouterr().out.splitlines()[1:] == ['1 x cpu, float32']


def test_a_resumed_run_counts_from_where_it_was(tmp_path):
    shown = progress.Progress({'a': (4, 1.0)}, 1)
    shown.update('a', record(6, message='resumed at step 6'))
    assert shown.taken['a'] == 0
    shown.update('a', record(8, loss=1.0))
    assert shown.taken['a'] == 2


def test_the_forecast_counts_steps_left_and_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.measure, 'clock', lambda fn, device: 2.0)
    config = trainer.TrainConfig(**SHORT, max_iters=100, eval_interval=50, gradient_accumulation_steps=3)
    job = jobs.Job('a', config, str(tmp_path))
    assert jobs.forecast([job], {'n_vocab': 65}, 10**6) == {job.name: (100, 2.0 * (300 + 3 * 3 / 3))}
    assert jobs.forecast([job], {'n_vocab': 65}, 33)[job.name][1] == 2.0 * (300 + 3 * 2 / 3)  # 2 batches hold the text
    trainer.train(trainer.TrainConfig(**SHORT, max_iters=4, out_dir=str(tmp_path)), quiet=True)
    assert jobs.forecast([job], {'n_vocab': 65}, 10**6)[job.name][0] == 96
    new = jobs.Job('a', config, str(tmp_path / 'new'))
    assert jobs.forecast([new], {'n_vocab': 65}, 10**6)[new.name][0] == 100


def test_a_network_too_large_is_refused_before_it_is_timed(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(['--n_embd=2000000', '--modes=standard', f'--out_dir={tmp_path}'])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and 'must fit into memory' in err and err.count('\n') == 1


@pytest.mark.slow
def test_runs_side_by_side_report_to_one_display(tmp_path, capsys):
    two = [a for a in BARE if not a.startswith('--workers')]
    compare.main([*two, '--modes=standard,full', '--workers=2', f'--out_dir={tmp_path}'])
    out = capsys.readouterr().out
    assert out.index('2 runs, 2 at a time, 8 steps in all: about') < out.index('final loss')
    for line in ('standard, seed 1337: final loss', 'full, seed 1337: final loss', '(2 of 2 runs done)'):
        assert line in out


def test_a_child_says_why_it_failed(tmp_path):
    """ The parent raises the same kind of error, so the exit code and the one line are its own. """
    (tmp_path / 'taken').write_text('')
    child = jobs.Child(jobs.Job('a', trainer.TrainConfig(**SHORT), str(tmp_path / 'taken')), 1)
    child.process.join()
    with pytest.raises(ValueError, match='must be a writable folder'):
        child.ended(None)


def test_an_interrupted_run_continues(tmp_path, monkeypatch):
    args = [*BARE, '--modes=standard', f'--out_dir={tmp_path}']

    def dies(cfg, report):
        trainer.train(trainer.TrainConfig(**vars(cfg) | {'max_iters': cfg.max_iters}))
        raise KeyboardInterrupt
    monkeypatch.setattr(jobs, 'train', dies)
    with pytest.raises(SystemExit):
        compare.main(args)
    resumed = []
    monkeypatch.setattr(jobs, 'train', lambda cfg, report: resumed.append(cfg.resume) or trainer.train(cfg))
    compare.main(args)
    assert resumed == [True]


def test_json_goes_to_stdout_only_if_asked(done, capsys):
    out, _ = done
    args = [*BARE, '--modes=standard,full', f'--out_dir={out}']
    compare.main(args)
    shown = capsys.readouterr().out
    assert '{' not in shown and shown.splitlines()[-1].startswith('wrote results.json')
    compare.main([*args, '--json'])
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert data == json.loads((out / 'results.json').read_text()) and data['torch'] == torch.__version__
    assert 'wrote results.json' in shown.err


def test_the_table_fits_an_ordinary_terminal(done):
    _, data = done
    longest = {'denseformer': data['modes']['standard'], 'block:12': data['modes']['full']}
    wide = data | {'modes': data['modes'] | longest, 'memory': 'peak memory'}
    lines = (table(L.cells(wide)) + '\n' + L.legend(wide)).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(len(row) == len(L.COLUMNS) for row in L.cells(wide, L.COLUMNS))


def test_paired_statistics():
    """ Against a worked example: differences -1, -2, -3; sd 1; t(2) = 4.303. """
    mean, half = L.paired([1., 2., 3.], [2., 4., 6.])
    assert mean == -2 and half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert L.paired([1.], [3.]) == (-2., None)


def results_of(base, other):
    history = [[[0, 4.], [10, 3.], [20, v]] for v in base], [[[0, 4.], [10, 2.5], [20, v]] for v in other]
    mean, half = L.paired(other, base)
    mode = {'params': 1, 'first_loss': 4., 'best_loss': base, 'cost': {'ms': 1., 'ratio': 1.1, 'bytes': 2**20}}
    return {'base': 'standard', 'memory': 'kept', 'same': {},
            'modes': {'standard': mode | {'final_loss': base, 'history': history[0], 'difference': 0., 'half_width': 0},
                      'full': mode | {'final_loss': other, 'history': history[1], 'difference': mean,
                                      'half_width': half}}}


@pytest.mark.parametrize('base,other,says', [
    ([2.0], [1.0], 'one seed'),
    ([2.0, 2.1, 2.2], [2.1, 1.9, 2.3], 'not distinguishable from zero'),
    ([2.0, 2.2, 2.4], [1.95, 2.15, 2.35], 'resolved, but less than the sd of standard between seeds (0.2'),
    ([2.0, 2.001, 2.002], [1.5, 1.501, 1.502], 'lower, by more than the sd of standard between seeds (0.0010)'),
    ([2.0, 2.001, 2.002], [2.5, 2.501, 2.502], 'higher, by more than'),
])
def test_a_difference_within_noise_is_called_so(base, other, says):
    assert says in L.verdicts(results_of(base, other))[0]


def test_when_a_mode_reaches_the_goal():
    assert L.reaches([[[0, 4.], [10, 3.], [20, 2.]]], 2.5) == 15
    assert L.reaches([[[0, 4.], [10, 3.]]], 2.5) is None
    assert L.reaches([[[0, 4.], [10, 4.]]], 4.) == L.reaches([[[0, 3.], [10, 4.]]], 4.5) == 10  # not at the start
    assert 'never' in L.verdicts(results_of([2.0], [2.2]))[0]
    assert 'at step 15 of 20, after 0 s (0.82 x the time of standard)' in L.verdicts(results_of([2.0], [1.5]))[0]


def test_table_is_aligned():
    assert table([('a', 'bb'), ('ccc', 'd')]) == 'a    bb\nccc   d'


def test_interleaving_takes_turns():
    order = []
    fns = {'a': lambda: order.append('a'), 'b': lambda: order.append('b')}
    times = measure.interleaved(fns, torch.device('cpu'), rounds=3, warmup=1)
    assert ''.join(order) == 'abababab' and [len(t) for t in times.values()] == [3, 3]
    assert measure.ratio([2., 4., 9.], [1., 2., 3.]) == 2.


def test_alive_bytes_of_a_known_graph():
    """ x -> exp -> exp keeps two results of 4 bytes each number; the parameter is not counted. """
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(1000))

    class Bench:
        model = Model()

        def loss(self):
            return self.model.x.exp().exp().sum()
    assert measure.alive_bytes(Bench()) == 8000


def test_picture_of_five_seeds(tmp_path):
    data = results_of([2.0, 2.1, 2.2, 2.3, 2.4], [1.9, 2., 2.1, 2.2, 2.3])
    pictures.loss(data, tmp_path / 'loss.png')
    assert (tmp_path / 'loss.png').stat().st_size > 10_000


@pytest.mark.parametrize('args,says', [
    (['results', '--only=x', '--rerun'], 'only='),
    (['--modes=standard,foo'], "'foo'"), (['--modes='], "''"), (['--modes=full:3'], 'full:3'),
    (['--modes=block:x'], 'block:x'),
    (['--modes=block:99'], 'residual_blocks=99'), (['--seeds=0'], 'seeds=0'), (['--seeds=x'], 'seeds'),
    (['--lerning_rate=1'], 'learning_rate'), (['speed', '--shape=Z'], "shape='Z'"), (['spede'], 'spede'),
    (['speed', '--kernels=cuda'], 'cuda'),
])
def test_bad_input_is_one_line_and_code_2(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        compare.main(args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count('\n') == 1 and 'Traceback' not in err


def test_mean_loss_in_the_table_is_that_of_the_runs(done):
    _, data = done
    row = dict(zip(L.cells(data)[0], L.cells(data)[3], strict=True))
    mean = statistics.mean(data['modes']['full']['final_loss'])
    assert row['mode'] == 'full' and row['final loss'] == f'{mean:.4f}'


@pytest.mark.parametrize('args,says', [
    (['--modes=full,full'], 'only once'), (['--modes=block:'], 'block:'), (['--residual=block'], '--modes'),
    (['--resume'], 'unfinished runs go on'), (['--seeds=2', '--seed=2147483647'], 'seeds=2'),
    (['speed', '--kernel=torch'], '--kernels'),
    (['speed', '--out=/no/such/folder/x.json'], 'out='), (['speed', '--threads=99999999999'], 'threads='),
    (['speed', '--batch_size=0'], 'batch_size=0'), (['speed', '--dtype=x', '--device=cpu'], "dtype='x'"),
    (['speed', '--dtype=float64', '--device=cpu'], "dtype='float64'"),
])
def test_what_would_be_ignored_or_fail_late_is_refused_early(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        compare.main(args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count('\n') == 1


def test_interrupting_is_one_line(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(L, 'compare', interrupted)
    with pytest.raises(SystemExit) as e:
        compare.main([])
    assert e.value.code == 130 and capsys.readouterr().err.count('\n') == 1


RESULTS = (results.ROOT / 'RESULTS.md').read_text(encoding='utf-8')


def test_results_are_generated_from_what_they_show():
    assert results.render(RESULTS) == RESULTS, 'python compare.py results writes it'


def test_every_number_in_the_words_of_results_comes_from_an_asset():
    words = RESULTS.partition(results.HAND[1])[0]
    assert claims.wrong(words) == [] and len(claims.COMMENT.findall(words)) > 5
    number = claims.NUMBER.search(words).group()
    changed = number[:-1] + str((int(number[-1]) + 1) % 10)
    assert claims.wrong(words.replace(number, changed, 1)) and claims.wrong(words + '\nIt is 0.5 better.')


def test_words_by_hand_are_kept_and_a_part_appears_with_its_asset(tmp_path, monkeypatch):
    begin, end = results.HAND
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    page = f'# Results\n\n{begin}\nMy words.\n{end}\n'
    assert results.render(page) == page
    (tmp_path / 'assets').mkdir()
    asset = results.json.dumps({'command': 'c', 'torch': '2', 'device': 'cpu', 'commit': 'abc+', 'u': {'full': 805}})
    (tmp_path / 'assets' / 'traffic.json').write_text(asset)
    shown = results.render(page + 'An old part.\n')
    assert shown.startswith(page) and '| full | 805 |' in shown and 'An old part' not in shown
    assert 'commit abc with uncommitted changes.' in shown
    with pytest.raises(ValueError, match='written by hand'):
        results.render('# Results\n')


def test_check_tells_whether_the_page_is_up_to_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    page = '\n'.join(results.HAND) + '\n'
    (tmp_path / 'RESULTS.md').write_text(page)
    compare.main(['results', '--check'])
    (tmp_path / 'RESULTS.md').write_text(page + 'more')
    with pytest.raises(SystemExit) as stop:
        compare.main(['results', '--check'])
    assert stop.value.code == 1 and (tmp_path / 'RESULTS.md').read_text() == page + 'more'
    assert 'python compare.py results' in capsys.readouterr().err


def test_rerun_makes_the_parts_asked_for(tmp_path, monkeypatch):
    """ Each part's command line is one that its verb takes, whatever part is run. """
    calls = []
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    monkeypatch.setattr(results, 'load', lambda name: calls.append(name))
    monkeypatch.setattr(results.shutil, 'copy', lambda a, b: calls.append((str(a), b.name)))
    monkeypatch.setattr(results, 'write_json', lambda path, value: calls.append(path.name))
    for verb in (L, results.sweep, results.scaling):
        monkeypatch.setattr(verb, 'main', lambda argv, verb=verb: calls.append(verb))
    monkeypatch.setattr(results.cost, 'main', lambda argv: calls.append(argv))
    results.rerun(['rates', 'shakespeare', 'speed_B', 'ablations'])
    assert calls == ['enwik8', results.sweep, ('out/results/sweep.json', 'rates.json'), L,
                     ('out/results/results.json', 'shakespeare.json'), ('out/results/depth.json', 'depth.json'),
                     [*results.PARTS['speed_B']['argv'], '--out=assets/speed_B.json'], L, ('out/results/results.json', 'ablations.json')]


@pytest.mark.parametrize('verb', ['loss', 'sweep', 'scaling', 'speed', 'depth', 'results'])
def test_help_names_the_verb_and_puts_its_own_keys_first(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main([verb, '--help'])
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if line.startswith('  --'))
    own = {'loss': 'timing_rounds', 'sweep': 'vary', 'scaling': 'sizes', 'speed': 'vocab_size', 'depth': 'out',
           'results': 'check'}
    assert not stop.value.code and lines[0].startswith(f'usage: compare.py {verb} ')
    assert first.startswith(f'  --{own[verb]}=')


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    command = f'{sys.executable} compare.py sweep --help | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(['bash', '-c', command], cwd=results.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ''


def test_a_value_of_the_preset_is_called_so(tmp_path, capsys):
    """ Where no mode uses it, it is no error; where one does, the message says whose value it is. """
    shallow = ['--n_layer=2', '--device=cpu', f'--out_dir={tmp_path}']
    runs.settings(L.CompareConfig, ['--modes=standard,full,block:2', *shallow], 'loss', '')
    for given, says in (([], 'compare_cpu.toml)'), (['--residual_blocks=8'], 'must be from 1 to 2 * n_layer = 4')):
        with pytest.raises(SystemExit) as stop:
            runs.settings(L.CompareConfig, ['--modes=standard,block', *shallow, *given], 'loss', '')
        err = capsys.readouterr().err.strip()
        assert stop.value.code == 2 and 'residual_blocks=8' in err and err.endswith(says)


def test_a_mode_that_comes_out_as_another_is_announced_under_its_own_name(tmp_path, capsys):
    config = trainer.TrainConfig(**SHORT, max_iters=1, residual='block', residual_blocks=2)
    jobs.forecast([jobs.Job('block:2', config, str(tmp_path))], {'n_vocab': 65}, 100)
    out = capsys.readouterr().out
    assert out.startswith('block:2: 2 sublayers in 2 residual blocks of 1; 0.00 M parameters')
    assert progress.ROUTINE.match('full: 2 sublayers in 2 residual blocks of 1; 0.00 M parameters')


@pytest.mark.parametrize('name', [name for name, part in results.PARTS.items() if part.get('argv')])
def test_each_part_of_results_can_be_made(name):
    part = results.PARTS[name]
    if part['kind'] == 'speed':
        results.cost.SpeedConfig(**configuration.parse(results.cost.SpeedConfig, part['argv']))
    else:
        cls = results.sweep.SweepConfig if part['kind'] == 'sweep' else L.CompareConfig
        runs.settings(cls, [*part['argv'], '--device=cpu'], 'loss', '')


def test_the_paper_is_beside_our_dots(tmp_path):
    data = results_of([2.0, 2.1, 2.2], [1.9, 2., 2.1])
    pictures.dots(data, tmp_path / 'dots.png', 'standard', {'full': -0.029})
    assert (tmp_path / 'dots.png').stat().st_size > 5_000


def test_a_dot_may_have_a_base_of_its_own(tmp_path, monkeypatch):
    """ heads changes Block, so its difference is from Block. """
    seen = []
    monkeypatch.setattr(pictures, 'paired', lambda values, base: seen.append((values, base)) or (0.0, 0.1))
    data = {'modes': {'full': {'final_loss': 1}, 'block:8': {'final_loss': 2}, 'heads': {'final_loss': 3}}}
    pictures.dots(data, tmp_path / 'dots.png', 'full', {}, {'heads': 'block:8'})
    assert sorted(seen) == [(2, 1), (3, 2)]


def test_the_same_function_is_one_run_and_another_is_another():
    """ The number of residual blocks counts for block and for heads, which is made from it, and for no other rule. """
    def key(residual, N):
        return runs.run_key(runs.TrainConfig(residual=residual, residual_blocks=N, n_layer=4, device='cpu'), {})
    assert key('full', 2) == key('full', 8) == key('block', 8) and key('window', 2) == key('window', 8)
    assert key('block', 5) == key('block', 4) != key('block', 2)
    assert key('heads', 2) != key('heads', 8) != key('block', 8)


def test_an_edit_of_the_model_makes_new_runs_and_a_comment_does_not(tmp_path, monkeypatch):
    """ Kept runs are those of the code that is there, so whoever edits a rule sees what it does. """
    def key(edit):
        (tmp_path / 'model.py').write_text(edit(source))
        return runs.run_key(runs.TrainConfig(device='cpu'), {})
    source = Path(runs.model.__file__).read_text()
    monkeypatch.setattr(runs.model, '__file__', str(tmp_path / 'model.py'))
    monkeypatch.setattr(runs.inspect, 'getfile', lambda rule: str(tmp_path / 'model.py'))
    before = key(lambda text: text)
    assert key(lambda text: '# a comment\n' + text) == before
    assert key(lambda text: text.replace('h = h + f(h)', 'h = h + 2 * f(h)', 1)) != before


def test_a_commit_with_changes_anywhere_says_so(tmp_path, monkeypatch):
    git = ['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b']
    (tmp_path / 'config').mkdir()
    for name in ('model.py', 'config/x.toml', 'README.md'):
        (tmp_path / name).write_text('one')
    for command in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'one']):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(common, 'ROOT', tmp_path)
    clean = common.commit()
    for name, changes in (('README.md', False), ('model.py', True), ('config/x.toml', True)):
        (tmp_path / name).write_text('two')
        assert common.commit() == clean + '+' * changes, name
        (tmp_path / name).write_text('one')


@pytest.mark.parametrize('modes, message', [
    ('standard,block:400', "modes='block:400': residual_blocks=400: must be from 1 to 2 * n_layer = 24"),
    ('block:0', "modes='block:0': residual_blocks=0: must be a whole number from 1 to 2**31 - 1")])
def test_a_number_of_blocks_that_cannot_be_is_the_mode_s(modes, message, capsys):
    with pytest.raises(SystemExit):
        compare.main([f'--modes={modes}', '--device=cpu'])
    assert capsys.readouterr().err == f'error: {message}\n'


def test_help_lists_the_verbs(capsys):
    with pytest.raises(SystemExit):
        compare.main(['--help'])
    shown = capsys.readouterr().out
    assert 'compare.py sweep --vary=' in shown and 'Without a FILE.toml, config/compare_cpu.toml' in shown


def test_a_job_whose_folder_cannot_be_written_says_why():
    """ What a child process reports is raised as it is, an OSError too. """
    sent = []
    pipe = type('Pipe', (), {'send': lambda self, what: sent.append(what)})()
    with mock.patch.object(jobs, 'run', side_effect=OSError(28, 'No space left on device')), \
            mock.patch.object(jobs, 'when_parent_ends'):
        jobs.in_a_process(None, torch.get_num_threads(), pipe)
    assert [error.errno for error in sent] == [28]


def test_picture_of_the_first_steps(tmp_path):
    """ Of each recipe that lines names, the mean over its seeds. """
    run = {'step': [0, 1, 2], 'validation loss': [3., 2.9, 2.8], 'norm of the queries': [0., 1., 2.],
           'entropy of the weights': [1., 0.9, 0.8]}
    found = {'runs': {'Full': [run, run], 'Block': [run, run]}}
    pictures.start(found, tmp_path / 'start.png', {'Full': '0 -', 'Block': '1 --'})
    assert (tmp_path / 'start.png').stat().st_size > 5_000
    with pytest.raises(KeyError):
        pictures.start(found, tmp_path / 'start.png', {'Fool': '0 -'})
