"""
Trains a GPT with any residual rule, on one device or, started by torchrun, on several.

    python train.py config/shakespeare_char_cpu.toml --residual=block
    python train.py --out_dir=out/shakespeare_char_cpu --resume
    torchrun --nproc_per_node=4 train.py config/shakespeare_char.toml --gradient_accumulation_steps=4

What a run promises: batches and dropout are functions of (seed, step, micro-batch) alone, so runs that differ in the
residual rule or in the number of processes see the same data and start from the same weights; a stopped run continues
as if it had never stopped; nothing is overwritten unless asked; files appear whole or not at all.
"""
import hashlib
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
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
    compile: bool | None = None  # torch.compile; none: on CUDA, if it works there

    def __post_init__(self):
        check = configuration.checker(self)
        self.model(self.vocab_size or 1)  # checks the model's keys
        for key in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval'):
            check(key, 1 <= getattr(self, key) < 2**31, 'a whole number from 1 to 2**31 - 1')
        for key in ('vocab_size', 'seed', 'max_iters', 'warmup_iters', 'lr_decay_iters', 'eval_iters', 'patience'):
            check(key, 0 <= getattr(self, key) < 2**31, 'a whole number from 0 to 2**31 - 1')
        for key in ('learning_rate', 'min_lr', 'weight_decay', 'grad_clip'):
            check(key, 0 <= getattr(self, key) < math.inf, 'zero or a positive number')
        for key in ('beta1', 'beta2'):
            check(key, 0 <= getattr(self, key) < 1, 'in [0, 1)')
        for key in ('dataset', 'out_dir'):
            check(key, getattr(self, key).strip() and '\0' not in getattr(self, key), 'the name of a folder')
        check('nonfinite', self.nonfinite in ('stop', 'skip'), 'stop or skip')
        check('dtype', self.dtype in ('auto', *DTYPES), 'one of auto, ' + ', '.join(DTYPES))
        check('overwrite', not (self.overwrite and self.resume), 'left out with --resume')

    def model(self, vocab_size):
        """ The model's part of the settings. """
        keys = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**keys | {'vocab_size': vocab_size})


DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Keys that a resumed run may change; all others define it.
FREE = {'out_dir', 'resume', 'overwrite', 'device', 'compile', 'kernel', 'recompute', 'log_interval', 'patience',
        'nonfinite'}


# -----------------------------------------------------------------------------
# The machine.

def pick_device(name):
    """ The torch.device that name stands for; auto takes CUDA, else MPS, else the CPU. """
    given = name
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name == 'cuda' and 'LOCAL_RANK' in os.environ:  # torchrun's: one process, one GPU
        name = f'cuda:{os.environ["LOCAL_RANK"]}'
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f'device={given!r}: must be usable here ({str(e).splitlines()[0]}); auto picks one') from e
    return device


def pick_dtype(name, device):
    """ The autocast dtype that name stands for; auto takes bfloat16 or float16 on CUDA, float32 elsewhere. """
    if name == 'auto':
        bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported()
        name = 'bfloat16' if bf16 else 'float16' if device.type == 'cuda' else 'float32'
    if name == 'float16' and device.type != 'cuda':
        raise ValueError(f"dtype='float16': needs CUDA (gradients are scaled there), the device is {device.type}")
    return DTYPES[name]


def check_memory(model, batch_size, device):
    """ Refuses, before anything is allocated, a model whose training cannot fit: ValueError. A lower bound. """
    c, tokens = model, batch_size * model.n_ctx
    params = (c.vocab_size + c.n_ctx) * c.n_embd + 12 * c.n_layer * c.n_embd**2
    need = 16 * params  # weights, gradients and AdamW's two moments, four bytes each
    need += 2 * tokens * (c.vocab_size + 2 * c.n_layer * c.n_embd)  # logits and each sublayer's input, in two bytes
    need += 2**15 * c.n_layer  # a block's Python objects
    if device.type == 'cuda':
        have = torch.cuda.mem_get_info(device)[1]
    else:
        have = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') if hasattr(os, 'sysconf') else math.inf
    if need > have:
        raise ValueError(f'n_layer={c.n_layer}, n_embd={c.n_embd}, n_ctx={c.n_ctx}, vocab_size={c.vocab_size}, '
                         f'batch_size={batch_size}: must fit into memory: {device.type} has {have / 2**30:.1f} GiB, '
                         f'training takes at least {need / 2**30:.1f}')


