"""
Trains the residual rules side by side and shows how they compare.

Runs are paired: one seed means the same weights and the same batches in every mode; see experiments/runs.py.
"""
import os
import statistics
from dataclasses import asdict, dataclass

import config as configuration
from experiments import depth, measure, pictures
from experiments.common import environment, paired, signed, table, write_json
from experiments.runs import RunsConfig, commits, partition, run_all, settings
from sample import SampleConfig, sample
from train import pick_compile, pick_device, pick_dtype
from weights import load_checkpoint


@dataclass
class CompareConfig(RunsConfig):
    timing_rounds: int = 15  # interleaved training steps behind the column ms/step; 0: none
    noise: bool = True  # also train standard, else the first mode, on other batches: how far apart equal rules end

    def __post_init__(self):
        super().__post_init__()
        configuration.checker(self)('timing_rounds', 0 <= self.timing_rounds < 2**31, '0 or more')
        self.mode_configs()


def costs(configs, vocab_size, rounds, base):
    """ {label: median ms of a step, ratio to the base, bytes}, from steps that take turns. """
    first = next(iter(configs.values()))
    device = pick_device(first.device)
    dtype = pick_dtype(first.dtype, device)
    benches = {label: measure.Bench(c.model(vocab_size), c.batch_size, device, dtype, pick_compile(c.compile, device))
               for label, c in configs.items()}
    times = measure.interleaved({label: b.step for label, b in benches.items()}, device, rounds)
    memory = measure.peak_bytes if device.type == 'cuda' else measure.alive_bytes
    passes = 1e3 * first.gradient_accumulation_steps  # in a step; what an optimiser does once is small beside them
    return {label: {'ms': passes * statistics.median(t), 'ratio': measure.ratio(t, times[base]),
                    'bytes': memory(benches[label])}
            for label, t in times.items()}


# -----------------------------------------------------------------------------
# What is shown.

def verdicts(data):
    """ A sentence on each mode: its difference from the base, and when it reaches the base's final loss. """
    modes, base = data['modes'], data['base']
    final = modes[base]['final_loss']
    lines = []
    if data.get('noise'):
        gaps = [abs(a - b) for a, b in zip(data['noise']['final_loss'], final, strict=True)]
        line = f'noise: {base} with other batches, from the same weights, ends {max(gaps):.4f} away'
        if len(gaps) > 1:
            line += f' at most, {statistics.mean(gaps):.4f} on average'
        lines.append(line)
    for label, m in modes.items():
        if label != base:
            lines.append(f'{label} - {base}: {in_words(m, final, base)}; {when_it_gets_there(m, final, base)}')
    return lines


def in_words(m, final, base):
    """ A mode's difference from the base, whose final losses are given, and what to think of it. """
    d, half = m['difference'], m['half_width']
    if half is None:
        return f'{d:+.4f} from one seed, which shows no spread; --seeds=5 shows it'
    text = f'{signed(d, half)} (95 %, {len(final)} paired seeds), '
    spread = statistics.stdev(final)
    if abs(d) <= half:
        return text + 'not distinguishable from zero'
    if abs(d) < spread:
        return text + f'resolved, but less than the sd of {base} between seeds ({spread:.4f})'
    return text + f'{"lower" if d < 0 else "higher"}, by more than the sd of {base} between seeds ({spread:.4f})'


def when_it_gets_there(m, final, base):
    """ When a mode reaches the base's mean final loss, in words. """
    step, total = reaches(m['history'], statistics.mean(final)), m['history'][0][-1][0]
    if step is None:
        return f'it never reaches the final loss of {base}'
    text = f'it reaches the final loss of {base} at step {step:.0f} of {total}'
    if m['cost']:
        seconds, ratio = step * m['cost']['ms'] / 1e3, step * m['cost']['ratio'] / total
        text += f', after {seconds:.0f} s ({ratio:.2f} x the time of {base})'
    return text


def reaches(history, goal):
    """ The step, interpolated, at which the mean over the runs first is at or below goal; None if never after 0. """
    mean = [(points[0][0], statistics.mean(v for _, v in points)) for points in zip(*history, strict=False)]
    for (s0, v0), (s1, v1) in zip(mean, mean[1:], strict=False):
        if v1 <= goal:
            return s0 + (s1 - s0) * (v0 - goal) / (v0 - v1) if v0 > goal else s1
    return None


COLUMNS = ('mode', 'parameters', 'first loss', 'final loss', 'sd', 'best loss', 'difference', 'catches up',
           'step', 'ms', 'memory')
SHORT = ('mode', 'final loss', 'sd', 'difference', 'step', 'memory')  # these fit in 80 columns


def cells(data, columns=SHORT):
    """ The table, a tuple of strings a row: of each mode and, after the base, of the base with other batches. """
    rows = []
    for label, m in data['modes'].items():
        rows.append(line(label, m, data['modes'][data['base']]))
        if label == data['base'] and data.get('noise'):
            rows.append(line('other batches', data['noise'], m))
    rows += [{'mode': f'{label} = {other}'} for label, other in data['same'].items()]
    return [columns, *(tuple(row.get(c, '') for c in columns) for row in rows)]


