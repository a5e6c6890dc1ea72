"""
Trains a GPT with any residual rule, on one device or, started by torchrun, on several.

    python train.py config/shakespeare_char_cpu.toml --residual=block
    python train.py --out_dir=out/shakespeare_char_cpu --resume
    torchrun --nproc_per_node=4 train.py config/shakespeare_char.toml --gradient_accumulation_steps=4

What a run promises: batches are functions of (data_seed or seed, step, micro-batch) alone, dropout of (seed, step,
micro-batch), so runs that differ in the residual rule or in the number of processes see the same data and start from
the same weights; a stopped run continues as if it had never stopped; nothing is overwritten unless asked; files appear
whole or not at all.
"""
import hashlib
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from tqdm import tqdm

import baselines  # noqa: F401 - importing it registers its rules
import config as configuration
import kernels
from data.prepare import load
from model import GPT, GPTConfig
from weights import checkpoint_file, initial_weights, load_checkpoint, model_config


@dataclass
class TrainConfig(GPTConfig):
    vocab_size: int = 0  # rows of the embedding; 0: as many as the tokenizer has, BPE padded to a multiple of 64
    dataset: str = 'shakespeare_char'  # folder under data/ that holds train.bin, val.bin and meta.json
    out_dir: str = 'out/run'  # where checkpoints and log.jsonl go
    init_from: str = ''  # begin with weights: gpt2, gpt2-medium, ..., or the folder of a run in standard mode
    resume: bool = False  # go on from out_dir/ckpt.pt; keys that are not given come from there
    overwrite: bool = False  # replace the run that out_dir holds
    seed: int = 1337  # of the weights, the order of the batches and dropout
    data_seed: int = 0  # of the order of the batches alone; 0: seed
    batch_size: int = 12  # sequences in one forward pass
    gradient_accumulation_steps: int = 1  # forward passes in one step, shared among the processes
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
    nonfinite: str = 'stop'  # a step whose loss or gradient is not finite: stop the run, or skip the step
    eval_interval: int = 250  # steps between evaluations; each saves a checkpoint
    eval_iters: int = 200  # batches in an evaluation, spread evenly over the validation text; 0: all of it
    log_interval: int = 10  # steps between training lines in log.jsonl
    patience: int = 0  # stop after that many evaluations without a better one; 0: never
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps
    dtype: str = 'auto'  # auto | float32 | bfloat16 | float16: autocast; weights stay float32
    compile: bool | None = None  # torch.compile; none: on CUDA if triton is installed

    def __post_init__(self):
        check = configuration.checker(self)
        self.out_dir = configuration.expand(self.out_dir)
        self.init_from = configuration.expand(self.init_from)
        self.model(self.vocab_size or 1)  # checks the model's keys
        for key in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval'):
            check(key, 1 <= getattr(self, key) < 2**31, 'a whole number from 1 to 2**31 - 1')
        for key in 'vocab_size seed data_seed max_iters warmup_iters lr_decay_iters eval_iters patience'.split():
            check(key, 0 <= getattr(self, key) < 2**31, 'a whole number from 0 to 2**31 - 1')
        for key in ('learning_rate', 'min_lr', 'weight_decay', 'grad_clip'):
            check(key, 0 <= getattr(self, key) < math.inf, 'zero or a positive number')
        for key in ('beta1', 'beta2'):
            check(key, 0 <= getattr(self, key) < 1, 'in [0, 1)')
        for key in ('dataset', 'out_dir'):
            check(key, getattr(self, key).strip() and '\0' not in getattr(self, key), 'the name of a folder')
        check('init_from', self.init_from not in ('scratch', 'resume'), 'a folder, the name of a GPT-2 or nothing at '
              'all, which begins anew; --resume goes on with a run')
        check('nonfinite', self.nonfinite in ('stop', 'skip'), 'stop or skip')
        check('dtype', self.dtype in ('auto', *DTYPES), 'one of auto, ' + ', '.join(DTYPES))

    def model(self, vocab_size):
        """ The model's part of the settings. """
        keys = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**keys | {'vocab_size': vocab_size})


