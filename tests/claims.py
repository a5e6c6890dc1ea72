""" Checks the numbers in prose against the JSON in assets/.

A comment after the words names what they say: <!-- NAME: WHAT -->, of assets/NAME.json. WHAT is
A - B (the paired difference of two modes and its interval), A (mean loss and sd), noise (how far the
base ends from itself, at most and on average), ROW KIND (a ratio of `compare.py speed`) or queries
of A / B (the ratio of their mean lengths). A mode of a sweep is MODE@VALUE.
Every number with a decimal point must be one of those that its comment names, rounded as it is written.
"""
import json
import re
import statistics
from pathlib import Path

from experiments.common import paired

ASSETS = Path(__file__).resolve().parents[1] / 'assets'
COMMENT = re.compile(r'<!-- (\w+): ([^>]+?) -->')
NUMBER = re.compile(r'(?<![\w.])\d+\.\d+(?![\w.]*\w)')


def losses(data, mode):
    label, _, value = mode.partition('@')
    return data['final_loss'][label][value] if value else data['modes'][label]['final_loss']


def named(name, what):
    """ The numbers that a comment names. """
    data = json.loads((ASSETS / f'{name}.json').read_text(encoding='utf-8'))
    if what == 'noise':
        base = data['modes'][data['base']]['final_loss']
        gaps = [abs(a - b) for a, b in zip(data['noise']['final_loss'], base, strict=True)]
        return max(gaps), statistics.mean(gaps)
    if what.startswith('queries of '):
        a, b = (data['modes'][mode]['query_norm'] for mode in what.removeprefix('queries of ').split(' / '))
        return statistics.mean(a) / statistics.mean(b),
    if 'rows' in data:
        row, kind = what.split(' ', 1)
        return data['rows'][row][kind]['ratio'],
    a, minus, b = what.partition(' - ')
    if minus:
        return paired(losses(data, a), losses(data, b))
    return statistics.mean(losses(data, a)), statistics.stdev(losses(data, a))


def wrong(text):
    """ What in text is not so, a line each. """
    *claims, rest = re.split(r'(?<=-->)', re.sub(r'<!-- (?!\w+: )[^>]*-->', '', text))
    faults = [f'{number}: no comment says where it is from' for number in NUMBER.findall(COMMENT.sub('', rest))]
    for claim in claims:
        name, what = COMMENT.search(claim).groups()
        values = named(name, what)
        for number in NUMBER.findall(COMMENT.sub('', claim)):
            digits = len(number.partition('.')[2])
            if number not in [f'{abs(v):.{digits}f}' for v in values if v is not None]:
                faults.append(f'{number}: {name}: {what} is {values}')
    return faults