@contextmanager
def team(device):
    """ Joins the processes that torchrun started: (rank, their number), (0, 1) without torchrun. """
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if world > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    try:
        yield rank, world
    finally:
        if world > 1:
            dist.destroy_process_group()


@contextmanager
def own(out_dir):
    """ Holds out_dir for one run at a time; the operating system lets go when the process ends, however it ends. """
    try:
        os.makedirs(out_dir, exist_ok=True)
        lock = open(os.path.join(out_dir, 'lock'), 'w')
    except OSError as e:
        raise ValueError(f'out_dir={out_dir!r}: must be a writable folder ({e.strerror})') from e
    with lock:
        try:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'out_dir={out_dir!r}: must be free, another run is writing there') from None
        except (ImportError, OSError):
            pass  # Windows and some network file systems have no such lock: there the user sees to it
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
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, handler)
    try:
        yield got
    finally:
        for number, before in old.items():
            signal.signal(number, before)


# -----------------------------------------------------------------------------
# Data.

class Data:
    """ The token files of a dataset, read in windows of n_ctx tokens and their successors. """
    PIECE = 2**15  # tokens

    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.meta, self.tokens = load(cfg.dataset)
        self.n_vocab = self.meta['n_vocab']
        for split, tokens in self.tokens.items():
            if len(tokens) <= cfg.n_ctx:
                raise ValueError(f'n_ctx={cfg.n_ctx}: must be less than the {len(tokens)} tokens that {split} of dataset='
                                 f'{cfg.dataset!r} has; lower n_ctx or prepare a longer text')
        if 0 < cfg.vocab_size < self.n_vocab:
            raise ValueError(f'vocab_size={cfg.vocab_size}: must be at least {self.n_vocab}, the tokenizer of dataset='
                             f'{cfg.dataset!r} needs them')
        self.fingerprint = {split: self.hash(tokens) for split, tokens in self.tokens.items()}

    def hash(self, tokens):
        """ SHA-256 of a token file's length and tokens; beyond 64 MiB, of 1024 pieces spread evenly over it. """
        pieces = min(1024, -(-len(tokens) // self.PIECE))
        sha = hashlib.sha256(str(len(tokens)).encode())
        for start in np.linspace(0, max(0, len(tokens) - self.PIECE), pieces).astype(int):
            sha.update(self.read(tokens, slice(start, start + self.PIECE)))
        return sha.hexdigest()

    def read(self, tokens, where):
        tokens = np.memmap(tokens.filename, tokens.dtype, 'r')  # opened anew: pages read do not pile up
        out = np.array(tokens[where])
        if out.max() >= self.n_vocab:
            raise ValueError(f'dataset={self.cfg.dataset!r}: {os.path.basename(tokens.filename)} has token id {out.max()}'
                             f', the ids of its tokenizer must be below {self.n_vocab}; prepare it again')
        return out

    def windows(self, split, starts):
        """ Inputs and targets (B, n_ctx): tokens[s : s + n_ctx] and tokens[s + 1 : s + n_ctx + 1] for each start s. """
        both = self.read(self.tokens[split], starts[:, None] + np.arange(self.cfg.n_ctx + 1))
        both = torch.from_numpy(both.astype(np.int64))
        if self.device.type == 'cuda':
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[:, :-1].to(self.device), both[:, 1:].to(self.device)

    def train_batch(self, step, micro):
        """ The batch of one forward pass, a function of (seed, step, micro) and of nothing else. """
        rng = np.random.default_rng((self.cfg.seed, step, micro))
        last = len(self.tokens['train']) - self.cfg.n_ctx
        return self.windows('train', rng.integers(0, last, self.cfg.batch_size))

    def val_batches(self, rank=0, world=1):
        """ The validation text in windows that do not overlap, all or eval_iters batches of them spread evenly.

        Of `world` processes each takes every world-th batch. The last batch may be smaller.
        """
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
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        with suppress(OSError):
            os.remove(tmp)
        raise RuntimeError(f'{path}: could not be written ({str(e).splitlines()[0]}); the one before it stands') from e


def read_checkpoint(path):
    """ The dict that save wrote, every byte checked against the file's checksums. ValueError says what is wrong. """
    with suppress(FileNotFoundError):  # load_checkpoint says so
        try:
            with zipfile.ZipFile(path) as z:
                bad = z.testzip()
        except FileNotFoundError:
            raise
        except Exception as e:  # zipfile raises a dozen kinds for a damaged or foreign file
            raise ValueError(f'{path}: not a whole checkpoint ({type(e).__name__}: {e})') from e
        if bad:
            raise ValueError(f'{path}: not a whole checkpoint (damaged in {bad})')
    return load_checkpoint(path)


def read_run(out_dir):
    """ The checkpoint that a run in out_dir goes on from: ValueError unless this trainer's. """
    path = os.path.join(out_dir, 'ckpt.pt')
    state = read_checkpoint(path)
    lacks = {'config', 'optimizer', 'scaler', 'progress', 'tokenizer', 'data'} - state.keys()
    if lacks:
        raise ValueError(f'{path}: not a run of this version of train.py: it lacks {", ".join(sorted(lacks))}')
    other = sorted(state['config'].keys() ^ {f.name for f in fields(TrainConfig)})
    if other:
        raise ValueError(f'{path}: not a run of this version of train.py: not both know the keys {", ".join(other)}')
    return state


def check_same(cfg, data, saved):
    """ ValueError that names the first thing which defines the run and differs from the saved one. """
    for key, value in asdict(cfg).items():
        if key not in FREE and saved['config'][key] != value:
            raise ValueError(f'{key}={value!r}: must be {saved["config"][key]!r}, as in the run that out_dir='
                             f'{cfg.out_dir!r} holds; leave the key out')
    for what, old, new in (('tokenizer', saved['tokenizer'], data.meta['tokenizer']),
                           ('text', saved['data'], data.fingerprint)):
        if old != new:
            raise ValueError(f'dataset={cfg.dataset!r}: its {what} has changed since the checkpoint in out_dir='
                             f'{cfg.out_dir!r}; prepare it as it was, or start anew with --overwrite')


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


class Run:
    """ A run under way: what it trains (model, optimizer, data), how far it is (now), what it says and writes. """
    def __init__(self, cfg, device, rank, world, quiet):
        self.cfg, self.device, self.rank, self.world = cfg, device, rank, world
        self.quiet = quiet or rank > 0
        self.dtype = pick_dtype(cfg.dtype, device)
        self.data = Data(cfg, device)
        n = self.data.n_vocab
        model_cfg = cfg.model(cfg.vocab_size or (n if n < 1024 else -(-n // 64) * 64))
        check_memory(model_cfg, cfg.batch_size, device)
        self.ckpt, self.best, self.log = (os.path.join(cfg.out_dir, f) for f in ('ckpt.pt', 'best.pt', 'log.jsonl'))
        torch.manual_seed(cfg.seed)
        self.model = GPT(model_cfg).to(device).train()
        self.optimizer = self.model.configure_optimizers(cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2))
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.saved = None  # step of the newest checkpoint
        self.now = SimpleNamespace(  # what a checkpoint keeps besides the model's and the optimizer's state
            step=0, best_loss=math.inf, best_step=0, since=0, skipped=0, seconds=0.0, loss_sum=0.0, loss_count=0,
            history=[],  # evaluations: step, validation loss, mean training loss since the last one, seconds
            log=[json.dumps({'config': asdict(cfg) | {'vocab_size': model_cfg.vocab_size}})])  # log.jsonl, its lines
