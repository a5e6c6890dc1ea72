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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from glob import glob
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread

import torch

import config as configuration
from data.prepare import load
from experiments.common import commit, environment, mode_keys, preset, table, write_json
from train import MAY_CHANGE_ON_RESUME, Diverged, TrainConfig, pick_device, pick_dtype, train
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


def run(cfg, folder, title, label='', goes_on=False):
    """ Trains cfg in folder, from its checkpoint if it has one, and keeps the result there. """
    print(title, flush=True)
    if cfg.overwrite:
        with suppress(FileNotFoundError):
            os.remove(os.path.join(folder, 'result.json'))
    unfinished = os.path.exists(os.path.join(folder, 'ckpt.pt')) and not cfg.overwrite
    change = {'out_dir': folder, 'resume': unfinished, 'overwrite': not unfinished}
    try:
        result = train(replace(canonical(cfg), **change), label=label)
    except Diverged as e:
        if not goes_on:
            raise
        print(f'{label}diverged: {e}')
        result = {'final_loss': None, 'diverged': str(e), 'stopped': None}
    if result['stopped']:
        print(f'{result["stopped"]}: the same command{" without --overwrite" * cfg.overwrite} goes on from here')
        raise SystemExit(130)
    write_json(os.path.join(folder, 'result.json'), result | {'commit': commit()})


def alone(threads, *call):
    """ run(*call) as all that a process does. """
    torch.set_num_threads(threads)
    parent = parent_process()  # if that is killed, this saves and ends
    Thread(target=lambda: (parent.join(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    try:
        run(*call)
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)


def side_by_side(calls, workers, threads):
    """ Runs in processes of their own, some at a time. Whatever ends one of them early ends all; they save first. """
    waiting, alive, context = [*calls], {}, get_context('spawn')
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or alive:
            while waiting and len(alive) < workers:
                process = context.Process(target=alone, args=(threads, *waiting[0]))
                listens = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: there, only training listens to it
                process.start()
                signal.signal(signal.SIGINT, listens)
                alive[process.sentinel] = process, waiting.pop(0)
            for sentinel in wait([*alive]):
                process, (_, _, title, *_) = alive.pop(sentinel)
                process.join()
                if process.exitcode < 0:
                    raise RuntimeError(f'{title}: its process was killed by {signal.Signals(-process.exitcode).name}')
                if process.exitcode:  # it said why
                    raise SystemExit(process.exitcode)
    except BaseException:
        for process, _ in alive.values():
            process.terminate()
        for process, _ in alive.values():
            process.join()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def run_all(todo, cfg):
    """ The results of todo, a list of (label, TrainConfig), in its order; equal runs are trained once. cfg: RunsConfig

    On a CPU several at a time, unless cfg.workers says otherwise: one small network cannot keep all cores busy.
    """
    data = load(cfg.dataset)[0]['sha256']
    start = cfg.init_from and checkpoint_file(cfg.init_from)
    files = [start] if os.path.isfile(start) else sorted(glob(os.path.join(cfg.init_from, '*'))) if start else []
    for path in filter(os.path.isfile, files):  # the checkpoint that is loaded, or all of a GPT-2's folder
        with open(path, 'rb') as f:
            data = data | {os.path.basename(path): hashlib.file_digest(f, 'sha256').hexdigest()}
    folders = [os.path.join(cfg.out_dir, 'runs', f'{partition(c).replace(":", "-")}-{c.seed}-{run_key(c, data)}')
               for _, c in todo]
    unique = {folder: pair for folder, pair in zip(folders, todo, strict=True)}
    new = [folder for folder in unique if cfg.overwrite or (result := kept(folder)) is None
           or 'diverged' in result and not cfg.goes_on]
    if len(new) < len(unique):
        print(f'{len(unique) - len(new)} of {len(unique)} runs are kept from an earlier call')
    (most, threads), calls = cfg.share, []
    workers = min(most, len(new))
    for i, folder in enumerate(new, 1):
        (label, c), number = unique[folder], f'[{i}/{len(new)}] '
        calls.append((c, folder, f'{number}{label}, seed {c.seed}', number if workers > 1 else '', cfg.goes_on))
    if workers > 1:
        side_by_side(calls, workers, threads)
    else:
        for call in calls:
            run(*call)
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
    """ Shows the table and the sentences, writes VERB.json and VERB.png, prints the JSON in a line. Returns data. """
    print('\n' + table(rows) + '\n\n' + '\n'.join(lines))
    write_json(os.path.join(cfg.out_dir, f'{verb}.json'), data)
    picture(data, os.path.join(cfg.out_dir, f'{verb}.png'))
    print(f'\nwrote {verb}.json and {verb}.png into {cfg.out_dir}')
    print(json.dumps({k: v for k, v in data.items() if k != 'config'}))
    return data
