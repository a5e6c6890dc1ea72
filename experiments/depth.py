"""
Shows what the sublayers of trained models read: the depth-mixing matrix M, and the dynamics along depth.

    python compare.py depth CHECKPOINT_DIR [CHECKPOINT_DIR ... --out=FOLDER]

h_l = sum_i M_li v_i, token by token. Row l: the read of sublayer l, last the output's. Column 0: the embedding, column
i + 1: the output of sublayer i. Gates held, every rule but ddl is linear in these sources, so M is measured: the rule
runs again with the gates it had and unit vectors as sources. M counts only if M v is what was really read.
"""
import json
import math
import os
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

import baselines  # noqa: F401 - importing it registers its rules, so that their checkpoints load
import config as configuration
from experiments import pictures
from experiments.common import environment, table, write_json
from model import GPT
from train import Data, pick_device, read_run

HEAD = ('weight of embedding', 'of newest output', 'sd over tokens', 'entropy / most', 'stream rms', 'gradient rms')


@dataclass
class DepthConfig:
    out: str = ''  # folder for depth.json, depth.png and dynamics.png; by default that of the only checkpoint
    batch_size: int = 4  # sequences in a batch
    eval_iters: int = 16  # batches, spread evenly over the validation text; 0: all of it
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps

    def __post_init__(self):
        check = configuration.checker(self)
        check('batch_size', 1 <= self.batch_size < 2**31, 'a whole number, 1 or more')
        check('eval_iters', 0 <= self.eval_iters < 2**31, 'a whole number, 0 or more')


class Gates(TorchFunctionMode):
    """ Notes every softmax, sigmoid, tanh and exp; given noted ones, returns these instead of computing them. """
    def __init__(self, noted=None):
        super().__init__()
        self.noted, self.replay = [], noted and iter(noted)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, '__name__', '') not in ('softmax', 'sigmoid', 'tanh', 'exp'):
            return func(*args, **kwargs or {})
        self.noted.append(next(self.replay) if self.replay else func(*args, **kwargs or {}))
        return self.noted[-1]


def reads(rule, v):
    """ What the L sublayers and the output read if the sources are v, (L + 1, B, T, D) -> the same shape """
    h = []
    last = rule(v[0], [lambda x, y=y: h.append(x) or y for y in v[1:]])
    return torch.stack([*h, last])


@torch.no_grad()
def mixing(rule, v):
    """ M (L + 1 reads, L + 1 sources, B, T), v: the sources (L + 1, B, T, D). None if reads are no weighted sums. """
    with Gates() as gates:
        h = reads(rule, v)
    M = v.new_zeros(len(v), *v.shape[:-1])
    for some in torch.arange(len(v)).split(v.size(-1)):  # a channel for each source, as many at a time as there are
        unit = torch.zeros_like(v)
        unit[some, ..., torch.arange(len(some))] = 1
        with Gates(gates.noted):
            M[:, some] = reads(rule, unit)[..., :len(some)].movedim(-1, 1)
    error = (torch.einsum('lsbt,sbtd->lbtd', M, v) - h).norm() / h.norm()
    return M if error < 1e-4 else None


def watch(model):
    """ Two lists that every forward pass fills anew: the sources embedding, y_0 .. y_L-1 and the reads h_0 .. h_L. """
    v, h = [], []

    def before(module, args):
        v[:], h[:] = args[:1], []
        return args[0], [lambda x, f=f: h.append(x) or v.append(f(x)) or v[-1] for f in args[1]]
    model.residual.register_forward_pre_hook(before)
    model.residual.register_forward_hook(lambda module, args, last: h.append(last))
    return v, h


