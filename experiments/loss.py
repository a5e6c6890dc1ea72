"""
Trains the residual rules side by side and shows how they compare.

Runs are paired: one seed means the same weights and the same batches in every mode. A finished run is kept under
out_dir/runs, keyed by everything that defines it, and an interrupted one continues.
"""
import hashlib
import json
import os
import statistics
from dataclasses import asdict, dataclass, fields

import torch

import config as configuration
from data.prepare import load
from experiments import measure, pictures
from experiments.common import environment, mode_configs, table, write_json
from model import RESIDUALS, load_checkpoint
from sample import SampleConfig, sample
from train import FREE, TrainConfig, pick_device, pick_dtype, train


@dataclass
class CompareConfig(TrainConfig):
    out_dir: str = 'out/compare'  # where results.json, loss.png and the runs go
    modes: str = 'standard,full,block'  # what to compare: residual rules; block:N fixes the number of residual blocks
    seeds: int = 1  # paired runs of each mode, with seeds seed, seed + 1, ...
    timing_rounds: int = 15  # interleaved training steps behind the column ms/step; 0: none

    def __post_init__(self):
        super().__post_init__()
        for key, least in (('seeds', 1), ('timing_rounds', 0)):
            if getattr(self, key) < least:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {least} or more')
        self.mode_configs()
        if self.seed + self.seeds > 2**31:
            raise ValueError(f'seeds={self.seeds!r}: must keep seed + seeds at most 2**31')

    def mode_configs(self):
        """ {label: TrainConfig}, in the order asked for, each with the first seed. """
        base = {f.name: getattr(self, f.name) for f in fields(TrainConfig)}
        return {label: TrainConfig(**base | keys) for label, keys in mode_configs(self.modes).items()}


