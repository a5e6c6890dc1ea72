"""
Writes RESULTS.md: everything measured, from the JSON in assets/, and draws its pictures.

    python compare.py results                        writes the page, draws the pictures
    python compare.py results --check                exit code 1 if the page is out of date
    python compare.py results --rerun --only=rates   first trains all behind that part anew

assets/results.toml lists the parts. The words above the second of the two marks in HAND are written
by hand and kept as they are.
"""
import json
import os
import shutil
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean

import torch

import config as configuration
import model
from data.prepare import load
from experiments import depth, loss, pictures, scaling, sweep
from experiments import speed as cost
from experiments.common import environment, mode_keys, write_json

ROOT = Path(__file__).resolve().parent.parent
HAND = '<!-- written by hand -->', '<!-- the rest is generated: python compare.py results -->'
PARTS = tomllib.loads((ROOT / 'assets' / 'results.toml').read_text(encoding='utf-8'))


@dataclass
class ResultsConfig:
    check: bool = False  # write nothing; exit code 1 if RESULTS.md is out of date
    rerun: bool = False  # first train and time everything anew, from where it was stopped: hours
    only: str = ''  # of --rerun: the parts to run, separated by commas; by default all

    def __post_init__(self):
        check = configuration.checker(self)
        can = [name for name, part in PARTS.items() if 'argv' in part]
        self.parts = [name for name in can if not self.only or name in self.only.split(',')]
        check('only', set(self.only.split(',')) <= {'', *can}, 'some of ' + ', '.join(can))
        check('only', self.rerun or not self.only, 'used with --rerun')


def asset(name):
    """ The JSON of a part, or None. """
    path = ROOT / 'assets' / f'{name}.json'
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else None


# -----------------------------------------------------------------------------
# The page.

def markdown(rows):
    """ Rows of strings as a Markdown table. """
    head, *body = rows
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in (head, ('---',) * len(head), *body))


def bullets(lines):
    return '\n'.join(f'- {line}' for line in lines)


def picture(name, alt):
    return f'![{alt}](assets/{name}.png)'


def setting(c):
    tokens = c['batch_size'] * c['gradient_accumulation_steps'] * c['n_ctx']
    return (f'{c["dataset"]}, {c["n_layer"]} transformer blocks of width {c["n_embd"]}, '
            f'context {c["n_ctx"]}, {c["max_iters"]} steps of {tokens:,} tokens, '
            f'warm-up {c["warmup_iters"]}, learning rate {c["learning_rate"]:g}, '
            f'beta2 {c["beta2"]:g}; {c["seeds"]} paired seeds, 95 % intervals.')


def show_loss(name, data):
    return [setting(data['config']), markdown(loss.cells(data, loss.COLUMNS)),
            picture(name, 'validation loss against steps and against time')]


def show_dots(name, data):
    return [setting(data['config']), markdown(loss.cells(data, loss.COLUMNS)),
            picture(name, 'differences with their intervals, beside the paper\'s')]


def show_sweep(name, data):
    return [setting(data['config']), markdown(sweep.cells(data, full=True)),
            bullets(sweep.verdicts(data)), picture(name, 'final loss by setting')]


def show_scaling(name, data):
    return [setting(data['config']), markdown(scaling.cells(data)),
            bullets(scaling.verdicts(data)), picture(name, 'loss over compute')]


def show_speed(name, data):
    c = data['config']
    head = (f'{c["n_layer"]} transformer blocks of width {c["n_embd"]}, context {c["n_ctx"]}, '
            f'batch {c["batch_size"]}; threads: {data["threads"]}.')
    return [head, markdown(cost.cells(data['rows']))]


def show_traffic(name, data):
    return [markdown([('rule', 'u'), *((label, str(u)) for label, u in data['u'].items())])]


def show_depth(name, data):
    return [markdown(depth.cells(data['modes'])), picture('depth', 'depth-mixing matrices'),
            'Magnitude and gradient along depth:',
            picture('dynamics', 'magnitude and gradient along depth')]


def show_start(name, data):
    rows = [('recipe', *(f'seed {seed}' for seed in data['seeds']), 'mean')]
    for recipe, runs in data['runs'].items():
        final = [run['validation loss'][-1] for run in runs]
        rows.append((recipe, *(f'{loss:.3f}' for loss in (*final, mean(final)))))
    return [markdown(rows), picture(name, 'the first steps of training')]


