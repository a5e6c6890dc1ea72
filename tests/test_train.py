""" The trainer: what a run sees, that it continues to the last bit, what it guards, what it refuses. """
import errno
import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train as T
import weights
from config.report import Display
from data import prepare as P
from model import GPT
from train import TrainConfig, learning_rate

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device('cpu')
TINY = dict(dataset='tiny', n_layer=2, n_embd=16, n_head=2, n_ctx=8, batch_size=3, max_iters=9, eval_interval=4,
            eval_iters=2, log_interval=2, warmup_iters=2, learning_rate=1e-2, residual_blocks=2, device='cpu')
MODES = 'standard', 'full', 'block'


@pytest.fixture
def root(tmp_path, monkeypatch):
    """ A folder with the prepared dataset tiny, which the trainer then reads. """
    letters = '.' + ' ' + ''.join(map(chr, range(97, 120)))  # 25 of them
    text = letters + ''.join(random.Random(1).choices(letters, range(1, 26), k=1175))
    (tmp_path / 'tiny.txt').write_text(text)
    P.prepare('tiny', input=tmp_path / 'tiny.txt', root=tmp_path)
    monkeypatch.setattr('data.batches.load', lambda name: P.load(name, root=tmp_path))
    return tmp_path


@pytest.fixture
def config(root):
    return lambda **change: TrainConfig(**TINY | {'out_dir': str(root / 'run')} | change)


def stop_after(monkeypatch, step, number=signal.SIGTERM):
    """ Sends a signal to the trainer in the middle of the step that follows `step` finished ones. """
    seed_dropout = T.seed_dropout

    def interrupted(seed, now, micro):
        if now == step and micro == 0:
            os.kill(os.getpid(), number)
        seed_dropout(seed, now, micro)
    monkeypatch.setattr(T, 'seed_dropout', interrupted)


def start(cfg, saved=None):
    """ A run that is about to begin its training loop. """
    Path(cfg.out_dir).mkdir(exist_ok=True)
    run = T.Run(cfg, T.Data(cfg, CPU), torch.float32, Display(cfg.max_iters, quiet=True))
    run.announce()
    run.begin(saved)
    run.display.bar(run.progress.step)
    return run


def one_step(cfg):
    """ The run, and the record of its first and only step. """
    run = start(replace(cfg, max_iters=1, log_interval=1))
    T.training_loop(run, [])
    return run, next(r for r in map(json.loads, run.progress.log) if 'loss' in r)


def everything(folder):
    """ What a run leaves behind, times apart, as something comparable by ==. """
    def plain(x):
        if isinstance(x, torch.Tensor):
            return x.dtype, x.shape, x.numpy().tobytes()
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items() if k not in ('seconds', 'out_dir', 'resume', 'overwrite')}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        return x

    def run(name):
        state = T.load_checkpoint(str(folder / name))
        progress = state['progress']
        progress['history'] = [h[:3] for h in progress['history']]
        progress['log'] = [plain(json.loads(line)) for line in progress['log']]
        return plain(state)
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    return run('ckpt.pt'), run('best.pt'), plain(log)


# ---- what a run sees

def test_batches_are_a_function_of_seed_and_step(config):
    a, b = (T.Data(config(**c), CPU) for c in ({'residual': 'full'}, {'learning_rate': 1.0, 'max_iters': 99}))
    other = T.Data(config(seed=7), CPU)
    b.train_batch(5, 1)  # an earlier call leaves no trace
    for step, micro in ((0, 0), (3, 0), (3, 1)):
        x, y = a.train_batch(step, micro)
        assert x.shape == (3, 8) and torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(x, b.train_batch(step, micro)[0]) and not torch.equal(x, other.train_batch(step, micro)[0])
    split = T.Data(config(batch_size=1, gradient_accumulation_steps=3), CPU)  # the same data however a step is split
    for step in range(20):
        assert torch.equal(torch.cat([split.train_batch(step, m)[0] for m in range(3)]), a.train_batch(step, 0)[0])
    assert len({split.train_batch(s, m)[0].numpy().tobytes() for s in range(20) for m in range(3)}) == 60


def test_train_batches_reach_every_token(config):
    data, n = T.Data(config(batch_size=20000), CPU), 1080
    assert len(data.tokens['train']) == n
    data.windows = lambda split, starts: starts
    starts = data.train_batch(0, 0)
    assert starts.min() == 0 and starts.max() == n - 8 - 1


def test_every_mode_starts_at_the_same_loss(config):
    first = {m: T.train(config(residual=m, out_dir=config().out_dir + m, max_iters=0), quiet=True) for m in MODES}
    assert len({f'{r["first_loss"]:.4f}' for r in first.values()}) == 1, first
    assert abs(first['full']['first_loss'] - math.log(25)) < 0.1


