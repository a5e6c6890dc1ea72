""" The pictures of compare.py. One message a panel; colours that stay apart in grey and for the colour-blind. """
import statistics

COLOURS = ('#4d4d4d', '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8c564b')


def plt():
    """ matplotlib without a screen, imported where it is used. """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as pyplot
    pyplot.rcParams.update({'figure.dpi': 150, 'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False,
                            'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False})
    return pyplot


def loss(results, path):
    """ Validation loss against steps, and against wall-clock: steps times the median ms of interleaved steps. """
    pyplot = plt()
    timed = all(m['cost'] for m in results['modes'].values())
    figure, axes = pyplot.subplots(1, 2 if timed else 1, figsize=(9.5 if timed else 5, 3.6), sharey=True, squeeze=False)
    lowest, highest = float('inf'), 0.0
    for colour, (label, m) in zip(COLOURS, results['modes'].items(), strict=False):
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
    axes[0][0].set_ylim(lowest - 0.03 * (highest - lowest), highest)
    axes[0][0].set_ylabel('validation loss (nats per token)')
    axes[0][0].set_xlabel('steps')
    axes[0][0].set_title('same steps', fontsize=9)
    axes[0][0].legend(title='mode, final loss')
    if timed:
        axes[0][1].set_xlabel('seconds of training')
        axes[0][1].set_title('same time', fontsize=9)
    if seeds > 1:
        figure.suptitle(f'mean of {seeds} seeds; shaded: lowest to highest', fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