def observe(model, batches):
    """ Means over the tokens of batches, lists by depth; matrix and entropy are None if the rule has none.

    matrix, spread: M and the standard deviation of its entries over tokens. entropy: of a read's weights, in nats;
    most: that of equal ones. output, read: rms of y_l, of h_l. gradient: rms of d(summed loss) / dy_l. stream: rms of
    the sum that y_l went into, in AttnRes that of its residual block so far, in other rules what is read next.
    """
    S, seen, (v, h) = getattr(model.residual, 'S', None), [], watch(model)
    for idx, targets in batches:
        grads = torch.autograd.grad(model(idx, targets)[1] * idx.numel(), v[1:])
        stream = [sum(v[1 + l - l % S:l + 2]) for l in range(len(grads))] if S else h[1:]
        now = {k: torch.stack([x.detach().double().square().mean() for x in xs]) for k, xs in
               {'output': v[1:], 'read': h, 'stream': stream, 'gradient': grads}.items()}
        if (M := mixing(model.residual, torch.stack(v).detach())) is not None:
            M = M.double().flatten(2)  # (L + 1, L + 1, tokens)
            p = M[:, [0, *range(1, len(M), S or 1)]]  # the weight of a residual block counts once
            one = 0 if ((p.sum(1) - 1).abs() < 1e-4).all() else math.nan  # other weights have no entropy
            now |= dict(matrix=M.mean(-1), spread=M.square().mean(-1), entropy=one - torch.xlogy(p, p).sum(1).mean(-1))
        seen.append((len(idx), now))
    out = {k: sum(n * now[k] for n, now in seen) / sum(n for n, _ in seen) for k in now}
    if 'matrix' in out:
        out['spread'] = (out['spread'] - out['matrix'].square()).clamp(min=0)
    out |= {k: out[k].sqrt() for k in out.keys() - {'matrix', 'entropy'}}
    most = [math.log(1 + -(-l // (S or 1))) for l in range(len(h))]
    return {'S': S, 'most': most, 'matrix': None, 'spread': [], 'entropy': None} | {
        k: x.tolist() for k, x in sorted(out.items()) if x.isfinite().all()}


def examine(folder, cfg, device):
    """ (label, what observe says) of the checkpoint in folder, on its own validation text """
    model, run = GPT.from_checkpoint(folder, device, 'reference'), read_run(folder)
    c, dataset = model.config, run.get('config', {}).get('dataset', '')
    data = Data(SimpleNamespace(**vars(cfg), dataset=dataset, n_ctx=c.n_ctx, vocab_size=0), device)
    if run.get('tokenizer') != data.meta['tokenizer']:
        raise ValueError(f'{folder}: must have the tokenizer that dataset={dataset!r} has now')
    label = c.residual + (f':{c.residual_blocks}' if c.residual == 'block' else '')
    seen = observe(model, data.val_batches())
    if 'stream' not in seen:
        raise ValueError(f'{folder}: must have finite weights and activations')
    return label, {'checkpoint': folder} | seen


def cells(m):
    """ A row of the table: means over attention's / MLP's reads without the first; first to last sublayer. """
    M, sd = m['matrix'] or [], m['spread']
    columns = [[r[0] for r in M], [r[l] for l, r in enumerate(M)], [fmean(r[:l + 1]) for l, r in enumerate(sd)],
               [e / (most or 1) for e, most in zip(m['entropy'] or [], m['most'], strict=False)]]
    return [*(' / '.join(f'{fmean(part):.3f}' for part in (x[2:-1:2], x[1:-1:2]) if part) or 'none' for x in columns),
            *(f'{m[k][0]:.3g} to {m[k][-1]:.3g}' for k in ('stream', 'gradient'))]


def show(folders, cfg, out, command):
    """ Examines the checkpoints in folders, {label or number: folder}; a table, depth.json and pictures. """
    device, modes = pick_device(cfg.device), {}
    for name, folder in folders.items():
        label, m = examine(folder, cfg, device)
        label = name if isinstance(name, str) else f'{label} ({folder})' if label in modes else label
        modes[label] = m
    os.makedirs(out, exist_ok=True)
    rows = {label: cells(m) for label, m in modes.items()}
    print(table([(label, *row) for label, row in ({'attention / MLP': HEAD} | rows).items()]))
    data = {'command': command, **environment(device), 'modes': modes}
    write_json(os.path.join(out, 'depth.json'), data)
    pictures.depth(modes, os.path.join(out, 'depth.png'))
    pictures.dynamics(modes, os.path.join(out, 'dynamics.png'))
    return data, rows


def main(argv):
    folders = [a for a in argv if not a.startswith('-') and not a.endswith('.toml')]
    values = configuration.parse(DepthConfig, [a for a in argv if a not in folders], __doc__.split('\n\n')[0])
    cfg = configuration.build(DepthConfig, values)
    try:
        if len(folders) != 1 and not (folders and cfg.out):
            raise ValueError(f'{len(folders)} CHECKPOINT_DIRs: must be one, or several and --out=FOLDER')
        out = cfg.out or folders[0]
        data, rows = show(dict(enumerate(folders)), cfg, out, ' '.join(['python compare.py depth', *argv]))
        print(f'\nwrote depth.json, depth.png and dynamics.png into {out}')
    except OSError as e:
        configuration.fail(f'out={cfg.out!r}: must be a writable folder ({e.strerror})')
    print(json.dumps(data | {'out': out, 'columns': HEAD, 'modes': rows}))
    return data
