"""
What a GPU alone can tell: microseconds of each Triton kernel against its byte floor, and other packages' kernels.

The floor of a launch is the time that a plain copy on the same card takes for the bytes that the launch reads and
writes. At small sizes part of them stays in the card's cache, and a kernel may fall below it.
"""
from dataclasses import replace
from importlib import import_module

import torch
from torch.profiler import ProfilerActivity, profile

import kernels
from experiments import measure

LAUNCHES = {'read': '_read_kernel', 'source': '_source_kernel'}  # op in kernels.py -> name of its kernel on the card


def copy_speed(device, megabytes=1024, rounds=20):
    """ Bytes read and written per second by a copy, the best of some. """
    x = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / min(measure.clock(lambda: y.copy_(x), device) for _ in range(rounds))


def against_floor(launches, spent, speed):
    """ {op: us per launch, floor in us, floor / time}

    launches: (op, bytes) of each; spent: {kernel: (launches, total us)}; speed: bytes per second.
    """
    out = {}
    for op, kernel in LAUNCHES.items():
        sizes = [n for name, n in launches if name.split('::')[-1] == op]
        count, us = spent.get(kernel, (0, 0.0))
        if count:
            if count != len(sizes):
                raise RuntimeError(f'{kernel}: {count} launches on the card, {len(sizes)} counted')
            floor = 1e6 * sum(sizes) / speed
            out[op] = {'launches': count, 'us': us / count, 'floor_us': floor / count, 'of_floor': floor / us}
    return out


def kernel_times(config, batch_size, device, dtype, speed, passes=5):
    """ against_floor of the forward and backward of a model on the Triton path. """
    bench = measure.Bench(replace(config, kernel='triton'), batch_size, device, dtype)
    kernels.traffic = launches = []
    try:
        bench.loss().backward()  # compiles, and counts
    finally:
        kernels.traffic = None
    bench.loss().backward()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(passes):
            bench.loss().backward()
        torch.cuda.synchronize(device)
    spent = {e.key: (e.count, e.self_device_time_total) for e in seen.key_averages() if e.key in LAUNCHES.values()}
    return against_floor(launches * passes, spent, speed)


# name -> module, function f, call(f, w, v, eps): w (D,) query * key gain, v a tuple of sources (..., D)
PEERS = {
    'fla': ('fla.ops.attnres', 'fused_attnres',
            lambda f, w, v, eps: f(w, list(v), torch.ones_like(w), rms_eps=eps)),
    'liger': ('liger_kernel.transformers.functional', 'liger_attn_res',
              lambda f, w, v, eps: f(torch.stack(v), w, torch.ones_like(w), eps)),
    'fast-attnres': ('attnres', 'attnres', lambda f, w, v, eps: f(list(v), w, eps=eps))}


def peers():
    """ {name: attend(w, v, eps)} of the packages that are installed. flash-attn-res owns the whole forward pass and
    takes no sublayers as functions: it cannot stand beside them. """
    out = {}
    for name, (module, function, call) in PEERS.items():
        try:
            f = getattr(import_module(module), function)
        except Exception as e:  # not there, too old, or broken: theirs
            if not isinstance(e, ImportError):
                print(f'{name}: left out, {type(e).__name__}: {e}')
            continue
        out[name] = lambda w, v, eps, f=f, call=call: v[0] if len(v) == 1 else call(f, w.to(v[0].dtype), v, eps)
    return out


class Peer(torch.nn.Module):
    """ Takes the place of model.DepthAttention: depth attention by another package. """
    def __init__(self, attend, eps):
        super().__init__()
        self.attend, self.eps = attend, eps

    def forward(self, w, v):
        return self.attend(w, v, self.eps)
