"""
Training runs that an experiment asks for: each is done once, kept under out_dir/runs, and read back afterwards.

A run is keyed by everything that defines it, so experiments share runs, and one that was interrupted goes on where it
was. Runs are paired: one seed means the same weights and the same batches in every mode.
"""
import hashlib
import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import active_children, get_context

import torch

import config as configuration
from data.prepare import load
from experiments.common import mode_keys, preset, write_json
from train import FREE, TrainConfig, pick_device, train


@dataclass
class RunsConfig(TrainConfig):
    out_dir: str = 'out/compare'  # where results, pictures and the runs go
    modes: str = 'standard,full,block'  # what to compare: residual rules; block:N fixes the number of residual blocks
    seeds: int = 1  # paired runs of each mode, with seeds seed, seed + 1, ...
    workers: int = 0  # runs at the same time, sharing the threads; 0: on a CPU one a core, else 1

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        check('seeds', 1 <= self.seeds <= 2**31 - self.seed, '1 or more, and seed + seeds at most 2**31')
        check('workers', 0 <= self.workers <= 256, 'from 0 to 256')
        self.mode_configs()

    @property
    def base(self):
        """ What the others are compared with: standard, else the first mode. """
        labels = list(mode_keys(self.modes))
        return 'standard' if 'standard' in labels else labels[0]

    def plain(self, **keys):
        """ The trainer's part of the settings, with keys changed. """
        return TrainConfig(**{k: v for k, v in asdict(self).items() if hasattr(TrainConfig, k)} | keys)

    def mode_configs(self, **keys):
        """ {label: TrainConfig}, in the order asked for, with keys changed. """
        return {label: self.plain(**mode, **keys) for label, mode in mode_keys(self.modes).items()}


def settings(cls, argv, name, description, refused=()):
    """ A cls, a kind of RunsConfig, from the command line over the preset called name. Bad input ends the program. """
    values = configuration.parse(cls, preset(argv, name), description)
    for key in ('residual', 'resume', *refused):
        if key in values:
            configuration.fail(f'{key}={values[key]!r}: must be left out: --modes and the like say what to train, and '
                               'unfinished runs are resumed')
    return configuration.build(cls, values)


def partition(cfg):
    """ What the residual rule does, as a string that is equal for equal functions: block with S = 1 is full. """
    S = {'full': 1, 'block': -(-2 * cfg.n_layer // cfg.residual_blocks)}.get(cfg.residual)
    return cfg.residual if S is None else f'attnres, S={S}'


def run_key(cfg, data):
    """ What defines a run, hashed: two configs with the same key train the same network on the same batches. """
    skip = FREE | {'residual', 'residual_blocks'}
    text = json.dumps([{k: v for k, v in sorted(asdict(cfg).items()) if k not in skip}, partition(cfg), data])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(cfg, root, data, title, label=''):
    """ The result of one training run: read if it is there, else trained, from its checkpoint if it has one. """
    folder = os.path.join(root, 'runs', f'{partition(cfg).replace(", S=", "-")}-{cfg.seed}-{run_key(cfg, data)}')
    done = os.path.join(folder, 'result.json')
    if os.path.exists(done) and not cfg.overwrite:
        with open(done, encoding='utf-8') as f:
            result = json.load(f)
        print(f'{title}: kept from an earlier call ({folder})', flush=True)
        return result
    print(title, flush=True)
    unfinished = os.path.exists(os.path.join(folder, 'ckpt.pt')) and not cfg.overwrite
    change = {'out_dir': folder, 'resume': unfinished, 'overwrite': not unfinished}
    result = train(replace(cfg, **change), label=label)
    if result['stopped']:
        print(f'{result["stopped"]}: the same command goes on from here')
        raise SystemExit(130)
    write_json(done, result)
    return result


def in_worker(*call):
    """ run(*call), but after a run that was stopped no other: the pool has handed out the next one by then. """
    if in_worker.stopped:
        raise SystemExit(130)
    try:
        return run(*call)
    except SystemExit:
        in_worker.stopped = True
        raise


in_worker.stopped = False


def run_all(todo, cfg):
    """ The results of todo, a list of (label, TrainConfig), in its order; equal runs are trained once. cfg: RunsConfig

    On a CPU several at a time, unless cfg.workers says otherwise: one small network cannot keep all cores busy.
    """
    data, cpu = load(cfg.dataset)[0]['sha256'], pick_device(cfg.device).type == 'cpu'
    keys, unique = [run_key(c, data) for _, c in todo], {}
    for key, pair in zip(keys, todo, strict=True):
        unique.setdefault(key, pair)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    workers = min(cfg.workers or (cores if cpu else 1), len(unique))
    calls = [(c, cfg.out_dir, data, f'[{i}/{len(unique)}] {label}, seed {c.seed}', f'{label}: ' if workers > 1 else '')
             for i, (label, c) in enumerate(unique.values(), 1)]
    if workers == 1:
        results = [run(*call) for call in calls]
    else:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ProcessPoolExecutor(workers, mp_context=get_context('spawn'), initializer=torch.set_num_threads,
                                 initargs=(max(1, cores // workers),)) as pool:
            try:
                results = [f.result() for f in [pool.submit(in_worker, *call) for call in calls]]
            except BaseException:  # whatever it is, the runs under way save and stop
                for child in active_children():
                    child.terminate()
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                signal.signal(signal.SIGTERM, before)
    results = dict(zip(unique, results, strict=True))
    return [results[k] for k in keys]


def final_losses(cfg, points, title):
    """ {label: {point: [final loss, one a seed]}} of every mode at points, {point: keys that are changed there}. """
    grid = [(label, p, c) for s in range(cfg.seeds) for p, keys in points.items()
            for label, c in cfg.mode_configs(**keys, seed=cfg.seed + s).items()]
    out = {label: {p: [] for p in points} for label in cfg.mode_configs()}
    results = run_all([(f'{label}, {title.format(p)}', c) for label, p, c in grid], cfg)
    for (label, p, _), result in zip(grid, results, strict=True):
        out[label][p].append(result['final_loss'])
    return out
