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
from experiments.common import ROOT, environment, write_json
from experiments.depth import DepthConfig, examine
from train import read_run
from weights import load_checkpoint

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
    shutil.copytree(ROOT / 'config', Path(folder, 'config'))
    shutil.copytree(ROOT / 'data', Path(folder, 'data'), ignore=other_texts)
    Path(folder, 'model.py').write_text(model_after(diff), encoding='utf-8')


def other_texts(folder, names):
    return [name for name in names if Path(folder, name).is_dir() and name != 'shakespeare_char']


def model_after(diff):
    """ The text of model.py, edited by the diff if there is one. """
    source = (ROOT / 'model.py').read_text(encoding='utf-8')
    return apply(diff, source) if diff else source


def trained(seed, residual, diff=''):
    """ The folder of a finished run with the rule, edited by diff. Trains if there is none. """
    defined = model_after(diff) + (ROOT / 'config' / 'learn.toml').read_text(encoding='utf-8')
    name = f'{residual}-{hashlib.sha256(defined.encode()).hexdigest()[:8]}-{seed}'
    folder = ROOT / 'out' / 'learn' / name
    command = [sys.executable, 'train.py', 'config/learn.toml', f'--out_dir={folder}',
               f'--residual={residual}', f'--seed={seed}']
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
        folders = list(pool.map(lambda job: trained(*job[1:]), wanted))
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
