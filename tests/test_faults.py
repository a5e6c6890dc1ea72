""" What a run survives: kills at any moment, full disks, damaged files, rivals, signals, a process that dies. Slow. """
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import compare
from experiments import jobs, runs
from experiments.progress import Progress
from weights import load_checkpoint

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
KEYS = dict(
    n_layer=2,
    n_embd=32,
    n_head=2,
    n_ctx=16,
    batch_size=4,
    max_iters=40,
    eval_interval=3,
    eval_iters=2,
    device='cpu',
    log_interval=2,
    dropout=0.1,
    residual='block',
    residual_blocks=2,
    learning_rate=1e-2,
    kernel='reference',
)
PATIENCE = 600  # seconds after which something hangs: a busy machine takes a minute to import torch
ENV = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}
TORCHRUN = ['-m', 'torch.distributed.run', '--nproc_per_node=2']


def command(out, *more, torchrun=False, **keys):
    args = [f'--{k}={v}' for k, v in (KEYS | keys).items()] if '--resume' not in more else []
    return [sys.executable, *(TORCHRUN if torchrun else []), 'train.py', *args, f'--out_dir={out}', *more]


def start(*args, **keys):
    return subprocess.Popen(command(*args, **keys), cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def run(*args, **keys):
    return subprocess.run(command(*args, **keys), cwd=ROOT, env=ENV, text=True, capture_output=True)


def result(out):
    """ The final model and the log without times. """
    state = load_checkpoint(str(out / 'ckpt.pt'))
    log = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    return state, [{k: v for k, v in r.items() if k not in ('seconds', 'config')} for r in log]


def assert_same(one, two):
    assert one[1] == two[1]
    for key, value in one[0]['model'].items():
        assert torch.equal(value, two[0]['model'][key]), key


def wait_for(condition, process=None):
    until = time.time() + PATIENCE
    while not condition():
        assert time.time() < until and (process is None or process.poll() is None)
        time.sleep(0.01)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """ A run that nothing disturbs. """
    out = tmp_path_factory.mktemp('whole') / 'run'
    assert run(out).returncode == 0
    return out


# Kills by the trainer itself, in a forked child, at moments that a clock would seldom hit: the n-th call of a function.
KILLER = '''
import os, signal, sys, random
import torch, train
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def forked(argv, place, n):
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1); os.dup2(null, 2)
        count = [0]
        def hook(owner, name, after=False):
            real = getattr(owner, name)
            def wrapped(*a, **k):
                count[0] += 1
                if count[0] == n:
                    if after: real(*a, **k)
                    kill()
                return real(*a, **k)
            setattr(owner, name, wrapped)
        if place == 'half':
            real = torch.save
            def half(state, f):
                count[0] += 1
                if count[0] == n:
                    import io
                    b = io.BytesIO(); real(state, b); f.write(b.getvalue()[:len(b.getvalue()) // 2]); f.flush(); kill()
                real(state, f)
            torch.save = half
        elif place == 'renamed': hook(os, 'replace', True)
        elif place == 'rename': hook(os, 'replace')
        elif place == 'sync': hook(os, 'fsync')
        elif place == 'log': hook(train.Run, 'write_log', True)
        elif place == 'step': hook(train, 'seed_dropout')
        elif place == 'evaluate': hook(train.Run, 'evaluate')
        code = 1
        try:
            train.main(argv); code = 0
        except SystemExit as e:
            code = e.code or 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]
out, keys = sys.argv[1], sys.argv[2:]
rng, killed = random.Random(5), 0
places = ['half', 'rename', 'renamed', 'sync', 'log', 'step', 'evaluate'] * 3
rng.shuffle(places)
for place in places[:20]:
    have = os.path.exists(out + '/ckpt.pt')
    argv = ['--out_dir=' + out, '--resume'] if have else keys + ['--out_dir=' + out]
    status = forked(argv, place, rng.randrange(1, 5))
    assert os.WIFSIGNALED(status) or status == 0, (place, status)
    killed += os.WIFSIGNALED(status)
    if os.path.exists(out + '/ckpt.pt'): train.read_run(out)
    else: assert not have
print('killed', killed)
train.main(['--out_dir=' + out, '--resume'] if os.path.exists(out + '/ckpt.pt') else keys + ['--out_dir=' + out])
'''


def test_kills_at_20_moments_leave_a_checkpoint_that_leads_to_the_same_weights(whole, tmp_path):
    out = tmp_path / 'run'
    r = subprocess.run([sys.executable, '-c', KILLER, str(out), *(f'--{k}={v}' for k, v in KEYS.items())],
                       cwd=ROOT, env=ENV | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]
    assert int(r.stdout.split('killed ')[1].split()[0]) >= 15, r.stdout[-500:]
    assert_same(result(whole), result(out))
    assert not list(out.glob('*.tmp'))


def test_kills_by_the_clock(whole, tmp_path):
    out, rng = tmp_path / 'run', random.Random(2)
    for _ in range(4):
        p = start(out, *(['--resume'] if (out / 'ckpt.pt').exists() else []))
        wait_for(lambda p=p: p.poll() is not None or (out / 'log.jsonl').exists())
        time.sleep(rng.random() * 0.6)
        p.kill()
        p.communicate()
        load_checkpoint(str(out / 'ckpt.pt'))
    r = run(out, '--resume')
    assert r.returncode == 0, r.stderr
    assert_same(result(whole), result(out))


def test_a_full_disk_is_one_line_and_the_old_checkpoint_stands(tmp_path):
    """ RLIMIT_FSIZE lets the first checkpoint pass, without the optimiser's state, and not the next one. """
    out = tmp_path / 'run'
    assert run(out, max_iters=0).returncode == 0
    size = (out / 'ckpt.pt').stat().st_size
    r = subprocess.run(command(tmp_path / 'full'), cwd=ROOT, env=ENV, text=True, capture_output=True,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, size * 3 // 2)))
    assert r.returncode == 1 and r.stderr.count('\n') == 1, r.stderr
    assert r.stderr.startswith('error: ') and 'could not be written' in r.stderr
    assert load_checkpoint(str(tmp_path / 'full' / 'ckpt.pt'))['progress']['step'] == 0
    assert not list((tmp_path / 'full').glob('*.tmp'))
    assert run(tmp_path / 'full', '--resume').returncode == 0


def test_damaged_bytes_are_refused_or_harmless(whole, tmp_path):
    """ A byte changed anywhere: one line, or, in padding, the very same state. """
    data, rng, path = (whole / 'ckpt.pt').read_bytes(), random.Random(3), tmp_path / 'ckpt.pt'
    good, refused = load_checkpoint(str(whole / 'ckpt.pt')), 0
    for _ in range(150):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:])
        try:
            state = load_checkpoint(str(path))
        except ValueError as e:
            refused += 1
            assert 'ckpt.pt' in str(e)
        else:
            assert all(torch.equal(v, state['model'][k]) for k, v in good['model'].items())
            assert state['progress'] == good['progress'] and state['config'] == good['config']
    assert refused > 75