GOLDEN = (math.sqrt(5) - 1) / 2
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Keys that a resumed run may change; all others define it.
MAY_CHANGE_ON_RESUME = {'out_dir', 'resume', 'overwrite', 'device', 'compile', 'kernel', 'recompute', 'log_interval',
                        'patience', 'nonfinite'}


# -----------------------------------------------------------------------------
# The machine.

def pick_device(name):
    """ The torch.device that name stands for; auto takes CUDA, else MPS, else the CPU. """
    if not re.fullmatch(r'auto|cpu|mps|cuda(:\d{1,3})?', name):
        raise ValueError(f'device={name!r}: must be auto, cpu, cuda, cuda:N or mps')
    kind = (name if name != 'auto' else 'cuda' if torch.cuda.is_available() else
            'mps' if torch.backends.mps.is_available() else 'cpu')
    try:
        device = torch.device(kind)
        if kind == 'cuda' and 'LOCAL_RANK' in os.environ:  # torchrun's: one process, one GPU, also for NCCL
            torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f'device={name!r}: must be usable here ({str(e).splitlines()[0]}); auto picks one') from e
    return device


def pick_dtype(name, device):
    """ The autocast dtype that name stands for; auto takes bfloat16 or float16 on CUDA, float32 elsewhere. """
    if name == 'auto':
        name = 'float32' if device.type != 'cuda' else 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
    if name == 'float16' and device.type != 'cuda':
        raise ValueError(f"dtype='float16': needs CUDA (gradients are scaled there), the device is {device.type}")
    if name not in DTYPES:
        raise ValueError(f'dtype={name!r}: must be one of auto, ' + ', '.join(DTYPES))
    return DTYPES[name]


def pick_compile(wanted, device):
    """ Whether to compile; none: on CUDA if triton is installed. """
    return device.type == 'cuda' and find_spec('triton') is not None if wanted is None else wanted


