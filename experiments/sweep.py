"""
Trains the residual rules over several values of one key: where is each at its best?

    python compare.py sweep --vary=learning_rate=1e-3,2e-3,4e-3,8e-3 --seeds=2
    python compare.py sweep --vary=scale_proj_init=true,false --modes=standard,block:4
    python compare.py sweep --vary=n_layer,n_embd=6:136,12:96     several keys at once

With learning_rate, min_lr keeps its share of it.
"""
import math
from dataclasses import dataclass, fields
from statistics import mean, stdev

import config as configuration
from experiments import pictures
from experiments.common import paired, signed
from experiments.runs import RunsConfig, conclude, final_losses, heading, settings
from train import MAY_CHANGE_ON_RESUME, TrainConfig

# Keys that a sweep may not vary.
FIXED = {'residual', 'residual_blocks', 'seed', 'dataset', 'init_from', 'min_lr', 'vocab_size'}
KEYS = {f.name: f.type for f in fields(TrainConfig) if f.name not in MAY_CHANGE_ON_RESUME | FIXED}


@dataclass
class SweepConfig(RunsConfig):
    vary: str = 'learning_rate=1e-3,2e-3,4e-3,8e-3'  # KEY=A,B,... or KEY,KEY=A:X,B:Y,...
    seeds: int = 2  # paired runs of each mode and value
    may_diverge = True

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        names, has_values, texts = self.vary.partition('=')
        keys, texts = split(names, ','), split(texts, ',')
        known = has_values and set(keys) <= set(KEYS) and len(set(keys)) == len(keys)
        check('vary', known, 'KEY=VALUE,VALUE,... with KEY one of ' + ', '.join(KEYS))
        check('vary', len(set(texts)) == len(texts), 'without a value given twice')
        self.points = {}  # {text of the values: the settings that it stands for}
        for text in texts:
            values = split(text, ':')
            joined = f'{len(keys)} values joined by ":" at each point, not {text!r}'
            check('vary', len(values) == len(keys), joined)
            point = {key: configuration.convert(key, value, KEYS[key])
                     for key, value in zip(keys, values, strict=True)}
            if 'learning_rate' in point:
                share = self.min_lr / self.learning_rate if self.learning_rate else 1.0
                point['min_lr'] = point['learning_rate'] * share
            self.points[text] = point
            self.mode_configs(**point)


def split(text, mark):
    return [part.strip() for part in text.split(mark)]


def average(losses):
    """ Their mean; infinite if a run diverged. """
    return math.inf if None in losses else mean(losses)


def difference(losses, base):
    """ The mean paired difference and its 95 % interval, in words. """
    if None in losses + base:
        return 'none (diverged)'
    return signed(*paired(losses, base))


def best_values(loss):
    """ {label: the value with the lowest mean loss} """
    out = {}
    for label, by_value in loss.items():
        means = {value: average(losses) for value, losses in by_value.items()}
        out[label] = min(means, key=means.get)
    return out


def cells(data, full=False):
    """ The table: a row a mode, a column a value; in full with the sd and the difference. """
    loss, base = data['final_loss'], data['base']
    rows = [(f'{data["vary"].partition("=")[0]}:', *loss[base])]
    for label, by in loss.items():
        row = [label]
        for value, losses in by.items():
            text = 'diverged' if None in losses else f'{mean(losses):.4f}'
            if full and None not in losses and len(losses) > 1:
                text += f' (sd {stdev(losses):.4f})'
            if full and label != base:
                text += f', {difference(losses, loss[base][value])}'
            row.append(text)
        rows.append(tuple(row))
    return rows


def verdicts(data):
    """ A sentence a mode: its best value, and the difference from the base there, at the base's
    best, and each at its own.
    """
    loss, base, keys = data['final_loss'], data['base'], data['vary'].partition('=')[0]
    best = best_values(loss)
    ends = outermost(keys, loss[base])
    lines = []
    for label in sorted(loss, key=lambda label: label != base):  # the base first
        by, own, theirs = loss[label], best[label], best[base]
        text = f'{label} is at its best with {keys} {own}'
        if own in ends:
            text += ' (an end of what was tried)'
        text += f': {average(by[own]):.4f}'
        if label != base:
            text += f'; {label} - {base} there {difference(by[own], loss[base][own])}'
        if own != theirs:
            text += (f', at the best of {base} {difference(by[theirs], loss[base][theirs])}, '
                     f'each at its own best {difference(by[own], loss[base][theirs])} '
                     '(optimistic: chosen by these runs)')
        lines.append(text)
    return lines


def outermost(keys, values):
    """ The lowest and the highest of the values, if they are numbers of one key. """
    if KEYS.get(keys) not in (int, float):
        return ()
    return min(values, key=float), max(values, key=float)


def main(argv):
    cfg = settings(SweepConfig, argv, 'sweep', __doc__.split('\n\n')[0])
    keys = cfg.vary.partition('=')[0]
    data = {**heading('sweep', argv, cfg), 'vary': cfg.vary,
            **final_losses(cfg, cfg.points, keys + ' {}')}
    return conclude('sweep', cfg, data, cells(data), verdicts(data), pictures.sweep)