def test_two_runs_in_one_folder(tmp_path):
    a = start(tmp_path / 'run', max_iters=100000)
    try:
        wait_for((tmp_path / 'run' / 'ckpt.pt').exists, a)
        for more in ([], ['--overwrite'], ['--resume']):
            b = run(tmp_path / 'run', *more)
            assert b.returncode == 2 and b.stderr.count('\n') == 1 and 'another run' in b.stderr, (more, b)
    finally:
        a.kill()
        a.communicate()


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_evaluation(number, whole, tmp_path):
    """ It is acknowledged, the evaluation is left, the state saved, and a line says how to go on. """
    out = tmp_path / 'a run'
    slow = ('import train, os; e = train.Run.evaluate\n'
            'def f(self, stop):\n'
            f'  if self.progress.step == 6: os.kill(os.getpid(), {int(number)})\n'
            '  return e(self, stop)\n'
            'train.Run.evaluate = f; train.main()')
    args = command(out)[2:]
    r = subprocess.run([sys.executable, '-c', slow, *args], cwd=ROOT, env=ENV | {'PYTHONPATH': str(ROOT)},
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert f'{signal.Signals(number).name}: stops soon' in r.stderr
    progress = load_checkpoint(str(out / 'ckpt.pt'))['progress']
    assert progress['step'] == 6 and progress['history'][-1][0] == 3
    line = r.stdout.splitlines()[-1]
    assert line.startswith(f'{signal.Signals(number).name}: saved at step 6; go on with: python train.py ')
    copied = sys.executable + line.split('go on with: python')[1]
    assert subprocess.run(copied, shell=True, cwd=ROOT, env=ENV, capture_output=True).returncode == 0
    assert_same(result(whole), result(out))


def test_several_processes_stop_at_one_signal_and_go_on(tmp_path):
    out = tmp_path / 'run'
    p = start(out, torchrun=True, gradient_accumulation_steps=2, max_iters=100000, eval_interval=50)
    wait_for((out / 'best.pt').exists, p)
    p.terminate()
    stdout, stderr = p.communicate(timeout=PATIENCE)
    assert 'SIGTERM: saved at step ' in stdout and 'torchrun --nproc_per_node=2 train.py' in stdout, stderr
    step = load_checkpoint(str(out / 'ckpt.pt'))['progress']['step']
    p = start(out, '--resume', torchrun=True)
    wait_for(lambda: load_checkpoint(str(out / 'ckpt.pt'))['progress']['step'] > step, p)
    p.terminate()
    assert f'resumed at step {step}' in p.communicate(timeout=PATIENCE)[0]


def test_a_process_that_dies_ends_the_run(tmp_path):
    out = tmp_path / 'run'
    p = start(out, torchrun=True, gradient_accumulation_steps=2, max_iters=100000, eval_interval=20)
    wait_for((out / 'best.pt').exists, p)
    children = Path(f'/proc/{p.pid}/task/{p.pid}/children').read_text().split()
    second = [int(c) for c in children if b'\0LOCAL_RANK=1\0' in Path(f'/proc/{c}/environ').read_bytes()]
    os.kill(second[0], signal.SIGKILL)
    _, stderr = p.communicate(timeout=PATIENCE)
    assert p.returncode == 1
    line = [line for line in stderr.splitlines() if line.startswith('error: process 0 of 2')]
    assert len(line) == 1 and 'ckpt.pt holds step ' in line[0], stderr[-2000:]
    step = load_checkpoint(str(out / 'ckpt.pt'))['progress']['step']
    assert step % 20 == 0 and f'holds step {step}' in line[0]


SIDE_BY_SIDE = ['config/compare_cpu.toml', '--n_layer=2', '--n_embd=32', '--n_head=2', '--n_ctx=16', '--batch_size=4',
                '--max_iters=2000', '--eval_interval=2000', '--eval_iters=2', '--log_interval=5',
                '--residual_blocks=2', '--modes=standard,block', '--noise=false', '--timing_rounds=0', '--device=cpu']


def under_way(parent, folder):
    """ Waits until two runs side by side have logged some steps; their logs. """
    for _ in range(20 * PATIENCE):
        logs = [*folder.glob('runs/*/log.jsonl')]
        if len(logs) == 2 and min(len(log.read_text().splitlines()) for log in logs) > 4 or parent.poll() is not None:
            return logs
        time.sleep(0.05)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    """ What the comparison SIDE_BY_SIDE says that nobody stopped. """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.RunsConfig, 'share', (1, 1))
        return compare.main([*SIDE_BY_SIDE, '--workers=1', f'--out_dir={tmp_path_factory.mktemp("whole")}'])


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_interrupted_comparisons_save_every_run_and_go_on(number, uninterrupted, tmp_path, capsys, monkeypatch):
    """ Ctrl-C reaches the whole group, SIGTERM only the parent: either way two runs side by side save and resume. """
    argv = [sys.executable, 'compare.py', *SIDE_BY_SIDE, '--workers=2', f'--out_dir={tmp_path / "cut"}']
    two = [*os.sched_getaffinity(0)][:2]  # so that each run has one thread, as below
    parent = subprocess.Popen(argv, cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, two))
    under_way(parent, tmp_path / 'cut')
    (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
    out = parent.communicate(timeout=PATIENCE)[0]
    assert parent.returncode == 130 and 'the same command goes on' in out and 'Traceback' not in out, out
    assert not [*(tmp_path / 'cut').glob('runs/*/result.json')]
    steps = [load_checkpoint(str(path))['progress']['step'] for path in (tmp_path / 'cut').glob('runs/*/ckpt.pt')]
    assert len(steps) == 2 and min(steps) > 0 and max(steps) < 2000
    monkeypatch.setattr(runs.RunsConfig, 'share', (1, 1))  # the threads of before
    cut = compare.main([*SIDE_BY_SIDE, '--workers=1', f'--out_dir={tmp_path / "cut"}'])
    assert capsys.readouterr().out.count('resumed at step') == 2
    for mode in ('standard', 'block'):
        assert cut['modes'][mode]['final_loss'] == uninterrupted['modes'][mode]['final_loss']


def test_without_their_parent_runs_save_and_end(tmp_path):
    fcntl = pytest.importorskip('fcntl')
    endless = [a for a in SIDE_BY_SIDE if not a.startswith('--max_iters')]
    argv = [sys.executable, 'compare.py', *endless, '--max_iters=1000000', '--workers=2', f'--out_dir={tmp_path}']
    parent = subprocess.Popen(argv, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logs = under_way(parent, tmp_path)
    parent.kill()
    parent.wait()
    for log in logs:
        with open(log.parent / 'lock') as lock:
            for _ in range(20 * PATIENCE):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # the run goes on
                    time.sleep(0.05)
            else:
                raise AssertionError('a run without a parent does not end')
        assert 0 < load_checkpoint(str(log.parent / 'ckpt.pt'))['progress']['step'] < 1_000_000


def test_one_run_that_fails_stops_the_others_and_says_why(tmp_path):
    """ The second of three runs meets a folder that cannot be written: the first saves, the third does not begin. """
    cfg = runs.RunsConfig(**KEYS | {'max_iters': 100_000, 'out_dir': str(tmp_path)})
    (tmp_path / 'taken').write_text('')
    todo = [jobs.Job(name, cfg.plain(seed=i), str(tmp_path / name)) for i, name in enumerate(('a', 'taken', 'c'))]
    with pytest.raises(ValueError, match='must be a writable folder'):
        jobs.side_by_side(todo, 2, 1, Progress({name: (1, 1.0) for name in ('a', 'taken', 'c')}, 2))
    assert not (tmp_path / 'c').exists() and not (tmp_path / 'a' / 'result.json').exists()
    if (tmp_path / 'a' / 'ckpt.pt').exists():  # it had begun
        assert load_checkpoint(str(tmp_path / 'a' / 'ckpt.pt'))['progress']['step'] < 100_000
