"""The Triton kernels compiled for GPUs that are not here: they fit in registers, without spilling where it counts.

Run as a program, in a process of its own (the interpreter would replace what is to be compiled), this file compiles
every variant for one architecture and prints one JSON object: variant -> [registers, bytes of stack]. A spill shows up
as stack.      python tests/test_offline.py 90
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
D = 768


def compile_for(arch, kernel, types, constants, warps=1):
    """[registers, bytes of stack]; types: argument -> type, tuple of types, or nothing for None"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    signature, aligned, constants = {}, {}, dict(constants)
    for i, name in enumerate(kernel.arg_names):
        kind = None if name in constants else types.get(name)
        if kind is None:
            constants.setdefault(name, None)
        signature[name] = kind or 'constexpr'
        for j, part in enumerate(kind if isinstance(kind, tuple) else [kind]):
            if part and part.startswith('*'):
                aligned[(i, j) if isinstance(kind, tuple) else (i,)] = [['tt.divisibility', 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget('cuda', arch, 32), options={'num_warps': warps})
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(binary.asm['cubin'])
        f.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, '--dump-resource-usage', f.name],
                               capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf'\b{key}:(\d+)', usage).group(1)) for key in ('REG', 'STACK')]


def tile(D):
    return 1 << (D - 1).bit_length()


def several(kind, n):
    """a tuple of pointers, as long as the launch makes it"""
    return (kind,) * (tile(n) if n <= 8 else (n + 7) // 8 * 8)


def read(arch, n, S, mean=False, new=False, norm=True, D=D, dtype='*bf16'):
    """a read of n sources by S queries"""
    import kernels
    number = '*fp32'
    types = dict(v=several(dtype, n), q=number, h=several(dtype, S), lse=number, T='i32', n='i32', eps='fp32',
                 norm_eps='fp32')
    types |= dict(mean=several(dtype, S), mean_lse=number) if mean else {}
    types |= dict(weight=number, bias=number, y=dtype) if norm else {}
    types |= dict(new=dtype, total=dtype) if new else {}
    return compile_for(arch, kernels._read_kernel, types, dict(Q=S, D=D, TILE_D=tile(D)), max(1, tile(D) // 1024))


def source(arch, N, M, own=True, norm=True, found=False, first=False, D=D, dtype='*bf16'):
    """a pass over N sources and M later reads"""
    import kernels
    v, number = several(dtype, N), '*fp32'
    types = dict(v=v, dv=v, q=number, T='i32', M='i32', ROWS='i32', eps='fp32', norm_eps='fp32')
    types |= dict(dh=several(dtype, M), stats=number, coef=number) if M else {}
    types |= dict(found=v) if found else {}
    types |= dict(dy=dtype, h=dtype, sums=number) if own else {}
    types |= dict(lse=number, own_stats=number) if own and not first else {}
    types |= dict(weight=number, own_dh=dtype) if own and norm else {}
    return compile_for(arch, kernels._source_kernel, types, dict(N=N, D=D, TILE_D=tile(D)), max(1, tile(D) // 1024))


SINGLE = {  # one query or one source at a time: no stack
    'read, n = 1': lambda arch: read(arch, 1, 1),
    'read, n = 2': lambda arch: read(arch, 2, 1),
    'read, n = 9': lambda arch: read(arch, 9, 1),
    'read, n = 9, last': lambda arch: read(arch, 9, 1, norm=False),
    'phase 2 of Full': lambda arch: read(arch, 4, 1, mean=True),
    'phase 2 of Block': lambda arch: read(arch, 1, 1, mean=True, new=True),
    'source, own read': lambda arch: source(arch, 1, 0, found=True),
    'source, M = 3': lambda arch: source(arch, 1, 3, found=True),
    'source, M = 9': lambda arch: source(arch, 1, 9),
    'source, M = 9, float32': lambda arch: source(arch, 1, 9, dtype='*fp32'),
    'source 0': lambda arch: source(arch, 1, 8, first=True, found=True),
    'source, D = 100': lambda arch: source(arch, 1, 9, D=100, found=True),
}
SHARED = {  # many, or several at once: a little stack, which holds what the inner loop does not touch
    'read, n = 33': lambda arch: read(arch, 33, 1),
    'phase 1, S = 3': lambda arch: read(arch, 8, 3, new=True),
    'phase 1, S = 5': lambda arch: read(arch, 21, 5),
    'source 0, M = 24': lambda arch: source(arch, 1, 24, first=True, found=True),
    'source, M = 33': lambda arch: source(arch, 1, 33, found=True),
    'group, M = 8': lambda arch: source(arch, 4, 8),
    'group, M = 21': lambda arch: source(arch, 4, 21),
}
QUICK = 'read, n = 9', 'source, M = 3', 'group, M = 8'


def report(arch, *names):
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    command = [sys.executable, __file__, str(arch), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(found):
    for name, (registers, stack) in found.items():
        assert registers <= 255
        assert stack <= (0 if name in SINGLE else 768), f'{name}: {registers} registers, {stack} bytes of stack'


def test_main_kernels_fit():
    pytest.importorskip('triton', reason='triton is not installed')
    check(report(90, *QUICK))


@pytest.mark.slow
@pytest.mark.parametrize('arch', [80, 90, 100])
def test_every_kernel_compiles_and_fits(arch):
    pytest.importorskip('triton', reason='triton is not installed')
    found = report(arch)
    assert found.keys() == SINGLE.keys() | SHARED.keys()
    check(found)


if __name__ == '__main__':
    assert os.environ.get('TRITON_INTERPRET') != '1', 'the interpreter compiles nothing: unset TRITON_INTERPRET'
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as cache:
        os.environ['TRITON_CACHE_DIR'] = cache  # compiled anew: this is a test of the compilation
        variants = SINGLE | SHARED
        print(json.dumps({name: variants[name](int(sys.argv[1])) for name in sys.argv[2:] or variants}, indent=1))
