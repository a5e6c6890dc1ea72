"""
Writes the generated parts of README.md: the rules from model.py, the numbers and pictures from the JSON in assets/.

    python compare.py readme                        writes the parts and draws the pictures anew
    python compare.py readme --check                writes nothing; exit code 1 if a part is out of date
    python compare.py readme --rerun --only=rates   first trains everything behind that part anew

A part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""
import inspect
import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

import config as configuration
import model
from data.prepare import load
from experiments import loss, pictures, scaling, sweep
from experiments.common import environment, mode_keys, paired, write_json
from experiments.speed import traffic as count

ROOT = Path(__file__).resolve().parent.parent
MODES = '--modes=standard,full,block:8,static,block:4,denseformer,mhc'
SWEPT = '--modes=standard,full,block:8'
ENWIK8 = ('--dataset=enwik8', '--max_iters=600', '--eval_interval=150', '--eval_iters=60')
RERUN = {  # name: (verb, its arguments, {a file it writes into out_dir: its name in assets/})
    'shakespeare': ('loss', ('--seeds=5', MODES), {'results.json': 'shakespeare.json', 'depth.json': 'depth.json'}),
    'enwik8': ('loss', ('--seeds=5', MODES, *ENWIK8), {'results.json': 'enwik8.json'}),
    'rates': ('sweep', ('--seeds=5', SWEPT, *ENWIK8), {'sweep.json': 'rates.json'}),
    'projection': ('sweep', ('--vary=scale_proj_init=true,false', SWEPT, *ENWIK8), {'sweep.json': 'projection.json'}),
    'scaling': ('scaling', (), {'scaling.json': 'scaling.json'}),
    'speed_B': ('speed', ('--shape=B', '--out=assets/speed_B.json'), {}),
    'speed_C': ('speed', ('--shape=C', '--modes=standard,full,block:8', '--rounds=5', '--out=assets/speed_C.json'), {}),
    'traffic': (None, (), {})}  # counted here, no verb
TEXTS = {'shakespeare': 'The bundled text (characters)', 'enwik8': 'enwik8 (bytes)'}
SWEEPS = {'rates': 'Over the learning rate',
          'projection': 'With and without the smaller start of output projections, 1 / sqrt(2 n_layer), made for a sum'}
QUESTIONS = {  # question: (modes whose loss is taken, modes whose loss is subtracted); of several the first there is
    'Does Full beat standard? Full - standard': ('full', 'standard'),
    'Does Block (N = 8) beat standard? Block - standard': ('block:8 block', 'standard'),
    'Is Block as good as Full? Block - Full': ('block:8 block', 'full'),
    'Does N matter? N = 4 minus N = 8': ('block:4', 'block:8 block'),
    'Must the weights look at the input? Full - static': ('full', 'static'),
    'Block - static': ('block:8 block', 'static'),
    'Do other rules do as well? Block - DenseFormer': ('block:8 block', 'denseformer'),
    'Block - mHC': ('block:8 block', 'mhc')}


@dataclass
class ReadmeConfig:
    check: bool = False  # write nothing; exit code 1 if README.md is out of date
    rerun: bool = False  # first train and time everything anew: hours; goes on where it was stopped
    only: str = ''  # of --rerun: names of what to run, separated by commas; by default all

    def __post_init__(self):
        check = configuration.checker(self)
        check('only', {*filter(None, self.only.split(','))} <= {*RERUN}, 'some of ' + ', '.join(RERUN))
        check('only', self.rerun or not self.only, 'used with --rerun')


def asset(name):
    """ The JSON in assets/, or None. """
    path = ROOT / 'assets' / name
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else None


def markdown(rows):
    """ Rows of strings as a Markdown table. """
    return '\n'.join('| ' + ' | '.join(r) + ' |' for r in (rows[0], ('---',) * len(rows[0]), *rows[1:]))


def bullets(lines):
    return '\n'.join(f'- {line}.' for line in lines)


def in_words(values, base):
    """ Their mean paired difference, its interval, and whether that holds zero. """
    text = sweep.difference(values, base)
    if None in values + base:
        return text
    d, half = paired(values, base)
    return text + (' from one seed, not resolved' if half is None else ', not resolved' if abs(d) <= half else '')


def where(data):
    return (f'Made by `{data["command"]}`, torch {data["torch"]}, {data["device"]}'
            + (f', commit {data["commit"].replace("+", " with changes")}' if data['commit'] else ''))


def setting(c):
    return (f'{c["n_layer"]} transformer blocks of width {c["n_embd"]}, context {c["n_ctx"]}, {c["max_iters"]} steps '
            f'of {c["batch_size"] * c.get("gradient_accumulation_steps", 1) * c["n_ctx"]:,} tokens')


# -----------------------------------------------------------------------------
# The parts.

def rules():
    """ The bodies of the three rules, verbatim. """
    parts = []
    for cls, method in ((model.Standard, 'forward'), (model.FullAttnRes, 'rule'), (model.BlockAttnRes, 'rule')):
        doc = inspect.getsource(cls).split('"""')[1]
        parts.append(f'class {cls.__name__}({cls.__mro__[1].__name__}):\n    """{doc}"""\n'
                     + inspect.getsource(getattr(cls, method)).rstrip())
    return '```python\n' + '\n\n'.join(parts).replace('(Module)', '(nn.Module)') + '\n```'


