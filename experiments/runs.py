"""
Training runs that an experiment asks for: each is done once, kept under out_dir/runs, and read back afterwards.

A run is keyed by everything that defines it, so experiments share runs, and one that was interrupted goes on where it
was. Runs are paired: one seed means the same weights and the same batches in every mode.
"""
import hashlib
import json
import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import glob
from multiprocessing import get_context
from multiprocessing.connection import wait

import torch

import config as configuration
from data.files import when_parent_ends
from data.prepare import load
from experiments import measure
from experiments.common import commit, environment, mode_keys, preset, table, write_json
from experiments.progress import Progress
from train import MAY_CHANGE_ON_RESUME, Diverged, TrainConfig, check_memory, pick_device, pick_dtype, read_run, train
from weights import checkpoint_file


@dataclass
class RunsConfig(TrainConfig):
    out_dir: str = 'out/compare'  # where results, pictures and the runs go
    modes: str = 'standard,full,block'  # what to compare: residual rules; block:N fixes the number of residual blocks
    seeds: int = 1  # paired runs of each mode, with seeds seed, seed + 1, ...
    workers: int = 0  # runs at the same time, sharing the threads; 0: on a CPU one a core, else 1
    goes_on = False  # no setting: whether a run that diverges is a result, its final loss being None

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        check('seeds', 1 <= self.seeds <= 2**31 - self.seed, '1 or more, and seed + seeds at most 2**31')
        check('workers', 0 <= self.workers <= 256, 'from 0 to 256')
        check('patience', self.patience == 0, '0 here: all modes take the same steps')
        mode_keys(self.modes)

    @property
    def base(self):
        """ What the others are compared with: standard, else the first mode. """
        labels = list(mode_keys(self.modes))
        return 'standard' if 'standard' in labels else labels[0]

    @property
    def share(self):
        """ (runs at the same time, threads of each), whatever is left to run: the number of threads changes bits """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        runs = self.workers or (cores if pick_device(self.device).type == 'cpu' else 1)
        return runs, max(1, cores // runs)

    def plain(self, **keys):
        """ The trainer's part of the settings, with keys changed. """
        return TrainConfig(**{k: v for k, v in asdict(self).items() if hasattr(TrainConfig, k)} | keys)

    def mode_configs(self, **keys):
        """ {label: TrainConfig}, in the order asked for, with keys changed. """
        return {label: self.plain(**mode, **keys) for label, mode in mode_keys(self.modes).items()}


def settings(cls, argv, name, description, refused=()):
    """ A cls, a kind of RunsConfig, from the command line over the preset called name. Bad input ends the program. """
    values = configuration.parse(cls, preset(argv, name), description)
    instead = {'residual': '--modes says what to train', 'resume': 'unfinished runs go on by themselves'}
    for key, why in {**instead, **dict.fromkeys(refused, '--sizes decides it')}.items():
        if key in values:
            configuration.fail(f'{key}={values[key]!r}: must be left out: {why}')
    cfg = configuration.build(cls, values)
    torch.set_num_threads(cfg.share[1])  # for what is trained, timed and sampled in this process
    return cfg


def canonical(cfg):
    """ One config for all that are the same function: block with S = 1 is full, N counts in block mode only. """
    S, blocks = math.ceil(2 * cfg.n_layer / cfg.residual_blocks), TrainConfig.residual_blocks
    if cfg.residual != 'block':
        return replace(cfg, residual_blocks=blocks)
    return replace(cfg, residual='full', residual_blocks=blocks) if S == 1 else \
        replace(cfg, residual_blocks=math.ceil(2 * cfg.n_layer / S))


def partition(cfg):
    """ What the residual rule does, as a string that is equal for equal functions. """
    cfg = canonical(cfg)
    return cfg.residual + (f':{cfg.residual_blocks}' if cfg.residual == 'block' else '')


def run_key(cfg, data):
    """ What defines a run, hashed: two configs with the same key train the same network on the same batches.

    data: what a config only names: hashes of the token files and of the weights to begin with.
    """
    device = pick_device(cfg.device)
    ignored = MAY_CHANGE_ON_RESUME - {'patience', 'nonfinite'}
    known = {k: v for k, v in asdict(canonical(cfg)).items() if k not in ignored}
    known |= {'data': data, 'device': device.type, 'dtype': str(pick_dtype(cfg.dtype, device))}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def kept(folder):
    """ The result of the finished run in folder, else None: if its file is damaged, the checkpoint can tell again. """
    with suppress(FileNotFoundError, ValueError):
        with open(os.path.join(folder, 'result.json'), encoding='utf-8') as f:
            result = json.load(f)
        if isinstance(result, dict) and 'commit' in result:  # written last
            return result | {'out_dir': folder}
    return None


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
        return os.path.exists(os.path.join(self.folder, 'ckpt.pt')) and not self.config.overwrite

    def steps_left(self):
        done = read_run(self.folder)['progress'].get('step', 0) if self.unfinished() else 0
        return max(0, self.config.max_iters - done)


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


def in_a_process(job, threads, pipe):
    """ run(job) as all that a process does. What it reports, and why it failed, goes into pipe. """
    torch.set_num_threads(threads)
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))  # then the run saves and ends
    last_sent = 0.0

    def report(record):
        nonlocal last_sent
        if record['message'] or time.monotonic() - last_sent > 0.5:
            last_sent = time.monotonic()
            with suppress(OSError):  # the parent has ended
                pipe.send(record)
    try:
        run(job, report)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, RuntimeError) as e:
        with suppress(OSError):
            kind = ValueError if isinstance(e, ValueError) else RuntimeError
            pipe.send(kind(str(e)))
        raise SystemExit(1) from None


