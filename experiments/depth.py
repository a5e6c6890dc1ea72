"""
Shows what the sublayers of trained models read: the depth-mixing matrix M, the dynamics by depth.

    python compare.py depth CHECKPOINT_DIR [CHECKPOINT_DIR ... --out=FOLDER]

h_l = sum_i M_li v_i for each token. Row l of M is the read of sublayer l, the last row is the
output's. Column 0 is the embedding, column i + 1 is the output of sublayer i. With its weights and
gates held fixed every rule but ddl is linear in these sources. So M is measured: the rule runs
again with the weights it had and with unit vectors as sources. M counts only if M v is what was
read.
"""
import math
import os
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

import config as configuration
from config.machine import pick_device
from data.batches import Data
from experiments import pictures
from experiments.common import environment, table, write_json
from model import GPT
from train import read_run

GATES = 'softmax', 'sigmoid', 'tanh', 'exp'
LEGEND = """Mean weights over validation tokens: in attention's reads / in the MLPs' reads.
sd: of a weight over the tokens. entropy: as a share of that of equal weights."""


@dataclass
class DepthConfig:
    out: str = ''  # folder for what is written; by default that of the only checkpoint
    batch_size: int = 4  # sequences in a batch
    eval_iters: int = 16  # batches, spread evenly over the validation text; 0: all of it
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps

    def __post_init__(self):
        check = configuration.checker(self)
        self.out = configuration.expand(self.out)
        check('batch_size', 1 <= self.batch_size < 2**31, 'a whole number, 1 or more')
        check('eval_iters', 0 <= self.eval_iters < 2**31, 'a whole number, 0 or more')


# -----------------------------------------------------------------------------
# The matrix.

class Gates(TorchFunctionMode):
    """ Notes what every gate returns; given a list of noted ones, it replays them in order. """
    def __init__(self, noted=None):
        super().__init__()
        self.noted, self.held = [], noted and iter(noted)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, '__name__', '') not in GATES:
            return func(*args, **kwargs or {})
        gate = next(self.held) if self.held else func(*args, **kwargs or {})
        self.noted.append(gate)
        return gate


def reads(rule, v):
    """ What the L sublayers and the output read if the sources are v; both (L + 1, B, T, D). """
    h = []

    def sublayer(y):
        def f(x):
            h.append(x)
            return y
        return f

    last = rule(v[0], [sublayer(y) for y in v[1:]])
    return torch.stack([*h, last])


@torch.no_grad()
def mixing(rule, seen):
    """ M (L + 1 reads, L + 1 sources, B, T) of the pass that was seen.

    None if reads are no weighted sums of the sources.
    """
    v, h = torch.stack(seen.sources).detach(), torch.stack(seen.reads).detach()
    reference = patch.object(rule, 'kernel', 'reference', create=True)  # its gates are seen
    with reference, Gates() as gates:
        reads(rule, v)
    M = v.new_zeros(len(v), *v.shape[:-1])
    for some in torch.arange(len(v)).split(v.size(-1)):  # a channel for each source
        unit = torch.zeros_like(v)
        unit[some, ..., torch.arange(len(some))] = 1
        with reference, Gates(gates.noted):
            found = reads(rule, unit)  # channel i tells the weight of source some[i]
        M[:, some] = found[..., :len(some)].movedim(-1, 1)
    error = (torch.einsum('lsbt,sbtd->lbtd', M, v) - h).norm() / h.norm()
    return M if error < 1e-4 else None


# -----------------------------------------------------------------------------
# The dynamics.

def watch(model):
    """ An object whose lists every forward pass fills anew, whatever kernel runs.

    sources: the embedding and y_0 .. y_{L-1}. reads: h_0 .. h_L.
    """
    seen = SimpleNamespace(sources=[], reads=[])

    def watched(f):
        def run(h):
            seen.reads.append(h)
            seen.sources.append(f(h))
            return seen.sources[-1]
        return run

    def before(module, args):
        h, sublayers = args
        seen.sources[:], seen.reads[:] = [h], []
        return h, [watched(f) for f in sublayers]

    def after(module, args, last):
        seen.reads.append(last)

    model.residual.register_forward_pre_hook(before)
    model.residual.register_forward_hook(after)
    return seen


def wide(x):
    """ x in float64, on the CPU: a Mac's GPU has no float64. """
    return x.detach().cpu().double()


