""" The pictures of compare.py. The colours stay apart in grey and for the colour-blind. """
import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import AsinhNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.common import paired

plt.switch_backend('Agg')  # it needs no screen
plt.rcParams.update({
    'figure.dpi': 150, 'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False,
    'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False,
    'figure.constrained_layout.use': True,
    'axes.prop_cycle': plt.cycler(color=['#4d4d4d', '#0072b2', '#d55e00', '#009e73', '#cc79a7',
                                         '#e69f00', '#56b4e9', '#8c564b'])})
LIMIT = 0.1  # of dots, in nats
KINDS = {'attention': ('C5', 'o'), 'MLP': ('C3', 's')}  # of sublayers: colour, marker


def finish(figure, path):
    figure.savefig(path)
    plt.close(figure)


def plain_numbers(axis, steps):
    """ A logarithmic axis with plain numbers at `steps` of each power of ten. """
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter('{x:g}')
    axis.set_minor_formatter(NullFormatter())


def curves(ax, modes, in_time=False):
    """ Draws mean and range of the loss over steps, or over their time; returns the caption. """
    lowest, highest = np.inf, 0.0
    for i, (label, m) in enumerate(modes.items()):
        x = np.array([step for step, _ in m['history'][0]])
        if in_time:
            x = x * m['cost']['ms'] / 1e3
        runs = np.array([[value for _, value in run] for run in m['history']])  # (seeds, steps)
        mean = runs.mean(0)
        ax.plot(x, mean, color=f'C{i}', lw=1.8, label=f'{label}  {mean[-1]:.3f}')
        ax.fill_between(x, runs.min(0), runs.max(0), color=f'C{i}', alpha=0.18, lw=0)
        early = min(len(mean) - 1, max(1, len(mean) // 6))  # the y axis ends at this loss
        lowest, highest = min(lowest, runs.min()), max(highest, mean[early])
    highest = max(highest, lowest + 1e-3)
    ax.set_ylim(lowest - 0.03 * (highest - lowest), highest)
    ax.set_xlabel('steps x time of a step (s)' if in_time else 'steps')
    return 'one seed' if len(runs) == 1 else f'mean of {len(runs)} seeds; shaded: their range'


def loss(results, path):
    """ The validation loss of all modes, at the same steps and at the same time. """
    timed = all(m['cost'] for m in results['modes'].values())
    figure, axes = plt.subplots(1, 1 + timed, figsize=(9.5 if timed else 5, 3.6), sharey=True,
                                squeeze=False)
    for ax, in_time in zip(axes[0], (False, True), strict=False):
        title = curves(ax, results['modes'], in_time)
    axes[0, 0].set_ylabel('validation loss (nats per token)')
    axes[0, 0].legend(title='mode, final loss')
    figure.suptitle(title, fontsize=8)
    finish(figure, path)


def dots(results, path, base, paper, bases=None):
    """ Each mode's difference from base with its interval; paper: {mode: its difference}, hollow.

    bases: {mode: its own base} of those that are compared with another. A difference that
    is larger than LIMIT is an arrow at the edge, so that the others can be told apart.
    """
    bases = bases or {}
    final = {label: m['final_loss'] for label, m in results['modes'].items()}
    labels = [label for label in final if label != base][::-1]  # the first at the top
    figure, ax = plt.subplots(figsize=(6, 0.9 + 0.35 * len(labels)))
    for y, label in enumerate(labels):
        d, half = paired(final[label], final[bases.get(label, base)])
        if abs(d) > LIMIT:
            ax.plot(math.copysign(LIMIT, d), y, '>' if d > 0 else '<', color='C1', ms=7)
        else:
            ax.errorbar(d, y, xerr=half or 0, fmt='o', color='C1', capsize=3, ms=5)
        if label in paper:
            ax.plot(paper[label], y, 'D', mfc='none', mec='C2', ms=6)
    ax.axvline(0, color='C0', lw=0.8)
    ax.set_xlim(-1.1 * LIMIT, 1.1 * LIMIT)
    names = [f'{label} - {bases[label]}' if label in bases else label for label in labels]
    ax.set_yticks(range(len(labels)), names)
    ax.set_xlabel(f'final validation loss - that of {base} (nats per token)')
    here = Line2D([], [], color='C1', marker='o', label='here, 95 % interval')
    theirs = Line2D([], [], color='C2', marker='D', mfc='none', ls='', label='paper')
    figure.legend(handles=[here, theirs], loc='outside upper center', ncols=2, fontsize=8)
    finish(figure, path)


def start(results, path, lines):
    """ A panel a quantity over the first steps. A line is the mean over the seeds of a recipe.

    lines: {recipe: 'colour linestyle'}, the recipes to draw.
    """
    quantities = 'validation loss', 'norm of the queries', 'entropy of the weights'
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.6))
    for ax, quantity in zip(axes, quantities, strict=True):
        for recipe, style in lines.items():
            i, dashes = style.split()
            runs = results['runs'][recipe]
            mean = np.mean([run[quantity] for run in runs], axis=0)
            ax.plot(runs[0]['step'], mean, dashes, color=f'C{i}', lw=1.3, label=recipe)
        ax.set_title(quantity, fontsize=9)
        ax.set_xlabel('step')
    axes[0].set_ylim(2.25, 3.0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4,
                  fontsize=8)
    finish(figure, path)


