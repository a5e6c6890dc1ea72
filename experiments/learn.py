"""
Measures what LEARN.md says: trains the rules, and every edit of that page applied to a copy.

    python -m experiments.learn

An edit is a diff block of LEARN.md. Finished runs are kept in out/learn, so the same command goes
on where it was stopped. It writes assets/learn.json and assets/mixing.png.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from data.prepare import load
from experiments import pictures
from experiments.common import environment, write_json
from experiments.depth import DepthConfig, examine
from train import read_run
from weights import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
RULES = 'standard', 'highway', 'denseformer', 'mhc', 'full', 'block'  # as in the picture
COMPARED = 'standard', 'full', 'block'
SEEDS = 1337, 1338, 1339, 1340, 1341
EDIT = re.compile(r'### (\d)\..*?--residual=(\w+).*?```diff\n(.*?)```', re.DOTALL)


def edits():
    """ {'edit 1': (residual, diff)} and so on, as LEARN.md has them. """
    page = (ROOT / 'LEARN.md').read_text(encoding='utf-8')
    return {f'edit {number}': (residual, diff) for number, residual, diff in EDIT.findall(page)}


def apply(diff, source):
    """ source with the lines of a diff changed; ValueError unless they stand there just once. """
    lines = diff.splitlines()
    old = ''.join(line[1:] + '\n' for line in lines if not line.startswith('+'))
    new = ''.join(line[1:] + '\n' for line in lines if not line.startswith('-'))
    if source.count(old) != 1:
        raise ValueError(f'LEARN.md: these lines must be in model.py once:\n{old}')
    return source.replace(old, new)


def copy(folder, diff=''):
    """ Writes the trainer and what it needs into folder, with model.py changed by the diff. """
    for path in ROOT.glob('*.py'):
        shutil.copy(path, folder)
    for name in ('config', 'data'):
        shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns('enwik8'))
    if diff:
        model = Path(folder, 'model.py')
        model.write_text(apply(diff, model.read_text(encoding='utf-8')), encoding='utf-8')


def trained(residual, seed, diff='', *settings):
    """ The folder of a finished run with the rule, edited by diff. Trains if there is none. """
    name = f'{residual}-{hashlib.sha256(diff.encode()).hexdigest()[:8]}-{seed}'
    folder = ROOT / 'out' / 'learn' / name
    command = [sys.executable, 'train.py', 'config/learn.toml', f'--out_dir={folder}',
               f'--residual={residual}', f'--seed={seed}', *settings]
    if not (folder / 'finished').exists():
        with TemporaryDirectory() as there:
            copy(there, diff)
            done = subprocess.run([*command, '--overwrite'], cwd=there, capture_output=True,
                                  text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
        if done.returncode:
            raise RuntimeError(f'{name}: {done.stderr[-2000:]}')
        (folder / 'finished').touch()
        print(f'{name}: {final_loss(folder):.4f}', flush=True)
    return folder


def final_loss(folder):
    return read_run(str(folder))['progress']['history'][-1][1]


def query_norm(folder):
    """ The mean length of a run's pseudo-queries, None if its rule has none. """
    query = load_checkpoint(str(folder / 'ckpt.pt'))['model'].get('residual.query')
    return None if query is None else query.norm(dim=-1).mean().item()


def main():
    load('shakespeare_char')  # prepared once, before copies are made
    todo = {label: (label, '') for label in COMPARED} | edits()
    wanted = [(label, seed, *todo[label]) for seed in SEEDS for label in todo]
    wanted += [(label, SEEDS[0], label, '') for label in RULES if label not in COMPARED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = list(pool.map(lambda job: trained(job[2], job[1], job[3]), wanted))
    modes, shown = {label: {'final_loss': [], 'query_norm': []} for label in todo}, {}
    for (label, seed, *_), folder in zip(wanted, folders, strict=True):
        if label in modes:
            modes[label]['final_loss'].append(final_loss(folder))
            modes[label]['query_norm'].append(query_norm(folder))
        if label in RULES and seed == SEEDS[0]:
            shown[label] = examine(str(folder), DepthConfig(), torch.device('cpu'))[1]
    data = {'command': 'python -m experiments.learn', **environment(torch.device('cpu')),
            'seeds': SEEDS, 'modes': modes}
    write_json(ROOT / 'assets' / 'learn.json', data)
    pictures.depth({label: shown[label] for label in RULES}, ROOT / 'assets' / 'mixing.png')


if __name__ == '__main__':
    main()
