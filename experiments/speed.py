"""
Cost of the residual rules by mode and kernel: time of forward, step and one decoded token, memory.

All candidates take turns in one process with the base, the standard residual. Figures are medians,
ratios are medians of the ratios within a round. On CUDA each kernel is also held against the time
of a plain copy. On a CPU with one thread the clock is the process's own CPU time: a busy machine
disturbs it less.

    python compare.py speed --shape=B
    python compare.py speed --shape=gpt2 --modes=standard,block:8 --kernels=torch,triton --compile
"""
import os
import statistics
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from unittest.mock import patch

import torch

import config as configuration
import kernels
import triton_kernels
from config.machine import pick_device, pick_dtype
from experiments import cuda, measure
from experiments.common import environment, mode_keys, table, write_json
from model import GPT, Cache, GPTConfig

SHAPES = {'A': dict(n_layer=4, n_head=4, n_embd=128, n_ctx=64, batch_size=12),
          'B': dict(n_layer=12, n_head=4, n_embd=128, n_ctx=128, batch_size=16),
          'C': dict(n_layer=12, n_head=6, n_embd=384, n_ctx=256, batch_size=8),
          'gpt2': dict(n_layer=12, n_head=12, n_embd=768, n_ctx=1024, batch_size=12,
                       vocab_size=50304)}


@dataclass
class SpeedConfig(GPTConfig):
    vocab_size: int = 65  # rows of the embedding
    bias: bool = False  # biases in Linear and LayerNorm
    shape: str = 'B'  # A | B | C | gpt2: sizes of network and batch; model keys given win
    batch_size: int = 16  # sequences; by default the shape's
    modes: str = 'standard,full,block:4,block:8'  # residual rules; block:N: N residual blocks
    kernels: str = 'auto'  # of full and block: some of auto, reference, torch, triton, with commas
    rounds: int = 0  # interleaved rounds; 0: at least 5, about 20 seconds for each kind of figure
    threads: int = 1  # CPU threads
    decode: bool = True  # measure the decoding of one token, too
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps
    dtype: str = 'auto'  # auto | float32 | bfloat16 | float16
    compile: bool = False  # torch.compile
    out: str = ''  # also write the JSON to this file

    def __post_init__(self):
        check = configuration.checker(self)
        self.out = configuration.expand(self.out)
        folder = os.path.dirname(self.out) or '.'
        writable = not self.out or os.path.isdir(folder) and not os.path.isdir(self.out)
        check('shape', self.shape in SHAPES, 'one of ' + ', '.join(SHAPES))
        check('rounds', self.rounds >= 0, '0 or more')
        check('batch_size', self.batch_size >= 1, '1 or more')
        check('threads', 1 <= self.threads <= 4096, 'from 1 to 4096')
        check('out', writable, 'a file in a folder that exists')
        known = set(self.kernels.split(',')) <= set(kernels.KERNELS)
        check('kernels', known, 'some of ' + ', '.join(kernels.KERNELS))

    def gpt(self, **keys):
        own = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**own | {k: v for k, v in keys.items() if k in own})


def candidates(cfg):
    """ {label: GPTConfig}, the base first: standard, else the first mode. AttnRes by kernel. """
    modes, out = mode_keys(cfg.modes), {}
    for label in sorted(modes, key=lambda label: label != 'standard'):
        attnres = modes[label]['residual'] in ('full', 'block')
        for kernel in cfg.kernels.split(',') if attnres else ['auto']:
            name = label if kernel == 'auto' else f'{label} {kernel}'
            out[name] = cfg.gpt(**modes[label], kernel=kernel)
    return out


# -----------------------------------------------------------------------------
# What is measured.

def decoder(bench):
    """ A function that decodes one token (batch 1) with half a window in the cache. """
    model, past = bench.model, bench.model.config.n_ctx // 2
    idx = bench.idx[:1]
    caches = [Cache(model.config.n_ctx) for _ in model.transformer.h]
    with torch.no_grad():
        model.eval()
        model(idx[:, :past], caches=caches)

    @torch.no_grad()
    def decode():
        for c in caches:
            c.length = past
        bench.run(idx[:, past:past + 1], caches=caches)
    return decode


def forward(bench):
    with torch.no_grad():
        bench.loss()


def forward_backward(bench):
    bench.loss().backward()
    bench.optimizer.zero_grad(set_to_none=True)


KINDS = {'forward': forward, 'forward + backward': forward_backward, 'step': measure.Bench.step}


def timed(functions, cfg, device, seconds=20):
    """ {name: {ms, ratio to the first, n}} of functions that take turns. """
    clock = measure.cpu_clock if device.type == 'cpu' and cfg.threads == 1 else measure.clock
    rounds = cfg.rounds
    if not rounds:  # as many as take about `seconds`
        for f in functions.values():
            f()  # the first call compiles
        once = sum(clock(f, device) for f in functions.values())
        rounds = max(5, min(200, int(seconds / max(once, 1e-4))))
    times = measure.interleaved(functions, device, rounds, clock=clock)
    base = next(iter(times.values()))
    return {name: {'ms': 1e3 * statistics.median(t), 'ratio': measure.ratio(t, base), 'n': len(t)}
            for name, t in times.items()}


