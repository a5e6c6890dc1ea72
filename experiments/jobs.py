""" Training runs that are to be done: each in its folder, some at a time if there are cores. """
import json
import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait

import torch

from config.machine import check_memory, pick_device, pick_dtype
from data.files import when_parent_ends
from experiments import measure
from experiments.common import commit, write_json
from experiments.progress import Progress
from model import RESIDUALS, BlockAttnRes
from train import Diverged, TrainConfig, read_run, train


def canonical(cfg):
    """ One TrainConfig for all that are the same function.

    Block with residual blocks of one sublayer is full; rules not made from it have no such blocks.
    """
    unused = TrainConfig.residual_blocks
    if not issubclass(RESIDUALS[cfg.residual], BlockAttnRes):
        return replace(cfg, residual_blocks=unused)
    S = math.ceil(2 * cfg.n_layer / cfg.residual_blocks)
    if S == 1 and cfg.residual == 'block':
        return replace(cfg, residual='full', residual_blocks=unused)
    return replace(cfg, residual_blocks=math.ceil(2 * cfg.n_layer / S))


@dataclass
class Job:
    """ A run to be done: what it is called, its settings, the folder that keeps it. """
    label: str
    config: TrainConfig
    folder: str
    may_diverge: bool = False  # whether a run that diverges is a result, its final loss being None

    @property
    def name(self):
        return f'{self.label}, seed {self.config.seed}'

    def unfinished(self):
        """ Whether the folder holds the beginning of this run. """
        begun = os.path.exists(os.path.join(self.folder, 'ckpt.pt'))
        return begun and not self.config.overwrite

    def steps_left(self):
        done = read_run(self.folder)['progress'].get('step', 0) if self.unfinished() else 0
        return max(0, self.config.max_iters - done)


def kept(folder):
    """ The result of the finished run in folder, else None. If its file is damaged that is None,
    too: the run then goes on from its last checkpoint, and writes it again.
    """
    with suppress(FileNotFoundError, ValueError):
        with open(os.path.join(folder, 'result.json'), encoding='utf-8') as f:
            result = json.load(f)
        if isinstance(result, dict) and 'commit' in result:  # it is written last
            return result | {'out_dir': folder}
    return None


def run(job, report):
    """ Trains a job, from its checkpoint if it has one, and keeps the result in its folder.

    KeyboardInterrupt if a signal stopped the training, which has saved its state then.
    """
    if job.config.overwrite:
        with suppress(FileNotFoundError):
            os.remove(os.path.join(job.folder, 'result.json'))
    resume = job.unfinished()
    change = {'out_dir': job.folder, 'resume': resume, 'overwrite': not resume}
    try:
        result = train(replace(canonical(job.config), **change), report=report)
    except Diverged as e:
        if not job.may_diverge:
            raise
        result = {'final_loss': None, 'diverged': str(e), 'stopped': None}
    if result['stopped']:
        raise KeyboardInterrupt
    write_json(os.path.join(job.folder, 'result.json'), result | {'commit': commit()})


def ending(job):
    """ How a finished job ended, in words. """
    result = kept(job.folder)
    if result['final_loss'] is None:
        return f'diverged: {result["diverged"]}'
    return f'final loss {result["final_loss"]:.4f}'


# -----------------------------------------------------------------------------
# Side by side.

def in_a_process(job, threads, pipe):
    """ run(job) as all that a process does. What it reports, and why it failed, goes into pipe. """
    torch.set_num_threads(threads)
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))  # then the run saves and ends
    last_sent = 0.0

    def send(record):
        with suppress(OSError):  # the parent has ended
            pipe.send(record)

    def report(record):
        nonlocal last_sent
        if record['message'] or time.monotonic() - last_sent > 0.5:
            last_sent = time.monotonic()
            send(record)

    try:
        run(job, report)
    except (KeyboardInterrupt, ValueError, RuntimeError, OSError) as e:
        send(e)


class Child:
    """ A process that does one job, and the pipe that it reports into. """
    def __init__(self, job, threads):
        context = get_context('spawn')
        self.job = job
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=in_a_process, args=(job, threads, theirs))
        # The child inherits that Ctrl-C is ignored, so only its training listens to it.
        listens = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, listens)
        theirs.close()

    def ended(self, progress):
        """ Shows what has been reported, raises why the job failed; whether it is done. """
        code = self.process.exitcode  # asked before the last report is read
        with suppress(EOFError, OSError):  # the pipe is closed, or a report was cut by a kill
            while self.pipe.poll():
                record = self.pipe.recv()
                if isinstance(record, BaseException):
                    raise record
                progress.update(self.job.name, record)
        if code:
            raise RuntimeError(f'{self.job.name}: its process ended with exit code {code}')
        return code == 0


def side_by_side(jobs, workers, threads, progress):
    """ Does jobs in processes, some at a time. If one ends early all do, and save first. """
    waiting, alive = [*jobs], []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or alive:
            while waiting and len(alive) < workers:
                alive.append(Child(waiting.pop(0), threads))
            wait([child.process.sentinel for child in alive], timeout=0.5)
            for child in [*alive]:
                if child.ended(progress):
                    alive.remove(child)
                    progress.finish(child.job.name, ending(child.job))
    except BaseException:
        for child in alive:
            child.process.terminate()
        for child in alive:
            child.process.join()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def do_all(jobs, workers, threads, meta, val_tokens):
    """ Does jobs, `workers` at a time, each in a process of its own then. """
    progress = Progress(forecast(jobs, meta, val_tokens), workers)
    try:
        if workers > 1:
            side_by_side(jobs, workers, threads, progress)
        else:
            for job in jobs:
                run(job, partial(progress.update, job.name))
                progress.finish(job.name, ending(job))
    finally:
        progress.close()


def forecast(jobs, meta, val_tokens):
    """ What each job will take by itself, {name: (steps, seconds)}; shows each kind of network.

    One step of each kind is timed. An evaluation counts as its forward passes, a third of a step
    each. ValueError if a network does not fit in memory.
    """
    step_seconds, out = {}, {}
    for job in jobs:
        c = canonical(job.config)
        device = pick_device(c.device)
        network = c.gpt_config(c.vocab_size or meta['n_vocab'])
        kind = repr((network, c.batch_size))
        if kind not in step_seconds:
            check_memory(network, c.batch_size, device)
            bench = measure.Bench(network, c.batch_size, device, pick_dtype(c.dtype, device))
            describe, size = bench.model.residual.describe(), bench.model.n_params() / 1e6
            print(f'{job.label}: {describe}; {size:.2f} M parameters', flush=True)
            bench.step()  # the first is slower
            step_seconds[kind] = measure.clock(bench.step, device)
        steps = job.steps_left()
        batches = math.ceil(val_tokens / (c.n_ctx * c.batch_size))  # of an evaluation
        if c.eval_iters:
            batches = min(batches, c.eval_iters)
        evaluations = 1 + steps // c.eval_interval
        passes = steps * c.gradient_accumulation_steps + evaluations * batches / 3
        out[job.name] = steps, step_seconds[kind] * passes
    return out
