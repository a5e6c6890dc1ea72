"""
Trains the residual rules on a ladder of sizes and fits loss = A C^-alpha to each.

    python compare.py scaling          small networks on a CPU, larger ones on CUDA
    python compare.py scaling config/scaling_cpu.toml --sizes=4,6,8 --seeds=3

One dial makes a network: n transformer blocks of width aspect * n. Steps grow with n and the
learning rate falls with 1 / n. C = 6 * parameters (embeddings apart) * tokens, in floating-point
operations; as in the paper it leaves out the cost of the rule itself.
C'/C: the compute that the standard residual would need, by its fit, for the loss that a rule's fit
reaches at the largest C.
"""
from dataclasses import dataclass

import numpy as np

import config as configuration
from experiments import pictures
from experiments.common import paired, signed, student
from experiments.runs import RunsConfig, conclude, final_losses, heading, settings

RESAMPLES = 10_000
DAY = 8.64e19  # floating-point operations of a petaflop/s-day


@dataclass
class ScalingConfig(RunsConfig):
    sizes: str = '4,6,8,10'  # numbers of transformer blocks, even, growing
    aspect: int = 16  # width for each transformer block; heads are 32 wide
    max_iters: int = 600  # steps of the smallest network; one k times as deep takes k times as many
    learning_rate: float = 4e-3  # of the smallest network; one k times as deep takes 1 / k of it
    seeds: int = 3  # paired runs of each mode and size

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        texts = [text.strip() for text in self.sizes.split(',')]
        numbers = [int(text) for text in texts if text.isdecimal() and len(text) < 5]
        growing = numbers == sorted(set(numbers)) and len(numbers) == len(texts) > 1
        even = all(n > 0 and n % 2 == 0 for n in numbers)
        check('sizes', growing and even, 'two or more even numbers, growing, for example 4,6,8')
        check('max_iters', self.max_iters > 0, '1 or more')
        wide = self.aspect > 0 and self.aspect % 16 == 0
        check('aspect', wide, 'a multiple of 16: heads are 32 wide')
        self.ladder = {n: self.rung(n, numbers[0]) for n in numbers}
        for keys in self.ladder.values():
            self.mode_configs(**keys)

    def rung(self, n, first):
        """ The settings of the network with n transformer blocks. """
        steps, width = round(self.max_iters * n / first), self.aspect * n
        return {'n_layer': n, 'n_embd': width, 'n_head': width // 32,
                'max_iters': steps, 'eval_interval': max(1, steps // 4),
                'learning_rate': self.learning_rate * first / n, 'min_lr': self.min_lr * first / n}

    def compute(self, n):
        """ Floating-point operations of a run. """
        c = self.plain(**self.ladder[n])
        tokens = c.max_iters * c.batch_size * c.gradient_accumulation_steps * c.n_ctx
        return 6.0 * 12 * n * c.n_embd**2 * tokens


def fit(C, loss):
    """ (A, alpha) of loss = A C^-alpha, by least squares of the logarithms; loss: (..., sizes) """
    x, y = np.log(C), np.log(loss)
    alpha = -(y * (x - x.mean())).sum(-1) / ((x - x.mean()) ** 2).sum()
    return np.exp(y.mean(-1) + alpha * x.mean()), alpha


def advantage(C, base, loss):
    """ C'/C at the largest C, of losses (..., sizes). nan: more compute does not help the base. """
    (A, alpha), (A_other, alpha_other) = fit(C, base), fit(C, loss)
    alpha = np.where(alpha > 0, alpha, np.nan)
    return (A / (A_other * C[-1] ** -alpha_other)) ** (1 / alpha) / C[-1]


def interval(C, base, loss, seed=0):
    """ 95 % interval of advantage by bootstrap; base, loss: (sizes, seeds), paired.

    A few seeds a size are too few to draw from. So the deviations of all sizes are pooled, pairs
    kept, and each size's mean is drawn anew from the pool. Where more compute does not help the
    drawn base there is no C', and the interval has no end: None, as for one seed. The interval
    shows the noise between seeds, not how well a power law fits.
    """
    both = np.stack((base, loss), -1)  # (sizes, seeds, 2)
    sizes, seeds, _ = both.shape
    if seeds < 2:
        return None
    means = both.mean(1)
    pool = (both - means[:, None]).reshape(-1, 2)
    pool *= (seeds / (seeds - 1)) ** 0.5  # deviations from the mean of few are too small
    pool *= student(sizes * (seeds - 1)) / 1.96  # and there are few
    draws = np.random.default_rng(seed).integers(len(pool), size=(RESAMPLES, sizes, seeds))
    drawn = means + pool[draws].mean(2)  # (RESAMPLES, sizes, 2)
    with np.errstate(all='ignore'):
        found = advantage(C, drawn[..., 0], drawn[..., 1])
    endless = np.where(np.isfinite(found), found, np.inf)
    low, high = np.percentile(endless, [2.5, 97.5], method='nearest').tolist()
    return [low, high] if np.isfinite(high) else None


def analyse(C, loss, base):
    """ {label: fit, advantage, interval}; loss: {label: (sizes, seeds)} """
    out, C = {}, np.array(C)
    for label, values in loss.items():
        values, reference = np.array(values), np.array(loss[base])
        A, alpha = fit(C, values.mean(1))
        out[label] = {'A': float(A), 'alpha': float(alpha)}
        if label != base:
            gain = float(advantage(C, reference.mean(1), values.mean(1)))
            out[label] |= {'advantage': gain if np.isfinite(gain) else None,
                           'interval': interval(C, reference, values)}
    return out


def verdicts(data):
    """ A sentence a mode: its fit, its compute advantage, what was measured at the largest C. """
    lines, base = [], data['base']
    for label, m in data['fits'].items():
        text = f'{label}: loss = {m["A"]:.3f} C^-{m["alpha"]:.4f} (C in PFLOP/s-days)'
        if 'advantage' in m:
            last, of_base = data['final_loss'][label][-1], data['final_loss'][base][-1]
            measured = signed(*paired(last, of_base))
            text += f"; C'/C = {advantage_in_words(m)}"
            text += f'; measured at the largest C, {label} - {base}: {measured}'
        lines.append(text)
    return lines


def advantage_in_words(m):
    text = 'none' if m['advantage'] is None else f'{m["advantage"]:.2f}'
    if m['interval'] is None:
        return text + ' without an interval (one seed, or fits too flat), not resolved'
    low, high = m['interval']
    text += f' (95 %: {low:.2f} to {high:.2f})'
    return text if low > 1 or high < 1 else text + ', not resolved'


def cells(data):
    """ The table: a row a size, a column a mode. """
    rows = [('blocks x width', 'steps', 'PFLOP/s-days', *data['final_loss'])]
    for i, (n, keys) in enumerate(data['ladder'].items()):
        rows.append((f'{n} x {keys["n_embd"]}', str(keys['max_iters']), f'{data["compute"][i]:.2e}',
                     *(f'{np.mean(v[i]):.4f}' for v in data['final_loss'].values())))
    return rows


def main(argv):
    refused = ('n_layer', 'n_embd', 'n_head', 'eval_interval')  # what sizes decides
    cfg = settings(ScalingConfig, argv, 'scaling', __doc__.split('\n\n')[0], refused)
    C = [cfg.compute(n) / DAY for n in cfg.ladder]
    found = final_losses(cfg, cfg.ladder, '{} transformer blocks')
    loss = {label: [*by.values()] for label, by in found['final_loss'].items()}
    ladder = {str(n): keys for n, keys in cfg.ladder.items()}
    data = {**heading('scaling', argv, cfg), 'ladder': ladder, 'compute': C, **found,
            'final_loss': loss, 'fits': analyse(C, loss, cfg.base)}
    return conclude('scaling', cfg, data, cells(data), verdicts(data), pictures.scaling)