def test_validation_windows_are_fixed_and_cover_the_text(config):
    data = T.Data(config(eval_iters=0), CPU)
    batches = list(data.val_batches())
    x, y = (torch.cat(t).flatten() for t in zip(*batches, strict=True))
    val = torch.from_numpy(np.array(data.tokens['val']).astype(np.int64))
    assert torch.equal(x, val[:len(x)]) and torch.equal(y, val[1:len(y) + 1]) and len(val) - len(x) <= 8
    few = T.Data(config(eval_iters=2, seed=3), CPU)
    some = torch.cat([x for x, _ in few.val_batches()])
    assert some.shape == (6, 8) and torch.equal(some[0], val[:8]) and torch.equal(some[-1], x[-8:])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(few.val_batches(), few.val_batches(), strict=True))
    shared = [[x for x, _ in data.val_batches(r, 3)] for r in range(3)]
    dealt = [shared[i % 3][i // 3] for i in range(len(batches))]
    assert torch.equal(torch.cat(dealt), torch.cat([b[0] for b in batches]))


def test_evaluation_is_the_mean_over_tokens(config):
    cfg = config(eval_iters=0, dropout=0.5)
    run = start(cfg)
    x, y = (torch.cat(t) for t in zip(*run.data.val_batches(), strict=True))
    value = run.evaluate()
    assert run.model.training and run.evaluate() == value
    assert value == pytest.approx(run.model.eval()(x, y)[1].item(), rel=1e-5)


def test_learning_rate():
    cfg = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, max_iters=109)
    assert learning_rate(cfg, 0) == 0.1 and learning_rate(cfg, 8) == pytest.approx(0.9)
    assert learning_rate(cfg, 9) == 1.0 and learning_rate(cfg, 59) == pytest.approx(0.55)
    assert learning_rate(cfg, 109) == pytest.approx(0.1) == learning_rate(cfg, 10**6)
    rates = [learning_rate(cfg, s) for s in range(110)]
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True) and min(rates) > 0
    long = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, max_iters=109, lr_decay_iters=209)
    assert learning_rate(long, 109) == pytest.approx(0.55)
    short = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, max_iters=10)
    assert learning_rate(short, 9) == 1.0 and learning_rate(short, 10) == pytest.approx(0.1)
    flat = TrainConfig(learning_rate=1.0, decay_lr=False)
    assert {learning_rate(flat, s) for s in (0, 1, 5000)} == {1.0}


