"""
Trains a GPT with any residual rule, on one device or, started by torchrun, on several.

    python train.py config/shakespeare_char_cpu.toml --residual=block
    python train.py --out_dir=out/shakespeare_char_cpu --resume
    python train.py --out_dir=out/shakespeare_char_cpu --eval_only
    torchrun --nproc_per_node=4 train.py config/train_gpt2.toml

What a run promises. A batch is a function of data seed, step and micro-batch; dropout is one of
seed, step and micro-batch. So runs that differ in the residual rule or in the number of processes
see the same data and start from the same weights. A stopped run continues as if it had never
stopped. Nothing is overwritten unless asked. Files appear whole or not at all.

Reading order: the training loop comes first, then what it calls.
"""
if __name__ == '__main__':
    from config import program
    program.begin()  # first, so that Ctrl-C during the slow imports ends quietly
import hashlib
import json
import math
import os
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn

import baselines  # noqa: F401 - importing it registers its rules
import config as configuration
import kernels
import triton_kernels
from config.machine import DTYPES, check_memory, matmul_speed, pick_compile, pick_device, pick_dtype
from config.program import only_run_in, stoppable
from config.report import Display, import_wandb, json_line, start_wandb
from data.batches import Data
from model import GPT, GPTConfig
from weights import (
    checkpoint_file,
    initial_weights,
    load_checkpoint,
    model_config,
    save,
    settings_of_weights,
)


@dataclass
class TrainConfig(GPTConfig):
    # model
    vocab_size: int = 0  # rows of the embedding; 0: as the tokenizer needs, BPE padded to 64s
    init_from: str = ''  # begin with weights: gpt2, gpt2-medium, ..., or the folder of a run
    # data
    dataset: str = 'shakespeare_char'  # folder under data/ that prepare.py wrote
    batch_size: int = 12  # sequences in one forward pass
    gradient_accumulation_steps: int = 1  # forward passes in a step, shared among the processes
    seed: int = 1337  # of the weights, the order of the batches and dropout
    data_seed: int = 0  # of the order of the batches alone; 0: the same as seed
    # training
    max_iters: int = 5000  # optimiser steps
    learning_rate: float = 6e-4  # the highest, right after the warm-up
    min_lr: float = 6e-5  # the lowest, at the end of the cosine
    warmup_iters: int = 100  # steps in which the rate rises; above zero from the first on
    lr_decay_iters: int = 0  # steps until the rate is min_lr; 0: max_iters
    decay_lr: bool = True  # warm-up and cosine; false: learning_rate throughout
    weight_decay: float = 0.1  # of matrices and embeddings, never of queries, gains and biases
    beta1: float = 0.9  # AdamW's decay of the mean of the gradients
    beta2: float = 0.95  # AdamW's decay of the mean of their squares
    grad_clip: float = 1.0  # largest gradient norm; 0: no limit
    nonfinite: str = 'stop'  # if a loss or gradient is not finite: stop the run or skip the step
    eval_interval: int = 250  # steps between evaluations; each saves a checkpoint
    eval_iters: int = 200  # batches in an evaluation, spread over the validation text; 0: all
    patience: int = 0  # stop after that many evaluations without a better one; 0: never
    # run
    out_dir: str = 'out/run'  # where checkpoints and log.jsonl go
    resume: bool = False  # go on with the run in out_dir; its settings hold
    overwrite: bool = False  # replace the run in out_dir
    eval_only: bool = False  # print the loss of the run in out_dir, or of init_from; write nothing
    log_interval: int = 10  # steps between training lines in log.jsonl
    wandb: str = ''  # also log to this project of Weights & Biases
    # machine
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps
    dtype: str = 'auto'  # auto | float32 | bfloat16 | float16: of autocast; weights are float32
    compile: bool | None = None  # call torch.compile; none: on CUDA if triton is installed

    def __post_init__(self):
        check = configuration.checker(self)
        self.out_dir = configuration.expand(self.out_dir)
        self.init_from = configuration.expand(self.init_from)
        self.gpt_config(self.vocab_size or 1)  # checks the model's keys
        for key in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval'):
            check(key, 1 <= getattr(self, key) < 2**31, 'a whole number from 1 to 2**31 - 1')
        for key in ('vocab_size', 'seed', 'data_seed', 'max_iters', 'warmup_iters',
                    'lr_decay_iters', 'eval_iters', 'patience'):
            check(key, 0 <= getattr(self, key) < 2**31, 'a whole number from 0 to 2**31 - 1')
        for key in ('learning_rate', 'min_lr', 'weight_decay', 'grad_clip'):
            check(key, 0 <= getattr(self, key) < math.inf, 'zero or a positive number')
        for key in ('beta1', 'beta2'):
            check(key, 0 <= getattr(self, key) < 1, 'in [0, 1)')
        for key in ('dataset', 'out_dir'):
            name = getattr(self, key)
            check(key, name.strip() and '\0' not in name, 'the name of a folder')
        check('init_from', self.init_from not in ('scratch', 'resume'), 'a folder, the name of a '
              'GPT-2 or nothing at all, which begins anew; --resume goes on with a run')
        check('nonfinite', self.nonfinite in ('stop', 'skip'), 'stop or skip')
        check('dtype', self.dtype in ('auto', *DTYPES), 'one of auto, ' + ', '.join(DTYPES))

    def gpt_config(self, vocab_size):
        """ The model's part of the settings. """
        keys = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**keys | {'vocab_size': vocab_size})