class Child:
    """ A process that does one job, and the pipe that it reports into. """
    def __init__(self, job, threads):
        context = get_context('spawn')
        self.job, self.error = job, None
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=in_a_process, args=(job, threads, theirs))
        # The child inherits that it ignores Ctrl-C, except while it trains.
        listens = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, listens)
        theirs.close()

    def read(self, progress):
        """ Shows what has been reported. """
        with suppress(EOFError, OSError):  # it has closed the pipe, or was killed in the middle of a report
            while self.pipe.poll():
                record = self.pipe.recv()
                if isinstance(record, Exception):
                    self.error = record
                else:
                    progress.update(self.job.name, record)

    def check(self):
        """ Raises the reason why the process, which has ended, did not finish its job. """
        code = self.process.exitcode
        if self.error:
            raise self.error
        if code == 130:
            raise KeyboardInterrupt
        if code < 0:
            signal_name = signal.Signals(-code).name
            raise RuntimeError(f'{self.job.name}: its process was killed by {signal_name}')
        if code:
            raise RuntimeError(f'{self.job.name}: its process ended with exit code {code}')


def side_by_side(jobs, workers, threads, progress):
    """ Does jobs in processes of their own, some at a time. Whatever ends one early ends all; they save first. """
    waiting, alive = [*jobs], []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or alive:
            while waiting and len(alive) < workers:
                alive.append(Child(waiting.pop(0), threads))
            wait([child.process.sentinel for child in alive], timeout=0.5)
            for child in [*alive]:
                ended = child.process.exitcode is not None  # asked first: what it sent last is read below
                child.read(progress)
                if ended:
                    alive.remove(child)
                    child.check()
                    progress.finish(child.job.name, ending(child.job))
    except BaseException:
        for child in alive:
            child.process.terminate()
        for child in alive:
            child.process.join()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def forecast(jobs, meta, val_tokens):
    """ What each job will take by itself, {name: (steps, seconds)}. One step of each kind of network is timed for it.

    An evaluation counts as its forward passes, each a third of a step. ValueError if a network does not fit in memory.
    """
    step_seconds, out = {}, {}
    for job in jobs:
        c = canonical(job.config)
        device = pick_device(c.device)
        model = c.model(c.vocab_size or meta['n_vocab'])
        kind = repr((model, c.batch_size))
        if kind not in step_seconds:
            check_memory(model, c.batch_size, device)
            bench = measure.Bench(model, c.batch_size, device, pick_dtype(c.dtype, device))
            describe, size = bench.model.residual.describe(), bench.model.n_params() / 1e6
            print(f'{job.label}: {describe}; {size:.2f} M parameters')
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