def partition(cfg):
    """ What the residual rule does, as a string that is equal for equal functions: block with S = 1 is full. """
    S = {'full': 1, 'block': -(-2 * cfg.n_layer // cfg.residual_blocks)}.get(cfg.residual)
    return cfg.residual if S is None else f'attnres, S={S}'


def run_key(cfg, data):
    """ What defines a run, hashed: two configs with the same key train the same network on the same batches. """
    skip = FREE | {'residual', 'residual_blocks'}
    text = json.dumps([{k: v for k, v in sorted(asdict(cfg).items()) if k not in skip}, partition(cfg), data])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(cfg, root, data, title):
    """ The result of one training run: read if it is there, else trained, from its checkpoint if it has one. """
    folder = os.path.join(root, 'runs', f'{partition(cfg).replace(", S=", "-")}-{cfg.seed}-{run_key(cfg, data)}')
    done = os.path.join(folder, 'result.json')
    if os.path.exists(done) and not cfg.overwrite:
        with open(done, encoding='utf-8') as f:
            result = json.load(f)
        print(f'{title}: kept from an earlier call ({folder})')
        return result
    print(f'{title}', flush=True)
    unfinished = os.path.exists(os.path.join(folder, 'ckpt.pt')) and not cfg.overwrite
    change = {'out_dir': folder, 'resume': unfinished, 'overwrite': not unfinished}
    result = train(TrainConfig(**asdict(cfg) | change))
    if result['stopped']:
        print(f'{result["stopped"]}: the same command goes on from here')
        raise SystemExit(130)
    write_json(done, result)
    return result


def costs(configs, vocab_size, rounds):
    """ {label: (median ms of a step, ratio to the first, bytes)}, from steps that take turns. """
    first = next(iter(configs.values()))
    device = pick_device(first.device)
    dtype = pick_dtype(first.dtype, device)
    benches = {label: measure.Bench(c.model(vocab_size), c.batch_size, device, dtype,
                                    device.type == 'cuda' if c.compile is None else c.compile)
               for label, c in configs.items()}
    times = measure.interleaved({label: b.step for label, b in benches.items()}, device, rounds)
    memory = measure.peak_bytes if device.type == 'cuda' else measure.alive_bytes
    base = times[next(iter(configs))]
    return {label: {'ms': 1e3 * statistics.median(t), 'ratio': measure.ratio(t, base), 'bytes': memory(benches[label])}
            for label, t in times.items()}


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 97.5 %, 1 to 9 degrees of freedom


def paired(values, base):
    """ Mean paired difference and the half-width of its 95 % interval (None from one pair). """
    d = [v - b for v, b in zip(values, base, strict=True)]
    if len(d) < 2:
        return d[0], None
    t = T95[len(d) - 2] if len(d) - 2 < len(T95) else 2.0
    return statistics.mean(d), t * statistics.stdev(d) / len(d) ** 0.5


def verdicts(data):
    """ One plain sentence on each mode's difference from the base, and when it reaches the base's final loss. """
    modes, base = data['modes'], data['base']
    spread = statistics.stdev(modes[base]['final_loss']) if len(modes[base]['final_loss']) > 1 else 0.0
    goal = statistics.mean(modes[base]['final_loss'])
    total = modes[base]['history'][0][-1][0]
    out = []
    for label, m in modes.items():
        if label == base:
            continue
        d, half = m['difference'], m['half_width']
        if half is None:
            text = f'{label} - {base}: {d:+.4f} from one seed, which shows no spread; --seeds=5 shows it'
        else:
            text = f'{label} - {base}: {d:+.4f} +- {half:.4f} (95 %, paired over {len(m["final_loss"])} seeds), ' + (
                'not distinguishable from zero' if abs(d) <= half
                else f'consistent, but smaller than the seed spread of {base} ({spread:.4f})' if abs(d) < spread
                else f'{"lower" if d < 0 else "higher"} loss, beyond the seed spread of {base} ({spread:.4f})')
        step = reaches(m['history'], goal)
        text += f'; it reaches the final loss of {base} ' + (f'at step {step:.0f} of {total}' if step else 'never')
        if step and m['cost']:
            text += f' ({step * m["cost"]["ratio"] / total:.2f} of its time)'
        out.append(text)
    return out


def reaches(history, goal):
    """ The step, interpolated, at which the mean over the runs first is at or below goal; None if never. """
    mean = [(points[0][0], statistics.mean(v for _, v in points)) for points in zip(*history, strict=False)]
    for (s0, v0), (s1, v1) in zip(mean, mean[1:], strict=False):
        if v1 <= goal:
            return s0 + (s1 - s0) * (v0 - goal) / (v0 - v1)
    return None


def cells(data):
    """ The table, a tuple of strings a row. """
    base = data['base']
    rows = [('mode', 'parameters', 'first loss', 'final loss', 'best loss', f'final - {base}', 'ms/step',
             data['memory'])]
    for label, m in data['modes'].items():
        gap = '' if label == base else f'{m["difference"]:+.4f}'
        gap += f' +- {m["half_width"]:.4f}' if gap and m['half_width'] is not None else ''
        show = [f'{statistics.mean(v):.4f}' + (f' (sd {statistics.stdev(v):.4f})' if len(v) > 1 else '')
                for v in (m['final_loss'], m['best_loss'])]
        k = m['cost']
        rows.append((label, f'{m["params"]:,}', f'{m["first_loss"]:.4f}', *show, gap,
                     f'{k["ratio"]:.2f} x ({k["ms"]:.0f})' if k else '', f'{k["bytes"] / 2**20:.0f} MiB' if k else ''))
    return rows + [(f'{a} = {b}',) + ('',) * 7 for a, b in data['same'].items()]


def compare(cfg, argv):
    configs = cfg.mode_configs()
    meta, _ = load(cfg.dataset)
    twin, unique = {}, {}  # label -> label of the mode that is the same function
    for label, c in configs.items():
        twin[label] = unique.setdefault(partition(c), label)
    labels = list(unique.values())
    same = {label: first for label, first in twin.items() if label != first}
    for label, first in same.items():
        print(f'{label} comes out as the same partition as {first} ({partition(configs[label])}): trained once')
    for label in labels:
        print(f'{label}: {RESIDUALS[configs[label].residual](configs[label].model(1)).describe()}')
    print(f'one learning rate for all modes: {cfg.learning_rate:g} to {cfg.min_lr:g}')
    runs, todo = {label: [] for label in labels}, [(s, label) for s in range(cfg.seeds) for label in labels]
    for i, (s, label) in enumerate(todo, 1):
        c = TrainConfig(**asdict(configs[label]) | {'seed': cfg.seed + s})
        runs[label].append(run(c, cfg.out_dir, meta['sha256'], f'[{i}/{len(todo)}] {label}, seed {c.seed}'))
    cost = {}
    if cfg.timing_rounds:
        print(f'timing {cfg.timing_rounds} interleaved steps of each mode', flush=True)
        rows = load_checkpoint(os.path.join(runs[labels[0]][0]['out_dir'], 'ckpt.pt'))['model_config']['vocab_size']
        cost = costs({label: configs[label] for label in labels}, rows, cfg.timing_rounds)

    device = pick_device(cfg.device)
    base = 'standard' if 'standard' in labels else labels[0]
    data = {'command': ' '.join(['python compare.py', *argv]), **environment(device),
            'config': {k: v for k, v in asdict(cfg).items() if k not in ('resume', 'overwrite')}, 'base': base,
            'memory': 'peak memory' if device.type == 'cuda' else 'kept for backward', 'same': same, 'modes': {}}
    for label in labels:
        final = [r['final_loss'] for r in runs[label]]
        difference, half = paired(final, [r['final_loss'] for r in runs[base]])
        data['modes'][label] = {
            'params': runs[label][0]['params'], 'first_loss': runs[label][0]['first_loss'], 'final_loss': final,
            'best_loss': [r['best_loss'] for r in runs[label]], 'best_step': [r['best_step'] for r in runs[label]],
            'difference': difference, 'half_width': half, 'cost': cost.get(label),
            'history': [[h[:2] for h in r['history']] for r in runs[label]]}
    print('\n' + table(cells(data)) + '\n\n' + '\n'.join(verdicts(data)))
    write_json(os.path.join(cfg.out_dir, 'results.json'), data)
    pictures.loss(data, os.path.join(cfg.out_dir, 'loss.png'))
    for label in labels:
        print(f'\n--- {label}, a sample ---')
        chars = meta['tokenizer'].get('chars', '\n')
        print(sample(SampleConfig(out_dir=runs[label][0]['out_dir'], start='\n' if '\n' in chars else chars[0],
                                  max_new_tokens=300, device=cfg.device))[0].strip())
    print(f'\nwrote {os.path.join(cfg.out_dir, "results.json")} and loss.png')
    brief = {label: {k: v for k, v in m.items() if k != 'history'} for label, m in data['modes'].items()}
    print(json.dumps({k: v for k, v in data.items() if k != 'config'} | {'modes': brief}))
    return data


def preset():
    """ The settings that fit this machine. """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(here, 'config', 'compare_gpu.toml' if torch.cuda.is_available() else 'compare_cpu.toml')


def main(argv):
    given = any(a.endswith('.toml') or a.startswith('--config') for a in argv)
    values = configuration.parse(CompareConfig, argv if given else [preset(), *argv], __doc__.split('\n\n')[0])
    for key in ('residual', 'resume'):
        if key in values:
            configuration.fail(f'{key}={values[key]!r}: must be left out: --modes says what to compare, and unfinished '
                               'runs are resumed')
    try:
        return compare(configuration.build(CompareConfig, values), argv)
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)

