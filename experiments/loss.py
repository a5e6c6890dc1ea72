"""
Trains the residual rules side by side and shows how they compare.

Runs are paired: one seed means the same weights and the same batches in every mode; see experiments/runs.py.
"""
import json
import os
import statistics
from dataclasses import asdict, dataclass

import config as configuration
from experiments import depth, measure, pictures
from experiments.common import environment, paired, signed, table, write_json
from experiments.runs import RunsConfig, commits, partition, run_all, settings
from model import RESIDUALS
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


def verdicts(data):
    """ One plain sentence on each mode's difference from the base, and when it reaches the base's final loss. """
    modes, base, noise = data['modes'], data['base'], data.get('noise')
    spread = statistics.stdev(modes[base]['final_loss']) if len(modes[base]['final_loss']) > 1 else 0.0
    goal = statistics.mean(modes[base]['final_loss'])
    total = modes[base]['history'][0][-1][0]
    out = []
    if noise:
        d = [abs(a - b) for a, b in zip(noise['final_loss'], modes[base]['final_loss'], strict=True)]
        out.append(f'noise: {base} against itself with other batches, the same weights at the start: {max(d):.4f} apart'
                   + (f' at most, {statistics.mean(d):.4f} on average' if len(d) > 1 else ''))
    for label, m in modes.items():
        if label == base:
            continue
        d, half = m['difference'], m['half_width']
        if half is None:
            text = f'{label} - {base}: {d:+.4f} from one seed, which shows no spread; --seeds=5 shows it'
        else:
            text = f'{label} - {base}: {signed(d, half)} (95 %, paired over {len(m["final_loss"])} seeds), ' + (
                'not distinguishable from zero' if abs(d) <= half
                else f'resolved, but less than the sd of {base} between seeds ({spread:.4f})' if abs(d) < spread
                else f'{"lower" if d < 0 else "higher"}, by more than the sd of {base} between seeds ({spread:.4f})')
        step = reaches(m['history'], goal)
        text += f'; it {"reaches" if step else "never reaches"} the final loss of {base}'
        text += f' at step {step:.0f} of {total}' if step else ''
        if step and m['cost']:
            c = m['cost']
            text += f', after {step * c["ms"] / 1e3:.0f} s ({step * c["ratio"] / total:.2f} x the time of {base})'
        out.append(text)
    return out


def reaches(history, goal):
    """ The step, interpolated, at which the mean over the runs first is at or below goal; None if never after 0. """
    mean = [(points[0][0], statistics.mean(v for _, v in points)) for points in zip(*history, strict=False)]
    for (s0, v0), (s1, v1) in zip(mean, mean[1:], strict=False):
        if v1 <= goal:
            return s0 + (s1 - s0) * (v0 - goal) / (v0 - v1) if v0 > goal else s1
    return None


def cells(data):
    """ The table, a tuple of strings a row. """
    base, rows = data['base'], data['modes']
    if data.get('noise'):  # after the base
        rows = {base: rows[base], f'{base}, other batches': data['noise']} | rows
    out = [('mode', 'parameters', 'first loss', 'final loss', 'best loss', f'final - {base}', 'step (ms)',
            data['memory'])]
    for label, m in rows.items():
        gap = '' if label == base else signed(m['difference'], m['half_width'])
        show = [f'{statistics.mean(v):.4f}' + (f' (sd {statistics.stdev(v):.4f})' if len(v) > 1 else '')
                for v in (m['final_loss'], m['best_loss'])]
        k = m['cost']
        out.append((label, f'{m["params"]:,}', f'{m["first_loss"]:.4f}', *show, gap,
                    f'{k["ratio"]:.2f} x ({k["ms"]:.0f})' if k else '', f'{k["bytes"] / 2**20:.0f} MiB' if k else ''))
    return out + [(f'{a} = {b}',) + ('',) * 7 for a, b in data['same'].items()]