def do_all(jobs, workers, threads, progress):
    """ Does jobs, some at a time, each in a process of its own then. """
    try:
        if workers > 1:
            side_by_side(jobs, workers, threads, progress)
        else:
            for job in jobs:
                run(job, partial(progress.update, job.name))
                progress.finish(job.name, ending(job))
    finally:
        progress.close()


def run_all(todo, cfg):
    """ The results of todo, a list of (label, TrainConfig), in its order; equal runs are trained once.

    cfg: RunsConfig. On a CPU several are trained at a time, unless cfg.workers says otherwise: one small network cannot
    keep all cores busy.
    """
    meta, tokens = load(cfg.dataset)
    data = meta['sha256']
    start = cfg.init_from and checkpoint_file(cfg.init_from)
    files = [start] if os.path.isfile(start) else sorted(glob(os.path.join(cfg.init_from, '*'))) if start else []
    for path in filter(os.path.isfile, files):  # the checkpoint that is loaded, or all of a GPT-2's folder
        with open(path, 'rb') as f:
            data = data | {os.path.basename(path): hashlib.file_digest(f, 'sha256').hexdigest()}
    folders = [os.path.join(cfg.out_dir, 'runs', f'{partition(c).replace(":", "-")}-{c.seed}-{run_key(c, data)}')
               for _, c in todo]
    unique = {folder: pair for folder, pair in zip(folders, todo, strict=True)}
    jobs = []
    for folder, (label, c) in unique.items():
        result = None if cfg.overwrite else kept(folder)
        if result is None or 'diverged' in result and not cfg.goes_on:
            jobs.append(Job(label, c, folder, cfg.goes_on))
    if len(jobs) < len(unique):
        print(f'{len(unique) - len(jobs)} of {len(unique)} runs are kept from an earlier call')
    if jobs:
        most, threads = cfg.share
        workers = min(most, len(jobs))
        progress = Progress(forecast(jobs, meta, len(tokens['val'])), workers)
        do_all(jobs, workers, threads, progress)
    return [kept(folder) for folder in folders]


def commits(results):
    """ The commits that runs were made at. """
    return ', '.join(sorted({r['commit'] or 'unknown' for r in results}))


def final_losses(cfg, points, title):
    """ Trains every mode at points, {point: keys that are changed there}: what a grid's JSON says of it.

    'final_loss': {label: {point: [final loss, one a seed]}}, 'commit': those of the runs.
    """
    grid = [(label, p, c) for s in range(cfg.seeds) for p, keys in points.items()
            for label, c in cfg.mode_configs(**keys, seed=cfg.seed + s).items()]
    out = {label: {p: [] for p in points} for label in cfg.mode_configs()}
    results = run_all([(f'{label}, {title.format(p)}', c) for label, p, c in grid], cfg)
    for (label, p, _), result in zip(grid, results, strict=True):
        out[label][p].append(result['final_loss'])
    return {'final_loss': out, 'commit': commits(results)}


def heading(verb, argv, cfg):
    """ What the JSON of a grid begins with: how it was made. """
    return {'command': ' '.join([f'python compare.py {verb}', *argv]), **environment(pick_device(cfg.device)),
            'config': asdict(cfg), 'base': cfg.base}


def conclude(verb, cfg, data, rows, lines, picture):
    """ Writes VERB.json and VERB.png; shows the table, the sentences and where the files are. Returns data. """
    write_json(os.path.join(cfg.out_dir, f'{verb}.json'), data)
    picture(data, os.path.join(cfg.out_dir, f'{verb}.png'))
    print('\n' + table(rows) + '\n\n' + '\n'.join(lines))
    print(f'\nwrote {verb}.json and {verb}.png into {cfg.out_dir}')
    return data