# The keys that a resumed run may change. A change of any other would make it another run.
MAY_CHANGE_ON_RESUME = {'out_dir', 'resume', 'overwrite', 'eval_only', 'log_interval', 'wandb',
                        'patience', 'nonfinite', 'device', 'compile', 'kernel', 'recompute'}


# -----------------------------------------------------------------------------
# The training loop.

def training_loop(run, stop):
    """ Evaluates, saves and steps until max_iters, patience or a signal ends it.

    stop: a list that is empty until a signal arrives.
    """
    cfg, data, progress = run.cfg, run.data, run.progress
    while True:
        # Evaluate and save: at the start, every eval_interval steps and at the end.
        if run.evaluation_is_due():
            val_loss = run.evaluate(stop)
            if val_loss is None:  # a signal came
                break
            better = run.record_evaluation(val_loss)
            run.save(better)
        if progress.step == cfg.max_iters or run.patience_is_over() or run.any_process_has(stop):
            break

        # One step: load the batches, forward, backward.
        began = time.perf_counter()
        rate = learning_rate(cfg, progress.step)
        for group in run.optimizer.param_groups:
            group['lr'] = rate
        loss = 0.0
        for micro in range(run.rank, cfg.gradient_accumulation_steps, run.world):
            x, y = data.train_batch(progress.step, micro)
            seed_dropout(cfg.seed, progress.step, micro)
            last = micro + run.world >= cfg.gradient_accumulation_steps
            run.parallel_net.require_backward_grad_sync = last  # only then do processes talk
            with run.autocast():
                logits, micro_loss = run.parallel_net(x, y)
            micro_loss = micro_loss / cfg.gradient_accumulation_steps
            loss += micro_loss.detach()
            # Processes average their gradients; times their number (world) that is the sum.
            run.scaler.scale(micro_loss * run.world).backward()
        loss = run.sum_over_processes(loss.item())[0]

        # Clip the gradient and update the weights, unless something is not finite.
        run.scaler.unscale_(run.optimizer)
        limit = cfg.grad_clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), limit).item()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            run.scaler.step(run.optimizer)
            progress.loss_sum += loss
            progress.loss_count += 1
        elif run.may_skip(loss):
            progress.skipped += 1
        else:
            raise Diverged(f'loss {loss:.4g}, gradient norm {grad_norm:.4g} at step {progress.step}'
                           f'; {run.last_saved}; try a lower learning_rate, or --resume '
                           '--nonfinite=skip')
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.seconds += time.perf_counter() - began

        if progress.step % cfg.log_interval == 0:
            run.log(step=progress.step, loss=loss, lr=rate, grad_norm=grad_norm,
                    skipped=progress.skipped)
        run.display.show_step(progress.step, loss, run.tokens_per_second())
    if progress.step != run.saved_step:
        run.save()


