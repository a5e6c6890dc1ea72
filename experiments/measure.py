"""
Cost of a model: time of a training step and bytes kept for the backward pass, compared fairly.

Machines drift, so nothing is timed alone: the candidates take turns in one process (A B C A B C ...), the figure is the
median, and a ratio is the median of the ratios within a round.
"""
import statistics
import time
from contextlib import nullcontext

import torch

from model import GPT


class Bench:
    """ One candidate: a model with its optimiser and one fixed batch; step() is a whole training step. """
    def __init__(self, config, batch_size, device, dtype=torch.float32, compiled=False, seed=1337):
        torch.manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.model = GPT(config).to(device)
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99))
        self.idx = torch.randint(0, config.vocab_size, (batch_size, config.n_ctx), device=device)

    def loss(self):
        on = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if on else nullcontext():
            return self.run(self.idx, self.idx)[1]

    def step(self):
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def clock(fn, device):
    """ Seconds of one call. """
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    fn()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def cpu_clock(fn, device):
    """ CPU seconds of one call: other processes on the machine do not count. For one thread. """
    began = time.process_time()
    fn()
    return time.process_time() - began


def interleaved(fns, device, rounds, warmup=2, clock=clock):
    """ {name: seconds of each of `rounds` calls}, the functions of {name: fn} taking turns. """
    times = {name: [] for name in fns}
    for r in range(warmup + rounds):
        for name, fn in fns.items():
            t = clock(fn, device)
            if r >= warmup:
                times[name].append(t)
    return times


def ratio(times, base):
    """ Median over the rounds of time / time of the base in the same round. """
    return statistics.median(t / b for t, b in zip(times, base, strict=True))


def alive_bytes(bench):
    """ Bytes that stay alive between forward and backward, parameters apart: what autograd keeps. """
    bench.model.zero_grad(set_to_none=True)
    parameters = {p.untyped_storage().data_ptr() for p in bench.model.parameters()}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = bench.loss()
    total = sum(kept.values())
    del loss
    return total


def peak_bytes(bench):
    """ CUDA: the most bytes allocated during a training step. """
    torch.cuda.synchronize(bench.device)
    torch.cuda.reset_peak_memory_stats(bench.device)
    bench.step()
    return torch.cuda.max_memory_allocated(bench.device)