def sweep(results, path):
    """ Final loss over the values of a key, a line a mode: the mean of the seeds; a dot each. """
    figure, ax = plt.subplots(figsize=(5, 3.6))
    for i, (label, by_value) in enumerate(results['final_loss'].items()):
        losses = np.array([*by_value.values()], float)  # (values, seeds); nan where a run diverged
        ax.plot([*by_value], losses.mean(1), color=f'C{i}', lw=1.6, label=label)
        ax.plot([*by_value], losses, 'o', ms=3.5, color=f'C{i}', mew=0)
    ax.set_xlabel(results['vary'].partition('=')[0])
    ax.set_ylabel('final validation loss (nats per token)')
    ax.legend(title='mode; line: mean, dot: a seed')
    finish(figure, path)


def scaling(results, path):
    """ Loss over compute, both logarithmic, with the power law fitted to each mode. """
    figure, ax = plt.subplots(figsize=(5.5, 4))
    C = np.array(results['compute'])
    for i, (label, loss) in enumerate(results['final_loss'].items()):
        A, alpha = results['fits'][label]['A'], results['fits'][label]['alpha']
        ax.plot(C, A * C ** -alpha, color=f'C{i}', lw=1.4,
                label=f'{label}: {A:.3f} $C^{{{-alpha:.4f}}}$')
        ax.plot(C, loss, 'o', color=f'C{i}', ms=3.5, mew=0)
    ax.set_xscale('log')
    ax.set_yscale('log')
    plain_numbers(ax.yaxis, np.arange(1, 10, 0.2))
    ax.set_xlabel('compute C (PFLOP/s-days)')
    ax.set_ylabel('final validation loss (nats per token)')
    ax.legend(title='mode and fit; a dot is a run')
    finish(figure, path)


# -----------------------------------------------------------------------------
# Depth.

def triangle(ax, M, norm):
    """ A depth-mixing matrix (n, n) without what lies in the future of a read. """
    future = np.triu(np.ones_like(M), 1)
    shades = 'RdBu' if norm.vmin else 'Blues'
    ax.grid(False)
    ax.tick_params(length=0)
    return ax.imshow(np.ma.masked_where(future, M), cmap=shades, norm=norm)


def shades_of(matrices):
    """ A scale that shows small weights: from the lowest, if some are negative, to at most 2. """
    weights = np.concatenate([np.ravel(M) for M in matrices])
    high = min(2.0, max(1.0, np.abs(weights).max()))
    return AsinhNorm(linear_width=0.1, vmin=-high if weights.min() < -0.01 else 0, vmax=high)


def colour_bar(figure, image, axes):
    norm = image.norm
    marks = [x for x in (-2, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 2) if norm.vmin <= x <= norm.vmax]
    figure.colorbar(image, ax=axes, label='mean weight', shrink=0.8, ticks=marks, format='%g',
                    extend='max' if norm.vmax == 2 else None)


