"""
Trains the residual rules over several values of one key: where is each at its best, and does one for all favour any?

    python compare.py sweep --vary=learning_rate=1e-3,2e-3,4e-3,8e-3 --seeds=2
    python compare.py sweep --vary=scale_proj_init=true,false --modes=standard,block:4

With learning_rate, min_lr keeps its share of it.
"""
import math
from dataclasses import dataclass, fields
from statistics import mean

import config as configuration
from experiments import pictures
from experiments.common import paired, signed
from experiments.runs import RunsConfig, conclude, final_losses, heading, settings
from train import MAY_CHANGE_ON_RESUME, TrainConfig

KEYS = {f.name: f.type for f in fields(TrainConfig)
        if f.name not in MAY_CHANGE_ON_RESUME | {'residual', 'residual_blocks', 'seed', 'dataset', 'init_from',
                                                 'min_lr', 'vocab_size'}}


@dataclass
class SweepConfig(RunsConfig):
    vary: str = 'learning_rate=1e-3,2e-3,4e-3,8e-3'  # KEY=VALUE,VALUE,...: every mode is trained with each value
    seeds: int = 2  # paired runs of each mode and value
    goes_on = True

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        key, has_values, texts = self.vary.partition('=')
        check('vary', has_values and key in KEYS, 'KEY=VALUE,VALUE,... with KEY one of ' + ', '.join(KEYS))
        self.values = {text.strip(): configuration.convert(key, text.strip(), KEYS[key]) for text in texts.split(',')}
        check('vary', len(self.values) == texts.count(',') + 1, 'without a value given twice')
        for value in self.values.values():
            self.mode_configs(**self.changed(value))

    def changed(self, value):
        """ The settings that a value stands for. """
        key = self.vary.partition('=')[0]
        share = self.min_lr / self.learning_rate if self.learning_rate else 1.0
        return {key: value} | ({'min_lr': value * share} if key == 'learning_rate' else {})


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
    return {label: min(by, key=lambda value, by=by: average(by[value])) for label, by in loss.items()}


def cells(data):
    """ The table: a row a value, a column a mode, then the paired differences from the base. """
    loss, base = data['final_loss'], data['base']
    others = [label for label in loss if label != base]
    rows = [(data['vary'].partition('=')[0], *loss, *(f'{label} - {base}' for label in others))]
    for value in loss[base]:
        rows.append((value, *('diverged' if None in loss[k][value] else f'{mean(loss[k][value]):.4f}' for k in loss),
                     *(difference(loss[label][value], loss[base][value]) for label in others)))
    return rows


def verdicts(data):
    """ A sentence a mode: its best value, the difference from the base there, at the base's best, each at its own. """
    loss, base, key = data['final_loss'], data['base'], data['vary'].partition('=')[0]
    best = best_values(loss)
    numbers = [float(v) for v in loss[base]] if KEYS[key] in (int, float) else []

    def at(value):
        edge = numbers and float(value) in (min(numbers), max(numbers))
        return value + (' (an end of what was tried)' if edge else '')
    out = [f'{base} is at its best with {key} {at(best[base])}: {average(loss[base][best[base]]):.4f}']
    for label in (label for label in loss if label != base):
        own, theirs = best[label], best[base]
        text = (f'{label} is at its best with {at(own)}: {average(loss[label][own]):.4f}; {label} - {base} there '
                + difference(loss[label][own], loss[base][own]))
        if own != theirs:
            text += (f', at the best of {base} {difference(loss[label][theirs], loss[base][theirs])}, each at its own '
                     f'best {difference(loss[label][own], loss[base][theirs])} (optimistic: chosen by these runs)')
        out.append(text)
    return out


def main(argv):
    cfg = settings(SweepConfig, argv, 'compare', __doc__.split('\n\n')[0])
    key = cfg.vary.partition('=')[0]
    data = {**heading('sweep', argv, cfg), 'vary': cfg.vary,
            **final_losses(cfg, {text: cfg.changed(v) for text, v in cfg.values.items()}, key + ' {}')}
    return conclude('sweep', cfg, data, cells(data), verdicts(data), pictures.sweep)
