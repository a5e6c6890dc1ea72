"""
Cost of a model: time of a training step and bytes kept for the backward pass, compared fairly.

Machines drift, so nothing is timed alone: the candidates take turns in one process, A B C A B C.
The figure is the median, and a ratio is the median of the ratios within a round.
"""
import statistics
import time
from contextlib import nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT


class Bench:
    """ One candidate: a model with its optimiser and one batch; step() is a training step. """
    def __init__(self, config, batch_size, device, dtype=torch.float32, compiled=False, seed=1337):
        torch.manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.model = GPT(config).to(device)
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99))
        self.idx = torch.randint(0, config.vocab_size, (batch_size, config.n_ctx), device=device)

    def loss(self):
        autocast = nullcontext()
        if self.dtype != torch.float32:
            autocast = torch.autocast(self.device.type, dtype=self.dtype)
        with autocast:
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


class Created(TorchDispatchMode):
    """ Watches every operation's results and can tell how many bytes of them are still alive. """
    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                ref = StorageWeakRef(t.untyped_storage())
                self.storages[ref.cdata] = (ref, t.untyped_storage().nbytes())
        return out

    def alive(self, but):
        """ Bytes alive, tensors in `but` apart. """
        known = {t.untyped_storage()._cdata for t in but}
        alive = [(ref, n) for ref, n in self.storages.values() if not ref.expired()]
        return sum(n for ref, n in alive if ref.cdata not in known)


def alive_bytes(bench):
    """ Bytes made by the forward pass that live on until the backward pass, whoever holds them.

    For eager models only.
    """
    bench.model.zero_grad(set_to_none=True)
    with Created() as created:
        loss = bench.loss()
    return created.alive(but=[loss, *bench.model.parameters()])


def peak_bytes(bench):
    """ CUDA: the most bytes allocated during a training step. """
    torch.cuda.synchronize(bench.device)
    before = torch.cuda.memory_allocated(bench.device)  # of all benches, this one's own among it
    torch.cuda.reset_peak_memory_stats(bench.device)
    bench.step()
    own = [*bench.model.parameters()]
    for state in bench.optimizer.state.values():
        own += state.values()
    most = torch.cuda.max_memory_allocated(bench.device)
    return most - before + sum(t.nbytes for t in own)
