"""
What a GPU alone can tell: the time of each Triton kernel against its byte floor.

The floor of a launch is the time that a plain copy on the same card takes for the bytes that the
launch reads and writes. At small sizes part of them stays in the card's cache, and a kernel may
fall below it.
"""
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

import triton_kernels
from experiments import measure

LAUNCHES = {'read': '_read_kernel', 'visit': '_visit_kernel'}  # name here -> in triton_kernels.py


def copy_speed(device, megabytes=1024, rounds=20):
    """ Bytes read and written per second by a copy, the best of some. """
    x = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / min(measure.clock(lambda: y.copy_(x), device) for _ in range(rounds))


def against_floor(launches, spent, speed):
    """ {op: {launches, us per launch, floor in us, floor / time}}

    launches: (kernel, bytes) of each; spent: {kernel: (launches, total us)}; speed: bytes a second.
    """
    out = {}
    for op, kernel in LAUNCHES.items():
        sizes = [n for name, n in launches if name == kernel]
        count, us = spent.get(kernel, (0, 0.0))
        if count:
            if count != len(sizes):
                raise RuntimeError(f'{kernel}: {count} launches on the card, {len(sizes)} counted')
            floor = 1e6 * sum(sizes) / speed
            out[op] = {'launches': count, 'us': us / count, 'floor_us': floor / count,
                       'of_floor': floor / us}
    return out


def kernel_times(config, batch_size, device, dtype, passes=5):
    """ against_floor of the forward and backward of a model on the Triton path. """
    bench = measure.Bench(replace(config, kernel='triton'), batch_size, device, dtype)
    triton_kernels.traffic = launches = []
    try:
        bench.loss().backward()  # compiles, and counts
    finally:
        triton_kernels.traffic = None
    bench.loss().backward()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(passes):
            bench.loss().backward()
        torch.cuda.synchronize(device)
    spent = {e.key: (e.count, e.self_device_time_total) for e in seen.key_averages()
             if e.key in LAUNCHES.values()}
    return against_floor(launches * passes, spent, copy_speed(device))