def depth(modes, path):
    """ The depth-mixing matrices, one a panel: row = who reads, column = what is read. """
    shown = {label: m for label, m in modes.items() if m['matrix']}
    if not shown:
        return
    columns = 3 if len(shown) in (5, 6) else min(len(shown), 4)
    lines = -(-len(shown) // columns)
    size = (3.2 * columns + 0.8, 3.3 * lines + 0.6)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    norm = shades_of(m['matrix'] for m in shown.values())
    for ax in axes.flat[len(shown):]:
        ax.remove()
    axes = [*axes.flat[:len(shown)]]
    for ax, (label, m) in zip(axes, shown.items(), strict=True):
        image = triangle(ax, np.array(m['matrix']), norm)
        name_sublayers(ax, len(m['matrix']), m['S'] or 1)
        ax.set_title(label)
    figure.supylabel('who reads: transformer block', fontsize=9)
    read = 'what is read: e, the embedding, then the outputs of transformer block'
    figure.supxlabel(read, fontsize=9)
    colour_bar(figure, image, axes)
    handles = [Line2D([], [], color=c, marker=marker, ls='', ms=4, label=f'{kind} reads')
               for kind, (c, marker) in KINDS.items()]
    handles.append(Line2D([], [], color='C2', lw=1, label='between residual blocks'))
    figure.legend(handles=handles, loc='outside upper center', ncols=3, fontsize=8)
    finish(figure, path)


def name_sublayers(ax, n, S):
    """ Labels a matrix (n, n), with lines between residual blocks of S sublayers. """
    for edge in range(S, n - 1, S) if S > 1 else ():
        x, y = (-0.5, edge + 0.5, edge + 0.5), (edge - 0.5, edge - 0.5, n - 0.5)
        ax.plot(x, y, color='C2', lw=0.8)
    for i, (c, marker) in enumerate(KINDS.values()):
        rows = np.arange(i, n - 1, 2)
        ax.scatter(np.full(len(rows), -0.035), rows, s=min(14, 300 / n), color=c, marker=marker,
                   transform=ax.get_yaxis_transform(), clip_on=False, lw=0)
    blocks = np.arange(0, n // 2, -(-n // 26))  # the transformer blocks that have room for a label
    names = [str(b + 1) for b in blocks]
    ax.set_yticks([*(2 * blocks + 0.5), n - 1], [*names, 'output'])
    ax.set_xticks([0, *(2 * blocks + 1.5)], ['e', *names])
    ax.tick_params(labelsize=7)
    ax.tick_params(axis='y', pad=9)


def dynamics(modes, path):
    """ The running sum, the output that it grew by and the gradient there by depth. """
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    titles = {'stream': 'running sum after a sublayer', 'output': 'its output',
              'gradient': 'gradient at its output'}
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        for label, m in modes.items():
            ax.plot(range(1, len(m[key]) + 1), m[key], marker='.', ms=4, lw=1.3, label=label)
        ax.set_yscale('log')
        plain_numbers(ax.yaxis, (1, 2, 5))
        ax.set_title(title, fontsize=9)
        ax.set_xlabel('sublayer (odd: attention, even: MLP)')
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel('root mean square')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right center', fontsize=8)
    finish(figure, path)


def front_page(results, maps, path):
    """ Loss curves above, what Full and Block read below; large enough to be read on a phone. """
    figure, axes = plt.subplot_mosaic([['loss', 'loss'], ['full', 'block:8']],
                                      figsize=(6.4, 6.2), height_ratios=(1, 1.15))
    title = curves(axes['loss'], results['modes'])
    axes['loss'].set_xlim(left=results['modes']['full']['history'][0][1][0])
    axes['loss'].set_xlabel('training steps', fontsize=11)
    axes['loss'].set_ylabel('validation loss', fontsize=11)
    axes['loss'].legend(fontsize=11, title=title)
    matrices = {label: np.array(maps[label]['matrix']) for label in ('full', 'block:8')}
    for label, M in matrices.items():
        image = triangle(axes[label], M, shades_of(matrices.values()))
        axes[label].set_title(f'what {label} reads', fontsize=11)
        axes[label].set_xticks([0, len(M) - 1], ['embedding', f'output {len(M) - 2}'])
        axes[label].set_yticks([0, len(M) - 1], ['sublayer 0', 'final'])
    colour_bar(figure, image, [axes['full'], axes['block:8']])
    finish(figure, path)
