"""What the tests of both kernels share: rules driven over the sources of any path, and small networks to drive.

Everything here only calls verbs. What the numbers must be is said by reference.py.
"""
import random

import torch

import kernels
import model


def run(path, h, sublayers, w, S, eps, boundaries=None):
    """ The rule of model.py over the sources of one path; S sublayers make a residual block.

    boundaries: the sublayers that begin a residual block, where they are not the multiples of S.
    """
    v = kernels.new_sources(path, model.Sources, w, eps, h)
    v.push(h)
    for l, f in enumerate(sublayers):
        y = f(v.read(l))
        if l in boundaries if boundaries is not None else l % S == 0:
            v.push(y)
        else:
            v.add(y)
    return v.read(len(sublayers))


def script(seed, reads=6):
    """ Verbs by chance: (verb, number), each read once and in order, some left out, sources always there. """
    chance = random.Random(seed)
    verbs, n, l = [('push', None)], 1, 0
    while l < reads:
        verb = chance.choice(['push', 'push', 'add', 'add', 'drop', 'read', 'read', 'read', 'skip'])
        if verb == 'drop':
            if n == 1:
                continue
            verbs.append((verb, chance.randrange(n)))
            n -= 1
        elif verb == 'read':
            verbs.append((verb, l))
            l += 1
        elif verb == 'skip':
            l += chance.randrange(2)
        else:
            verbs.append((verb, None))
            n += verb == 'push'
    return verbs


def follow(path, verbs, outputs, w, eps):
    """ The reads of a script. outputs[k](h) is what the k-th push or add takes; h: the latest read, or None. """
    v = kernels.new_sources(path, model.Sources, w, eps, outputs[0](None))
    reads, outputs = [], iter(outputs)
    for verb, number in verbs:
        if verb in ('push', 'add'):
            getattr(v, verb)(next(outputs)(reads[-1] if reads else None))
        elif verb == 'drop':
            v.drop(number)
        else:
            reads.append(v.read(number))
    return reads


def gradients(outs, leaves, **keys):
    """ Gradients of a sum in which no number of no tensor counts like another. """
    total = 0
    for k, out in enumerate(outs):
        weight = torch.linspace(-1, 1 + k, out.numel(), dtype=out.dtype, device=out.device)
        total = total + (out * weight.view(out.shape)).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True, **keys)