def traffic(config):
    """ u of forward + backward of the rule on the Triton path in bfloat16, with all norms.

    u: a (tokens, D) tensor, read or written once. The count depends on neither tokens nor D, so a
    tiny network of as many sublayers tells it, on any machine.
    """
    moved = []

    def count(kernel, tensors, x, *args):  # in place of a launch
        moved.append(('launch', tensors * x.nbytes))

    tiny = replace(config, kernel='triton', n_ctx=1, vocab_size=1, n_embd=8, n_head=1)
    h = torch.randn(1, 1, tiny.n_embd, device='cpu', requires_grad=True)
    with (patch.object(triton_kernels, '_launch', count),
          patch.object(triton_kernels, 'traffic', moved),
          patch.dict(os.environ, TRITON_INTERPRET='1'),  # so that no GPU is asked for
          torch.autocast('cpu', torch.bfloat16)):
        model = GPT(tiny)
        out = model.residual(h, model.sublayers())
        out.backward(torch.ones_like(out))
    norms = 2 * config.n_layer + 1  # each moves 2 u in the forward and 3 u in the backward
    return sum(size for _, size in moved) / (h.numel() * 2) + 5 * norms


def speed(cfg):
    """ {name: {kind of figure: its numbers}} """
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    torch.set_num_threads(cfg.threads)
    configs = candidates(cfg)
    benches = {name: measure.Bench(c, cfg.batch_size, device, dtype, cfg.compile)
               for name, c in configs.items()}
    figures = {}  # kind -> name -> its numbers
    for kind, f in KINDS.items():
        figures[kind] = timed({name: partial(f, b) for name, b in benches.items()}, cfg, device)
    if not cfg.compile:
        kept = {name: measure.alive_bytes(b) for name, b in benches.items()}
        base = next(iter(kept.values()))
        figures['kept'] = {name: {'bytes': n, 'ratio': n / base} for name, n in kept.items()}
    if device.type == 'cuda':
        figures['peak'] = {name: {'bytes': measure.peak_bytes(b)} for name, b in benches.items()}
    if cfg.decode:
        figures['decode'] = timed({name: decoder(b) for name, b in benches.items()}, cfg, device)
    rows = {name: {kind: of[name] for kind, of in figures.items()} for name in benches}
    for name, c in configs.items():
        if c.residual not in ('full', 'block') or triton_kernels.triton is None:
            continue
        rows[name]['traffic'] = traffic(c)
        if device.type == 'cuda':
            try:
                rows[name]['kernels'] = cuda.kernel_times(c, cfg.batch_size, device, dtype)
            except RuntimeError as e:
                print(f'{name}: kernels not timed, {str(e).partition(chr(10))[0]}')
    return device, rows


# -----------------------------------------------------------------------------
# What is shown.

def kernel_cells(rows):
    """ The table of kernels: only its head where none was timed. """
    out = [('', 'kernel', 'launches', 'us each', 'floor us', 'floor / time')]
    for name, r in rows.items():
        for op, k in r.get('kernels', {}).items():
            out.append((name, op, str(k['launches']), f'{k["us"]:.1f}', f'{k["floor_us"]:.1f}',
                        f'{k["of_floor"]:.0%}'))
    return out


def cells(rows):
    """ The table: ratios to the first row, and the time of its step. """
    columns = ('forward', 'forward + backward', 'step', 'kept', 'decode')
    out = [('', 'forward', 'fwd + bwd', 'step', 'step ms', 'kept', 'decode', 'traffic')]
    for name, r in rows.items():
        ratios = [f'{r[k]["ratio"]:.2f} x' if k in r else '' for k in columns]
        moved = f'{r["traffic"]:.0f} u' if 'traffic' in r else ''
        out.append((name, *ratios[:3], f'{r["step"]["ms"]:.1f}', *ratios[3:], moved))
    return out


def main(argv):
    values = configuration.parse(SpeedConfig, argv, __doc__.split('\n\n')[0], 'compare.py speed')
    for key in ('residual', 'kernel'):
        if key in values:
            why = '--modes and --kernels say what to time'
            configuration.fail(f'{key}={values[key]!r}: must be left out: {why}')
    shape = values.get('shape', SpeedConfig.shape)
    shape = SHAPES.get(shape, {}) if isinstance(shape, str) else {}
    cfg = configuration.build(SpeedConfig, shape | values, argv)
    device, rows = speed(cfg)
    print(table(cells(rows)))
    print('kept: bytes for the backward pass. decode: one token. u: tokens x width numbers.')
    launches = kernel_cells(rows)
    if len(launches) > 1:
        print('\n' + table(launches))
    out = {'command': ' '.join(['python compare.py speed', *argv]), **environment(device),
           'threads': cfg.threads, 'config': asdict(cfg), 'rows': rows}
    if cfg.out:
        write_json(cfg.out, out)
        print(f'\nwrote {cfg.out}')
    return out
