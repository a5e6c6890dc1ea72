""" The pictures of compare.py. The colours stay apart in grey and for the colour-blind. """
from statistics import fmean

import numpy as np

from experiments.common import paired

COLOURS = ('#4d4d4d', '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8c564b')
KINDS = {'attention': ('#e69f00', 'o'), 'MLP': ('#009e73', 's')}  # of sublayers: colour, marker


def plt():
    """ matplotlib without a screen, imported where it is used. """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as pyplot
    pyplot.rcParams.update({
        'figure.dpi': 150, 'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False,
        'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False})
    return pyplot


def colour(i):
    return COLOURS[i % len(COLOURS)]


def finish(figure, path):
    """ Writes the picture; ValueError if it cannot be written. """
    try:
        figure.savefig(path)
    except OSError as e:
        raise ValueError(f'{path}: could not be written ({e.strerror})') from e
    plt().close(figure)


def plain_log_axis(axis, steps):
    """ A logarithmic axis with plain numbers at `steps` of each power of ten. """
    axis.set_major_locator(plt().LogLocator(subs=steps))
    axis.set_major_formatter('{x:g}')
    axis.set_minor_formatter(plt().NullFormatter())


def loss(results, path):
    """ Validation loss against steps and against time: steps x the median time of a step. """
    pyplot = plt()
    timed = all(m['cost'] for m in results['modes'].values())
    size = (9.5 if timed else 5, 3.6)
    figure, axes = pyplot.subplots(1, 1 + timed, figsize=size, sharey=True, squeeze=False)
    axes, lowest, highest = axes[0], np.inf, 0.0
    for i, (label, m) in enumerate(results['modes'].items()):
        steps = np.array([step for step, _ in m['history'][0]])
        curves = np.array([[value for _, value in run] for run in m['history']])  # (seeds, steps)
        mean = curves.mean(0)
        early = min(len(mean) - 1, max(1, len(mean) // 6))  # what was before is cut off
        lowest, highest = min(lowest, curves.min()), max(highest, mean[early])
        for ax, scale in zip(axes, (1, m['cost']['ms'] / 1e3 if timed else 0), strict=False):
            ax.plot(steps * scale, mean, color=colour(i), lw=1.6, label=f'{label}  {mean[-1]:.3f}')
            if len(curves) > 1:
                ax.fill_between(steps * scale, curves.min(0), curves.max(0), color=colour(i),
                                alpha=0.18, lw=0)
    highest = max(highest, lowest + 1e-3)
    axes[0].set_ylim(lowest - 0.03 * (highest - lowest), highest)
    axes[0].set_ylabel('validation loss (nats per token)')
    axes[0].set_xlabel('steps')
    axes[0].set_title('same steps', fontsize=9)
    axes[0].legend(title='mode, final loss')
    if timed:
        axes[1].set_xlabel('steps x time of a step (s)')
        axes[1].set_title('same time', fontsize=9)
    if len(curves) > 1:
        figure.suptitle(f'mean of {len(curves)} seeds; shaded: lowest to highest', fontsize=8)
    figure.tight_layout()
    finish(figure, path)


def dots(results, path, base, paper):
    """ Each mode's difference from base with its interval; hollow: the paper's, {mode: number}. """
    pyplot = plt()
    final = {label: m['final_loss'] for label, m in results['modes'].items()}
    labels = [label for label in final if label != base][::-1]  # the first at the top
    size = (6, 0.9 + 0.35 * len(labels))
    figure, ax = pyplot.subplots(figsize=size, layout='constrained')
    for y, label in enumerate(labels):
        d, half = paired(final[label], final[base])
        ax.errorbar(d, y, xerr=half or 0, fmt='o', color=colour(1), capsize=3, ms=5)
        if label in paper:
            ax.plot(paper[label], y, 'D', mfc='none', mec=colour(2), ms=6)
    ax.axvline(0, color=colour(0), lw=0.8)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlabel(f'final validation loss - that of {base} (nats per token)')
    here = pyplot.Line2D([], [], color=colour(1), marker='o', label='here, 95 % interval')
    theirs = pyplot.Line2D([], [], color=colour(2), marker='D', mfc='none', ls='', label='paper')
    figure.legend(handles=[here, theirs], loc='outside upper center', ncols=2, fontsize=8)
    finish(figure, path)


def start(results, path, lines):
    """ A panel a quantity over the first steps. A line is the mean over the seeds of a recipe.

    lines: {recipe: 'colour linestyle'}, the recipes to draw.
    """
    pyplot = plt()
    quantities = 'validation loss', 'norm of the queries', 'entropy of the weights'
    figure, axes = pyplot.subplots(1, 3, figsize=(9.5, 3.6), layout='constrained')
    for ax, quantity in zip(axes, quantities, strict=True):
        for recipe, style in lines.items():
            i, dashes = style.split()
            runs = results['runs'][recipe]
            mean = np.mean([run[quantity] for run in runs], axis=0)
            ax.plot(runs[0]['step'], mean, dashes, color=colour(int(i)), lw=1.3, label=recipe)
        ax.set_title(quantity, fontsize=9)
        ax.set_xlabel('step')
    axes[0].set_ylim(2.25, 3.0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4,
                  fontsize=8)
    finish(figure, path)


def sweep(results, path):
    """ Final loss over the values of a key, a line a mode: the mean of the seeds; a dot each. """
    pyplot = plt()
    figure, ax = pyplot.subplots(figsize=(5, 3.6), layout='constrained')
    for i, (label, by_value) in enumerate(results['final_loss'].items()):
        losses = np.array([*by_value.values()], float)  # (values, seeds); nan where a run diverged
        places = np.arange(len(losses))
        ax.plot(places, losses.mean(1), color=colour(i), lw=1.6, label=label)
        ax.plot(places, losses, 'o', ms=3.5, color=colour(i), mew=0)
    seeds = losses.shape[1]
    ax.set_xticks(places, list(by_value))
    ax.set_xlabel(results['vary'].partition('=')[0])
    ax.set_ylabel('final validation loss (nats per token)')
    title = 'one seed' if seeds == 1 else f'lines: mean of {seeds} seeds, dots: each'
    ax.set_title(title, fontsize=8)
    ax.legend(title='mode')
    finish(figure, path)


def scaling(results, path):
    """ Loss over compute, both logarithmic, with the power law fitted to each mode. """
    pyplot = plt()
    figure, ax = pyplot.subplots(figsize=(5.5, 4), layout='constrained')
    C = np.array(results['compute'])
    fine = np.geomspace(C[0], C[-1], 50)
    for i, (label, loss) in enumerate(results['final_loss'].items()):
        A, alpha = results['fits'][label]['A'], results['fits'][label]['alpha']
        dashes = '--' if label == results['base'] else '-'
        ax.plot(fine, A * fine ** -alpha, color=colour(i), lw=1.4, ls=dashes,
                label=f'{label}: {A:.3f} $C^{{{-alpha:.4f}}}$')
        ax.plot(C, loss, 'o', color=colour(i), ms=3.5, mew=0)
    ax.set_xscale('log')
    ax.set_yscale('log')
    plain_log_axis(ax.yaxis, np.arange(1, 10, 0.2))
    ax.set_xlabel('compute C (PFLOP/s-days)')
    ax.set_ylabel('final validation loss (nats per token)')
    ax.legend(title='mode and fit; a dot is a run')
    finish(figure, path)


def square_root_scale(weights):
    """ Colours for mean weights: from the lowest, if there are negative ones, to at most 2. """
    from matplotlib.colors import FuncNorm
    high = min(2.0, max(1.0, np.abs(weights).max()))
    low = -high if weights.min() < -0.01 else 0

    def root(x):
        return np.sign(x) * np.abs(x) ** 0.5

    def square(x):
        return np.sign(x) * x ** 2
    return FuncNorm((root, square), low, high)


def depth(modes, path):
    """ The depth-mixing matrices, one a panel: row = who reads, column = what is read. """
    pyplot = plt()
    shown = {label: m for label, m in modes.items() if m['matrix']}
    if not shown:
        return
    columns = 3 if len(shown) in (5, 6) else min(len(shown), 4)
    lines = -(-len(shown) // columns)
    size = (3.2 * columns + 0.8, 3.3 * lines + 0.6)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False,
                                   layout='constrained')
    norm = square_root_scale(np.concatenate([np.ravel(m['matrix']) for m in shown.values()]))
    for ax in axes.flat[len(shown):]:
        ax.remove()
    for ax, (label, m) in zip(axes.flat, shown.items(), strict=False):
        image = matrix(ax, np.array(m['matrix']), m['S'] or 1, norm)
        ax.set_title(label)
    figure.supylabel('who reads: transformer block', fontsize=9)
    read = 'what is read: e, the embedding, then the outputs of transformer block'
    figure.supxlabel(read, fontsize=9)
    marks = (-1, -0.3, -0.1, 0, 0.01, 0.1, 0.3, 0.6, 1, 2)
    figure.colorbar(image, ax=[*axes.flat[:len(shown)]], label='mean weight (square-root scale)',
                    shrink=0.8, format='%g', extend='max' if norm.vmax == 2 else None,
                    ticks=[mark for mark in marks if norm.vmin <= mark <= norm.vmax])
    handles = [pyplot.Line2D([], [], color=c, marker=marker, ls='', ms=4, label=f'{kind} reads')
               for kind, (c, marker) in KINDS.items()]
    if any((m['S'] or 1) > 1 for m in shown.values()):
        edge = pyplot.Line2D([], [], color=colour(2), lw=1, label='between residual blocks')
        handles.append(edge)
    figure.legend(handles=handles, loc='outside upper center', ncols=3, fontsize=8)
    finish(figure, path)


def matrix(ax, M, S, norm):
    """ One depth-mixing matrix (n, n), with lines between residual blocks of S sublayers. """
    n = len(M)
    future = np.triu(np.ones((n, n)), 1)
    shades = 'RdBu' if norm.vmin else 'Blues'
    image = ax.imshow(np.ma.masked_where(future, M), cmap=shades, norm=norm)
    for edge in range(S, n - 1, S) if S > 1 else ():
        x, y = (-0.5, edge + 0.5, edge + 0.5), (edge - 0.5, edge - 0.5, n - 0.5)
        ax.plot(x, y, color=colour(2), lw=0.8)
    for i, (c, marker) in enumerate(KINDS.values()):
        rows = np.arange(i, n - 1, 2)
        ax.scatter(np.full(len(rows), -0.035), rows, s=min(14, 300 / n), color=c, marker=marker,
                   transform=ax.get_yaxis_transform(), clip_on=False, lw=0)
    blocks = np.arange(0, n // 2, -(-n // 26))  # the transformer blocks that have room for a label
    names = [str(b + 1) for b in blocks]
    ax.set_yticks([*(2 * blocks + 0.5), n - 1], [*names, 'output'])
    ax.set_xticks([0, *(2 * blocks + 1.5)], ['e', *names])
    ax.tick_params(length=0, labelsize=7, grid_alpha=0)
    ax.tick_params(axis='y', pad=9)
    return image


def dynamics(modes, path):
    """ The running sum, the output that it grew by and the gradient there by depth. """
    pyplot = plt()
    figure, axes = pyplot.subplots(1, 3, figsize=(10.5, 3.4), layout='constrained')
    titles = {'stream': 'running sum after a sublayer', 'output': 'its output',
              'gradient': 'gradient at its output'}
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (label, m) in enumerate(modes.items()):
            dashes = '--' if i >= len(COLOURS) else '-'
            ax.plot(range(1, len(m[key]) + 1), m[key], color=colour(i), marker='.', ms=4, lw=1.3,
                    ls=dashes, label=label)
        ax.set_yscale('log')
        plain_log_axis(ax.yaxis, (1, 2, 5))
        ax.set_title(title, fontsize=9)
        ax.set_xlabel('sublayer (odd: attention, even: MLP)')
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel('root mean square')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right center', fontsize=8)
    finish(figure, path)


def front_page(results, maps, path):
    """ Loss curves above, what Full and Block read below; large enough to be read on a phone. """
    pyplot = plt()
    figure, axes = pyplot.subplot_mosaic([['loss', 'loss'], ['full', 'block:8']],
                                         figsize=(6.4, 6.2), layout='constrained',
                                         height_ratios=(1, 1.15))
    ends = []
    for colour, (label, m) in zip(COLOURS, results['modes'].items(), strict=False):
        steps = [step for step, _ in m['history'][0]][1:]
        curves = [[loss for _, loss in history][1:] for history in m['history']]
        by_step = list(zip(*curves, strict=True))
        mean = [fmean(losses) for losses in by_step]
        axes['loss'].plot(steps, mean, color=colour, lw=2, label=f'{label}  {mean[-1]:.3f}')
        axes['loss'].fill_between(steps, [min(x) for x in by_step], [max(x) for x in by_step],
                                  color=colour, alpha=0.2, lw=0)
        ends += by_step[-1]
    axes['loss'].set_ylim(min(ends) - 0.02, max(ends) + 0.45)
    axes['loss'].set_xlim(steps[1], steps[-1] * 1.02)
    axes['loss'].set_xlabel('training steps', fontsize=11)
    axes['loss'].set_ylabel('validation loss', fontsize=11)
    axes['loss'].legend(fontsize=11, title=f'mean of {len(curves)} seeds, and their range')
    for label in ('full', 'block:8'):
        M = np.array(maps[label]['matrix'])
        M = np.ma.masked_where(np.triu(np.ones_like(M), 1), M)
        image = axes[label].imshow(M ** 0.5, cmap='Blues', vmin=0, vmax=1)
        axes[label].set_title(f'what {label} reads', fontsize=11)
        axes[label].set_xticks([0, len(M) - 1], ['embedding', f'output {len(M) - 2}'])
        axes[label].set_yticks([0, len(M) - 1], ['sublayer 0', 'final'])
        axes[label].tick_params(length=0, labelsize=9)
        axes[label].grid(False)
    bar = figure.colorbar(image, ax=[axes['full'], axes['block:8']], shrink=0.8,
                          ticks=[0, 0.1 ** 0.5, 0.3 ** 0.5, 1])
    bar.ax.set_yticklabels(['0', '0.1', '0.3', '1'])
    bar.set_label('mean weight', fontsize=10)
    finish(figure, path)
