"""
Cost of the residual rules by mode and kernel: forward, forward + backward, training step, one decoded token, memory.

All candidates take turns in one process with the standard residual; figures are medians, ratios medians within a round.
On CUDA also our kernels against their byte floor, and fla-core, liger-kernel and fast-attnres where they are installed.
On a CPU with one thread the clock is the process's own CPU time, so a busy machine disturbs it less.

    python compare.py speed --shape=B
    python compare.py speed --shape=gpt2 --modes=standard,block:8 --kernels=torch,triton --compile
"""
import json
import os
import statistics
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import config as configuration
import kernels
from experiments import cuda, measure
from experiments.common import environment, mode_keys, table, write_json
from model import GPT, Cache, GPTConfig
from train import pick_device, pick_dtype

SHAPES = {'A': dict(n_layer=4, n_head=4, n_embd=128, n_ctx=64, batch_size=12),
          'B': dict(n_layer=12, n_head=4, n_embd=128, n_ctx=128, batch_size=16),
          'C': dict(n_layer=12, n_head=6, n_embd=384, n_ctx=256, batch_size=8),
          'gpt2': dict(n_layer=12, n_head=12, n_embd=768, n_ctx=1024, batch_size=12, vocab_size=50304)}


@dataclass
class SpeedConfig(GPTConfig):
    vocab_size: int = 65  # rows of the embedding
    bias: bool = False  # biases in Linear and LayerNorm
    shape: str = 'B'  # A | B | C | gpt2: sizes of the network and the batch; model keys given besides win
    batch_size: int = 16  # sequences; by default the shape's
    modes: str = 'standard,full,block:4,block:8'  # residual rules; block:N fixes the number of residual blocks
    kernels: str = 'auto'  # of each AttnRes mode: any of auto, reference, torch, triton, separated by commas
    rounds: int = 0  # interleaved rounds; 0: about 20 seconds for each kind of figure, at least 5 rounds
    threads: int = 1  # CPU threads
    decode: bool = True  # measure the decoding of one token, too
    device: str = 'auto'  # auto | cpu | cuda | mps
    dtype: str = 'auto'  # auto | float32 | bfloat16 | float16
    compile: bool = False  # torch.compile
    out: str = ''  # also write the JSON to this file

    def __post_init__(self):
        configuration.checker(self)
        if self.shape not in SHAPES:
            raise ValueError(f'shape={self.shape!r}: must be one of ' + ', '.join(SHAPES))
        for key, least in (('rounds', 0), ('threads', 1), ('batch_size', 1)):
            if getattr(self, key) < least:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {least} or more')
        if self.threads > 4096:
            raise ValueError(f'threads={self.threads!r}: must be 4096 or less')
        if self.out and not os.path.isdir(os.path.dirname(self.out) or '.') or os.path.isdir(self.out):
            raise ValueError(f'out={self.out!r}: must be a file in a folder that exists')
        for kernel in self.kernels.split(','):
            if kernel not in kernels.KERNELS:
                raise ValueError(f'kernels={self.kernels!r}: {kernel!r} is none of ' + ', '.join(kernels.KERNELS))

    def gpt(self, **keys):
        own = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**own | {k: v for k, v in keys.items() if k in own})


def candidates(cfg):
    """ {label: GPTConfig}, every mode but standard with every kernel; standard, if it is there, first: the base. """
    out = {}
    for label, keys in sorted(mode_keys(cfg.modes).items(), key=lambda mode: mode[0] != 'standard'):
        for kernel in ['auto'] if keys['residual'] == 'standard' else cfg.kernels.split(','):
            name = label if kernel == 'auto' else f'{label} {kernel}'
            out[name] = cfg.gpt(**keys, kernel=kernel)
    return out


def decoder(bench):
    """ A function that decodes one token (batch 1) with half a window in the cache. """
    model, past = bench.model, bench.model.config.n_ctx // 2
    idx = bench.idx[:1]
    caches = [Cache(model.config.n_ctx) for _ in model.transformer.h]
    with torch.no_grad():
        model.eval()
        model(idx[:, :past], caches=caches)

    @torch.no_grad()
    def fn():
        for c in caches:
            c.length = past
        bench.run(idx[:, past:past + 1], caches=caches)
    return fn


def clocks(device, threads):
    return measure.cpu_clock if device.type == 'cpu' and threads == 1 else measure.clock


def timed(fns, device, threads, rounds, seconds=20):
    """ Interleaved times of fns; rounds 0 picks a number that takes about `seconds`. """
    clock = clocks(device, threads)
    if not rounds:
        for fn in fns.values():
            fn()  # the first call compiles
        once = sum(clock(fn, device) for fn in fns.values())
        rounds = max(5, min(200, int(seconds / max(once, 1e-4))))
    return measure.interleaved(fns, device, rounds, clock=clock)


def summary(times, base):
    return {'ms': 1e3 * statistics.median(times), 'ratio': measure.ratio(times, base), 'n': len(times)}