def observe(model, batches):
    """ Means over the tokens of batches, lists by depth; matrix and entropy may be None.

    matrix, spread: M and the standard deviation of its entries over tokens. entropy: of a read's
    weights, in nats; most: that of equal ones. output, read: rms of y_l, of h_l. gradient: rms of
    d(summed loss) / dy_l. stream: rms of the sum that y_l went into: in AttnRes its residual block
    so far, in other rules what is read next.
    """
    S = getattr(model.residual, 'S', None)
    seen, weighted = watch(model), []
    for idx, targets in batches:
        loss = model(idx, targets)[1] * idx.numel()
        v, h = seen.sources, seen.reads
        gradients = torch.autograd.grad(loss, v[1:])
        stream = h[1:]
        if S:
            stream = [sum(v[1 + l - l % S:l + 2]) for l in range(len(gradients))]
        means = {}
        parts = {'output': v[1:], 'read': h, 'stream': stream, 'gradient': gradients}
        for key, xs in parts.items():
            means[key] = torch.stack([wide(x).square().mean() for x in xs])
        M = mixing(model.residual, seen)
        if M is not None:
            means |= matrix_means(wide(M).flatten(2), S or 1)
        weighted.append((len(idx), means))

    sequences = sum(n for n, _ in weighted)
    out = {key: sum(n * means[key] for n, means in weighted) / sequences for key in weighted[0][1]}
    if 'matrix' in out:
        out['spread'] = (out['spread'] - out['matrix'].square()).clamp(min=0)
    for key in out.keys() - {'matrix', 'entropy'}:
        out[key] = out[key].sqrt()
    most = [math.log(1 + math.ceil(l / (S or 1))) for l in range(len(h))]
    finite = {key: x.tolist() for key, x in sorted(out.items()) if x.isfinite().all()}
    return {'S': S, 'most': most, 'matrix': None, 'spread': [], 'entropy': None} | finite


def matrix_means(M, S):
    """ Means over the tokens of M (L + 1, L + 1, tokens), of its square, of its rows' entropy. """
    p = M[:, [0, *range(1, len(M), S)]]  # the weight of a residual block counts once
    entropy = -torch.xlogy(p, p).sum(1).mean(-1)
    if not ((p.sum(1) - 1).abs() < 1e-4).all():
        entropy = entropy * math.nan  # weights of another sum have no entropy
    return {'matrix': M.mean(-1), 'spread': M.square().mean(-1), 'entropy': entropy}


# -----------------------------------------------------------------------------

def examine(folder, cfg, device):
    """ (label, what observe says) of the checkpoint in folder, on its own validation text. """
    model, run = GPT.from_checkpoint(folder, device), read_run(folder)
    c, dataset = model.config, run.get('config', {}).get('dataset', '')
    data = Data(SimpleNamespace(**vars(cfg), dataset=dataset, n_ctx=c.n_ctx, vocab_size=0), device)
    if run.get('tokenizer') != data.meta['tokenizer']:
        raise ValueError(f'{folder}: must have the tokenizer that dataset={dataset!r} has now')
    label = f'block:{c.residual_blocks}' if c.residual == 'block' else c.residual
    seen = observe(model, data.val_batches())
    if 'stream' not in seen:
        raise ValueError(f'{folder}: must have finite weights and activations')
    return label, {'checkpoint': folder} | seen


def by_kind(values):
    """ Means over attention's / the MLPs' reads, without the first and the last read. """
    parts = values[2:-1:2], values[1:-1:2]
    return ' / '.join(f'{fmean(part):.3f}' for part in parts if part) or 'none'


def cells(modes):
    """ The table: a row a mode. """
    rows = [('attention / MLP', 'embedding', 'newest output', 'sd', 'entropy')]
    for label, m in modes.items():
        M, entropy = m['matrix'] or [], m['entropy'] or []
        embedding = [row[0] for row in M]
        newest = [row[l] for l, row in enumerate(M)]
        spread = [fmean(row[:l + 1]) for l, row in enumerate(m['spread'])]
        share = [e / (most or 1) for e, most in zip(entropy, m['most'], strict=False)]
        rows.append((label, *map(by_kind, (embedding, newest, spread, share))))
    return rows


def show(folders, cfg, out, command):
    """ Examines the checkpoints in folders, {name: folder}: table, JSON, pictures.

    Where the name is a number, the label comes from the checkpoint.
    """
    device, modes = pick_device(cfg.device), {}
    for name, folder in folders.items():
        label, m = examine(folder, cfg, device)
        if isinstance(name, str):
            label = name
        elif label in modes:
            label = f'{label} ({folder})'
        modes[label] = m
    os.makedirs(out, exist_ok=True)
    print(table(cells(modes)))
    print(LEGEND)
    data = {'command': command, **environment(device), 'modes': modes}
    write_json(os.path.join(out, 'depth.json'), data)
    pictures.depth(modes, os.path.join(out, 'depth.png'))
    pictures.dynamics(modes, os.path.join(out, 'dynamics.png'))
    return data


def main(argv):
    folders = [a for a in argv if not a.startswith('-') and not a.endswith('.toml')]
    keys = [a for a in argv if a not in folders]
    intro = __doc__.split('\n\n')[0]
    values = configuration.parse(DepthConfig, keys, intro, 'compare.py depth DIR [DIR ...]')
    cfg = configuration.build(DepthConfig, values, argv)
    folders = [configuration.expand(folder) for folder in folders]
    if len(folders) != 1 and not (folders and cfg.out):
        n = len(folders)
        raise ValueError(f'{n} CHECKPOINT_DIRs: must be one, or several and --out=FOLDER')
    out, command = cfg.out or folders[0], ' '.join(['python compare.py depth', *argv])
    data = show(dict(enumerate(folders)), cfg, out, command)
    print(f'\nwrote depth.json, depth.png and dynamics.png into {out}')
    return data
