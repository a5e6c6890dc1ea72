"""
Trains a GPT with any residual rule, on one device.

    python train.py config/shakespeare_char_cpu.toml --residual=block
    python train.py --out_dir=out/shakespeare_char_cpu --resume

What a run promises: the batches are a function of (seed, step) alone, so runs that differ in the residual rule see the
same data and start from the same weights; a stopped run continues as if it had never stopped; nothing is overwritten
unless asked; files appear whole or not at all.
"""
import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from data.prepare import load
from tqdm import tqdm

import config as configuration
import kernels
from model import GPT, GPTConfig, load_checkpoint, model_config


@dataclass
class TrainConfig(GPTConfig):
    vocab_size: int = 0  # rows of the embedding; 0: as many as the tokenizer has, BPE padded to a multiple of 64
    dataset: str = 'shakespeare_char'  # folder under data/ that holds train.bin, val.bin and meta.json
    out_dir: str = 'out/run'  # where checkpoints and log.jsonl go
    resume: bool = False  # go on from out_dir/ckpt.pt; keys that are not given come from there
    overwrite: bool = False  # replace the run that out_dir holds
    seed: int = 1337  # of the weights, the order of the batches and dropout
    batch_size: int = 12  # sequences in one forward pass
    gradient_accumulation_steps: int = 1  # forward passes in one step
    max_iters: int = 5000  # optimiser steps
    learning_rate: float = 6e-4  # the highest, right after the warm-up
    min_lr: float = 6e-5  # the lowest, at the end of the cosine
    warmup_iters: int = 100  # steps in which the rate rises; the first is not zero
    lr_decay_iters: int = 0  # steps until the rate is min_lr; 0: max_iters
    decay_lr: bool = True  # warm-up and cosine; off: learning_rate throughout
    weight_decay: float = 0.1  # of matrices and embeddings, never of queries, gains and biases
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # largest gradient norm; 0: no limit
    eval_interval: int = 250  # steps between evaluations; each saves a checkpoint
    eval_iters: int = 200  # batches in an evaluation, spread evenly over the validation text; 0: all of it
    log_interval: int = 10  # steps between training lines in log.jsonl
    patience: int = 0  # stop after that many evaluations without a better one; 0: never
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps
    dtype: str = 'auto'  # auto | float32 | bfloat16 | float16: autocast; weights stay float32
    compile: bool | None = None  # torch.compile; none: on CUDA

    def __post_init__(self):
        def check(key, ok, allowed):
            if not ok:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {allowed}')

        for f in fields(self):
            value = getattr(self, f.name)
            fits = isinstance(value, f.type | int if f.type is float else f.type)
            check(f.name, fits and (not isinstance(value, bool) or isinstance(True, f.type)),
                  'of type ' + configuration.spell(f.type))
        self.model(self.vocab_size or 1)  # checks the model's keys
        for key in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval'):
            check(key, 1 <= getattr(self, key) < 2**31, 'a whole number from 1 to 2**31 - 1')
        for key in ('vocab_size', 'seed', 'max_iters', 'warmup_iters', 'lr_decay_iters', 'eval_iters', 'patience'):
            check(key, 0 <= getattr(self, key) < 2**31, 'a whole number from 0 to 2**31 - 1')
        for key in ('learning_rate', 'min_lr', 'weight_decay', 'grad_clip'):
            check(key, 0 <= getattr(self, key) < math.inf, 'zero or a positive number')
        for key in ('beta1', 'beta2'):
            check(key, 0 <= getattr(self, key) < 1, 'in [0, 1)')
        check('out_dir', self.out_dir.strip() and '\0' not in self.out_dir, 'the name of a folder')
        check('dtype', self.dtype in ('auto', *DTYPES), 'one of auto, ' + ', '.join(DTYPES))

    def model(self, vocab_size):
        """ The model's part of the settings. """
        keys = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**keys | {'vocab_size': vocab_size})


DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Keys that a resumed run may change; all others define it.
FREE = {'out_dir', 'resume', 'overwrite', 'device', 'compile', 'kernel', 'recompute', 'log_interval', 'patience'}


def pick_device(name):
    """ The torch.device that name stands for; auto takes CUDA, else MPS, else the CPU. """
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f'device={name!r}: not usable here ({str(e).splitlines()[0]}); auto picks one that is') from e
    return device


def pick_dtype(name, device):
    """ The autocast dtype that name stands for; auto takes bfloat16 or float16 on CUDA, float32 elsewhere. """
    if name == 'auto':
        bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported()
        name = 'bfloat16' if bf16 else 'float16' if device.type == 'cuda' else 'float32'
    if name == 'float16' and device.type != 'cuda':
        raise ValueError(f"dtype='float16': needs CUDA (gradients are scaled there), the device is {device.type}")
    return DTYPES[name]


