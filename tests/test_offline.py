""" The Triton kernels compiled for GPUs that are not here: they fit into registers, two variants but for 8 bytes.

Run as a program, in a process of its own (the interpreter would replace what is to be compiled), this file compiles
for one architecture and prints one JSON object: variant -> [registers, bytes of stack]. A spill shows up as stack.

    python tests/test_offline.py 90 768 bf16
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
WIDTHS = 384, 768, 1024, 1600, 2048
TYPES = {'fp16': '*fp16', 'bf16': '*bf16', 'fp32': '*fp32'}
CARRY = 'carry'  # the one argument that may be None


def compile_for(arch, kernel, width, kind, carry=True):
    """ [registers, bytes of stack] of a kernel for rows of one width and type. """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    tile = triton.next_power_of_2(width)
    types = dict.fromkeys(('v', 'v_row', 'y', 'h', 'dh_l', 'carry', 'dh', 'dv'), TYPES[kind])
    types |= dict.fromkeys(('w', 'lse', 'stats', 'dz_r'), '*fp32')
    types |= {'others': '*i32', 'eps': 'fp32'}
    signature, constants, aligned = {}, {'D': width, 'TILE': tile}, {}
    for i, name in enumerate(kernel.arg_names):
        if name == CARRY and not carry:
            constants[name] = None
        signature[name] = 'constexpr' if name in constants else types.get(name, 'i32')
        if signature[name].startswith('*'):
            aligned[(i,)] = [['tt.divisibility', 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target, warps = GPUTarget('cuda', arch, 32), max(1, tile // 1024)
    binary = triton.compile(source, target=target, options={'num_warps': warps})
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(binary.asm['cubin'])
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, '--dump-resource-usage', f.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf'\b{key}:(\d+)', usage).group(1)) for key in ('REG', 'STACK')]


def variants(arch, width, kind):
    """ All that is compiled for training any rule: {name: [registers, bytes of stack]}. """
    import triton_kernels as kernels
    return {'read': compile_for(arch, kernels._read_kernel, width, kind),
            'visit': compile_for(arch, kernels._visit_kernel, width, kind, carry=False),
            'visit with carry': compile_for(arch, kernels._visit_kernel, width, kind)}


def check(arch, *cases):
    """ Compiles in another process and asserts that nothing spills, but for two variants on sm_75, and no compiler gave up. """
    pytest.importorskip('triton', reason='triton is not installed')
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    command = [sys.executable, __file__, str(arch), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 3 * len(cases)
    for name, (registers, stack) in found.items():
        most = 8 if arch == 75 and name.endswith('D = 1600, fp32') else 0  # two registers short
        assert stack <= most, f'sm_{arch}, {name}: {stack} bytes of stack'
        assert 40 <= registers <= 255, f'sm_{arch}, {name}: {registers} registers'


def test_kernels_fit_where_they_matter_most():
    check(90, '768:bf16')


@pytest.mark.slow
@pytest.mark.parametrize('kind', TYPES)
@pytest.mark.parametrize('arch', [75, 80, 86, 89, 90, 120])
def test_kernels_fit_everywhere(arch, kind):
    if arch == 75 and kind == 'bf16':
        pytest.skip('sm_75 has no bfloat16')
    check(arch, *(f'{width}:{kind}' for width in WIDTHS))


if __name__ == '__main__':
    assert os.environ.get('TRITON_INTERPRET') != '1', 'the interpreter compiles nothing: unset TRITON_INTERPRET'
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as cache:
        os.environ['TRITON_CACHE_DIR'] = cache  # everything is compiled anew: this is a test of the compilation
        out = {}
        for case in sys.argv[2:]:
            width, kind = case.split(':')
            for name, usage in variants(int(sys.argv[1]), int(width), kind).items():
                out[f'{name}, D = {width}, {kind}'] = usage
        print(json.dumps(out, indent=1))
