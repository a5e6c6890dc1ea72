"""
Trains the residual rules side by side and shows how they compare.

Runs are paired: one seed means the same weights and the same batches in every mode. A finished run is kept under
out_dir/runs, keyed by everything that defines it, and an interrupted one continues.
"""
import hashlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, fields

import torch
from data.prepare import load

import config as configuration
from experiments import measure, pictures
from model import RESIDUALS
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

    def mode_configs(self):
        """ {label: TrainConfig}, in the order asked for, each with the first seed. """
        base = {f.name: getattr(self, f.name) for f in fields(TrainConfig)}
        out = {}
        for mode in self.modes.split(','):
            rule, _, n = mode.strip().partition(':')
            if rule not in RESIDUALS or (n and (rule != 'block' or not n.isdecimal())):
                raise ValueError(f'modes={self.modes!r}: {mode!r} is none of {", ".join(RESIDUALS)}, block:N')
            rest = {'residual_blocks': int(n)} if n else {}
            out[mode.strip()] = TrainConfig(**base | {'residual': rule} | rest)
        return out


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
        raise SystemExit(0)
    write_json(done, result)
    return result


def write_json(path, value):
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        json.dump(value, f, indent=1)
    os.replace(path + '.tmp', path)


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


def verdict(label, base, mean, half, spread):
    """ One plain sentence on a difference. """
    if half is None:
        return f'{label} - {base}: {mean:+.4f} from one seed, which shows no spread; --seeds=5 shows it'
    sentence = f'{label} - {base}: {mean:+.4f} +- {half:.4f} (95 %, paired over seeds)'
    if abs(mean) <= half:
        return sentence + ': not distinguishable from zero'
    if abs(mean) < spread:
        return sentence + f': consistent, but smaller than the seed spread of {base} ({spread:.4f})'
    return sentence + f': {"lower" if mean < 0 else "higher"} loss, beyond the seed spread ({spread:.4f})'


def commit():
    """ The checkout's commit, '+' if it has changes, or None outside git. """
    try:
        where = os.path.dirname(os.path.abspath(__file__))
        out = [subprocess.run(['git', '-C', where, *c], capture_output=True, text=True, check=True).stdout.strip()
               for c in (['rev-parse', '--short', 'HEAD'], ['status', '--porcelain', '--untracked-files=no'])]
        return out[0] + ('+' if out[1] else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device):
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{device.type}, {os.cpu_count()} cores'
    return {'torch': torch.__version__, 'device': name, 'commit': commit()}


def table(rows):
    """ Rows of strings as aligned text, the first column left, the others right. """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows)


def compare(cfg, argv):
    configs = cfg.mode_configs()
    meta, _ = load(cfg.dataset)
    vocab_size = cfg.vocab_size or meta['n_vocab']
    twin, unique = {}, {}  # label -> label of the mode that is the same function
    for label, c in configs.items():
        twin[label] = unique.setdefault(partition(c), label)
    labels = list(unique.values())
    for label, same in twin.items():
        if label != same:
            print(f'{label} comes out as the same partition as {same} ({partition(configs[label])}): trained once')
    for label in labels:
        print(f'{label}: {RESIDUALS[configs[label].residual](configs[label].model(1)).describe()}')
    print(f'one learning rate for all modes: {cfg.learning_rate:g} to {cfg.min_lr:g}')
    results = {label: [] for label in labels}
    count = 0
    for s in range(cfg.seeds):
        for label in labels:
            count += 1
            c = TrainConfig(**asdict(configs[label]) | {'seed': cfg.seed + s})
            results[label].append(run(c, cfg.out_dir, meta['sha256'],
                                      f'[{count}/{cfg.seeds * len(labels)}] {label}, seed {c.seed}'))
    cost = {}
    if cfg.timing_rounds:
        print(f'timing {cfg.timing_rounds} interleaved steps of each mode', flush=True)
        cost = costs({label: configs[label] for label in labels}, vocab_size, cfg.timing_rounds)

    base = 'standard' if 'standard' in labels else labels[0]
    final = {label: [r['final_loss'] for r in runs] for label, runs in results.items()}
    best = {label: [r['best_loss'] for r in runs] for label, runs in results.items()}
    spread = {label: statistics.stdev(v) if len(v) > 1 else None for label, v in final.items()}
    memory = 'peak memory' if torch.cuda.is_available() and cfg.device != 'cpu' else 'kept for backward'
    rows = [('mode', 'parameters', 'first loss', 'final loss', 'best loss', f'final - {base}', 'ms/step', memory)]
    summary, sentences = {}, []
    for label in labels:
        mean, half = paired(final[label], final[base])
        gap = '' if label == base else f'{mean:+.4f}' + (f' +- {half:.4f}' if half is not None else '')
        show = [f'{statistics.mean(v):.4f}' + (f' (sd {statistics.stdev(v):.4f})' if len(v) > 1 else '')
                for v in (final[label], best[label])]
        k = cost.get(label)
        r = results[label][0]
        rows.append((label, f'{r["params"]:,}', f'{r["first_loss"]:.4f}', *show, gap,
                     f'{k["ratio"]:.2f} x ({k["ms"]:.0f})' if k else '', f'{k["bytes"] / 2**20:.0f} MiB' if k else ''))
        summary[label] = {'params': r['params'], 'first_loss': r['first_loss'], 'final_loss': final[label],
                          'best_loss': best[label], 'best_step': [x['best_step'] for x in results[label]],
                          'difference': mean, 'half_width': half, 'cost': k,
                          'history': [[h[:2] for h in x['history']] for x in results[label]]}
        if label != base:
            sentences.append(verdict(label, base, mean, half, spread[base] or 0.0))
    for label, same in twin.items():
        if label != same:
            rows.append((f'{label} = {same}',) + ('',) * 7)
    print('\n' + table(rows) + '\n')
    print('\n'.join(sentences))
    out = {'command': ' '.join(['python compare.py', *argv]), **environment(pick_device(cfg.device)),
           'config': {k: v for k, v in asdict(cfg).items() if k not in ('resume', 'overwrite')}, 'modes': summary}
    write_json(os.path.join(cfg.out_dir, 'results.json'), out)
    pictures.loss(out, os.path.join(cfg.out_dir, 'loss.png'))
    for label in labels:
        print(f'\n--- {label}, a sample ---')
        start = '\n' if '\n' in meta['tokenizer'].get('chars', '\n') else meta['tokenizer']['chars'][0]
        print(sample(SampleConfig(out_dir=results[label][0]['out_dir'], start=start, max_new_tokens=300,
                                  device=cfg.device))[0].strip())
    print(f'\nwrote {os.path.join(cfg.out_dir, "results.json")} and loss.png')
    brief = {label: {k: v for k, v in s.items() if k != 'history'} for label, s in summary.items()}
    print(json.dumps({k: v for k, v in out.items() if k != 'config'} | {'modes': brief}))
    return out


def preset():
    """ The settings that fit this machine. """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(here, 'config', 'compare_gpu.toml' if torch.cuda.is_available() else 'compare_cpu.toml')


def main(argv):
    given = any(a.endswith('.toml') or a.startswith('--config') for a in argv)
    values = configuration.parse(CompareConfig, argv if given else [preset(), *argv], __doc__.split('\n\n')[0])
    try:
        return compare(configuration.build(CompareConfig, values), argv)
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)


if __name__ == '__main__':
    main(sys.argv[1:])
