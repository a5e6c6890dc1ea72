""" The pictures of compare.py. One message a panel; colours that stay apart in grey and for the colour-blind. """
import statistics

import numpy as np

from experiments.common import paired

COLOURS = ('#4d4d4d', '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8c564b')


def plt():
    """ matplotlib without a screen, imported where it is used. """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as pyplot
    pyplot.rcParams.update({'figure.dpi': 150, 'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False,
                            'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False})
    return pyplot


def finish(figure, path):
    """ Writes the picture; ValueError if it cannot be written. """
    try:
        figure.savefig(path)
    except OSError as e:
        raise ValueError(f'{path}: could not be written ({e.strerror})') from e
    plt().close(figure)


def loss(results, path):
    """ Validation loss against steps, and against wall-clock: steps times the median ms of interleaved steps. """
    pyplot = plt()
    timed = all(m['cost'] for m in results['modes'].values())
    figure, axes = pyplot.subplots(1, 2 if timed else 1, figsize=(9.5 if timed else 5, 3.6), sharey=True, squeeze=False)
    lowest, highest = float('inf'), 0.0
    for i, (label, m) in enumerate(results['modes'].items()):
        colour = COLOURS[i % len(COLOURS)]
        steps = [s for s, _ in m['history'][0]]
        curves = list(zip(*[[v for _, v in h] for h in m['history']], strict=True))
        mean = [statistics.mean(c) for c in curves]
        lowest, highest = min(lowest, *map(min, curves)), max(highest, mean[min(len(mean) - 1, max(1, len(mean) // 6))])
        for ax, scale in zip(axes[0], (1.0, m['cost']['ms'] / 1e3 if timed else 0), strict=False):
            x = [s * scale for s in steps]
            ax.plot(x, mean, color=colour, lw=1.6, label=f'{label}  {mean[-1]:.3f}')
            if len(m['history']) > 1:
                ax.fill_between(x, [min(c) for c in curves], [max(c) for c in curves], color=colour, alpha=0.18, lw=0)
    seeds = len(next(iter(results['modes'].values()))['history'])
    highest = max(highest, lowest + 1e-3)
    axes[0][0].set_ylim(lowest - 0.03 * (highest - lowest), highest)
    axes[0][0].set_ylabel('validation loss (nats per token)')
    axes[0][0].set_xlabel('steps')
    axes[0][0].set_title('same steps', fontsize=9)
    axes[0][0].legend(title='mode, final loss')
    if timed:
        axes[0][1].set_xlabel('steps x time of a step (s)')
        axes[0][1].set_title('same time', fontsize=9)
    if seeds > 1:
        figure.suptitle(f'mean of {seeds} seeds; shaded: lowest to highest', fontsize=8)
    figure.tight_layout()
    finish(figure, path)


def dots(results, path, base, paper):
    """ Each mode's difference from base with its 95 % interval; hollow: the paper's, {mode: difference}. """
    pyplot = plt()
    final = {label: m['final_loss'] for label, m in results['modes'].items()}
    labels = [label for label in final if label != base][::-1]  # the first at the top
    figure, ax = pyplot.subplots(figsize=(6, 0.9 + 0.35 * len(labels)), layout='constrained')
    for y, label in enumerate(labels):
        d, half = paired(final[label], final[base])
        ax.errorbar(d, y, xerr=half or 0, fmt='o', color=COLOURS[1], capsize=3, ms=5)
        if label in paper:
            ax.plot(paper[label], y, 'D', mfc='none', mec=COLOURS[2], ms=6)
    handles = [pyplot.Line2D([], [], color=COLOURS[1], marker='o', label='here, 95 % interval'),
               pyplot.Line2D([], [], color=COLOURS[2], marker='D', mfc='none', ls='', label='the paper')]
    ax.axvline(0, color=COLOURS[0], lw=0.8)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlabel(f'final validation loss - that of {base} (nats per token)')
    figure.legend(handles=handles, loc='outside upper center', ncols=2, fontsize=8)
    finish(figure, path)


def start(results, path):
    """ A panel for each quantity over the first steps, a line a run; {label: {'step': [..], quantity: [..]}} """
    pyplot = plt()
    runs = results['runs']
    quantities = [key for key in next(iter(runs.values())) if key != 'step']
    size = (3.5 * len(quantities), 3.4)
    figure, axes = pyplot.subplots(1, len(quantities), figsize=size, squeeze=False, layout='constrained')
    for ax, quantity in zip(axes[0], quantities, strict=True):
        for i, (label, run) in enumerate(runs.items()):
            ax.plot(run['step'], run[quantity], color=COLOURS[i % len(COLOURS)], lw=1.3, label=label)
        ax.set_title(quantity, fontsize=9)
        ax.set_xlabel('step')
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc='outside right center', fontsize=8)
    finish(figure, path)


def sweep(results, path):
    """ Final loss over the values of a key, a line a mode: the mean of the seeds, and each of them as a dot. """
    pyplot = plt()
    figure, ax = pyplot.subplots(figsize=(5, 3.6), layout='constrained')
    for i, (label, by) in enumerate(results['final_loss'].items()):
        by = {value: [np.nan if y is None else y for y in losses] for value, losses in by.items()}  # None: diverged
        ax.plot(range(len(by)), [statistics.mean(v) for v in by.values()], color=COLOURS[i % len(COLOURS)], lw=1.6,
                label=label)
        ax.plot([x for x, v in enumerate(by.values()) for _ in v], [y for v in by.values() for y in v], 'o', ms=3.5,
                color=COLOURS[i % len(COLOURS)], mew=0)
    ax.set_xticks(range(len(by)), list(by))
    ax.set_xlabel(results['vary'].partition('=')[0])
    ax.set_ylabel('final validation loss (nats per token)')
    seeds = len(next(iter(by.values())))
    ax.set_title(f'lines: mean of {seeds} seeds, dots: each' if seeds > 1 else 'one seed', fontsize=8)
    ax.legend(title='mode')
    finish(figure, path)


def scaling(results, path):
    """ Loss over compute, both logarithmic, with the power law fitted to each mode. """
    pyplot = plt()
    figure, ax = pyplot.subplots(figsize=(5.5, 4), layout='constrained')
    C = np.array(results['compute'])
    fine = np.geomspace(C[0], C[-1], 50)
    for i, (label, loss) in enumerate(results['final_loss'].items()):
        colour, m = COLOURS[i % len(COLOURS)], results['fits'][label]
        ax.plot(fine, m['A'] * fine ** -m['alpha'], color=colour, lw=1.4, ls='--' if label == results['base'] else '-',
                label=f'{label}: {m["A"]:.3f} $C^{{{-m["alpha"]:.4f}}}$')
        ax.plot(np.repeat(C, len(loss[0])), np.ravel(loss), 'o', color=colour, ms=3.5, mew=0)
    ax.set_xscale('log')
    ax.set_yscale('log')
    ax.yaxis.set_major_locator(pyplot.LogLocator(subs=np.arange(1, 10, 0.2)))
    ax.yaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_minor_formatter(pyplot.NullFormatter())
    ax.set_xlabel('compute C (PFLOP/s-days)')
    ax.set_ylabel('final validation loss (nats per token)')
    ax.legend(title='mode and fit; a dot is a run')
    finish(figure, path)


KINDS = {'attention': ('#e69f00', 'o'), 'MLP': ('#009e73', 's')}  # of sublayers


def depth(modes, path):
    """ The depth-mixing matrices, one a panel: row = who reads, column = what is read, colour = mean weight. """
    pyplot = plt()
    from matplotlib.colors import FuncNorm
    shown = {label: m for label, m in modes.items() if m['matrix']}
    if not shown:
        return
    columns, weights = min(len(shown), 4), [w for m in shown.values() for row in m['matrix'] for w in row]
    lines, size = -(-len(shown) // columns), (3.2 * columns + 0.8, 3.3 * -(-len(shown) // columns) + 0.6)
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, layout='constrained', figsize=size)
    high = min(2.0, max(1.0, *np.abs(weights)))
    low = -high if min(weights) < -0.01 else 0
    norm = FuncNorm((lambda x: np.sign(x) * np.abs(x) ** 0.5, lambda x: np.sign(x) * x ** 2), low, high)
    for ax in axes.flat[len(shown):]:
        ax.remove()
    for ax, (label, m) in zip(axes.flat, shown.items(), strict=False):
        n, S = len(m['matrix']), m['S'] or 1
        M = np.ma.masked_where(np.triu(np.ones((n, n)), 1), m['matrix'])
        image = ax.imshow(M, cmap='RdBu' if low else 'Blues', norm=norm)
        for edge in range(S, n - 1, S) if S > 1 else ():  # between residual blocks
            ax.plot((-0.5, edge + 0.5, edge + 0.5), (edge - 0.5, edge - 0.5, n - 0.5), color='#d55e00', lw=0.8)
        for i, (colour, marker) in enumerate(KINDS.values()):
            rows = np.arange(i, n - 1, 2)
            ax.scatter(np.full(len(rows), -0.035), rows, s=min(14, 300 / n), color=colour, marker=marker,
                       transform=ax.get_yaxis_transform(), clip_on=False, lw=0)
        pairs = range(0, n // 2, -(-n // 26))  # the transformer blocks that have room for a label
        ax.set_yticks([*(2 * b + 0.5 for b in pairs), n - 1], [*(str(b + 1) for b in pairs), 'output'])
        ax.set_xticks([0, *(2 * b + 1.5 for b in pairs)], ['e', *(str(b + 1) for b in pairs)])
        ax.tick_params(length=0, labelsize=7, grid_alpha=0)
        ax.tick_params(axis='y', pad=9)
        ax.set_title(label)
    figure.supylabel('who reads: transformer block', fontsize=9)
    figure.supxlabel('what is read: e, the embedding, then the outputs of transformer block', fontsize=9)
    figure.colorbar(image, ax=[*axes.flat[:len(shown)]], label='mean weight (square-root scale)', shrink=0.8,
                    format='%g', extend='max' if high == 2 else None,
                    ticks=[t for t in (-1, -0.3, -0.1, 0, 0.01, 0.1, 0.3, 0.6, 1, 2) if low <= t <= high])
    handles = [pyplot.Line2D([], [], color=c, marker=k, ls='', ms=4, label=f'{x} reads') for x, (c, k) in KINDS.items()]
    if any((m['S'] or 1) > 1 for m in shown.values()):
        handles.append(pyplot.Line2D([], [], color='#d55e00', lw=1, label='between residual blocks'))
    figure.legend(handles=handles, loc='outside upper center', ncols=3, fontsize=8)
    finish(figure, path)


def dynamics(modes, path):
    """ How large the running sum, the output that it grew by and the gradient there are along depth, a line a mode. """
    pyplot = plt()
    figure, axes = pyplot.subplots(1, 3, figsize=(10.5, 3.4), layout='constrained')
    titles = {'stream': 'running sum after a sublayer', 'output': 'its output', 'gradient': 'gradient at its output'}
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (label, m) in enumerate(modes.items()):
            ax.plot(range(1, len(m[key]) + 1), m[key], color=COLOURS[i % len(COLOURS)], marker='.', ms=4, lw=1.3,
                    ls='--' if i >= len(COLOURS) else '-', label=label)
        ax.set_yscale('log')
        ax.yaxis.set_major_locator(pyplot.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter('{x:g}')
        ax.yaxis.set_minor_formatter(pyplot.NullFormatter())
        ax.set_title(title, fontsize=9)
        ax.set_xlabel('sublayer (odd: attention, even: MLP)')
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel('root mean square')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right center', fontsize=8)
    finish(figure, path)