def line(label, m, base):
    """ {column: text} of a mode. catches up: the step at which it reaches the base's final loss. """
    final, cost = m['final_loss'], m['cost']
    row = {'mode': label, 'parameters': f'{m["params"]:,}', 'first loss': f'{m["first_loss"]:.4f}',
           'final loss': f'{statistics.mean(final):.4f}', 'best loss': f'{statistics.mean(m["best_loss"]):.4f}'}
    if len(final) > 1:
        row['sd'] = f'{statistics.stdev(final):.4f}'
    if m is not base:
        step, last = reaches(m['history'], statistics.mean(base['final_loss'])), m['history'][0][-1][0]
        row['catches up'] = f'{step:.0f} of {last}' if step else 'never'
        row['difference'] = signed(m['difference'], m['half_width'])
    if cost:
        row |= {'step': f'{cost["ratio"]:.2f} x', 'ms': f'{cost["ms"]:.0f}',
                'memory': f'{cost["bytes"] / 2**20:.0f} MiB'}
    return row


def legend(data):
    text = f'final loss: mean over the seeds. difference: from {data["base"]}, paired by seed.'
    if any(m['cost'] for m in data['modes'].values()):
        text += f'\nstep: its time beside that of {data["base"]}. memory: {data["memory"]}.'
    return text


def show_samples(folders, device):
    for label, folder in folders.items():
        print(f'--- {label}, a sample ---')
        try:
            print(sample(SampleConfig(out_dir=folder, max_new_tokens=300, device=device))[0].strip() + '\n')
        except ValueError as e:  # a tokenizer that is not at hand spoils no comparison
            print(f'none: {e}\n')


# -----------------------------------------------------------------------------

def result(runs, base, cost):
    """ What the JSON says of a mode's runs, one a seed, against those of the base. """
    final = [r['final_loss'] for r in runs]
    difference, half = paired(final, [r['final_loss'] for r in base])
    return {'params': runs[0]['params'], 'final_loss': final,
            'first_loss': statistics.mean(r['first_loss'] for r in runs),
            'best_loss': [r['best_loss'] for r in runs], 'best_step': [r['best_step'] for r in runs],
            'difference': difference, 'half_width': half, 'cost': cost,
            'history': [[h[:2] for h in r['history']] for r in runs]}


def equal_modes(configs):
    """ {label: the first label that is the same function}, of modes that are not the first themselves. """
    first, same = {}, {}
    for label, c in configs.items():
        other = first.setdefault(partition(c), label)
        if other != label:
            same[label] = other
            print(f'{label} is the same function as {other} here ({partition(c)}): it is trained once')
    return same


def other_batches(cfg, seed):
    """ The base with a data_seed that orders the batches in another way than the seed does. """
    order = cfg.data_seed or seed
    data_seed = next(d for d in (2**31 - 1 - seed, 1, 2) if d not in (0, order))
    return cfg.mode_configs(seed=seed, data_seed=data_seed)[cfg.base]


def compare(cfg, argv):
    configs, base = cfg.mode_configs(), cfg.base
    same = equal_modes(configs)
    labels = [label for label in configs if label not in same]
    noise = f'{base}, other batches'
    todo, runs = [], {}
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        of_seed = cfg.mode_configs(seed=seed)
        todo += [(label, of_seed[label]) for label in labels]
        if cfg.noise:
            todo.append((noise, other_batches(cfg, seed)))
    print(f'one learning rate for all modes: {cfg.learning_rate:g} to {cfg.min_lr:g}')
    for (label, _), found in zip(todo, run_all(todo, cfg), strict=True):
        runs.setdefault(label, []).append(found)
    folders = {label: runs[label][0]['out_dir'] for label in labels}
    cost = {}
    if cfg.timing_rounds:
        print(f'timing {cfg.timing_rounds} interleaved steps of each mode', flush=True)
        size = load_checkpoint(os.path.join(folders[base], 'ckpt.pt'))['model_config']['vocab_size']
        cost = costs({label: configs[label] for label in labels}, size, cfg.timing_rounds, base)

    device = pick_device(cfg.device)
    data = {'command': ' '.join(['python compare.py', *argv]), **environment(device),
            'commit': commits([r for of_mode in runs.values() for r in of_mode]),
            'config': {k: v for k, v in asdict(cfg).items() if k not in ('resume', 'overwrite')}, 'base': base,
            'memory': 'peak memory' if device.type == 'cuda' else 'kept for backward', 'same': same,
            'modes': {label: result(runs[label], runs[base], cost.get(label)) for label in labels}}
    if cfg.noise:
        data['noise'] = result(runs[noise], runs[base], None)
    write_json(os.path.join(cfg.out_dir, 'results.json'), data)
    pictures.loss(data, os.path.join(cfg.out_dir, 'loss.png'))
    print()
    show_samples(folders, cfg.device)
    depth.show(folders, depth.DepthConfig(device=cfg.device), cfg.out_dir, data['command'])
    print('\n' + table(cells(data)) + '\n' + legend(data) + '\n\n' + '\n'.join(verdicts(data)))
    print(f'\nwrote results.json, loss.png, depth.json, depth.png and dynamics.png into {cfg.out_dir}')
    return data


def main(argv):
    return compare(settings(CompareConfig, argv, 'compare', __doc__.split('\n\n')[0]), argv)