def check_memory(c, batch_size, device):
    """ Refuses, before anything is allocated, what cannot fit: ValueError. c: GPTConfig. The need is a lower bound. """
    need = 16 * ((c.vocab_size + c.n_ctx) * c.n_embd + 12 * c.n_layer * c.n_embd**2)  # weight, gradient, two moments
    need += 2 * batch_size * c.n_ctx * (c.vocab_size + 2 * c.n_layer * c.n_embd)  # logits, inputs of sublayers
    need += 2**15 * c.n_layer  # Python objects
    have = (torch.cuda.mem_get_info(device)[1] if device.type == 'cuda' else math.inf if os.name == 'nt' else
            os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
    if need > have:
        sizes = ', '.join(f'{k}={getattr(c, k)}' for k in ('n_layer', 'n_embd', 'n_ctx', 'vocab_size'))
        raise ValueError(f'{sizes}, batch_size={batch_size}: must fit into memory: {device.type} has '
                         f'{have / 2**30:.1f} GiB, training takes {need / 2**30:.1f} or more')


@contextmanager
def own(out_dir):
    """ Holds out_dir for one run at a time; the operating system lets go when the process ends, however it ends. """
    try:
        os.makedirs(out_dir, exist_ok=True)
        lock = open(os.path.join(out_dir, 'lock'), 'w')
    except OSError as e:
        raise ValueError(f'out_dir={out_dir!r}: must be a writable folder ({e.strerror})') from e
    with lock:
        with suppress(ImportError):  # Windows has no such lock: there the user sees to it
            import fcntl
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise ValueError(f'out_dir={out_dir!r}: must be free, another run is writing there ({e})') from e
        yield


@contextmanager
def stoppable(world=1):
    """ Yields a list that gets the name of SIGINT or SIGTERM when one arrives; a second one kills as usual. """
    got, old = [], {}

    def handler(number, frame):
        got.append(signal.Signals(number).name)
        if world == 1:  # torchrun repeats what the terminal sent already, and kills by itself after 30 seconds
            signal.signal(number, old[number])

    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, before in old.items():
            signal.signal(number, before)


# -----------------------------------------------------------------------------
# Data.

class Data:
    """ The token files of a dataset, read in windows of n_ctx tokens and their successors. """
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.meta, self.tokens = load(cfg.dataset)
        self.files = {split: open(t.filename, 'rb') for split, t in self.tokens.items()}  # stay when prepared anew
        least = self.meta['n_vocab']
        self.rows = cfg.vocab_size or (least if least < 1024 else -(-least // 64) * 64)  # of the embedding
        for split, tokens in self.tokens.items():
            if len(tokens) <= cfg.n_ctx:
                raise ValueError(f'n_ctx={cfg.n_ctx}: must be below {len(tokens)}, the tokens in {split}.bin of '
                                 f'dataset={cfg.dataset!r}; lower it or prepare a longer text')
        if self.rows < least:
            raise ValueError(f'vocab_size={self.rows}: must be {least} or more for dataset={cfg.dataset!r}')
        self.sha = {split: self.hash(split) for split in self.tokens}

    def hash(self, split, piece=2**15):
        """ A hash of a token file: of its length and all of it; beyond 64 MiB, of 1024 pieces spread evenly. """
        n = len(self.tokens[split])
        sha = hashlib.sha256(str(n).encode())
        for start in np.linspace(0, max(0, n - piece), min(1024, -(-n // piece))).astype(int):
            sha.update(self.read(split, slice(start, start + piece)))
        return sha.hexdigest()

    def read(self, split, where):
        """ tokens[where]; ValueError if an id is past the vocabulary. """
        tokens = np.memmap(self.files[split], '<u2', 'r')[where]  # mapped anew, or pages read pile up
        if tokens.max() >= self.meta['n_vocab']:
            raise ValueError(f'dataset={self.cfg.dataset!r}: must have token ids below {self.meta["n_vocab"]}, '
                             f'{split}.bin has {tokens.max()}; prepare it again')
        return tokens

    def windows(self, split, starts):
        """ Inputs and targets (B, n_ctx): tokens[s : s + n_ctx] and tokens[s + 1 : s + n_ctx + 1] for each start s. """
        both = torch.from_numpy(self.read(split, starts[:, None] + np.arange(self.cfg.n_ctx + 1)).astype(np.int64))
        if self.device.type == 'cuda':
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[:, :-1].to(self.device), both[:, 1:].to(self.device)

    def train_batch(self, step, micro):
        """ The batch of one forward pass, a function of (data_seed, step, micro) and of nothing else.

        Window k of the run starts at the fraction k / golden ratio (modulo 1) of the text, from a random offset: no
        order is more even, so each part of the text is seen equally often. Drawn at random, one pass would miss 37 %.
        """
        k = (step * self.cfg.gradient_accumulation_steps + micro) * self.cfg.batch_size + np.arange(self.cfg.batch_size)
        place = (np.random.default_rng(self.cfg.data_seed or self.cfg.seed).random() + k * GOLDEN) % 1.0
        return self.windows('train', (place * (len(self.tokens['train']) - self.cfg.n_ctx)).astype(np.int64))

    def val_batches(self, rank=0, world=1):
        """ Every world-th batch of the validation windows: no overlap; all, or eval_iters batches spread evenly. """
        B, n_ctx = self.cfg.batch_size, self.cfg.n_ctx
        starts = np.arange(0, len(self.tokens['val']) - n_ctx, n_ctx)
        if 0 < self.cfg.eval_iters * B < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, self.cfg.eval_iters * B).round().astype(int)]
        for i in range(rank * B, len(starts), world * B):
            yield self.windows('val', starts[i:i + B])


# -----------------------------------------------------------------------------
# Checkpoints.

def save(state, path):
    """ Writes a checkpoint whole or not at all: under another name, synced, then renamed over the old one. """
    tmp = f'{path}.tmp'
    try:
        with open(tmp, 'wb') as f:
            torch.save(state, f)
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        with suppress(OSError):
            os.remove(tmp)
        raise RuntimeError(f'{path}: could not be written ({str(e).splitlines()[0]}); the one before it stands') from e


def read_checkpoint(path, needs=()):
    """ The dict that save wrote. ValueError says what is wrong. """
    state = load_checkpoint(path)
    for key in needs:
        if key not in state:
            raise ValueError(f'{path}: not a checkpoint of this version of train.py (it lacks {key})')
    return state


def read_run(out_dir):
    """ The checkpoint that a run goes on from. """
    path = os.path.join(out_dir, 'ckpt.pt')
    state = read_checkpoint(path, ('run', 'config', 'optimizer', 'scaler', 'progress'))
    for key in ('run', 'config', 'progress'):
        if not isinstance(state[key], dict) or not state[key]:
            raise ValueError(f'{path}: not a checkpoint of train.py (its {key} is empty or no table)')
    return state


def definition(cfg, data, old=None):
    """ All that makes a run what it is. ValueError names the first thing in which it differs from an older one. """
    new = {k: v for k, v in asdict(cfg).items() if k not in MAY_CHANGE_ON_RESUME}
    new |= {'tokenizer': data.meta['tokenizer'], 'token files': data.sha}
    for key in [*new, *(old.keys() - new.keys())] if old else ():
        if new.get(key) != old.get(key, getattr(TrainConfig, key, None)):  # the default: a key younger than the run
            was, now = (configuration.brief.repr(d.get(key)) for d in (old, new))
            raise ValueError(f'{key}={now}: must be {was}, as in the run that out_dir={cfg.out_dir!r} holds; leave '
                             f'the key out, restore dataset={cfg.dataset!r}, or start a new run')
    return new


# -----------------------------------------------------------------------------
# Training.

def learning_rate(cfg, step):
    """ Rate of the step that follows `step` finished ones: linear warm-up, then half a cosine to min_lr. """
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = min(1.0, (step - cfg.warmup_iters) / max(1, (cfg.lr_decay_iters or cfg.max_iters) - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * t)) * (cfg.learning_rate - cfg.min_lr)


def first_model(cfg, data):
    """ The model to begin with: its weights drawn, or those of init_from under the rule asked for. """
    model = cfg.model(data.rows)
    if not cfg.init_from or cfg.resume:
        return GPT(model)
    if os.path.isfile(checkpoint_file(cfg.init_from)):
        return initial_weights(cfg.init_from, model, data.meta['tokenizer'])
    if data.meta['tokenizer']['kind'] != 'gpt2':
        raise ValueError(f'dataset={cfg.dataset!r}: must be of --tokenizer=gpt2 for init_from={cfg.init_from!r}')
    return GPT.from_pretrained(cfg.init_from, **asdict(model))


class Diverged(RuntimeError):
    """ A loss or a gradient is not finite. """


class Run:
    """ A run under way: what it trains (model, optimizer, data) and how far it is (now). """
    def __init__(self, cfg, data, dtype, rank=0, world=1, quiet=False, label='', report=None):
        self.cfg, self.data, self.dtype, self.rank, self.world = cfg, data, dtype, rank, world
        self.device, self.quiet, self.label = data.device, quiet or rank > 0, label  # label: of runs side by side
        self.report = report if rank == 0 else None
        self.autocast = partial(torch.autocast, data.device.type, dtype, enabled=dtype != torch.float32)
        self.ckpt, self.best, self.log = (os.path.join(cfg.out_dir, f) for f in ('ckpt.pt', 'best.pt', 'log.jsonl'))
        self.tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.n_ctx  # in a step
        torch.manual_seed(cfg.seed)
        self.model = first_model(cfg, data).to(self.device).train()
        self.optimizer = self.model.configure_optimizers(cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.now = SimpleNamespace(  # what a checkpoint keeps, too; random numbers follow from step
            step=0, best_loss=math.inf, best_step=0, since=0, skipped=0, seconds=0.0, loss_sum=0.0, loss_count=0,
            history=[],  # evaluations: [step, validation loss, mean training loss since the last one, seconds]
            log=[json.dumps({'config': asdict(cfg) | {'vocab_size': data.rows}})])  # the lines of log.jsonl
        self.standing = 'there is no checkpoint yet'

    def tell(self, loss=None, message=None):
        """ Hands the state of the run, or a line of text, to whoever asked to be told. """
        val_loss = self.now.history[-1][1] if self.now.history else None
        self.report({'step': self.now.step, 'max_iters': self.cfg.max_iters, 'loss': loss, 'val_loss': val_loss,
                     'message': message})

    def say(self, line):
        if self.report:
            self.tell(message=line)
        elif not self.quiet:
            with suppress(OSError):  # whoever reads this may have gone away; the run goes on
                tqdm.write(self.label + line)

    def total(self, *numbers):
        """ The sum of each number over all processes. """
        if self.world > 1:
            t = torch.tensor(numbers, dtype=torch.float64, device='cuda' if self.device.type == 'cuda' else 'cpu')
            dist.all_reduce(t)
            numbers = t.tolist()
        return numbers

    def write(self, mode='a', **record):
        """ Adds a record to log.jsonl; mode 'w' writes all of it anew. """
        if record:
            self.now.log.append(json.dumps(record))
        if self.rank == 0:
            with open(self.log, mode, encoding='utf-8') as f:
                f.writelines(line + '\n' for line in self.now.log[-1 if mode == 'a' else 0:])

    def save(self, better=False):
        """ Writes ckpt.pt, after best.pt if no state was better. """
        state = {'model': self.model.state_dict(), 'model_config': model_config(self.model.config),
                 'tokenizer': self.data.meta['tokenizer'], 'config': asdict(self.cfg),
                 'run': definition(self.cfg, self.data), 'progress': vars(self.now),
                 'optimizer': self.optimizer.state_dict(), 'scaler': self.scaler.state_dict()}
        if self.rank == 0:
            for path in [self.best, self.ckpt] if better else [self.ckpt]:
                save(state, path)
        self.standing = f'{self.ckpt} holds step {self.now.step}, the last good state'

    def begin(self, state):
        """ Goes on from a checkpoint or, with None, takes out_dir: the first checkpoint replaces the old one. """
        if state:
            try:
                for key in ('model', 'optimizer', 'scaler'):
                    getattr(self, key).load_state_dict(state[key])
                if differ := vars(self.now).keys() ^ state['progress'].keys():
                    raise ValueError(f'progress: {", ".join(map(str, differ))}')
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as e:
                raise ValueError(f'{self.ckpt}: does not fit this run ({str(e).splitlines()[0]})') from e
            self.now = SimpleNamespace(**state['progress'])
            self.standing = f'{self.ckpt} holds step {self.now.step}, the last good state'
            self.say(f'resumed at step {self.now.step}')
        else:
            if self.rank == 0 and os.path.exists(self.best):
                os.remove(self.best)
            self.save()
        self.write('w')  # what was logged after the checkpoint happens again

    def warm_up(self):
        """ Compiles, tries forward and backward, says how long all will take and joins the other processes. """
        cfg, cuda, batch = self.cfg, self.device.type == 'cuda', self.data.train_batch(0, 0)
        compiled = pick_compile(cfg.compile, self.device)
        self.net = torch.compile(self.model) if compiled else self.model
        for _ in range(2):  # the first one compiles
            began = time.perf_counter()
            with self.autocast():
                loss = self.net(*batch)[1]
            loss.backward()
            loss.item()  # waits for the device
            seconds = (time.perf_counter() - began) * cfg.gradient_accumulation_steps / self.world
            self.model.zero_grad(set_to_none=True)
        n = self.model.n_params()
        path = kernels.choose(cfg.kernel, torch.empty(0, device=self.device, dtype=self.dtype))
        gib = (torch.cuda.max_memory_allocated(self.device) + 8 * n if cuda else 16 * n) / 2**30
        self.say(f'{cfg.residual}: {self.model.residual.describe()}; {n / 1e6:.2f} M parameters')
        self.say(f'{self.world} x {self.device.type}, {str(self.dtype)[6:]}, kernel '
                 f'{path if hasattr(self.model.residual, "attend") else "none"}, compile {"on" if compiled else "off"}')
        self.say(f'{cfg.max_iters} steps of {self.tokens:,} tokens in all, about {seconds * 1e3:.0f} ms each: '
                 f'{seconds * cfg.max_iters / 60:.1f} minutes; {gib:.2f} GiB' + ('' if cuda else ' and activations'))
        ids = [torch.cuda.current_device()] if cuda else None
        self.team_net = nn.parallel.DistributedDataParallel(self.net, ids) if self.world > 1 else self.net

    @torch.no_grad()
    def evaluate(self):
        """ Mean cross-entropy of the validation windows, in nats per token. """
        losses, counts = [], []
        self.model.eval()
        for x, y in self.data.val_batches(self.rank, self.world):
            with self.autocast():
                losses.append(self.net(x, y)[1])
            counts.append(len(x))
        self.model.train()
        total, count = self.total(sum(l.item() * n for l, n in zip(losses, counts, strict=True)), sum(counts))
        return total / count

    def measure(self):
        """ Evaluates, logs, saves. """
        now, val = self.now, self.evaluate()
        if not math.isfinite(val):
            raise Diverged(f'validation loss {val} at step {now.step}; {self.standing}; try a lower learning_rate')
        mean = now.loss_sum / now.loss_count if now.loss_count else None
        last = now.history[-1] if now.history else None
        now.history.append([now.step, val, mean, now.seconds])
        now.loss_sum, now.loss_count, now.since = 0.0, 0, now.since + 1
        better = val < now.best_loss
        if better:
            now.best_loss, now.best_step, now.since = val, now.step, 0
        self.write(step=now.step, val_loss=val, train_loss=mean, seconds=now.seconds, skipped=now.skipped)
        self.save(better)
        self.say(f'step {now.step:5d}: validation loss {val:.4f}' + (f', training {mean:.4f}' if mean else '')
                 + (f', {(now.seconds - last[3]) / (now.step - last[0]) * 1e3:.0f} ms a step' if last else ''))

    def update(self):
        """ One step of the optimiser: (mean loss, gradient norm, learning rate) of the global batch. """
        cfg, now, n = self.cfg, self.now, self.cfg.gradient_accumulation_steps
        rate, loss_sum = learning_rate(cfg, now.step), 0.0
        for group in self.optimizer.param_groups:
            group['lr'] = rate
        for micro in range(self.rank, n, self.world):
            x, y = self.data.train_batch(now.step, micro)
            mixed = hashlib.sha256(f'{cfg.seed} {now.step} {micro}'.encode()).digest()  # a CPU takes 32 bits of a seed
            torch.manual_seed(int.from_bytes(mixed[:4], 'little'))  # for dropout
            self.team_net.require_backward_grad_sync = micro + self.world >= n  # several processes: sum up once a step
            with self.autocast():
                loss = self.team_net(x, y)[1] / n
            self.scaler.scale(loss * self.world).backward()  # processes average their gradients: times their number
            loss_sum += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.grad_clip or math.inf).item()
        loss, = self.total(loss_sum.item())
        if math.isfinite(loss) and math.isfinite(norm):
            self.scaler.step(self.optimizer)
            now.loss_sum, now.loss_count = now.loss_sum + loss, now.loss_count + 1
        elif cfg.nonfinite == 'skip' or math.isfinite(loss) and self.scaler.is_enabled():  # float16 overflows at times
            now.skipped += 1
        else:
            raise Diverged(f'loss {loss:.4g}, gradient norm {norm:.4g} at step {now.step}; {self.standing}; try a '
                           'lower learning_rate, or --resume --nonfinite=skip')
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        now.step += 1
        return loss, norm, rate

    def loop(self, stop):
        """ Steps and evaluates until max_iters, patience or a signal ends it. """
        cfg, now = self.cfg, self.now
        with tqdm(total=cfg.max_iters, initial=now.step, unit='step', leave=False,
                  disable=bool(self.quiet or self.label or self.report or sys.stderr is None) or None) as bar:
            while True:
                evaluated = now.history and now.history[-1][0] == now.step
                if not evaluated and (now.step % cfg.eval_interval == 0 or now.step == cfg.max_iters):
                    self.measure()
                if now.step == cfg.max_iters or cfg.patience and now.since >= cfg.patience or self.total(len(stop))[0]:
                    break
                began = time.perf_counter()
                loss, norm, rate = self.update()
                now.seconds += time.perf_counter() - began
                if now.step % cfg.log_interval == 0:
                    self.write(step=now.step, loss=loss, lr=rate, grad_norm=norm, skipped=now.skipped)
                    speed = self.tokens * now.step / now.seconds
                    bar.set_postfix_str(f'loss {loss:.3f}, {speed:,.0f} tokens/s', refresh=False)
                bar.update()
                if self.report:
                    self.tell(loss)
        if now.history[-1][0] != now.step:
            self.save()


def train(cfg, quiet=False, label='', report=None):
    """ Trains as cfg says; the results as a dict (see the end). ValueError: bad input; RuntimeError: a failed run.

    With report given, train prints nothing and shows no bar. After every step, and whenever it would have printed a
    line, it calls report with a dict: step, max_iters, loss (None if the call brings a line), val_loss (the last one
    known, or None) and message (the line, or None).
    """
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    kernels.choose(cfg.kernel, torch.empty(0, device=device, dtype=dtype))  # raises if it cannot run here
    rank, world = (int(os.environ.get(*pair)) for pair in (('RANK', 0), ('WORLD_SIZE', 1)))  # torchrun's
    if cfg.gradient_accumulation_steps % world:
        raise ValueError(f'gradient_accumulation_steps={cfg.gradient_accumulation_steps}: must be divisible by '
                         f'{world}, the number of processes, which share them')
    data = Data(cfg, device)
    check_memory(cfg.model(data.rows), cfg.batch_size, device)
    with stoppable(world) as stop, own(cfg.out_dir) if rank == 0 else nullcontext():
        state = read_run(cfg.out_dir) if cfg.resume else None
        if state:
            definition(cfg, data, state['run'])
        elif rank == 0 and not cfg.overwrite and {'ckpt.pt', 'best.pt', 'log.jsonl'} & {*os.listdir(cfg.out_dir)}:
            raise ValueError(f'out_dir={cfg.out_dir!r}: must not hold a run already: --resume goes on with it, '
                             '--overwrite replaces it, another out_dir keeps it')
        if world > 1:
            dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
        run = Run(cfg, data, dtype, rank, world, quiet, label, report)
        try:
            run.warm_up()
            run.begin(state)
            now, state = run.now, None  # not two copies of everything
            run.loop(stop)
        except OSError as e:
            raise RuntimeError(f'{cfg.out_dir}: could not be written ({e.strerror}); {run.standing}') from e
        except RuntimeError as e:
            if world == 1:
                raise
            raise RuntimeError(f'process {rank} of {world}: {str(e).splitlines()[0]}; {run.standing}') from e
        if world > 1:
            dist.destroy_process_group()
        if stop:
            run.say(f'{stop[0]}: saved at step {now.step}; go on with: '
                    + ('python' if world == 1 else f'torchrun --nproc_per_node={world}')
                    + f' train.py --out_dir={shlex.quote(cfg.out_dir)} --resume')
    return {'residual': cfg.residual, 'params': run.model.n_params(), 'first_loss': now.history[0][1],
            'final_loss': now.history[-1][1], 'stopped': stop[0] if stop else None, 'out_dir': cfg.out_dir,
            **{k: getattr(now, k) for k in ('best_loss', 'best_step', 'step', 'skipped', 'history', 'seconds')}}


def main(argv=None):
    values = configuration.parse(TrainConfig, sys.argv[1:] if argv is None else argv, __doc__.split('\n\n')[0])
    try:
        if values.get('resume'):
            values = {'out_dir': TrainConfig.out_dir} | values
            saved = read_run(TrainConfig(out_dir=values['out_dir']).out_dir)['config']
            values = {f.name: saved[f.name] for f in fields(TrainConfig) if f.name in saved} | values
        return train(TrainConfig(**values))
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)
    except KeyboardInterrupt:  # before the first step, or a second one
        configuration.fail('interrupted', code=130)


if __name__ == '__main__':
    main()