class Diverged(RuntimeError):
    """ A loss or a gradient is not finite. """


def learning_rate(cfg, step):
    """ The rate of the step that follows `step` finished ones: it rises in a line, then falls as
    half a cosine to min_lr.
    """
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    falling = (cfg.lr_decay_iters or cfg.max_iters) - cfg.warmup_iters
    t = min(1.0, (step - cfg.warmup_iters) / max(1, falling))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * t)) * (cfg.learning_rate - cfg.min_lr)


def seed_dropout(seed, step, micro):
    """ Makes dropout a function of these three numbers. """
    mixed = hashlib.sha256(f'{seed} {step} {micro}'.encode()).digest()
    torch.manual_seed(int.from_bytes(mixed[:4], 'little'))  # a CPU takes 32 bits of a seed


# -----------------------------------------------------------------------------
# A run.

def train(cfg, quiet=False, label='', report=None):
    """ Trains as cfg says and returns the results as a dict; see Run.results.

    quiet: print nothing. label: what every line begins with. With report given, train prints
    nothing itself: after every step, and whenever it would have printed a line, it calls report
    with a dict of step, max_iters, loss (None if the call brings a line), val_loss (the last one
    known, or None) and message (the line, or None).
    ValueError: bad input; nothing has been written. RuntimeError: a failed run.
    """
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))  # torchrun's
    if cfg.gradient_accumulation_steps % world:
        raise ValueError(f'gradient_accumulation_steps={cfg.gradient_accumulation_steps}: must be '
                         f'divisible by {world}, the number of processes, which share them')
    if cfg.eval_only and not cfg.init_from:  # the command line takes the run in out_dir
        raise ValueError('eval_only=True: must have init_from, the weights to evaluate')
    display = Display(cfg.max_iters, quiet or rank > 0, label, report if rank == 0 else None)
    device = pick_device(cfg.device, display.say)
    dtype = pick_dtype(cfg.dtype, device)
    kernels.choose(cfg.kernel, torch.empty(0, device=device, dtype=dtype))  # ValueError if not here
    if cfg.wandb:
        import_wandb(cfg.wandb)  # ValueError if it is missing
    data = Data(cfg, device)
    check_memory(cfg.gpt_config(data.rows), cfg.batch_size, device)

    writes = rank == 0 and not cfg.eval_only
    acknowledge = None if quiet or report or rank > 0 else 'stops soon and saves what is done'
    signals = stoppable(acknowledge, second_kills=world == 1)
    lock = only_run_in(cfg.out_dir) if writes else nullcontext()
    with signals as stop, lock:
        saved = read_run(cfg.out_dir) if cfg.resume and not cfg.eval_only else None
        if saved:
            check_identity(cfg, data, saved['run'])
        elif writes and not cfg.overwrite:
            check_folder_is_new(cfg.out_dir)
        if world > 1:
            dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
        run = Run(cfg, data, dtype, display, rank, world)
        try:
            if cfg.eval_only:
                return run.evaluate_only(stop)
            run.announce()
            run.begin(saved)
            saved = None  # or everything would be in memory twice
            with display.bar(run.progress.step):
                training_loop(run, stop)
        except OSError as e:
            fault = f'{cfg.out_dir}: could not be written ({e.strerror}); {run.last_saved}'
            raise RuntimeError(fault) from e
        except RuntimeError as e:
            if world == 1:
                raise
            fault = f'process {rank} of {world}: {str(e).splitlines()[0]}; {run.last_saved}'
            raise RuntimeError(fault) from e
        finally:
            if run.wandb_run:
                run.wandb_run.finish()
        if world > 1:
            dist.destroy_process_group()
        if stop:
            start = 'python' if world == 1 else f'torchrun --nproc_per_node={world}'
            display.say(f'{stop[0]}: saved at step {run.progress.step}; go on with: '
                        f'{start} train.py --out_dir={shlex.quote(cfg.out_dir)} --resume')
    return run.results(stop)


