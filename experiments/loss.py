"""
Trains the residual rules side by side and shows how they compare.

Runs are paired: one seed means the same weights and the same batches in every mode.
"""
import os
import statistics
from dataclasses import dataclass

import config as configuration
from config.machine import pick_compile, pick_device, pick_dtype
from experiments import depth, measure, pictures
from experiments.common import paired, signed, table, write_json
from experiments.runs import RunsConfig, commits, heading, partition, run_all, settings
from sample import SampleConfig, sample
from weights import load_checkpoint


@dataclass
class CompareConfig(RunsConfig):
    timing_rounds: int = 15  # interleaved training steps that are timed for each mode; 0: none
    noise: bool = True  # also train standard, else the first mode, on other batches: equal rules

    def __post_init__(self):
        super().__post_init__()
        check = configuration.checker(self)
        check('timing_rounds', 0 <= self.timing_rounds < 2**31, '0 or more')
        self.mode_configs()


def compare(cfg, argv):
    configs, base = cfg.mode_configs(), cfg.base
    same = equal_modes(configs)
    labels = [label for label in configs if label not in same]
    print(f'one learning rate for all modes: {cfg.learning_rate:g} to {cfg.min_lr:g}')
    runs, noise = train_all(cfg, labels)
    folders = {label: runs[label][0]['out_dir'] for label in labels}
    cost = {}
    if cfg.timing_rounds:
        print(f'timing {cfg.timing_rounds} interleaved steps of each mode', flush=True)
        ckpt = os.path.join(folders[base], 'ckpt.pt')
        vocab_size = load_checkpoint(ckpt)['model_config']['vocab_size']
        timed = {label: configs[label] for label in labels}
        cost = costs(timed, vocab_size, cfg.timing_rounds, base)

    on_gpu = pick_device(cfg.device).type == 'cuda'
    data = {**heading('', argv, cfg),
            'commit': commits([run for of_mode in runs.values() for run in of_mode] + noise),
            'same': same, 'memory': 'peak memory' if on_gpu else 'kept for backward',
            'modes': {k: result(runs[k], runs[base], cost.get(k)) for k in labels}}
    if noise:
        data['noise'] = result(noise, runs[base], None)
    write_json(os.path.join(cfg.out_dir, 'results.json'), data)
    pictures.loss(data, os.path.join(cfg.out_dir, 'loss.png'))
    print()
    show_samples(folders, cfg.device)
    depth.show(folders, depth.DepthConfig(device=cfg.device), cfg.out_dir, data['command'])
    print('\n' + table(cells(data)) + '\n' + legend(data) + '\n')
    print('\n'.join(verdicts(data)) + '\n')
    files = 'results.json, loss.png, depth.json, depth.png and dynamics.png'
    print(f'wrote {files} into {cfg.out_dir}')
    return data


def equal_modes(configs):
    """ {label: the first label that is the same function}, of those that are not the first. """
    first, same = {}, {}
    for label, c in configs.items():
        other = first.setdefault(partition(c), label)
        if other != label:
            same[label] = other
            what = partition(c)
            print(f'{label} is the same function as {other} here ({what}): it is trained once')
    return same


def train_all(cfg, labels):
    """ The results of each mode, {label: [one a seed]}, and of the base with other batches. """
    todo, noise = [], f'{cfg.base}, other batches'
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        of_seed = cfg.mode_configs(seed=seed)
        todo += [(label, of_seed[label]) for label in labels]
        if cfg.noise:
            todo.append((noise, other_batches(cfg, seed)))
    runs = {}
    for (label, _), run in zip(todo, run_all(todo, cfg), strict=True):
        runs.setdefault(label, []).append(run)
    return runs, runs.pop(noise, [])


def other_batches(cfg, seed):
    """ The base with a data_seed that orders the batches in another way than the seed does. """
    order = cfg.data_seed or seed
    data_seed = next(d for d in (2**31 - 1 - seed, 1, 2) if d not in (0, order))
    return cfg.mode_configs(seed=seed, data_seed=data_seed)[cfg.base]


def costs(configs, vocab_size, rounds, base):
    """ {label: median ms of a step, ratio to the base, bytes}, from steps that take turns. """
    first = next(iter(configs.values()))
    device = pick_device(first.device)
    dtype, compiled = pick_dtype(first.dtype, device), pick_compile(first.compile, device)
    benches = {label: measure.Bench(c.gpt_config(vocab_size), c.batch_size, device, dtype, compiled)
               for label, c in configs.items()}
    steps = {label: bench.step for label, bench in benches.items()}
    times = measure.interleaved(steps, device, rounds)
    memory = measure.peak_bytes if device.type == 'cuda' else measure.alive_bytes
    # What the optimiser does once in a step is small beside the passes.
    ms = 1e3 * first.gradient_accumulation_steps
    return {label: {'ms': ms * statistics.median(t), 'ratio': measure.ratio(t, times[base]),
                    'bytes': memory(benches[label])} for label, t in times.items()}


