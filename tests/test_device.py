"""
Training, sampling and comparing on a device without float64, such as Apple's MPS.

No such device is needed: FakeMPS is a tensor that says it is on 'mps' and keeps its numbers in the memory of the CPU.
What a Mac refuses is refused here as well: float64 on the device, and one operation on tensors of both.
"""
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import compare
import sample
import train
from data.tokenizer import CharTokenizer
from model import GPT, GPTConfig
from weights import model_config

MPS = torch.device('mps')
aten = torch.ops.aten
CROSSES = {aten._to_copy, aten.copy_, aten.index, aten.index_put_}  # these take tensors of both devices


class FakeMPS(torch.Tensor):
    """ A tensor on 'mps'. To torch's C++ half it is one on 'meta', where backward passes run as on the CPU. """
    @staticmethod
    def __new__(cls, inner):
        if inner.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        self = cls._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype,
                                          storage_offset=inner.storage_offset(), device='meta')
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = MPS
    is_meta = False

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def tolist(self):
        return self.inner.tolist()

    def __getitem__(self, where):
        """ torch would make an index of a list on the device 'meta', where it has no numbers. """
        where = where if isinstance(where, tuple) else (where,)
        return super().__getitem__(tuple(torch.tensor(x) if isinstance(x, (list, tuple)) else x for x in where))

    def __reduce_ex__(self, protocol):
        return self.inner.__reduce_ex__(protocol)

    def __repr__(self):
        return f'{self.inner!r} on mps'


def run(func, args, kwargs):
    """ Runs an operation in CPU memory. Its results are on MPS if that is asked for or if an argument is. """
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    on_mps = [x for x in given if isinstance(x, FakeMPS)]
    on_cpu = [x for x in given if not isinstance(x, FakeMPS) and x.dim() > 0]
    if on_mps and on_cpu and func.overloadpacket not in CROSSES:
        raise RuntimeError(f'{func}: expected all tensors to be on the same device, found mps and cpu')
    there = bool(on_mps)
    if kwargs.get('device') is not None:
        there = kwargs['device'].type in ('mps', 'meta')
        kwargs = kwargs | {'device': torch.device('cpu')}
    arguments = {id(x.inner): x for x in on_mps}

    def wrap(x):
        if id(x) in arguments:  # an operation in place returns its argument
            return arguments[id(x)]
        return FakeMPS(x) if there and isinstance(x, torch.Tensor) else x

    def unwrap(x):
        return x.inner if isinstance(x, FakeMPS) else x
    return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


class Rename(TorchFunctionMode):
    """ Says 'meta' to torch's C++ half where the caller says 'mps', which this build of torch may lack. """
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})

        def rename(x):
            return torch.device('meta') if isinstance(x, (str, torch.device)) and str(x) == 'mps' else x
        if func is torch.device:  # what the program asks of a device's name
            return func(*args, **kwargs)
        if func is torch.tensor and 'device' in kwargs:  # on 'meta' it would have no numbers
            device = rename(kwargs.pop('device'))
            return func(*args, **kwargs).to(device)
        return func(*map(rename, args), **{key: rename(x) for key, x in kwargs.items()})


class Factories(TorchDispatchMode):
    """ Sees the operations that have no argument of FakeMPS yet, such as torch.zeros. """
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@pytest.fixture
def mac(monkeypatch):
    """ A machine whose device is FakeMPS. """
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(torch, 'set_num_threads', lambda n: None)  # one thread is fastest at these sizes
    torch.__future__.set_swap_module_params_on_conversion(True)  # model.to(device) keeps tied weights tied
    with Rename(), Factories():
        yield
    torch.__future__.set_swap_module_params_on_conversion(False)


# -----------------------------------------------------------------------------
# the emulation itself

def test_float64_is_refused_there_and_allowed_on_the_cpu(mac):
    x = torch.ones(3).to('mps')
    there = {'device': x.device, 'dtype': torch.float64}
    for forbidden in (x.double, lambda: x.to(torch.float64), lambda: torch.zeros(2, **there),
                      lambda: x.new_ones(2, **there), lambda: torch.arange(3.0).double().to('mps'),
                      lambda: x.sum(dtype=torch.float64)):
        with pytest.raises(TypeError, match='float64'):
            forbidden()
    assert x.cpu().double().dtype == torch.float64
    assert x.device.type == 'mps' and (x * 2 / 3).sum().device.type == 'mps' and x.cpu().device.type == 'cpu'


def test_tensors_of_both_devices_are_not_mixed(mac):
    with pytest.raises(RuntimeError, match='same device'):
        torch.ones(3, device='mps') + torch.ones(3)


def test_gradients_are_those_of_the_cpu(mac):
    x = torch.randn(3, 4)
    grads = []
    for device in ('cpu', 'mps'):
        leaf = x.to(device, copy=True).requires_grad_()
        (leaf @ leaf.T).softmax(0).square().mean().backward()
        grads.append(leaf.grad)
    assert type(grads[1]) is FakeMPS and torch.equal(grads[0], grads[1].cpu())


# -----------------------------------------------------------------------------
# the programs

TINY = ['--n_layer=2', '--n_embd=16', '--n_head=2', '--n_ctx=16', '--batch_size=4', '--max_iters=3',
        '--eval_interval=3', '--eval_iters=2', '--warmup_iters=1']
slow = pytest.mark.slow


@pytest.fixture(params=['block', pytest.param('full', marks=slow), pytest.param('standard', marks=slow)])
def run_folder(request, tmp_path, mac):
    """ The folder of a run on FakeMPS, which device=auto finds. It ends as it does on the CPU. """
    rule = [f'--residual={request.param}', '--residual_blocks=2']
    there = train.main([*TINY, *rule, f'--out_dir={tmp_path}/mps'])
    here = train.main([*TINY, *rule, f'--out_dir={tmp_path}/cpu', '--device=cpu'])
    assert there['final_loss'] == pytest.approx(here['final_loss'], abs=1e-5)
    return str(tmp_path / 'mps')


def test_train_and_sample(run_folder, capsys):
    train.main([f'--out_dir={run_folder}', '--resume'])
    capsys.readouterr()
    for how in ([], ['--temperature=0'], ['--top_k=3', '--top_p=0.9', '--num_samples=2']):
        texts = []
        for device in ('auto', 'cpu'):
            sample.main([f'--out_dir={run_folder}', '--start=ROMEO:', '--max_new_tokens=9', f'--device={device}', *how])
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and texts[0].startswith('ROMEO:')


def test_depth(run_folder):
    compare.main(['depth', run_folder, '--eval_iters=1'])


def test_show_depth(tmp_path, mac, capsys):
    model = GPT(GPTConfig(n_ctx=8, vocab_size=2, n_layer=1, n_head=1, n_embd=4, residual='full'))
    state = {'model': model.state_dict(), 'model_config': model_config(model.config)}
    train.save(state | {'tokenizer': CharTokenizer('ab').state()}, f'{tmp_path}/best.pt')
    sample.main([f'--out_dir={tmp_path}', '--max_new_tokens=5', '--show_depth'])
    assert '\ndepth ' in capsys.readouterr().out


@slow
def test_compare(tmp_path, mac):
    data = compare.main(['config/compare_cpu.toml', *TINY, '--modes=standard,block:2', '--noise=false', '--workers=1',
                         '--timing_rounds=1', f'--out_dir={tmp_path}'])
    assert list(data['modes']) == ['standard', 'block:2']
