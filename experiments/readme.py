"""
Writes the generated parts of README.md: the rules from model.py, the numbers from the JSON files in assets/.

A part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. With --check nothing is written and the exit code
is 1 if a part is out of date.
"""
import inspect
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import config as configuration
import model
from experiments.loss import cells, verdicts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class ReadmeConfig:
    check: bool = False  # write nothing; exit code 1 if README.md is out of date


def asset(name):
    """ The JSON in assets/, or None. """
    path = Path(ROOT, 'assets', name)
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else None


def markdown(rows):
    """ Rows of strings as a Markdown table. """
    return '\n'.join('| ' + ' | '.join(r) + ' |' for r in (rows[0], ('---',) * len(rows[0]), *rows[1:]))


def rules():
    """ The bodies of the three rules, verbatim. """
    parts = []
    for cls, method in ((model.Standard, 'forward'), (model.FullAttnRes, 'rule'), (model.BlockAttnRes, 'rule')):
        doc = inspect.getsource(cls).split('"""')[1]
        parts.append(f'class {cls.__name__}({cls.__mro__[1].__name__}):\n    """{doc}"""\n'
                     + inspect.getsource(getattr(cls, method)).rstrip())
    return '```python\n' + '\n\n'.join(parts).replace('(Module)', '(nn.Module)') + '\n```'


def where(data):
    return (f'`{data["command"]}`, torch {data["torch"]}, {data["device"]}'
            + (f', commit {data["commit"]}' if data['commit'] else ''))


def results():
    data = asset('results.json')
    if data is None:
        return 'Not measured yet.'
    c = data['config']
    head = (f'{c["n_layer"]} transformer blocks of width {c["n_embd"]}, context {c["n_ctx"]}, {c["max_iters"]} steps '
            f'of {c["batch_size"] * c["n_ctx"]:,} characters, learning rate {c["learning_rate"]:g} in every mode; mean '
            'and standard deviation over the seeds; differences are paired by seed, with their 95 % interval.')
    return '\n\n'.join((head, markdown(cells(data)), '\n'.join(f'- {v}.' for v in verdicts(data)),
                        '![validation loss against steps and against time](assets/loss.png)', 'Made by ' + where(data),
                        *rates()))


def rates():
    """ The same at other learning rates, where measured. """
    data = asset('rates.json')
    if data is None:
        return []
    table = sorted(data['final_loss'].items(), key=lambda item: float(item[0]))
    rows = [('learning rate', *table[0][1])]
    rows += [(rate, *(f'{x:.4f}' for x in losses.values())) for rate, losses in table]
    return ['The rate matters as much as the rule. Final loss, one seed:', markdown(rows), 'Made by ' + where(data)]


def speed():
    parts = []
    for name in ('speed_B.json', 'speed_C.json'):
        data = asset(name)
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
                     f'{data["threads"]} thread.\n\n' + markdown(rows) + '\n\nMade by ' + where(data))
    if data := asset('traffic.json'):
        u = ', '.join(f'{label} {n} u' for label, n in data['u'].items())
        parts.append(f'Traffic of the Triton path in a step of GPT-2 124M, norms included: {u} (u: a tensor of tokens '
                     'x width, read or written once). Counted from its launches, not timed: no GPU was at hand.')
    return '\n\n'.join(parts) or 'Not measured yet.'


PARTS = {'rules': rules, 'results': results, 'speed': speed}


def render(text):
    """ README.md with its generated parts made anew. """
    for name, make in PARTS.items():
        begin, end = f'<!-- begin: {name} -->', f'<!-- end: {name} -->'
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f'README.md: must have one {begin} and one {end}')
        before, _, rest = text.partition(begin)
        text = f'{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}'
    return text


def main(argv):
    cfg = configuration.build(ReadmeConfig, configuration.parse(ReadmeConfig, argv, __doc__.split('\n\n')[0]))
    path = os.path.join(ROOT, 'README.md')
    with open(path, encoding='utf-8') as f:
        old = f.read()
    try:
        new = render(old)
    except ValueError as e:
        configuration.fail(e)
    if cfg.check:
        print('README.md is ' + ('up to date' if old == new else 'out of date: python compare.py readme'))
        sys.exit(0 if old == new else 1)
    with open(path, 'w', encoding='utf-8') as f:
        f.write(new)
    print('README.md written')