# -----------------------------------------------------------------------------
# Batches.

def windows(tokens, starts, n_ctx, device):
    """ Inputs and targets (B, n_ctx): tokens[s : s + n_ctx] and tokens[s + 1 : s + n_ctx + 1] for each start s. """
    tokens = np.memmap(tokens.filename, dtype=tokens.dtype, mode='r')  # opened anew: pages read do not pile up
    both = torch.from_numpy(tokens[starts[:, None] + np.arange(n_ctx + 1)].astype(np.int64))
    if device.type == 'cuda':
        both = both.pin_memory().to(device, non_blocking=True)
    return both[:, :-1].to(device), both[:, 1:].to(device)


def train_batch(tokens, cfg, step, micro, device):
    """ The batch of one forward pass: a function of (seed, step, micro) and of nothing else. """
    rng = np.random.default_rng((cfg.seed, step, micro))
    return windows(tokens, rng.integers(0, len(tokens) - cfg.n_ctx, cfg.batch_size), cfg.n_ctx, device)


def val_batches(tokens, cfg, device):
    """ The validation text in windows that do not overlap, all of them or eval_iters batches spread evenly. """
    starts = np.arange(0, len(tokens) - cfg.n_ctx, cfg.n_ctx)
    if 0 < cfg.eval_iters * cfg.batch_size < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, cfg.eval_iters * cfg.batch_size).round().astype(int)]
    for i in range(0, len(starts), cfg.batch_size):
        yield windows(tokens, starts[i:i + cfg.batch_size], cfg.n_ctx, device)


@torch.no_grad()
def evaluate(model, batches, autocast):
    """ Mean cross-entropy in nats per token. """
    was, total, count = model.training, 0.0, 0
    model.eval()
    for x, y in batches:
        with autocast():
            total += model(x, y)[1].double() * len(x)
        count += len(x)
    model.train(was)
    return (total / count).item()


def learning_rate(cfg, step):
    """ Rate of the step that follows `step` finished ones: linear warm-up, then half a cosine to min_lr. """
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = min(1.0, (step - cfg.warmup_iters) / max(1, (cfg.lr_decay_iters or cfg.max_iters) - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * t)) * (cfg.learning_rate - cfg.min_lr)


# -----------------------------------------------------------------------------
# Files.