def row(runs, base, cost):
    """ What the results say of a mode's runs, one a seed, against those of the base. """
    final = [r['final_loss'] for r in runs]
    difference, half = paired(final, [r['final_loss'] for r in base])
    return {'params': runs[0]['params'], 'final_loss': final,
            'first_loss': statistics.mean(r['first_loss'] for r in runs),
            'best_loss': [r['best_loss'] for r in runs], 'best_step': [r['best_step'] for r in runs],
            'difference': difference, 'half_width': half, 'cost': cost,
            'history': [[h[:2] for h in r['history']] for r in runs]}


def compare(cfg, argv):
    configs, same = cfg.mode_configs(), {}
    for label, c in configs.items():
        first = next(k for k, other in configs.items() if partition(other) == partition(c))
        if first != label:
            same[label] = first
            print(f'{label} comes out as the same partition as {first} ({partition(c)}): trained once')
        else:
            print(f'{label}: {RESIDUALS[c.residual](c.model(1)).describe()}')
    labels = [label for label in configs if label not in same]
    base = cfg.base
    print(f'one learning rate for all modes: {cfg.learning_rate:g} to {cfg.min_lr:g}')
    todo, runs = [], {}
    for s in range(cfg.seed, cfg.seed + cfg.seeds):
        todo += [(label, c) for label, c in cfg.mode_configs(seed=s).items() if label in labels]
        if cfg.noise:
            other = next(d for d in (2**31 - 1 - s, 1, 2) if d not in (0, cfg.data_seed or s))
            todo.append((f'{base}, other batches', cfg.mode_configs(seed=s, data_seed=other)[base]))
    for (label, _), result in zip(todo, run_all(todo, cfg), strict=True):
        runs.setdefault(label, []).append(result)
    cost, folders = {}, {label: runs[label][0]['out_dir'] for label in labels}
    if cfg.timing_rounds:
        print(f'timing {cfg.timing_rounds} interleaved steps of each mode', flush=True)
        size = load_checkpoint(os.path.join(folders[base], 'ckpt.pt'))['model_config']['vocab_size']
        cost = costs({label: configs[label] for label in labels}, size, cfg.timing_rounds, base)

    device = pick_device(cfg.device)
    data = {'command': ' '.join(['python compare.py', *argv]), **environment(device),
            'commit': commits([r for of_mode in runs.values() for r in of_mode]),
            'config': {k: v for k, v in asdict(cfg).items() if k not in ('resume', 'overwrite')}, 'base': base,
            'memory': 'peak memory' if device.type == 'cuda' else 'kept for backward', 'same': same,
            'modes': {label: row(runs[label], runs[base], cost.get(label)) for label in labels}}
    if cfg.noise:
        data['noise'] = row(runs[f'{base}, other batches'], runs[base], None)
    print('\n' + table(cells(data)) + '\n\n' + '\n'.join(verdicts(data)))
    write_json(os.path.join(cfg.out_dir, 'results.json'), data)
    pictures.loss(data, os.path.join(cfg.out_dir, 'loss.png'))
    print('\nwhat their sublayers read')
    depth.show(folders, depth.DepthConfig(device=cfg.device), cfg.out_dir, data['command'])
    for label, folder in folders.items():
        print(f'\n--- {label}, a sample ---')
        try:
            print(sample(SampleConfig(out_dir=folder, max_new_tokens=300, device=cfg.device))[0].strip())
        except ValueError as e:  # a tokenizer that is not at hand spoils no comparison
            print(f'none: {e}')
    print(f'\nwrote results.json, loss.png, depth.json, depth.png and dynamics.png into {cfg.out_dir}')
    brief = {label: {k: v for k, v in m.items() if k != 'history'} for label, m in data['modes'].items()}
    print(json.dumps({k: v for k, v in data.items() if k not in ('config', 'noise')} | {'modes': brief}))
    return data


def main(argv):
    return compare(settings(CompareConfig, argv, 'compare', __doc__.split('\n\n')[0]), argv)