def answers():
    """ The questions a reader has, each with a number for each text. """
    lines, texts = [], [data for name in TEXTS if (data := asset(f'{name}.json'))]
    for question, names in QUESTIONS.items():
        said = []
        for data in texts:
            found = [[data['modes'][k]['final_loss'] for k in n.split() if k in data['modes']] for n in names]
            if all(found):
                (a, *_), (b, *_) = found
                said.append(f'{in_words(a, b)} ({data["config"]["dataset"]})')
        lines += [f'{question}: ' + '; '.join(said)] if said else []
    if data := asset('rates.json'):
        by, base, best = data['final_loss'], data['base'], sweep.best_values(data['final_loss'])
        lines.append(f'And each at its own best of {len(by[base])} learning rates? ' + '; '.join(
            f'{k} ({best[k]}) - {base} ({best[base]}): {in_words(by[k][best[k]], by[base][best[base]])}'
            for k in by if k != base) + f' ({data["config"]["dataset"]}; optimistic: chosen by these runs)')
    for name in ('speed_B', 'speed_C'):
        if data := asset(f'{name}.json'):
            lines.append(f'At what cost at width {data["config"]["n_embd"]}? Time of a step, memory kept: ' + '; '.join(
                f'{k} {v["step"]["ratio"]:.2f} x, {v["kept"]["ratio"]:.2f} x'
                for k, v in data['rows'].items() if k != 'standard'))
    head = ('Differences of the final validation loss in nats, paired by seed, with 95 % intervals, not corrected for '
            'how many there are. Below zero the first is better; not resolved: the interval holds zero. One learning '
            'rate for all but where it says so: above the best of Full, whose differences are of rates, too.')
    return f'{head}\n\n{bullets(lines)}' if lines else 'Not measured yet.'


def results():
    """ Each text's table, sentences and picture. """
    parts = []
    for name, title in TEXTS.items():
        if data := asset(f'{name}.json'):
            c = data['config']
            parts += [f'**{title}**: {setting(c)}, learning rate {c["learning_rate"]:g} in every mode; mean and '
                      'standard deviation over the seeds; differences are paired by seed, with their 95 % interval.',
                      markdown(loss.cells(data)), bullets(loss.verdicts(data)),
                      f'![validation loss against steps and against time](assets/{name}.png)', where(data)]
    return '\n\n'.join(parts) or 'Not measured yet.'


def sweeps():
    """ Every mode over the values of a key. """
    parts = []
    for name, title in SWEEPS.items():
        if data := asset(f'{name}.json'):
            c = data['config']
            parts += [f'**{title}**: {c["dataset"]}, {setting(c)}, {c["seeds"]} paired seeds, 95 % intervals.',
                      markdown(sweep.cells(data)), bullets(sweep.verdicts(data)),
                      f'![final loss by setting](assets/{name}.png)', where(data)]
    return '\n\n'.join(parts) or 'Not measured yet: `python compare.py sweep`.'


def ladder():
    """ The sizes, the power laws and the compute that a rule saves. """
    data = asset('scaling.json')
    if data is None:
        return 'Not measured yet: `python compare.py scaling`.'
    c, rates = data['config'], ', '.join(f'{keys["learning_rate"]:g}' for keys in data['ladder'].values())
    head = f'{c["dataset"]}, context {c["n_ctx"]}, {c["seeds"]} seeds; learning rates, by size: {rates}.'
    return '\n\n'.join((head, markdown(scaling.cells(data)), bullets(scaling.verdicts(data)),
                        '![loss over compute](assets/scaling.png)', where(data)))