def save(state, path):
    """ Writes a checkpoint whole or not at all: under another name, synced, then renamed over the old one. """
    tmp = f'{path}.tmp'
    try:
        with open(tmp, 'wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        if os.path.exists(tmp):
            os.remove(tmp)
        raise RuntimeError(f'{path}: could not be written ({e}); the checkpoint before it stands') from e


@contextmanager
def own(out_dir):
    """ Holds out_dir for one run at a time; the operating system lets go when the process ends, however it ends. """
    try:
        os.makedirs(out_dir, exist_ok=True)
        lock = open(os.path.join(out_dir, 'lock'), 'w')
    except OSError as e:
        raise ValueError(f'out_dir={out_dir!r}: {e.strerror}') from e
    with lock:
        try:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no flock: there the user sees to it
            pass
        except OSError:
            raise ValueError(f'out_dir={out_dir!r}: another run is writing there') from None
        yield


@contextmanager
def stoppable():
    """ Yields a list that gets the name of SIGINT or SIGTERM when one arrives; a second one kills as usual. """
    got, old = [], {}

    def handler(number, frame):
        got.append(signal.Signals(number).name)
        signal.signal(number, old[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, handler)
    try:
        yield got
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def saved_run(cfg_or_dir):
    """ The checkpoint that a resumed run goes on from. """
    return load_checkpoint(os.path.join(cfg_or_dir, 'ckpt.pt'))


def differences(cfg, saved):
    """ The first key that defines the run and differs from the saved one, as an error; None if all agree. """
    for key, value in asdict(cfg).items():
        if key not in FREE and key in saved and saved[key] != value:
            return f'{key}={value!r}: the run in out_dir={cfg.out_dir!r} has {key}={saved[key]!r}; leave the key out'


# -----------------------------------------------------------------------------

def probe(model, batch, autocast, device):
    """ Runs forward and backward once and changes nothing: (seconds, bytes at the peak beyond the weights or None). """
    with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
        for _ in range(2):  # the first warms up, and compiles
            if device.type == 'cuda':
                torch.cuda.reset_peak_memory_stats(device)
                torch.cuda.synchronize(device)
            before = time.perf_counter()
            with autocast():
                loss = model(*batch)[1]
            loss.backward()
            if device.type == 'cuda':
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - before
            model.zero_grad(set_to_none=True)
            if seconds > 5 and device.type == 'cpu':
                break
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else None


def train(cfg, quiet=False):
    """ Trains as cfg says; the results as a dict (see the end). ValueError: bad input; RuntimeError: a failed run. """
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    compiled = device.type == 'cuda' if cfg.compile is None else cfg.compile
    meta, tokens = load(cfg.dataset)
    for split in ('train', 'val'):
        if len(tokens[split]) <= cfg.n_ctx:
            raise ValueError(f'dataset={cfg.dataset!r}: {split} has {len(tokens[split])} tokens, n_ctx={cfg.n_ctx} '
                             f'needs at least {cfg.n_ctx + 1}: lower n_ctx or prepare a longer text')
    n_vocab = meta['n_vocab']
    if 0 < cfg.vocab_size < n_vocab:
        raise ValueError(f'vocab_size={cfg.vocab_size}: the tokenizer of dataset={cfg.dataset!r} needs {n_vocab}')
    rows = cfg.vocab_size or (n_vocab if n_vocab < 1024 else -(-n_vocab // 64) * 64)
    with own(cfg.out_dir), stoppable() as stop:
        ckpt, best, log = (os.path.join(cfg.out_dir, name) for name in ('ckpt.pt', 'best.pt', 'log.jsonl'))
        state = None
        if cfg.resume:
            state = saved_run(cfg.out_dir)
            if why := differences(cfg, state['config']):
                raise ValueError(why)
            if state['data'] != meta['sha256']:
                raise ValueError(f'dataset={cfg.dataset!r}: its token files are not those of the checkpoint in '
                                 f'out_dir={cfg.out_dir!r}')
        elif os.path.exists(ckpt) or os.path.exists(log):
            if not cfg.overwrite:
                raise ValueError(f'out_dir={cfg.out_dir!r}: holds a run already: --resume goes on with it, --overwrite '
                                 'replaces it, another out_dir keeps it')
            for path in (ckpt, best, log):
                if os.path.exists(path):
                    os.remove(path)

        torch.manual_seed(cfg.seed)
        model = GPT(cfg.model(rows)).to(device)
        optimizer = model.configure_optimizers(cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2))
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        run = torch.compile(model) if compiled else model

        def autocast():
            on = dtype != torch.float32
            return torch.autocast(device.type, dtype=dtype) if on else nullcontext()

        def say(line):
            if not quiet:
                tqdm.write(line)

        step, best_loss, best_step, since, seconds = 0, math.inf, 0, 0, 0.0
        history = []  # evaluations: [step, validation loss, mean training loss since the last one, seconds of training]
        losses = torch.zeros((), dtype=torch.float64, device=device)  # sum of training losses since the last evaluation
        path = kernels.choose(cfg.kernel, torch.empty(0, device=device, dtype=dtype)) if model.residual.state_dict() \
            else 'no depth attention'
        say(f'{cfg.residual}: {model.residual.describe()}; {model.n_params() / 1e6:.2f} M parameters')
        say(f'device {device.type}, {str(dtype)[6:]}, kernel {path}, compile {"on" if compiled else "off"}')
        model.train()
        took, peak = probe(run, train_batch(tokens['train'], cfg, 0, 0, device), autocast, device)
        took *= cfg.gradient_accumulation_steps
        gib = (peak or 0) / 2**30 + model.n_params() * (8 if peak else 16) / 2**30
        say(f'{cfg.max_iters} steps of {cfg.batch_size * cfg.gradient_accumulation_steps * cfg.n_ctx:,} tokens, about '
            f'{took * 1e3:.0f} ms each: {took * cfg.max_iters / 60:.1f} minutes; '
            + (f'{gib:.2f} GiB at the peak' if peak else f'weights, gradients and optimiser {gib:.2f} GiB'))

        if state:
            try:
                model.load_state_dict(state['model'])
                optimizer.load_state_dict(state['optimizer'])
                scaler.load_state_dict(state['scaler'])
                torch.set_rng_state(state['rng'].cpu())
                if state['cuda_rng'] is not None and device.type == 'cuda':
                    torch.cuda.set_rng_state(state['cuda_rng'].cpu(), device)
                step, best_loss, best_step, since = (state[k] for k in ('step', 'best_loss', 'best_step', 'since'))
                seconds, history = state['seconds'], state['history']
                losses += state['losses']
            except (KeyError, RuntimeError) as e:
                raise ValueError(f'{ckpt}: does not fit this run ({str(e).splitlines()[0]})') from e
            with open(log, 'r+') as f:  # what was logged after the checkpoint happens again
                f.truncate(state['log_bytes'])
            say(f'resumed at step {step}')
        else:
            with open(log, 'w') as f:
                f.write(json.dumps({'config': asdict(cfg) | {'vocab_size': rows}}) + '\n')

        def write(**record):
            with open(log, 'a') as f:
                f.write(json.dumps(record) + '\n')

        def snapshot():
            return {'model': model.state_dict(), 'model_config': model_config(model.config), 'config': asdict(cfg),
                    'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict(), 'rng': torch.get_rng_state(),
                    'cuda_rng': torch.cuda.get_rng_state(device) if device.type == 'cuda' else None,
                    'step': step, 'best_loss': best_loss, 'best_step': best_step, 'since': since, 'seconds': seconds,
                    'history': history, 'losses': losses.item(), 'log_bytes': os.path.getsize(log),
                    'tokenizer': meta['tokenizer'], 'data': meta['sha256']}

        def measure():
            """ Evaluates, logs, saves; a checkpoint at an evaluated step is always one from after the evaluation. """
            nonlocal best_loss, best_step, since
            val = evaluate(run, val_batches(tokens['val'], cfg, device), autocast)
            mean = losses.item() / max(1, step - (history[-1][0] if history else 0)) if step else None
            if not math.isfinite(val):
                raise RuntimeError(f'the validation loss at step {step} is {val}; {ckpt} holds the last good state; '
                                   'try a lower learning_rate')
            history.append([step, val, mean, seconds])
            losses.zero_()
            write(step=step, val_loss=val, train_loss=mean, seconds=seconds)
            since += 1
            better = val < best_loss
            if better:
                best_loss, best_step, since = val, step, 0
            state = snapshot()
            if better:
                save(state, best)
            save(state, ckpt)
            say(f'step {step:5d}: validation loss {val:.4f}' + (f', training {mean:.4f}' if step else '')
                + (f', {seconds / step * 1e3:.0f} ms a step' if step else ''))

        bar = tqdm(total=cfg.max_iters, initial=step, unit='step', disable=True if quiet else None, leave=False)
        with bar:
            if not history:
                measure()
            while step < cfg.max_iters and not stop and not (cfg.patience and since >= cfg.patience):
                began = time.perf_counter()
                rate = learning_rate(cfg, step)
                for group in optimizer.param_groups:
                    group['lr'] = rate
                total = 0
                for micro in range(cfg.gradient_accumulation_steps):
                    x, y = train_batch(tokens['train'], cfg, step, micro, device)
                    with autocast():
                        loss = run(x, y)[1] / cfg.gradient_accumulation_steps
                    scaler.scale(loss).backward()
                    total += loss.detach()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
                finite = torch.isfinite(total) & (torch.isfinite(norm) | scaler.is_enabled())
                if device.type == 'cpu' or step % cfg.log_interval == 0:  # on CUDA asking costs a wait
                    if not finite:
                        raise RuntimeError(f'loss {total.item():.4g}, gradient norm {norm.item():.4g} at step {step}; '
                                           f'{ckpt} holds the last good state; try a lower learning_rate')
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                losses += total
                step += 1
                seconds += time.perf_counter() - began
                if step % cfg.log_interval == 0:
                    write(step=step, loss=total.item(), lr=rate, grad_norm=norm.item())
                    speed = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.n_ctx * step / seconds
                    bar.set_postfix_str(f'loss {total.item():.3f}, {speed:,.0f} tokens/s', refresh=False)
                bar.update()
                if step % cfg.eval_interval == 0 or step == cfg.max_iters:
                    measure()
            if stop:
                if history[-1][0] != step:
                    save(snapshot(), ckpt)
                say(f'{stop[0]}: saved at step {step}; go on with: python train.py --out_dir={cfg.out_dir} --resume')
        return {'residual': cfg.residual, 'params': model.n_params(), 'first_loss': history[0][1],
                'final_loss': history[-1][1], 'best_loss': best_loss, 'best_step': best_step, 'step': step,
                'stopped': stop[0] if stop else None, 'history': history, 'seconds': seconds, 'out_dir': cfg.out_dir}


def main(argv=None):
    values = configuration.parse(TrainConfig, sys.argv[1:] if argv is None else argv, __doc__.split('\n\n')[0])
    try:
        if values.get('resume'):
            values = saved_run(values.get('out_dir', TrainConfig.out_dir))['config'] | {'overwrite': False} | values
        result = train(TrainConfig(**values))
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)
    return result


if __name__ == '__main__':
    main()