def traffic(config, batch_size):
    """ u per token of forward + backward on the Triton path in bfloat16, norms included; u: a (tokens, D) tensor, once.

    Counted from the tensors that each launch reads and writes, on any machine: they have shapes, nothing is computed.
    """
    was, os.environ['TRITON_INTERPRET'] = os.environ.get('TRITON_INTERPRET'), '1'  # so that no GPU is asked for
    kernels.traffic = launches = []
    try:
        with FakeTensorMode():
            model = GPT(replace(config, kernel='triton'))
            h = torch.empty(batch_size, config.n_ctx, config.n_embd, requires_grad=True)
            with torch.autocast('cpu', torch.bfloat16):
                out = model.residual(h, model.sublayers())
            out.backward(torch.empty_like(out))
    finally:
        kernels.traffic = None
        del os.environ['TRITON_INTERPRET']
        if was is not None:
            os.environ['TRITON_INTERPRET'] = was
    return sum(n for _, n in launches) / (h.numel() * 2) + 5  # the final norm: 2 forward, 3 backward


def speed(cfg):
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    torch.set_num_threads(cfg.threads)
    configs = candidates(cfg)
    benches = {name: measure.Bench(c, cfg.batch_size, device, dtype, cfg.compile) for name, c in configs.items()}
    base = next(iter(benches))
    if device.type == 'cuda':
        for label, keys in mode_keys(cfg.modes).items():
            for peer, attend in (cuda.peers() if keys['residual'] in ('full', 'block') else {}).items():
                bench = measure.Bench(cfg.gpt(**keys, kernel='reference'), cfg.batch_size, device, dtype, cfg.compile)
                bench.model.residual.attend = cuda.Peer(attend, cfg.norm_eps)
                try:
                    bench.step()
                    benches[f'{label} {peer}'] = bench
                except Exception as e:  # theirs: dtypes and widths that a package does not take
                    print(f'{label} {peer}: left out, {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ""}')

    def forward(b):
        with torch.no_grad():
            b.loss()

    def both(b):
        b.loss().backward()
        b.optimizer.zero_grad(set_to_none=True)

    kinds = {'forward': forward, 'forward + backward': both, 'step': measure.Bench.step}
    rows = {name: {} for name in benches}
    for kind, fn in kinds.items():
        times = timed({name: partial(fn, b) for name, b in benches.items()}, device, cfg.threads, cfg.rounds)
        for name, t in times.items():
            rows[name][kind] = summary(t, times[base])
    for name, b in benches.items():
        if not cfg.compile:
            kept = measure.alive_bytes(b)
            rows[name]['kept'] = {'bytes': kept, 'ratio': kept / rows[base].get('kept', {'bytes': kept})['bytes']}
        if device.type == 'cuda':
            rows[name]['peak'] = {'bytes': measure.peak_bytes(b)}
    if cfg.decode:
        times = timed({name: decoder(benches[name]) for name in configs}, device, cfg.threads, cfg.rounds)
        for name, t in times.items():
            rows[name]['decode'] = summary(t, times[base])
    if kernels.triton is not None:
        for name, c in configs.items():
            if c.residual in ('full', 'block'):
                rows[name]['traffic'] = traffic(c, cfg.batch_size)
    if device.type == 'cuda' and kernels.triton is not None and dtype != torch.float64:
        copy = cuda.copy_speed(device)
        for name, c in configs.items():
            if c.residual in ('full', 'block'):
                try:
                    rows[name]['kernels'] = cuda.kernel_times(c, cfg.batch_size, device, dtype, copy)
                except RuntimeError as e:
                    print(f'{name}: kernels not timed, {str(e).splitlines()[0]}')
    return device, rows


def report_kernels(rows):
    """ Microseconds of each kernel, as text; empty where none was timed. """
    out = [('', 'kernel', 'launches', 'us each', 'floor us', 'floor / time')]
    for name, r in rows.items():
        for op, k in r.get('kernels', {}).items():
            out.append((name, op, str(k['launches']), f'{k["us"]:.1f}', f'{k["floor_us"]:.1f}', f'{k["of_floor"]:.0%}'))
    return '\n' + table(out) if len(out) > 1 else ''


def report(rows):
    """ The rows as text. """
    head = ('', 'forward', 'forward + backward', 'step', 'kept for backward', 'decode')
    out = [head]
    for name, r in rows.items():
        cells = [f'{r[k]["ratio"]:.3f} x ({r[k]["ms"]:.1f} ms)' if k in r else '' for k in (*head[1:4], 'decode')]
        cells.insert(3, f'{r["kept"]["ratio"]:.3f} x ({r["kept"]["bytes"] / 2**20:.0f} MiB)' if 'kept' in r else '')
        out.append((name, *cells, f'{r["traffic"]:.0f} u' if 'traffic' in r else ''))
    out[0] = (*head, 'traffic')
    return table(out)


def main(argv):
    values = configuration.parse(SpeedConfig, argv, __doc__.split('\n\n')[0])
    for key in ('residual', 'kernel'):
        if key in values:
            configuration.fail(f'{key}={values[key]!r}: must be left out: --modes and --kernels say what to time')
    shape = values.get('shape', SpeedConfig.shape)
    shape = SHAPES.get(shape, {}) if isinstance(shape, str) else {}
    cfg = configuration.build(SpeedConfig, shape | values)
    device, rows = speed(cfg)
    print(report(rows) + report_kernels(rows))
    sizes = {f.name: getattr(cfg, f.name) for f in fields(SpeedConfig) if f.name not in ('out', 'rounds', 'kernel')}
    out = {'command': ' '.join(['python compare.py speed', *argv]), **environment(device), 'threads': cfg.threads,
           'cpu': os.uname().machine if hasattr(os, 'uname') else '', 'config': sizes, 'rows': rows}
    print(json.dumps(out))
    if cfg.out:
        write_json(cfg.out, out)
    return out