def result(runs, base, cost):
    """ What the JSON says of a mode's runs, one a seed, against those of the base. """
    final = [run['final_loss'] for run in runs]
    difference, half = paired(final, [run['final_loss'] for run in base])
    return {'params': runs[0]['params'], 'final_loss': final,
            'first_loss': statistics.mean(run['first_loss'] for run in runs),
            'best_loss': [run['best_loss'] for run in runs],
            'best_step': [run['best_step'] for run in runs],
            'difference': difference, 'half_width': half, 'cost': cost,
            'history': [[point[:2] for point in run['history']] for run in runs]}


def show_samples(folders, device):
    for label, folder in folders.items():
        print(f'--- {label}, a sample ---')
        try:
            asked = SampleConfig(out_dir=folder, max_new_tokens=300, device=device)
            print(sample(asked)[0].strip() + '\n')
        except ValueError as e:  # a tokenizer that is not at hand spoils no comparison
            print(f'none: {e}\n')


# -----------------------------------------------------------------------------
# The table.

COLUMNS = ('mode', 'parameters', 'first loss', 'final loss', 'sd', 'best loss', 'difference',
           'catches up', 'step', 'ms', 'memory')
SHORT = ('mode', 'final loss', 'sd', 'difference', 'step', 'memory')  # these fit in 80 columns


def cells(data, columns=SHORT):
    """ A row a mode; after the base a row for the base with other batches. No empty columns. """
    base, rows = data['modes'][data['base']], []
    for label, m in data['modes'].items():
        rows.append(texts(label, m, base))
        if m is base and data.get('noise'):
            rows.append(texts('other batches', data['noise'], base))
    rows += [{'mode': f'{label} = {other}'} for label, other in data['same'].items()]
    shown = [column for column in columns if any(column in row for row in rows)]
    return [shown, *([row.get(column, '') for column in shown] for row in rows)]


def texts(label, m, base):
    """ {column: text} of a mode. catches up: when it reaches the base's final loss. """
    final, cost = m['final_loss'], m['cost']
    row = {'mode': label, 'parameters': f'{m["params"]:,}', 'first loss': f'{m["first_loss"]:.4f}',
           'final loss': f'{statistics.mean(final):.4f}',
           'best loss': f'{statistics.mean(m["best_loss"]):.4f}'}
    if len(final) > 1:
        row['sd'] = f'{statistics.stdev(final):.4f}'
    if m is not base:
        row['difference'] = signed(m['difference'], m['half_width'])
        step = reaches(m['history'], statistics.mean(base['final_loss']))
        row['catches up'] = f'{step:.0f} of {last_step(m)}' if step else 'never'
    if cost:
        row |= {'step': f'{cost["ratio"]:.2f} x', 'ms': f'{cost["ms"]:.0f}',
                'memory': f'{cost["bytes"] / 2**20:.0f} MiB'}
    return row


def legend(data):
    base = data['base']
    text = f'final loss: mean over the seeds. difference: from {base}, paired by seed.'
    if any(m['cost'] for m in data['modes'].values()):
        text += f'\nstep: its time beside that of {base}. memory: {data["memory"]}.'
    return text


def last_step(m):
    return m['history'][0][-1][0]


def reaches(history, goal):
    """ The step, interpolated, at which the mean over the runs first is at or below goal.

    None if that is never after step 0.
    """
    evaluations = zip(*history, strict=False)
    mean = [(points[0][0], statistics.mean(v for _, v in points)) for points in evaluations]
    for (s0, v0), (s1, v1) in zip(mean, mean[1:], strict=False):
        if v1 <= goal:
            return s0 + (s1 - s0) * (v0 - goal) / (v0 - v1) if v0 > goal else s1
    return None


# -----------------------------------------------------------------------------
# The sentences.

def verdicts(data):
    """ A sentence on each mode: its difference from the base, and when it catches up. """
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
            words = difference_in_words(m, final, base)
            lines.append(f'{label} - {base}: {words}; {when_it_catches_up(m, final, base)}')
    return lines


def difference_in_words(m, final, base):
    """ A mode's difference from the base, which has the final losses `final`. """
    d, half = m['difference'], m['half_width']
    if half is None:
        return f'{d:+.4f} from one seed, which shows no spread; --seeds=5 shows it'
    text = f'{signed(d, half)} (95 %, {len(final)} paired seeds), '
    spread = statistics.stdev(final)
    between = f'the sd of {base} between seeds ({spread:.4f})'
    if abs(d) <= half:
        return text + 'not distinguishable from zero'
    if abs(d) < spread:
        return text + f'resolved, but less than {between}'
    return text + ('lower' if d < 0 else 'higher') + f', by more than {between}'


def when_it_catches_up(m, final, base):
    """ When a mode reaches the base's mean final loss. """
    step = reaches(m['history'], statistics.mean(final))
    if step is None:
        return f'it never reaches the final loss of {base}'
    total = last_step(m)
    text = f'it reaches the final loss of {base} at step {step:.0f} of {total}'
    if m['cost']:
        seconds, ratio = step * m['cost']['ms'] / 1e3, step * m['cost']['ratio'] / total
        text += f', after {seconds:.0f} s ({ratio:.2f} x the time of {base})'
    return text


def main(argv):
    return compare(settings(CompareConfig, argv, 'loss', __doc__.split('\n\n')[0]), argv)
