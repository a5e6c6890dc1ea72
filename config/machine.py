""" What device=auto, dtype=auto and compile=none stand for on this machine, and what fits in. """
import functools
import math
import os
import re
import sys
import time
import warnings
from importlib.util import find_spec

import torch

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@functools.cache
def warn(line):
    """ Prints a line on stderr, each line once. """
    print(f'warning: {line}', file=sys.stderr)


def pick_device(name, say=warn):
    """ The torch.device that name stands for; auto takes CUDA, else MPS, else the CPU.

    say gets a line if auto cannot take an NVIDIA GPU that is there.
    """
    if not re.fullmatch(r'auto|cpu|mps|cuda(:\d{1,3})?', name):
        raise ValueError(f'device={name!r}: must be auto, cpu, cuda, cuda:N or mps')
    kind = name
    if name == 'auto':
        usable, why_not = cuda_state()
        kind = 'cuda' if usable else 'mps' if torch.backends.mps.is_available() else 'cpu'
        if why_not:
            say(f'device=auto takes the {kind}, not the GPU: {why_not}')
    try:
        device = torch.device(kind)
        if kind == 'cuda' and 'LOCAL_RANK' in os.environ:  # torchrun gives each process a GPU
            torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        fault = str(e).splitlines()[0]
        raise ValueError(f'device={name!r}: must be usable here ({fault}); auto picks one') from e
    return device


@functools.cache  # torch warns about a driver only once
def cuda_state():
    """ (whether CUDA can be used; if not although there is a GPU, why). """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        usable = torch.cuda.is_available()
    if usable or torch.version.cuda is None:  # None: a build of torch for other machines
        return usable, None
    if caught:  # torch says so if the driver is too old
        return False, str(caught[0].message).split('(Triggered')[0].strip()
    hidden = os.environ.get('CUDA_VISIBLE_DEVICES') in ('', '-1')
    if os.path.exists('/dev/nvidiactl') and not hidden:
        return False, f'there is a driver, but torch {torch.__version__} finds no GPU with it'
    return False, None


def pick_dtype(name, device):
    """ The autocast dtype that name stands for.

    auto is float32, but on CUDA bfloat16 or, where the GPU only emulates that (T4, V100), float16.
    """
    if name == 'auto':
        name = 'float32'
        if device.type == 'cuda':
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            name = 'bfloat16' if native else 'float16'
    if name == 'float16' and device.type != 'cuda':
        raise ValueError("dtype='float16': needs CUDA, where gradients are scaled; "
                         f'the device is {device.type}')
    if name not in DTYPES:
        raise ValueError(f'dtype={name!r}: must be one of auto, ' + ', '.join(DTYPES))
    return DTYPES[name]


def pick_compile(wanted, device):
    """ Whether to call torch.compile; if wanted is None, on CUDA where triton is installed. """
    if wanted is None:
        return device.type == 'cuda' and find_spec('triton') is not None
    return wanted


def check_memory(c, batch_size, device):
    """ ValueError, before anything is allocated, if training a GPTConfig c cannot fit into memory.

    The need is a lower bound.
    """
    weights = (c.vocab_size + c.n_ctx) * c.n_embd + 12 * c.n_layer * c.n_embd**2
    need = 16 * weights  # float32: the weight, its gradient and two moments
    need += 2 * batch_size * c.n_ctx * (c.vocab_size + 2 * c.n_layer * c.n_embd)  # 2 bytes each
    need += 2**15 * c.n_layer  # Python objects
    if device.type == 'cuda':
        have = torch.cuda.mem_get_info(device)[1]
    elif os.name == 'nt':
        have = math.inf
    else:
        have = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if need > have:
        sizes = ''.join(f'{key}={getattr(c, key)}, '
                        for key in ('n_layer', 'n_embd', 'n_ctx', 'vocab_size'))
        raise ValueError(f'{sizes}batch_size={batch_size}: must fit into memory: {device.type} has '
                         f'{have / 2**30:.1f} GiB, training takes {need / 2**30:.1f} or more')


def matmul_speed(n=768, repeats=3):
    """ Floating-point operations a second of the CPU in a product of n x n matrices. """
    a = torch.ones(n, n)
    a @ a  # the first is slower
    began = time.perf_counter()
    for _ in range(repeats):
        a @ a
    return repeats * 2 * n**3 / (time.perf_counter() - began)
