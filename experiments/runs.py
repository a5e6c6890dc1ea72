"""
The training runs of an experiment: each is done once, kept under out_dir/runs, and read back later.

A run is keyed by everything that defines it. So experiments share runs, and one that was
interrupted goes on where it was. Runs are paired: one seed means the same weights and the same
batches in every mode.
"""
import ast
import hashlib
import inspect
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import config as configuration
import model
from config.machine import pick_device, pick_dtype
from data.files import sha256
from data.prepare import load
from experiments.common import environment, mode_keys, preset, table, write_json
from experiments.jobs import Job, canonical, do_all, kept
from train import MAY_CHANGE_ON_RESUME, TrainConfig
from weights import checkpoint_file

REFUSED = {'residual': '--modes says what to train',
           'resume': 'unfinished runs go on by themselves',
           'eval_only': 'a comparison trains'}


@dataclass
class RunsConfig(TrainConfig):
    out_dir: str = 'out/compare'  # where results, pictures and the runs go
    modes: str = 'standard,full,block'  # residual rules to compare; block:N: N residual blocks
    seeds: int = 1  # paired runs of each mode, with seeds seed, seed + 1, ...
    workers: int = 0  # runs at the same time, sharing the threads; 0: on a CPU one a core, else 1
    may_diverge = False  # no key: whether a run that diverges counts as a result

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        enough = 1 <= self.seeds <= 2**31 - self.seed
        check('seeds', enough, '1 or more, and seed + seeds at most 2**31')
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
        """ (runs at the same time, threads of each).

        They do not depend on what is left to run: another number of threads gives other bits.
        """
        cores = os.cpu_count() or 1
        if hasattr(os, 'sched_getaffinity'):
            cores = len(os.sched_getaffinity(0))
        on_cpu = pick_device(self.device).type == 'cpu'
        runs = self.workers or (cores if on_cpu else 1)
        return runs, max(1, cores // runs)

    def plain(self, **keys):
        """ The trainer's part of the settings, with keys changed. """
        own = {f.name: getattr(self, f.name) for f in fields(TrainConfig)}
        return TrainConfig(**own | keys)

    def mode_configs(self, **keys):
        """ {label: TrainConfig}, in the order asked for, with keys changed. """
        configs = {}
        for label, mode in mode_keys(self.modes).items():
            try:
                configs[label] = self.plain(**mode, **keys)
            except ValueError as e:
                raise ValueError(f'modes={label!r}: {e}' if ':' in label else e) from e
        return configs


def settings(cls, argv, verb, description, refused=()):
    """ A cls, a kind of RunsConfig, from the command line over the preset of verb.

    refused: keys that another decides. Bad input ends the program.
    """
    name = 'scaling' if verb == 'scaling' else 'compare'
    argv = preset(argv, name)
    description += (f'\nWithout a FILE.toml, config/{name}_cpu.toml or, with a GPU, '
                    f'config/{name}_gpu.toml is read.')
    values = configuration.parse(cls, argv, description, f'compare.py {verb}')
    for key, why in (REFUSED | dict.fromkeys(refused, '--sizes decides it')).items():
        if key in values:
            configuration.fail(f'{key}={values[key]!r}: must be left out: {why}')
    cfg = configuration.build(cls, values, argv)
    torch.set_num_threads(cfg.share[1])  # for what is trained, timed and sampled in this process
    return cfg


# -----------------------------------------------------------------------------
# What makes a run what it is.

def partition(cfg):
    """ What the residual rule does, as a string that is equal for equal functions. """
    cfg = canonical(cfg)
    return f'block:{cfg.residual_blocks}' if cfg.residual == 'block' else cfg.residual


def run_key(cfg, data):
    """ What defines a run, hashed: the same key, the same network on the same batches.

    data: what a config only names: hashes of the token files and of the weights to begin with. The
    code of the model and of the rule counts, too: whoever edits a rule gets new runs.
    """
    device = pick_device(cfg.device)
    ignored = MAY_CHANGE_ON_RESUME - {'patience', 'nonfinite'}
    known = {k: v for k, v in asdict(canonical(cfg)).items() if k not in ignored}
    known |= {'data': data, 'code': code_of(cfg.residual),
              'device': device.type, 'dtype': str(pick_dtype(cfg.dtype, device))}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def code_of(residual):
    """ model.py and the file of the rule, as parsed: comments do not count. """
    files = {model.__file__, inspect.getfile(model.RESIDUALS[residual])}
    return [ast.dump(ast.parse(Path(file).read_bytes())) for file in sorted(files)]


def hashes(meta, init_from):
    """ {file: hash} of the token files and of the weights to begin with. """
    if not init_from:
        return meta['sha256']
    checkpoint = Path(checkpoint_file(init_from))
    files = [checkpoint] if checkpoint.is_file() else Path(init_from).glob('*')  # a GPT-2's folder
    return meta['sha256'] | {path.name: sha256(path) for path in files if path.is_file()}


def run_all(todo, cfg):
    """ The results of todo, a list of (label, TrainConfig), in its order. cfg: RunsConfig.

    Equal runs are trained once. On a CPU several are trained at a time, unless cfg.workers says
    otherwise: one small network cannot keep all cores busy.
    """
    meta, tokens = load(cfg.dataset)
    data = hashes(meta, cfg.init_from)
    folders, jobs = [], {}
    for label, c in todo:
        name = f'{partition(c).replace(":", "-")}-{c.seed}-{run_key(c, data)}'
        folder = os.path.join(cfg.out_dir, 'runs', name)
        folders.append(folder)
        jobs[folder] = Job(label, c, folder, cfg.may_diverge)
    missing = [job for job in jobs.values() if cfg.overwrite or not is_done(job)]
    if len(missing) < len(jobs):
        print(f'{len(jobs) - len(missing)} of {len(jobs)} runs are kept from an earlier call')
    if missing:
        at_once, threads = cfg.share
        do_all(missing, min(at_once, len(missing)), threads, meta, len(tokens['val']))
    return [kept(folder) for folder in folders]


def is_done(job):
    result = kept(job.folder)
    return result is not None and ('diverged' not in result or job.may_diverge)


def commits(results):
    """ The commits that runs were made at. """
    return ', '.join(sorted({r['commit'] or 'unknown' for r in results}))


# -----------------------------------------------------------------------------
# Experiments that are a grid of runs: sweep and scaling.

def final_losses(cfg, points, title):
    """ Trains every mode at points, {point: keys that are changed there}: what the JSON says of it.

    'final_loss': {label: {point: [final loss, one a seed]}}, 'commit': those of the runs.
    """
    grid = []
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        for point, keys in points.items():
            for label, c in cfg.mode_configs(**keys, seed=seed).items():
                grid.append((label, point, c))
    results = run_all([(f'{label}, {title.format(point)}', c) for label, point, c in grid], cfg)
    losses = {label: {point: [] for point in points} for label in cfg.mode_configs()}
    for (label, point, _), result in zip(grid, results, strict=True):
        losses[label][point].append(result['final_loss'])
    return {'final_loss': losses, 'commit': commits(results)}


def heading(verb, argv, cfg):
    """ What the JSON of a grid begins with: how it was made. """
    return {'command': ' '.join(filter(None, ['python compare.py', verb, *argv])),
            **environment(pick_device(cfg.device)), 'config': asdict(cfg), 'base': cfg.base}


def conclude(verb, cfg, data, rows, lines, picture):
    """ Writes VERB.json and VERB.png; shows the table, the sentences, the paths. Returns data. """
    write_json(os.path.join(cfg.out_dir, f'{verb}.json'), data)
    picture(data, os.path.join(cfg.out_dir, f'{verb}.png'))
    print('\n' + table(rows) + '\n\n' + '\n'.join(lines))
    print(f'\nwrote {verb}.json and {verb}.png into {cfg.out_dir}')
    return data