def test_accumulation_equals_one_large_batch(config, monkeypatch):
    """ Two batches of 3 give the step that one of 6 gives, whatever the loss says about the number of tokens. """
    cfg = config(gradient_accumulation_steps=2)
    run, record = one_step(cfg)
    both = [torch.cat(t) for t in zip(*(run.data.train_batch(0, m) for m in range(2)), strict=True)]
    monkeypatch.setattr(T.Data, 'train_batch', lambda self, step, micro: both)
    large, record6 = one_step(config(batch_size=6, out_dir=cfg.out_dir + '6'))
    assert record['loss'] == pytest.approx(record6['loss'], rel=1e-6)
    assert record['grad_norm'] == pytest.approx(record6['grad_norm'], rel=1e-5)
    assert record['lr'] == learning_rate(cfg, 0) == run.optimizer.param_groups[0]['lr']
    for a, b in zip(run.model.parameters(), large.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_gradients_are_clipped_and_queries_do_not_decay(config):
    cfg = config(grad_clip=1e-3, residual='full')
    run = start(replace(cfg, max_iters=1, log_interval=1))
    seen = []
    run.optimizer.register_step_pre_hook(lambda *a: seen.append(
        torch.cat([p.grad.flatten() for p in run.model.parameters()]).norm().item()))
    T.training_loop(run, [])
    assert json.loads(run.progress.log[-2])['grad_norm'] > 0.1 and seen[0] == pytest.approx(1e-3, rel=1e-2)
    still = {id(p) for p in run.optimizer.param_groups[1]['params']}
    assert {id(run.model.residual.query), id(run.model.residual.key_gain)} <= still
    assert run.optimizer.param_groups[1]['weight_decay'] == 0


# ---- what it writes

def test_log_and_checkpoints(config):
    result = T.train(config(residual='block'), quiet=True)
    out = Path(result['out_dir'])
    log = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    assert log[0] == {'config': asdict(config(residual='block')) | {'vocab_size': 25}}
    assert [r['step'] for r in log[1:] if 'val_loss' in r] == [0, 4, 8, 9]
    assert [r['step'] for r in log[1:] if 'loss' in r] == [2, 4, 6, 8]
    assert all(r['grad_norm'] > 0 and r['lr'] > 0 for r in log[1:] if 'loss' in r)
    assert result['final_loss'] < result['first_loss'] and result['step'] == 9 and result['stopped'] is None
    assert result['best_loss'] == min(h[1] for h in result['history'])
    assert T.load_checkpoint(str(out / 'best.pt'))['progress']['step'] == result['best_step']
    assert sorted(p.name for p in out.iterdir()) == ['best.pt', 'ckpt.pt', 'lock', 'log.jsonl']
    model = GPT.from_checkpoint(str(out))  # loads with weights_only, into the plain model
    assert not any('_orig_mod' in k or k.startswith('module.') for k in model.state_dict())


def test_no_state_is_saved_twice(config, monkeypatch):
    steps, save = [], weights.save

    def counting(state, path):
        if path.endswith('ckpt.pt'):
            steps.append(state['progress']['step'])
        save(state, path)
    monkeypatch.setattr(T, 'save', counting)
    T.train(config(), quiet=True)
    assert steps == [0, 0, 4, 8, 9]  # when it takes out_dir, then after each evaluation


def test_a_compiled_model_saves_plain_names(config, monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda m: torch._dynamo.eval_frame.OptimizedModule(m, lambda f: f))
    T.train(config(compile=True, max_iters=1), quiet=True)
    names = T.load_checkpoint(config().out_dir + '/ckpt.pt')['model']
    assert names.keys() == GPT(config().gpt_config(25)).state_dict().keys()


def test_what_is_compiled_by_default(monkeypatch):
    cpu, cuda, found = torch.device('cpu'), torch.device('cuda'), []
    monkeypatch.setattr('config.machine.find_spec', lambda name: {'triton': True}.get(name) if found else None)
    assert not T.pick_compile(None, cpu) and not T.pick_compile(None, cuda)
    found.append('triton')
    assert T.pick_compile(None, cuda) and not T.pick_compile(None, cpu)
    assert T.pick_compile(True, cpu) and not T.pick_compile(False, cuda)


def test_the_running_mean_covers_the_steps_since_the_last_evaluation(config):
    result = T.train(config(log_interval=1), quiet=True)
    log = [json.loads(line) for line in (Path(result['out_dir']) / 'log.jsonl').read_text().splitlines()]
    loss = {r['step']: r['loss'] for r in log if 'loss' in r}
    for (a, *_), (b, _, mean, _) in zip(result['history'], result['history'][1:], strict=False):
        assert mean == pytest.approx(sum(loss[s] for s in range(a + 1, b + 1)) / (b - a))


def test_a_report_hears_every_step_and_every_line_and_nothing_is_printed(config, capsys):
    calls, cfg = [], config(log_interval=3)
    result = T.train(cfg, label='x: ', report=calls.append)
    assert capsys.readouterr() == ('', '')
    assert all(c.keys() == {'step', 'max_iters', 'loss', 'val_loss', 'message'} for c in calls)
    steps = [c for c in calls if c['message'] is None]
    assert [c['step'] for c in steps] == list(range(1, 10)) and {c['max_iters'] for c in calls} == {9}
    val_loss = {step: loss for step, loss, *_ in result['history']}
    assert [c['val_loss'] for c in steps] == [val_loss[0]] * 4 + [val_loss[4]] * 4 + [val_loss[8]]
    logged = [json.loads(line) for line in (Path(cfg.out_dir) / 'log.jsonl').read_text().splitlines()]
    told = {c['step']: c['loss'] for c in steps}
    assert [told[r['step']] for r in logged if 'loss' in r] == [r['loss'] for r in logged if 'loss' in r]
    assert any('validation loss' in c['message'] for c in calls if c['message'])


# ---- going on

CASES = [
    ('standard', 'auto', 'float32', 1, 0.0),
    ('full', 'reference', 'float32', 2, 0.2),
    ('full', 'torch', 'float32', 1, 0.0),
    ('block', 'reference', 'bfloat16', 1, 0.0),
    ('block', 'torch', 'bfloat16', 2, 0.2),
    ('standard', 'auto', 'bfloat16', 2, 0.2),
    ('full', 'torch', 'bfloat16', 1, 0.2),
    ('block', 'torch', 'float32', 2, 0.0),
]


@pytest.mark.parametrize('residual, kernel, dtype, accumulation, dropout', CASES)
def test_a_resumed_run_is_the_same_run(
    residual, kernel, dtype, accumulation, dropout, config, root, monkeypatch, capsys
):
    keys = dict(residual=residual, kernel=kernel, dtype=dtype, gradient_accumulation_steps=accumulation,
                dropout=dropout)
    whole = T.train(config(**keys, out_dir=str(root / 'whole')), quiet=True)
    stopped = [2, 4]  # in the middle of the step after; 4 is evaluated first
    for i, step in enumerate(stopped):
        with monkeypatch.context() as m:
            stop_after(m, step, (signal.SIGINT, signal.SIGTERM)[i])
            result = T.train(config(**keys, resume=i > 0))
        assert result['stopped'] == ('SIGINT', 'SIGTERM')[i] and result['step'] == step + 1
        assert f'go on with: python train.py --out_dir={root}/run --resume' in capsys.readouterr().out
        assert T.load_checkpoint(str(root / 'run' / 'ckpt.pt'))['progress']['step'] == step + 1  # not of the evaluation
        torch.manual_seed(i)  # whatever the world does in between
        with open(root / 'run' / 'log.jsonl', 'a') as f:
            f.write('{"step": 999}\n')  # logged after the checkpoint: cut off
    again = T.main([f'--out_dir={root}/run', '--resume'])  # every key comes from the checkpoint
    assert everything(root / 'whole') == everything(root / 'run')
    assert [h[:3] for h in again['history']] == [h[:3] for h in whole['history']]


def test_dropout_does_not_depend_on_the_past(config, root, monkeypatch):
    """ Steps 3 .. of a run do not care what drew random numbers before. """
    whole = T.train(config(dropout=0.5), quiet=True)
    train_batch, out = T.Data.train_batch, str(root / 'other')

    def noisy(self, step, micro):
        torch.rand(step + 1)
        return train_batch(self, step, micro)
    with monkeypatch.context() as patch:
        patch.setattr(T.Data, 'train_batch', noisy)
        assert T.train(config(dropout=0.5, out_dir=out), quiet=True)['final_loss'] == whole['final_loss']
    assert T.train(config(dropout=0.0, out_dir=out, overwrite=True), quiet=True)['final_loss'] != whole['final_loss']


def test_a_finished_run_resumes_to_nothing(config, root):
    T.train(config(), quiet=True)
    before = everything(root / 'run')
    T.train(config(resume=True), quiet=True)
    assert everything(root / 'run') == before


def test_nothing_is_overwritten_unless_asked(config, root):
    T.train(config(), quiet=True)
    before = (root / 'run' / 'ckpt.pt').read_bytes()
    with pytest.raises(ValueError, match='out_dir=.*holds? a run already.*--resume.*--overwrite'):
        T.train(config(seed=3), quiet=True)
    with pytest.raises(ValueError, match='n_layer='):  # refused before it took anything
        T.train(config(seed=3, overwrite=True, n_layer=10**9), quiet=True)
    assert (root / 'run' / 'ckpt.pt').read_bytes() == before
    assert T.train(config(seed=3, overwrite=True), quiet=True)['step'] == 9
    assert T.read_run(str(root / 'run'))['config']['seed'] == 3


@pytest.mark.parametrize(
    'change',
    [
        {'residual': 'full'},
        {'n_layer': 3},
        {'seed': 4},
        {'learning_rate': 3e-3},
        {'n_ctx': 4},
        {'vocab_size': 64},
        {'batch_size': 4},
        {'dtype': 'bfloat16'},
        {'max_iters': 10},
    ],
)
def test_a_mismatch_is_named(change, config, root, capsys):
    T.train(config(max_iters=0), quiet=True)
    (key, value), = change.items()
    with pytest.raises(SystemExit) as e:
        T.main([f'--out_dir={root}/run', '--resume', f'--{key}={value}'])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith(f'error: {key}={value!r}: must be ') and err.count('\n') == 1


def test_a_key_younger_than_the_run_had_its_default(config):
    data = T.Data(config(), CPU)
    old = {k: v for k, v in T.run_identity(config(), data).items() if k != 'beta2'}
    T.check_identity(config(beta2=TrainConfig.beta2), data, old)
    with pytest.raises(ValueError, match='beta2=0.5: must be'):
        T.check_identity(config(beta2=0.5), data, old)


def test_the_scale_of_float16_goes_on(config, root, monkeypatch):
    monkeypatch.setattr(T, 'pick_dtype', lambda *_: torch.float16)  # the command line takes it on CUDA only
    T.train(config(dtype='float16', max_iters=1), quiet=True)
    path = str(root / 'run' / 'ckpt.pt')
    state = T.read_run(str(root / 'run'))
    assert state['scaler']['scale'] == 2.0**16
    weights.save(state | {'scaler': state['scaler'] | {'scale': 64.0}}, path)
    T.train(config(dtype='float16', max_iters=1, resume=True), quiet=True)
    assert T.read_run(str(root / 'run'))['scaler']['scale'] == 64.0


def test_a_resumed_run_says_where_it_stands(config, root, capsys):
    T.train(config(max_iters=3), quiet=True)
    run = T.Run(config(max_iters=4), T.Data(config(), CPU), torch.float32, Display(4))
    run.begin(T.read_run(str(root / 'run')))
    assert run.last_saved == f'{root}/run/ckpt.pt holds step 3, the last good state'
    assert capsys.readouterr().out == 'resumed at step 3\n'


def test_seconds_are_those_of_the_steps_and_each_record_is_whole(config, root):
    began = time.perf_counter()
    seconds = T.train(config(max_iters=3, log_interval=1), quiet=True)['seconds']
    assert 0 < seconds < time.perf_counter() - began
    records = [json.loads(line) for line in (root / 'run' / 'log.jsonl').read_text().splitlines()]
    assert [r.keys() for r in records if 'loss' in r] == [{'step', 'loss', 'lr', 'grad_norm', 'skipped'}] * 3


def test_a_new_run_leaves_no_better_weights_of_the_old_one(config, root):
    T.train(config(max_iters=3), quiet=True)
    start(config(max_iters=3, seed=5))
    assert not (root / 'run' / 'best.pt').exists() and T.read_run(str(root / 'run'))['config']['seed'] == 5


def test_changed_data_is_noticed(config, root):
    T.train(config(max_iters=1), quiet=True)
    for split in ('train', 'val'):
        path = root / 'tiny' / f'{split}.bin'
        good = path.read_bytes()
        for place in (0, len(good) // 4 * 2, len(good) - 2):
            path.write_bytes(good[:place] + bytes([(good[place] + 1) % 20]) + good[place + 1:])
            said = f"dataset='tiny': must have the text of the run in .*, {split}.bin changed"
            with pytest.raises(ValueError, match=said):
                T.train(config(resume=True, max_iters=1), quiet=True)
        path.write_bytes(good)
    meta = json.loads((root / 'tiny' / 'meta.json').read_text())
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    (root / 'tiny' / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="dataset='tiny': must have the tokenizer of the run in"):
        T.train(config(resume=True, max_iters=1), quiet=True)


def spoil(path, how):
    """ Makes the checkpoint at path bad in one way. """
    state = torch.load(path, weights_only=True)
    data = path.read_bytes()
    if how == 'truncated':
        path.write_bytes(data[:len(data) // 2])
    elif how == 'one bit of a weight':
        weight = state['model']['transformer.wte.weight'].numpy().tobytes()
        at = data.index(weight) + 5
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    elif how == 'empty':
        path.write_bytes(b'')
    elif how == 'text':
        path.write_text('not a checkpoint')
    elif how == 'code':
        torch.save(state | {'rng': Evil()}, path)
    elif how == 'legacy code':
        torch.save(Evil(), path, _use_new_zipfile_serialization=False)
    elif how == 'foreign':
        torch.save({'weights': torch.zeros(3)}, path)
    elif how == 'a list':
        torch.save([1, 2], path)
    elif how.startswith('without '):
        torch.save({k: v for k, v in state.items() if k != how.split()[1]}, path)
    elif how.startswith('a number as '):
        torch.save(state | {how.split()[3]: 5}, path)
    elif how == 'an empty optimizer':
        torch.save(state | {'optimizer': {}}, path)
    elif how == 'an optimizer of other groups':
        state['optimizer']['param_groups'].pop()
        torch.save(state, path)
    elif how == 'weights without names':
        torch.save(state | {'model': {5: torch.zeros(1)}}, path)
    elif how == 'a key more':
        state['run']['momentum'] = state['config']['momentum'] = 3
        torch.save(state, path)
    elif how == 'other shape':
        state['model']['transformer.wpe.weight'] = torch.zeros(9, 16)
        torch.save(state, path)
    elif how.startswith('progress without '):
        del state['progress'][how.split()[2]]
        torch.save(state, path)
    elif how == 'gone':
        path.unlink()


class Evil:
    def __reduce__(self):
        return os.mkdir, ('pwned',)


@pytest.mark.parametrize(
    'how',
    [
        'truncated',
        'one bit of a weight',
        'empty',
        'text',
        'code',
        'legacy code',
        'foreign',
        'a list',
        'without run',
        'without config',
        'without optimizer',
        'without scaler',
        'without progress',
        'a number as run',
        'a number as config',
        'a number as progress',
        'a number as model',
        'a number as optimizer',
        'an empty optimizer',
        'an optimizer of other groups',
        'weights without names',
        'a key more',
        'other shape',
        'progress without step',
        'progress without log',
        'gone',
    ],
)
def test_bad_checkpoints_are_refused_in_one_line(how, config, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    T.train(config(max_iters=0), quiet=True)
    spoil(root / 'run' / 'ckpt.pt', how)
    with pytest.raises(SystemExit) as e:
        T.main([f'--out_dir={root}/run', '--resume'])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1
    assert ('momentum' if how == 'a key more' else 'ckpt.pt') in err
    assert how[:7] != 'without' or f'(it lacks {how[8:]})' in err
    assert ('damage' in err) == (how in ('truncated', 'one bit of a weight', 'empty', 'text', 'legacy code'))
    assert not (root / 'pwned').exists()


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'),
                                   RuntimeError('[enforce fail] . No space left\nin 7 frames')])  # as torch says it
def test_a_failed_write_leaves_the_old_checkpoint(error, config, root, monkeypatch):
    path = str(root / 'a.pt')
    weights.save({'x': 1}, path)

    def full(state, f):
        f.write(b'half')
        raise error
    monkeypatch.setattr(torch, 'save', full)
    message = r'a.pt: could not be written \(.*No space left.*\); the previous one is whole$'
    with pytest.raises(RuntimeError, match=message):
        weights.save({'x': 2}, path)
    assert torch.load(path) == {'x': 1} and not os.path.exists(path + '.tmp')


def test_a_checkpoint_is_synced_before_it_takes_the_name(root, monkeypatch):
    order, path = [], root / 'a.pt'
    for name in ('fsync', 'replace'):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: order.append(
            (name, os.path.getsize(f'{path}.tmp'))) or real(*a))
    weights.save({'x': 1}, str(path))
    assert order == [('fsync', path.stat().st_size), ('replace', path.stat().st_size)]  # all of it, not a buffer less


def test_one_run_a_folder(config, root):
    with T.only_run_in(str(root / 'run')):
        with pytest.raises(ValueError, match='out_dir=.*another run'):
            T.train(config(), quiet=True)
    T.train(config(), quiet=True)


def test_a_folder_without_locks_is_taken(root, monkeypatch):
    """ As on some network file systems. """
    import fcntl

    def no_lock(file, how):
        raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', no_lock)
    with T.only_run_in(str(root / 'unlocked')):
        assert (root / 'unlocked').is_dir()


@pytest.mark.parametrize('out_dir', ['file', 'file/below', '/proc/none'])
def test_unwritable_folders(out_dir, config, root):
    (root / 'file').write_text('')
    with pytest.raises(ValueError, match='out_dir=.*must be a writable folder'):
        T.train(config(out_dir=str(root / out_dir)), quiet=True)


def test_torchrun_gives_each_process_a_gpu_of_its_own(monkeypatch):
    seen = []
    monkeypatch.setenv('LOCAL_RANK', '1')
    monkeypatch.setattr(torch.cuda, 'set_device', seen.append)
    for name in ('cuda', 'cuda:0', 'cpu'):
        with suppress(ValueError):  # where there is no GPU
            T.pick_device(name)
    assert seen == [1]


# ---- guards

def test_not_finite_stops_or_is_skipped(config, root, monkeypatch):
    batch = T.Data.train_batch
    forward = GPT.forward

    def nan(self, idx, targets=None, caches=None):
        logits, loss = forward(self, idx, targets, caches)
        return logits, loss * float('nan') if self.training and nan.on else loss
    def train_batch(self, step, micro):
        nan.on = step == 5
        return batch(self, step, micro)
    monkeypatch.setattr(GPT, 'forward', nan)
    monkeypatch.setattr(T.Data, 'train_batch', train_batch)
    said = 'loss nan, gradient norm nan at step 5;.*ckpt.pt holds step 4.*learning_rate.*skip'
    with pytest.raises(RuntimeError, match=said):
        T.train(config(), quiet=True)
    assert all(v.isfinite().all() for v in T.read_run(str(root / 'run'))['model'].values())
    result = T.main([f'--out_dir={root}/run', '--resume', '--nonfinite=skip'])
    assert result['skipped'] == 1 and result['step'] == 9 and math.isfinite(result['final_loss'])
    assert json.loads((root / 'run' / 'log.jsonl').read_text().splitlines()[-1])['skipped'] == 1


def test_a_gradient_that_is_not_finite_stops_too(config, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', lambda *a: torch.tensor(math.inf))
    with pytest.raises(RuntimeError, match='gradient norm inf at step 0; .*ckpt.pt holds step 0'):
        T.train(config(), quiet=True)


def test_validation_loss_that_is_not_finite_is_never_saved(config, root, monkeypatch):
    monkeypatch.setattr(T.Run, 'evaluate', lambda self, stop: math.nan if self.progress.step else 3.0)
    with pytest.raises(RuntimeError, match='validation loss nan at step 4; .*holds step 0'):
        T.train(config(), quiet=True)
    assert T.read_run(str(root / 'run'))['progress']['step'] == 0


def test_patience_and_best(config, root, monkeypatch):
    values = iter([3.0, 2.0, 2.5, 2.0, 1.0, 1.0])
    monkeypatch.setattr(T.Run, 'evaluate', lambda self, stop: next(values))
    result = T.train(config(eval_interval=1, patience=2), quiet=True)
    assert (result['step'], result['best_step'], result['best_loss']) == (3, 1, 2.0)
    steps = [T.load_checkpoint(str(root / 'run' / name))['progress']['step'] for name in ('best.pt', 'ckpt.pt')]
    assert steps == [1, 3]


@pytest.mark.parametrize(
    'change, said',
    [
        ({'n_ctx': 120}, 'n_ctx=120: must be below 120'),
        ({'vocab_size': 9}, 'vocab_size=9'),
        ({'dataset': 'none'}, "dataset='none'"),
        ({'device': 'cuda:77'}, "device='cuda:77'"),
        ({'device': 'hpu'}, "device='hpu': must be auto, cpu, cuda, cuda:N or mps"),
        ({'device': 'cpu:9'}, "device='cpu:9': must be auto, cpu, cuda, cuda:N or mps"),
        ({'dtype': 'float16'}, "dtype='float16'"),
        ({'batch_size': 2**30}, 'batch_size='),
        ({'n_embd': 2**20}, 'n_embd=.*must fit into memory'),
        ({'n_layer': 2**30}, 'n_layer'),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_made(change, said, config, root):
    with pytest.raises(ValueError, match=said):
        T.train(config(**change), quiet=True)
    assert not (root / 'run').exists()


def test_token_ids_past_the_vocabulary_are_refused(config, root):
    path = root / 'tiny' / 'val.bin'
    path.write_bytes(path.read_bytes()[:-2] + b'\x19\x00')
    with pytest.raises(ValueError, match="dataset='tiny': must have token ids below 25, val.bin has 25"):
        T.train(config(), quiet=True)


def test_memory_does_not_grow_with_what_was_read(config, root):
    """ 10,000 batches from a token file of 1 GB (sparse) cost less than 50 MB of resident memory. """
    meta = json.loads((root / 'tiny' / 'meta.json').read_text())
    meta['tokens']['train'] = 2**29
    (root / 'tiny' / 'meta.json').write_text(json.dumps(meta))
    os.truncate(root / 'tiny' / 'train.bin', 2**30)
    resident = lambda: int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()  # noqa: E731
    if not os.path.exists('/proc/self/statm'):
        pytest.skip('needs /proc')
    before = resident()
    data = T.Data(config(), CPU)
    for step in range(10_000):
        data.train_batch(step, 0)
    assert resident() - before < 50e6


def flags(**keys):
    return [f'--{k}={v}' for k, v in (TINY | keys).items()]


def test_main_starts_a_run_from_its_command_line(root, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['train.py', *reversed(flags(max_iters=1, out_dir=root / 'run'))])
    result = T.main()
    assert result['step'] == 1 and result['out_dir'] == str(root / 'run')
    capsys.readouterr()
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as e:
        T.main(['--resume'])
    assert e.value.code == 2 and TrainConfig.out_dir in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        T.main(['--help'])
    said = capsys.readouterr().out
    assert not e.value.code and 'Trains a GPT with any residual rule' in said and '--nproc' not in said


def test_out_dir_of_another_type_is_named_on_resume(root, capsys):
    (root / 'a.toml').write_text('out_dir = 5\nresume = true\n')
    with pytest.raises(SystemExit) as e:
        T.main([str(root / 'a.toml')])
    assert e.value.code == 2 and capsys.readouterr().err.startswith('error: out_dir=5: must be of type str')


def test_it_trains_without_a_terminal_at_all(config, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', None)  # 2>&-
    assert T.train(config(max_iters=1))['step'] == 1


@pytest.mark.parametrize('end, code, said', [(ValueError('x=1: y'), 2, 'error: x=1: y\n'),
                                             (RuntimeError('full'), 1, 'error: full\n'),
                                             (KeyboardInterrupt(), 130, 'error: interrupted\n')])
def test_how_main_ends(end, code, said, root, monkeypatch, capsys):
    def broken(cfg):
        raise end
    monkeypatch.setattr(T, 'train', broken)
    with pytest.raises(SystemExit) as e:
        T.main(flags(out_dir=root / 'run'))
    assert e.value.code == code and capsys.readouterr().err == said


def test_train_prepares_and_prints_its_choices(config, capsys):
    T.train(config(residual='block'))
    out = capsys.readouterr().out
    for said in ('4 sublayers in 2 residual blocks of 2', '1 x cpu, float32, kernel ', 'M parameters',
                 '9 steps of 24 tokens', ' minutes; ', 'GiB', 'step     9: validation loss'):
        assert said in out


def test_a_tilde_is_the_home_folder(root, monkeypatch):
    monkeypatch.setenv('HOME', str(root))
    cfg = TrainConfig(out_dir='~/run', init_from='~/other')
    assert (cfg.out_dir, cfg.init_from) == (str(root / 'run'), str(root / 'other'))


def test_accumulation_must_divide_among_processes(config, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='gradient_accumulation_steps=3: must be divisible by 2'):
        T.train(config(gradient_accumulation_steps=3), quiet=True)


def test_checkpoints_hold_no_second_copy_on_resume(config, root, monkeypatch):
    """ A resumed run lets go of the state that it read. """
    import gc
    import weakref
    T.train(config(max_iters=1), quiet=True)
    seen, read = [], T.read_run

    def spied(out_dir):
        state = read(out_dir)
        seen.append(weakref.ref(state['model']['lm_head.weight']))
        return state
    monkeypatch.setattr(T, 'read_run', spied)
    loop = T.training_loop

    def look(run, stop):
        gc.collect()
        seen.append(seen[0]())
        loop(run, stop)
    monkeypatch.setattr(T, 'training_loop', look)
    T.train(config(max_iters=1, resume=True), quiet=True)
    assert seen[1] is None


# ---- several processes

@pytest.mark.slow
@pytest.mark.parametrize('residual', ['standard', 'block'])
def test_the_number_of_processes_changes_nothing_but_rounding(residual, tmp_path):
    keys = TINY | {'residual': residual, 'gradient_accumulation_steps': 4, 'dropout': 0.1, 'eval_iters': 5}
    keys |= {'log_interval': 1, 'dataset': 'shakespeare_char'}
    args, env = ['train.py', *(f'--{k}={v}' for k, v in keys.items())], os.environ | {'OMP_NUM_THREADS': '1'}
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2']
    for start, out in (([sys.executable], 'one'), (torchrun, 'two')):
        r = subprocess.run([*start, *args, f'--out_dir={tmp_path / out}'], cwd=ROOT, env=env, text=True,
                           capture_output=True)
        assert r.returncode == 0, r.stderr[-2000:]
        assert r.stdout.count('step     9: validation') == 1  # one process speaks
    logs = [[json.loads(line) for line in (tmp_path / out / 'log.jsonl').read_text().splitlines()]
            for out in ('one', 'two')]
    assert len(logs[0]) == len(logs[1]) == 1 + 9 + 4
    for a, b in zip(*(log[1:] for log in logs), strict=True):
        for key in a.keys() - {'seconds'}:
            assert a[key] == b[key] or a[key] == pytest.approx(b[key], rel=2e-4), (a, b)
    one, two = (GPT.from_checkpoint(str(tmp_path / out / 'ckpt.pt')) for out in ('one', 'two'))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
    assert not any('module.' in k for k in two.state_dict())


def test_saving_what_it_holds_needs_no_code(config, root):
    T.train(config(max_iters=1), quiet=True)
    state = torch.load(io.BytesIO((root / 'run' / 'ckpt.pt').read_bytes()), weights_only=True)
    assert {'model', 'model_config', 'tokenizer', 'config', 'optimizer', 'progress'} <= state.keys()
    assert state['tokenizer']['kind'] == 'char' and 'kernel' not in state['model_config']


@pytest.mark.parametrize('residual', ['standard', 'full', 'block', 'static'])
def test_weights_of_a_standard_run_go_on_under_any_rule(config, tmp_path, residual):
    """ init_from takes weights only: the same function (norm_eps = 0), a run of its own. """
    first = T.train(config(residual='standard', max_iters=4, norm_eps=0.0), quiet=True)
    then = T.train(config(residual=residual, max_iters=2, norm_eps=0.0, init_from=str(tmp_path / 'run'),
                          out_dir=str(tmp_path / 'then')), quiet=True)
    assert then['first_loss'] == pytest.approx(first['final_loss'], abs=1e-5) and then['step'] == 2
    assert first['final_loss'] != pytest.approx(first['first_loss'], abs=1e-3)


def test_weights_that_do_not_fit_are_named(config, tmp_path):
    T.train(config(residual='block', max_iters=1), quiet=True)
    for source, says in ((str(tmp_path / 'run'), 'residual=.standard.: must be .block.'), ('gpt2', '--tokenizer=gpt2')):
        with pytest.raises(ValueError, match=says):
            T.train(config(max_iters=1, init_from=source, out_dir=str(tmp_path / 'x')), quiet=True)


def test_dropout_differs_in_every_step_and_seed(config, monkeypatch):
    """ Masks depend on seed, step and micro-batch, all three; a CPU's generator takes 32 bits of a seed. """
    drawn = []
    step = torch.manual_seed
    monkeypatch.setattr(T.torch, 'manual_seed', lambda seed: drawn.append(seed % 2**32) or step(seed))
    for seed in (1, 2, 3):
        T.train(config(seed=seed, max_iters=6, gradient_accumulation_steps=2, overwrite=True), quiet=True)
    masks = [d for d in drawn if d not in (1, 2, 3)]
    assert len(masks) == 3 * 6 * 2 and len(set(masks)) == len(masks)


def test_preparing_anew_does_not_disturb_a_run(config, root):
    """ A run reads the files that it found, also when others take their place. """
    data = T.Data(config(), CPU)
    before = data.train_batch(0, 0)
    P.prepare('tiny', input=shorter(root), root=root, overwrite=True)
    assert all(torch.equal(a, b) for a, b in zip(before, data.train_batch(0, 0), strict=True))


def shorter(root):
    text = (root / 'tiny.txt').read_text()
    (root / 'other.txt').write_text(text[:400][::-1])
    return root / 'other.txt'


@pytest.mark.parametrize('key', ['run', 'config', 'progress'])
def test_an_emptied_checkpoint_is_refused(config, tmp_path, key):
    T.train(config(max_iters=1), quiet=True)
    state = torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)
    for value in (None, {}):
        torch.save(state | {key: value}, tmp_path / 'run' / 'ckpt.pt')
        with pytest.raises(ValueError, match=key):
            T.train(config(max_iters=1, resume=True), quiet=True)


def test_a_gpu_that_triton_does_not_know_is_told_why(monkeypatch):
    """ Asked for nothing, the trainer says why the faster kernel is left out; else it is silent. """
    monkeypatch.setattr(T.triton_kernels, 'refusal', lambda h: 'the GPU is too old')
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    auto, asked = TrainConfig(), TrainConfig(kernel='torch')
    line, = T.kernel_advice(auto, 'torch', on_gpu)
    assert line == 'kernel triton cannot run here: the GPU is too old'
    for cfg, kernel, like in ((auto, 'triton', on_gpu), (auto, 'torch', on_cpu), (asked, 'torch', on_gpu),
                              (auto, 'none', on_gpu)):
        assert T.kernel_advice(cfg, kernel, like) == []