SHOW = {'loss': show_loss, 'dots': show_dots, 'sweep': show_sweep, 'scaling': show_scaling,
        'speed': show_speed, 'traffic': show_traffic, 'depth': show_depth, 'start': show_start}


def render(text):
    """ RESULTS.md made anew: the words by hand in text, then each part that has been measured. """
    begin, end = HAND
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f'RESULTS.md: must have one {begin} and one {end}')
    pieces = [text[:text.index(end) + len(end)]]
    for name, part in PARTS.items():
        data = asset(name)
        if data:
            commit = (data['commit'] or 'unknown').replace('+', ' with changes')
            pieces += [f'## {part["title"]}', part['caption'], *SHOW[part['kind']](name, data),
                       f'Made by `{data["command"]}`, torch {data["torch"]}, {data["device"]}, '
                       f'commit {commit}.']
    return '\n\n'.join(pieces) + '\n'


# -----------------------------------------------------------------------------
# The pictures.

DRAW = {'loss': pictures.loss, 'sweep': pictures.sweep, 'scaling': pictures.scaling}


def draw():
    """ The pictures of the committed numbers. """
    for name, part in PARTS.items():
        data, path = asset(name), ROOT / 'assets' / f'{name}.png'
        if not data:
            continue
        if part['kind'] == 'depth':
            pictures.depth(data['modes'], path)
            pictures.dynamics(data['modes'], ROOT / 'assets' / 'dynamics.png')
        elif part['kind'] == 'dots':
            pictures.dots(data, path, part['base'], part['paper'])
        elif part['kind'] == 'start':
            pictures.start(data, path, part['lines'])
        elif part['kind'] in DRAW:
            DRAW[part['kind']](data, path)
    if asset('quiet') and asset('quiet_depth'):
        path = ROOT / 'assets' / 'readme.png'
        pictures.front_page(asset('quiet'), asset('quiet_depth')['modes'], path)


# -----------------------------------------------------------------------------
# Measuring anew.

# Of a kind of part: the verb that makes it, and what it writes. Others are made by loss.
VERBS = {'sweep': ('sweep', 'sweep.json'), 'scaling': ('scaling', 'scaling.json')}


def rerun(names):
    """ Runs what stands behind the parts and copies its results to assets/. """
    if any('--dataset=enwik8' in PARTS[name]['argv'] for name in names):
        load('enwik8')  # says now, not hours later, that it is missing
    out, assets = Path('out', 'results'), ROOT / 'assets'  # one folder for all: parts share runs
    for name in names:
        kind, argv = PARTS[name]['kind'], PARTS[name]['argv']
        print(f'--- {name} ---', flush=True)
        if kind == 'traffic':
            write_json(assets / f'{name}.json', traffic())
        elif kind == 'speed':
            cost.main([*argv, f'--out=assets/{name}.json'])
        else:
            verb, file = VERBS.get(kind, ('loss', 'results.json'))
            import_module(f'experiments.{verb}').main([*argv, f'--out_dir={out}'])
            shutil.copy(out / file, assets / f'{name}.json')
        if name == 'shakespeare':
            shutil.copy(out / 'depth.json', assets / 'depth.json')


def traffic():
    """ u of a step of GPT-2 124M.

    Standard, for each sublayer: an addition fused with the norm after it reads two and writes two,
    its backward as well. Then the final norm.
    """
    u = {'standard': 8 * 2 * model.GPTConfig.n_layer + 5}
    for label, keys in mode_keys('full,block:8').items():
        u[label] = round(cost.traffic(model.GPTConfig(**keys, bias=False)))
    command = 'python compare.py results --rerun --only=traffic'
    return {'command': command, **environment(torch.device('cpu')), 'u': u}


def main(argv):
    intro = __doc__.split('\n\n')[0]
    values = configuration.parse(ResultsConfig, argv, intro, 'compare.py results')
    cfg = configuration.build(ResultsConfig, values)
    path = ROOT / 'RESULTS.md'
    if cfg.rerun:
        os.chdir(ROOT)
        rerun(cfg.parts)
    old = path.read_text(encoding='utf-8')
    new = render(old)
    if cfg.check:
        if old != new:
            raise RuntimeError('RESULTS.md is out of date: python compare.py results writes it')
        print('RESULTS.md is up to date')
        return
    path.write_text(new, encoding='utf-8')
    draw()
    print('wrote RESULTS.md and the pictures in assets/')
