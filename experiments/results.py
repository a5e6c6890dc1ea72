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
from pathlib import Path
from statistics import mean

import torch

import config as configuration
import model
from data.prepare import load
from experiments import depth, loss, pictures, scaling, sweep
from experiments import speed as cost
from experiments.common import ROOT, environment, mode_keys, write_json

HAND = '<!-- written by hand -->', '<!-- the rest is generated: python compare.py results -->'
# Of a kind of part: the verb that makes it, and the file that this one writes.
VERBS = {'loss': (loss, 'results.json'), 'dots': (loss, 'results.json'),
         'sweep': (sweep, 'sweep.json'), 'scaling': (scaling, 'scaling.json'), 'speed': (cost, '')}
DEPTHS = {'shakespeare': 'depth.json', 'quiet': 'quiet_depth.json'}  # maps of a part's runs
PARTS = tomllib.loads((ROOT / 'assets' / 'results.toml').read_text(encoding='utf-8'))


@dataclass
class ResultsConfig:
    check: bool = False  # write nothing; exit code 1 if RESULTS.md is out of date
    rerun: bool = False  # first train and time anew all parts that have argv, or go on: hours
    only: str = ''  # of --rerun: the parts to run, separated by commas; by default all

    def __post_init__(self):
        check = configuration.checker(self)
        can = [name for name, part in PARTS.items() if 'argv' in part]
        self.parts = [name for name in can if not self.only or name in self.only.split(',')]
        check('only', set(self.only.split(',')) <= {'', *can}, 'some of ' + ', '.join(can))
        check('check', not (self.check and self.rerun), 'used without --rerun')
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


def setting(c):
    """ What was trained or timed, from the settings c of a verb, but for what varies there. """
    varied = c.get('vary', '').partition('=')[0].split(',')
    if 'sizes' in c:
        varied = ['n_layer', 'n_embd', 'max_iters', 'learning_rate']
    texts = {'dataset': '{}', 'n_layer': '{} transformer blocks', 'n_embd': 'width {}',
             'n_ctx': 'context {}', 'batch_size': 'batches of {} sequences',
             'max_iters': '{} steps', 'warmup_iters': 'warm-up {}',
             'learning_rate': 'learning rate {:g}', 'beta2': 'beta2 {:g}',
             'threads': 'threads: {}', 'seeds': 'paired seeds: {}'}
    shown = [text.format(c[key]) for key, text in texts.items() if key in c and key not in varied]
    return ', '.join(shown) + '.'


def start_cells(data):
    """ The table of the first steps: a row a recipe. """
    rows = [('recipe', *(f'seed {seed}' for seed in data['seeds']), 'mean')]
    for recipe, runs in data['runs'].items():
        final = [run['validation loss'][-1] for run in runs]
        rows.append((recipe, *(f'{loss:.3f}' for loss in (*final, mean(final)))))
    return rows


def measured(kind, data):
    """ (the table, sentences on it) of a part. """
    if kind in ('loss', 'dots'):
        return loss.cells(data, loss.COLUMNS), []
    if kind == 'sweep':
        return sweep.cells(data, full=True), sweep.verdicts(data)
    if kind == 'scaling':
        return scaling.cells(data), scaling.verdicts(data)
    if kind == 'speed':
        return cost.cells(data['rows']), []
    if kind == 'depth':
        return depth.cells(data['modes']), []
    if kind == 'start':
        return start_cells(data), []
    return [('rule', 'u'), *((label, str(u)) for label, u in data['u'].items())], []


def show(name, part, data):
    """ A part of the page, in pieces. """
    pieces = [f'## {part["title"]}', part['caption']]
    if part['kind'] in VERBS:
        pieces.append(setting(data['config']))
    rows, sentences = measured(part['kind'], data)
    pieces.append(markdown(rows))
    if sentences:
        pieces.append('\n'.join(f'- {sentence}' for sentence in sentences))
    if hasattr(pictures, part['kind']):
        pieces.append(f'![{part["title"]}](assets/{name}.png)')
    if part['kind'] == 'depth':
        pieces.append('![Magnitude and gradient along depth](assets/dynamics.png)')
    commit = (data['commit'] or 'unknown').replace('+', ' with uncommitted changes')
    made = 'Made by'
    if data.get('joined'):
        made = 'Joined from several calls; this one repeats them all:'
    pieces.append(f'{made} `{data["command"]}`, torch {data["torch"]}, {data["device"]}, '
                  f'commit {commit}.')
    return pieces


def render(text):
    """ RESULTS.md made anew: the words by hand in text, then each part that has been measured. """
    begin, end = HAND
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f'RESULTS.md: must have one {begin} and one {end}')
    pieces = [text[:text.index(end) + len(end)]]
    for name, part in PARTS.items():
        data = asset(name)
        if data:
            pieces += show(name, part, data)
    return '\n\n'.join(pieces) + '\n'


def draw():
    """ The pictures of the committed numbers. """
    for name, part in PARTS.items():
        data, path = asset(name), ROOT / 'assets' / f'{name}.png'
        if not data or not hasattr(pictures, part['kind']):
            continue
        if part['kind'] == 'depth':
            pictures.depth(data['modes'], path)
            pictures.dynamics(data['modes'], path.with_name('dynamics.png'))
        else:
            options = {key: part[key] for key in ('base', 'bases', 'paper', 'lines') if key in part}
            getattr(pictures, part['kind'])(data, path, **options)
    if asset('quiet') and asset('quiet_depth'):
        path = ROOT / 'assets' / 'readme.png'
        pictures.front_page(asset('quiet'), asset('quiet_depth')['modes'], path)


# -----------------------------------------------------------------------------
# Measuring anew.

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
            verb, file = VERBS[kind]
            verb.main([*argv, f'--out_dir={out}'])
            shutil.copy(out / file, assets / f'{name}.json')
        if name in DEPTHS:
            shutil.copy(out / 'depth.json', assets / DEPTHS[name])


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
    cfg = configuration.build(ResultsConfig, values, argv)
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
