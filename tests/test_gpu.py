""" What only a GPU can show: the Triton kernels as they are compiled, at full width. Under a minute.

    python -m pytest tests/test_gpu.py

Without CUDA these tests are skipped, and one runs the same check in Triton's interpreter, at a small
width. test_triton.py runs on a GPU, too, where there is one.
"""
import pytest
import reference
import test_triton
import torch
from drive import run

import triton_kernels
from model import GPT, GPTConfig

EPS = 1e-6
CUDA = torch.cuda.is_available()
WITH_GPU = pytest.mark.skipif(not CUDA, reason='no CUDA device')
CASES = [(768, 24, 1, 1031), (768, 24, 3, 1031), (1600, 8, 2, 257), (100, 6, 1, 9)]  # D, L, S, tokens


def low_precision():
    """ What a GPU trains in: bfloat16 where the card has it, else float16. """
    if CUDA and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def make_leaves(D, L, tokens, dtype, device):
    """ [embedding, queries, and a gain for each sublayer], of numbers that bfloat16 can hold. """
    g = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, D, generator=g)
    query = torch.randn(L + 1, D, generator=g) * 2 / D ** 0.5  # scores of size 2
    gains = [1 + 0.3 * torch.randn(D, generator=g) for _ in range(L)]
    leaves = [t.bfloat16().to(device, torch.promote_types(dtype, torch.float32)) for t in (query, *gains)]
    return [t.requires_grad_() for t in (h.bfloat16().to(device, dtype), *leaves)]


def outcome(rule, leaves, S):
    """ The result, and a gradient for each leaf.

    Columns change places in every sublayer, or sources would be alike and gradients small
    differences of large numbers, in which rounding is all that can be seen.
    """
    def sublayer(gain):
        def f(x):
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)
            return torch.tanh(x.roll(7, -1) * gain.to(x.dtype))
        return f
    h, query, *gains = leaves
    out = rule(h, [sublayer(gain) for gain in gains], query, S, EPS)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def check(D, L, S, tokens, dtype, device):
    """ Against float64, the kernels err at most twice as much as plain autograd; every run is the same. """
    def on(path):
        return lambda *args: run(path, *args)
    leaves = make_leaves(D, L, tokens, dtype, device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = outcome(reference.depth_attention, wide, S)
    plain = outcome(on('reference'), leaves, S)
    ours, again = (outcome(on('triton'), leaves, S) for _ in range(2))
    assert all(map(torch.equal, ours, again))
    for i, (a, p, e) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.dtype == p.dtype and a.shape == p.shape
        error, allowed = (a.double() - e).norm(), 2 * (p.double() - e).norm() + torch.finfo(dtype).eps * e.norm()
        assert error <= allowed + 1e-6, f'tensor {i}: error {error:.2e}, allowed {allowed:.2e}'


def compiled():
    """ Every variant that was compiled in this process: {key: CompiledKernel}. """
    found = {}
    for kernel in (triton_kernels._read_kernel, triton_kernels._visit_kernel):
        for device, (variants, *_) in kernel.device_caches.items():
            found |= {(kernel.__name__, device, key): variant for key, variant in variants.items()}
    return found


@WITH_GPU
@pytest.mark.parametrize('D, L, S, tokens', CASES)
def test_right_repeatable_and_within_the_registers(D, L, S, tokens):
    before, device = compiled(), torch.device('cuda')
    check(D, L, S, tokens, low_precision(), device)
    new = {key: kernel for key, kernel in compiled().items() if key not in before}
    assert len(new) <= 8  # one forward, one or two backward, and what an unaligned row adds
    for (name, *_), kernel in new.items():
        print(f'{name}, D = {D}: {kernel.n_regs} registers, {kernel.n_spills} spills')
        assert kernel.n_spills == 0, f'{name}, D = {D}: {kernel.n_spills} spills'
        assert D < 384 or kernel.n_regs >= 40, f'{name}, D = {D}: {kernel.n_regs} registers'


@WITH_GPU
def test_float32_at_full_width():
    check(768, 6, 2, 257, torch.float32, torch.device('cuda'))


@WITH_GPU
@pytest.mark.parametrize('residual', ['full', 'block'])
def test_auto_takes_triton_and_a_model_trains_as_on_the_reference_path(residual):
    def losses(kernel):
        torch.manual_seed(3)
        config = GPTConfig(n_ctx=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128, residual=residual, kernel=kernel)
        net = GPT(config).to('cuda')
        adam = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
        idx = torch.arange(8 * 64, device='cuda').view(8, 64) * 7 % 256
        seen = []
        for _ in range(10):
            with torch.autocast('cuda', low_precision()):
                loss = net(idx, idx.roll(-1, 1))[1]
            loss.backward()
            adam.step()
            adam.zero_grad()
            seen.append(loss.item())
        return seen
    before = len(compiled())
    ours = losses('auto')
    assert len(compiled()) > before, 'auto did not take the Triton kernels'
    expected = losses('reference')
    assert ours == pytest.approx(expected, abs=0.05) and ours[-1] < ours[0] - 0.5


@WITH_GPU
@pytest.mark.parametrize('shape', [(0, 768), (1, 768), (1, 1, 1), (3, 16385)])
def test_odd_sizes(shape):
    """ No token, one, a width of one, and a width beyond 2**14. """
    h = torch.randn(shape, device='cuda', requires_grad=True)
    w = torch.randn(3, shape[-1], device='cuda')
    out = run('triton', h, [torch.sin, torch.cos], w, 1, EPS)
    expected = run('reference', h, [torch.sin, torch.cos], w, 1, EPS)
    for a, b in zip([out, *torch.autograd.grad(out.sum(), h)], [expected, *torch.autograd.grad(expected.sum(), h)],
                    strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@WITH_GPU
def test_no_launch_waits_for_the_gpu():
    """ The host runs ahead: neither pass asks the GPU for a number. """
    h = torch.randn(64, 256, device='cuda', requires_grad=True)
    w = torch.randn(7, 256, device='cuda', requires_grad=True)

    def step():
        run('triton', h, [torch.sin] * 6, w, 2, EPS).sum().backward()
    step()  # compiles, and makes the tables of rows
    try:
        torch.cuda.set_sync_debug_mode('error')
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.skipif(CUDA or bool(test_triton.unfit()), reason='for machines without a GPU, with the interpreter')
@pytest.mark.parametrize('D, L, S, tokens', [(100, 4, 1, 2), (24, 5, 2, 3)])
def test_the_check_itself(D, L, S, tokens, monkeypatch):
    check(D, L, S, tokens, low_precision(), torch.device('cpu'))
    broken = triton_kernels.visit

    def visit(*args):
        return broken(*args) * 1.05
    monkeypatch.setattr(triton_kernels, 'visit', visit)
    with pytest.raises(AssertionError, match='tensor'):
        check(D, L, S, tokens, low_precision(), torch.device('cpu'))