def speed():
    parts = []
    for name in ('speed_B', 'speed_C'):
        data = asset(f'{name}.json')
        if data is None:
            continue
        c = data['config']
        kinds = ('forward', 'forward + backward', 'step', 'kept', 'decode')
        rows = [('', *kinds[:3], 'kept for backward', 'decode, one token')]
        for label, r in data['rows'].items():
            rows.append((label, *(f'{r[k]["ratio"]:.2f}' if k in r else '' for k in kinds)))
        base = data['rows']['standard']['step']['ms']
        parts.append(f'Shape {c["shape"]}: {c["n_layer"]} transformer blocks of width {c["n_embd"]}, context '
                     f'{c["n_ctx"]}, batch {c["batch_size"]}; ratios to the standard residual (step {base:.0f} ms), '
                     f'{data["threads"]} thread.\n\n' + markdown(rows) + '\n\n' + where(data))
    if data := asset('traffic.json'):
        u = '; '.join(f'{label}: {n} u' for label, n in data['u'].items())
        parts.append('Traffic of the residual connection alone, with its norms, in a step of GPT-2 124M on the Triton '
                     f'path: {u} (u: a tensor of tokens x width, read or written once). Counted from its launches, not '
                     'timed; standard, by hand, as if each addition were fused with the norm after it.')
    return '\n\n'.join(parts) or 'Not measured yet.'


PARTS = {'rules': rules, 'answers': answers, 'results': results, 'sweeps': sweeps, 'scaling': ladder, 'speed': speed}


def render(text):
    """ README.md with its generated parts made anew. """
    for name, make in PARTS.items():
        begin, end = f'<!-- begin: {name} -->', f'<!-- end: {name} -->'
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f'README.md: must have one {begin} and one {end}')
        before, _, rest = text.partition(begin)
        text = f'{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}'
    return text


# -----------------------------------------------------------------------------

def rerun(names):
    """ Runs what stands behind the parts and copies its results to assets/. """
    if any(ENWIK8[0] in RERUN[name][1] for name in names):
        load('enwik8')  # says now, not hours later, that it is missing
    for name in names:
        (verb, argv, files), out = RERUN[name], Path('out', 'readme')  # one for all: parts share runs
        print(f'--- {name} ---', flush=True)
        if verb is None:
            write_json('assets/traffic.json', traffic())
            continue
        import_module(f'experiments.{verb}').main([*argv] if verb == 'speed' else [*argv, f'--out_dir={out}'])
        for source, target in files.items():
            shutil.copy(out / source, ROOT / 'assets' / target)


def traffic():
    """ What a step of GPT-2 124M, batch 12, moves on the Triton path. Standard: per sublayer an addition fused with the
    norm after it reads two and writes two, its backward as well; then the final norm.
    """
    u = {'standard': 8 * 2 * model.GPTConfig.n_layer + 5}
    for label, keys in mode_keys('full,block:8').items():
        u[label] = round(count(model.GPTConfig(**keys, bias=False), 12))
    return {'command': 'python compare.py readme --rerun --only=traffic', **environment(torch.device('cpu')), 'u': u}


def draw():
    """ The pictures of the committed numbers. """
    drawn = [*((name, pictures.loss) for name in TEXTS), *((name, pictures.sweep) for name in SWEEPS),
             ('scaling', pictures.scaling)]
    for name, picture in drawn:
        if data := asset(f'{name}.json'):
            picture(data, ROOT / 'assets' / f'{name}.png')
    if data := asset('depth.json'):
        pictures.depth(data['modes'], ROOT / 'assets' / 'depth.png')
        pictures.dynamics(data['modes'], ROOT / 'assets' / 'dynamics.png')


def main(argv):
    cfg = configuration.build(ReadmeConfig, configuration.parse(ReadmeConfig, argv, __doc__.split('\n\n')[0]))
    path = ROOT / 'README.md'
    if cfg.rerun:
        os.chdir(ROOT)
        rerun([name for name in RERUN if not cfg.only or name in cfg.only.split(',')])
    old = path.read_text(encoding='utf-8')
    new = render(old)
    if cfg.check:
        print('README.md is ' + ('up to date' if old == new else 'out of date: python compare.py readme'))
        sys.exit(0 if old == new else 1)
    path.write_text(new, encoding='utf-8')
    draw()
    print('README.md and the pictures in assets/ written')