class Run:
    """ A run under way: what it trains (model, optimizer, data) and how far it is (progress). """
    def __init__(self, cfg, data, dtype, display, rank=0, world=1):
        self.cfg, self.data, self.dtype, self.device = cfg, data, dtype, data.device
        self.display, self.rank, self.world = display, rank, world
        self.ckpt, self.best, self.log_file = (
            os.path.join(cfg.out_dir, name) for name in ('ckpt.pt', 'best.pt', 'log.jsonl'))
        self.tokens_per_step = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.n_ctx
        torch.manual_seed(cfg.seed)
        self.model = first_model(cfg, data).to(self.device).train()
        self.compiled = pick_compile(cfg.compile, self.device)
        self.net = torch.compile(self.model) if self.compiled else self.model
        self.parallel_net = self.net  # with several processes: see announce
        self.optimizer = self.model.configure_optimizers(
            cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.progress = SimpleNamespace(  # all that a checkpoint keeps beside these
            step=0, best_loss=math.inf, best_step=0, evals_since_best=0, skipped=0, seconds=0.0,
            loss_sum=0.0, loss_count=0,  # of the training losses since the last evaluation
            history=[],  # evaluations: [step, validation loss, mean training loss, seconds]
            log=[json_line({'config': self.settings()})])  # the lines of log.jsonl
        self.last_saved = 'there is no checkpoint yet'
        self.saved_step = self.wandb_run = None

    def settings(self):
        return asdict(self.cfg) | {'vocab_size': self.data.rows}

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum_over_processes(self, *numbers):
        """ The sum of each number over all processes. """
        if self.world > 1:
            where = 'cuda' if self.device.type == 'cuda' else 'cpu'
            total = torch.tensor(numbers, dtype=torch.float64, device=where)
            dist.all_reduce(total)
            numbers = total.tolist()
        return numbers

    def any_process_has(self, stop):
        """ Whether a signal reached any process; all of them get the same answer. """
        return self.sum_over_processes(len(stop))[0] > 0

    def may_skip(self, loss):
        """ Whether a step that is not finite is left out; float16 overflows at times. """
        overflow = math.isfinite(loss) and self.scaler.is_enabled()
        return overflow or self.cfg.nonfinite == 'skip'

    def announce(self):
        """ Says what will run and how long it takes. Then joins several processes by DDP. """
        cfg, n_params = self.cfg, self.model.n_params()
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        kernel = 'none'
        if hasattr(self.model.residual, 'kernel'):
            kernel = kernels.choose(self.model.residual.kernel, like)
        say = self.display.say
        say(f'{cfg.residual}: {self.model.residual.describe()}; {n_params / 1e6:.2f} M parameters')
        say(f'{self.world} x {self.device.type}, {str(self.dtype).removeprefix("torch.")}, '
            f'kernel {kernel}, compile {"on" if self.compiled else "off"}')
        for line in (*kernel_advice(cfg, kernel, like),
                     *advice(cfg, n_params, self.tokens_per_step, self.device)):
            say(line)
        if self.compiled or kernel == 'triton':
            say('compiling: the first pass takes much longer than the others')

        batch = self.data.train_batch(0, 0)
        for _ in range(2):  # the first is slower
            began = time.perf_counter()
            with self.autocast():
                loss = self.net(*batch)[1]
            loss.backward()
            loss.item()  # waits for the device
            seconds = time.perf_counter() - began
            self.model.zero_grad(set_to_none=True)
        seconds *= cfg.gradient_accumulation_steps / self.world
        if self.device.type == 'cuda':
            peak = torch.cuda.max_memory_allocated(self.device) + 8 * n_params  # Adam's moments
            memory = f'{peak / 2**30:.2f} GiB'
        else:
            memory = f'{16 * n_params / 2**30:.2f} GiB and activations'
        say(f'{cfg.max_iters} steps of {self.tokens_per_step:,} tokens in all, about '
            f'{seconds * 1e3:.0f} ms each: {seconds * cfg.max_iters / 60:.1f} minutes; {memory}')
        if self.world > 1:
            ids = [torch.cuda.current_device()] if self.device.type == 'cuda' else None
            self.parallel_net = nn.parallel.DistributedDataParallel(self.net, ids)

    def begin(self, saved):
        """ Goes on from a checkpoint's dict or, with None, takes out_dir for a new run. """
        if saved:
            self.restore(saved)
            self.display.say(f'resumed at step {self.progress.step}')
            if self.progress.step >= self.cfg.max_iters or self.patience_is_over():
                self.display.say(finished(self.cfg))
        else:
            if self.rank == 0 and os.path.exists(self.best):
                os.remove(self.best)
            self.save()
        self.write_log('w')  # without the lines after the checkpoint: their steps are repeated
        if self.cfg.wandb and self.rank == 0:
            self.wandb_run = start_wandb(self.cfg.wandb, self.cfg.out_dir, self.settings())

    def restore(self, saved):
        try:
            for key in ('model', 'optimizer', 'scaler'):
                getattr(self, key).load_state_dict(saved[key])
            progress = dict(saved['progress'])
            if 'since' in progress:  # its name in older checkpoints
                progress['evals_since_best'] = progress.pop('since')
            if differ := progress.keys() ^ vars(self.progress).keys():
                raise ValueError(f'progress: {", ".join(map(str, differ))}')
            progress['log'] = [json_line(json.loads(line)) for line in progress['log']]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as e:
            fault = str(e).splitlines()[0]
            raise ValueError(f'{self.ckpt}: does not fit this run ({fault})') from e
        self.progress = SimpleNamespace(**progress)
        self.note_save()

    def save(self, better=False):
        """ Writes ckpt.pt; before it best.pt, if this state is the best so far. """
        state = {'model': self.model.state_dict(), 'model_config': model_config(self.model.config),
                 'tokenizer': self.data.meta['tokenizer'], 'config': asdict(self.cfg),
                 'run': run_identity(self.cfg, self.data), 'progress': vars(self.progress),
                 'optimizer': self.optimizer.state_dict(), 'scaler': self.scaler.state_dict()}
        if self.rank == 0:
            if better:
                save(state, self.best)
            save(state, self.ckpt)
        self.note_save()

    def note_save(self):
        self.saved_step = self.progress.step
        self.last_saved = f'{self.ckpt} holds step {self.saved_step}, the last good state'

    def evaluation_is_due(self):
        step, history = self.progress.step, self.progress.history
        if history and history[-1][0] == step:
            return False
        return step % self.cfg.eval_interval == 0 or step == self.cfg.max_iters

    @torch.no_grad()
    def evaluate(self, stop=()):
        """ Mean cross-entropy of the validation windows, nats per token; None if a signal came. """
        losses, counts = [], []
        self.model.eval()
        for x, y in self.data.val_batches(self.rank, self.world):
            if stop:
                break
            with self.autocast():
                losses.append(self.net(x, y)[1])
            counts.append(len(x))
        self.model.train()
        total = sum(loss.item() * n for loss, n in zip(losses, counts, strict=True))
        total, count, stopped = self.sum_over_processes(total, sum(counts), len(stop))
        return None if stopped else total / count

    def record_evaluation(self, val_loss):
        """ Logs a validation loss; whether it is the best so far. """
        progress = self.progress
        if not math.isfinite(val_loss):
            raise Diverged(f'validation loss {val_loss} at step {progress.step}; '
                           f'{self.last_saved}; try a lower learning_rate')
        line = f'step {progress.step:5d}: validation loss {val_loss:.4f}'
        train_loss = None
        if progress.loss_count:
            train_loss = progress.loss_sum / progress.loss_count
            line += f', training {train_loss:.4f}'
        if progress.history:
            before = progress.history[-1]
            pace = (progress.seconds - before[3]) / (progress.step - before[0])
            line += f', {pace * 1e3:.0f} ms a step'
        progress.history.append([progress.step, val_loss, train_loss, progress.seconds])
        progress.loss_sum, progress.loss_count = 0.0, 0
        better = val_loss < progress.best_loss
        if better:
            progress.best_loss, progress.best_step = val_loss, progress.step
        progress.evals_since_best = 0 if better else progress.evals_since_best + 1
        self.log(step=progress.step, val_loss=val_loss, train_loss=train_loss,
                 seconds=progress.seconds, skipped=progress.skipped)
        self.display.val_loss = val_loss
        self.display.say(line)
        return better

    def patience_is_over(self):
        return 0 < self.cfg.patience <= self.progress.evals_since_best

    def log(self, **record):
        """ Adds a record to log.jsonl and, if asked for, to wandb. """
        self.progress.log.append(json_line(record))
        self.write_log('a')
        if self.wandb_run:
            self.wandb_run.log(record, step=record['step'])

    def write_log(self, mode):
        """ Writes the last line to log.jsonl (mode 'a') or all of them anew (mode 'w'). """
        lines = self.progress.log[-1:] if mode == 'a' else self.progress.log
        if self.rank == 0:
            with open(self.log_file, mode, encoding='utf-8') as f:
                f.writelines(line + '\n' for line in lines)

    def tokens_per_second(self):
        return self.tokens_per_step * self.progress.step / self.progress.seconds

    def evaluate_only(self, stop):
        """ Prints and returns the validation loss of the weights as they are; writes nothing. """
        val_loss = self.evaluate(stop)
        if val_loss is None:
            raise KeyboardInterrupt
        self.display.say(f'{self.cfg.init_from}: validation loss {val_loss:.4f} '
                         f'on {self.cfg.dataset}')
        return {'residual': self.cfg.residual, 'params': self.model.n_params(),
                'final_loss': val_loss, 'stopped': None, 'init_from': self.cfg.init_from}

    def results(self, stop):
        """ What train returns. """
        progress = self.progress
        losses = [val_loss for _, val_loss, *_ in progress.history] or [None]
        kept = ('best_loss', 'best_step', 'step', 'skipped', 'history', 'seconds')
        return {'residual': self.cfg.residual, 'params': self.model.n_params(),
                'first_loss': losses[0], 'final_loss': losses[-1],
                'stopped': stop[0] if stop else None, 'out_dir': self.cfg.out_dir,
                **{key: getattr(progress, key) for key in kept}}


def first_model(cfg, data):
    """ The model to begin with: its weights are drawn, or they are those of init_from. """
    config, tokenizer = cfg.gpt_config(data.rows), data.meta['tokenizer']
    if not cfg.init_from or (cfg.resume and not cfg.eval_only):  # restore loads a resumed run's
        return GPT(config)
    if os.path.isfile(checkpoint_file(cfg.init_from)):
        return initial_weights(cfg.init_from, config, tokenizer)
    if tokenizer['kind'] != 'gpt2':
        raise ValueError(f'dataset={cfg.dataset!r}: must be of --tokenizer=gpt2 for '
                         f'init_from={cfg.init_from!r}')
    return GPT.from_pretrained(cfg.init_from, **asdict(config))


def kernel_advice(cfg, kernel, like):
    """ On a GPU, a line that says why its faster kernel does not run on tensors like `like`. """
    if like.is_cuda and kernel == 'torch' and cfg.kernel == 'auto':
        return [f'kernel triton cannot run here: {triton_kernels.refusal(like)}']
    return []


def advice(cfg, n_params, tokens_per_step, device):
    """ Lines about settings that are hardly what their user wants. """
    lines = []
    if cfg.decay_lr and 0 < cfg.max_iters <= cfg.warmup_iters:
        lines.append(f'max_iters={cfg.max_iters} ends within warmup_iters={cfg.warmup_iters}: the '
                     f'rate rises to {learning_rate(cfg, cfg.max_iters - 1):.2g} and never reaches '
                     f'learning_rate={cfg.learning_rate:.2g}')
    if device.type == 'cpu':
        operations = 6 * n_params * tokens_per_step * cfg.max_iters
        hours = operations / matmul_speed() / 3600
        if hours > 1:
            lines.append(f'on this CPU, by the speed of a matrix product, {cfg.max_iters} steps of '
                         f'{tokens_per_step:,} tokens take about {hours:,.0f} hours; settings for '
                         'a CPU: python train.py config/shakespeare_char_cpu.toml')
    return lines


def finished(cfg):
    """ What can be done with a run that has nothing left to do. """
    out_dir = shlex.quote(cfg.out_dir)
    return (f'this run is finished: python sample.py --out_dir={out_dir} writes a text with it, '
            f'python train.py --out_dir={out_dir} --eval_only evaluates it, and '
            f'--init_from={out_dir} begins a new run with its weights')


# -----------------------------------------------------------------------------
# Checkpoints.

def read_run(out_dir):
    """ The dict that a run goes on from; ValueError if there is none. """
    path = os.path.join(out_dir, 'ckpt.pt')
    state = load_checkpoint(path)
    for key in ('run', 'config', 'optimizer', 'scaler', 'progress'):
        if key not in state:
            raise ValueError(f'{path}: not a checkpoint of this version of train.py '
                             f'(it lacks {key})')
    for key in ('run', 'config', 'progress'):
        if not isinstance(state[key], dict) or not state[key]:
            raise ValueError(f'{path}: not a checkpoint of train.py (its {key} is empty)')
    return state


def check_folder_is_new(out_dir):
    if {'ckpt.pt', 'best.pt', 'log.jsonl'} & set(os.listdir(out_dir)):
        raise ValueError(f'out_dir={out_dir!r}: must not hold a run already: --resume goes on with '
                         'it, --overwrite replaces it, another out_dir keeps it')


def run_identity(cfg, data):
    """ All that makes a run what it is. """
    identity = {k: v for k, v in asdict(cfg).items() if k not in MAY_CHANGE_ON_RESUME}
    return identity | {'tokenizer': data.meta['tokenizer'], 'token files': data.sha}


def check_identity(cfg, data, old):
    """ ValueError names the first thing in which cfg and data differ from a run to go on with. """
    new = run_identity(cfg, data)
    for key in [*new, *(old.keys() - new.keys())]:
        now = new.get(key)
        was = old.get(key, getattr(TrainConfig, key, None))  # the run may be older than a key
        if now == was:
            continue
        run = f'the run in out_dir={cfg.out_dir!r}'
        if key == 'tokenizer':
            raise ValueError(f'dataset={cfg.dataset!r}: must have the tokenizer of {run}; '
                             'prepare it as before or start a new run')
        if key == 'token files':
            changed = [f'{split}.bin' for split in now if now[split] != was.get(split)]
            raise ValueError(f'dataset={cfg.dataset!r}: must have the text of {run}, '
                             f'{" and ".join(changed)} changed; restore it or start a new run')
        now, was = configuration.brief.repr(now), configuration.brief.repr(was)
        raise ValueError(f'{key}={now}: must be {was}, as in {run}; leave the key out or start a '
                         'new run')


# -----------------------------------------------------------------------------
# The command line.

def complete(values, say=print):
    """ values, {key: value}, completed by the settings of the run that goes on, or of init_from.

    say gets a line if a default does not fit.
    """
    paths = TrainConfig(**{k: values[k] for k in ('out_dir', 'init_from') if k in values})
    ckpt = os.path.join(paths.out_dir, 'ckpt.pt')
    if values.get('resume') or (values.get('eval_only') and not paths.init_from):
        saved = read_run(paths.out_dir)['config']
        known = {f.name: saved[f.name] for f in fields(TrainConfig) if f.name in saved}
        values = known | {'out_dir': paths.out_dir} | values
        if values.get('eval_only'):
            values['init_from'] = ckpt
    elif paths.init_from:
        values = settings_of_weights(paths.init_from) | values
    L = 2 * values.get('n_layer', TrainConfig.n_layer)
    if values.get('residual') == 'block' and L < TrainConfig.residual_blocks:
        if 'residual_blocks' not in values:
            values = values | {'residual_blocks': L}
            say(f'residual_blocks={L}: the default, {TrainConfig.residual_blocks}, is more than '
                f'the {L} sublayers')
    return values


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    values = configuration.parse(TrainConfig, argv, __doc__.split('\n\n')[0])
    try:
        return train(TrainConfig(**complete(values)))
    except ValueError as e:
        configuration.fail(f'{e}{configuration.origin(e, argv)}')
    except RuntimeError as e:
        configuration.fail(e, code=1)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        configuration.fail('interrupted', code=130)


if __name__ == '__main__':
    program.run(main)
