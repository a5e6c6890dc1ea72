""" compare.py speed: the table, the JSON, and the traffic count at GPT-2's size. """
import json

import pytest

import compare
import triton_kernels
from experiments import cuda, speed
from model import GPTConfig

SMALL = ['speed', '--shape=A', '--n_layer=2', '--n_embd=16', '--n_head=2', '--n_ctx=8', '--batch_size=2', '--rounds=2',
         '--device=cpu']


def test_a_row_for_every_mode_and_kernel(tmp_path, capsys):
    data = compare.main([*SMALL, '--json', '--modes=standard,denseformer,full,block:2', '--kernels=reference,torch',
                         f'--out={tmp_path / "speed.json"}'])
    assert list(data['rows']) == ['standard', 'denseformer', 'full reference', 'full torch', 'block:2 reference', 'block:2 torch']
    for row in data['rows'].values():
        assert all(row[k]['ms'] > 0 and row[k]['n'] == 2 for k in ('forward', 'forward + backward', 'step', 'decode'))
        assert row['kept']['bytes'] > 0
    assert data['rows']['standard']['step']['ratio'] == 1.0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads((tmp_path / 'speed.json').read_text())
    assert max(map(len, shown.err.splitlines()[:7])) <= 80 and shown.err.endswith('speed.json\n')


@pytest.mark.parametrize('residual, N, u', [('full', 24, 950), ('block', 8, 598)])
def test_traffic_of_gpt2(residual, N, u):
    """ The Triton path moves what it is said to move, norms included; the count needs no GPU. """
    if triton_kernels.triton is None:
        pytest.skip('the package triton is not installed')
    config = GPTConfig(residual=residual, residual_blocks=N, bias=False)
    launch = triton_kernels._launch
    assert speed.traffic(config) == u and triton_kernels._launch is launch


def test_traffic_depends_on_the_rule_alone():
    if triton_kernels.triton is None:
        pytest.skip('the package triton is not installed')
    small = GPTConfig(residual='full', n_embd=16, n_head=2, n_ctx=4)
    assert speed.traffic(small) == speed.traffic(GPTConfig(residual='full')) > speed.traffic(
        GPTConfig(residual='block', residual_blocks=2))


def test_standard_comes_first():
    assert [*speed.candidates(speed.SpeedConfig(modes='block:8,standard,full'))] == ['standard', 'block:8', 'full']


def test_without_standard_the_first_mode_is_the_base(capsys):
    data = compare.main([*SMALL, '--modes=full', '--decode=false'])
    assert data["rows"]["full"]["step"]["ratio"] == 1.0 and "decode" not in data["rows"]["full"]


def test_kernels_against_their_floor():
    """ 3 launches of 4 MB in all at 1 GB/s: 4000 us by a copy; the card took 5000. """
    launches = [('_read_kernel', 1e6), ('_read_kernel', 2e6), ('_visit_kernel', 5e5), ('_read_kernel', 1e6)]
    out = cuda.against_floor(launches, {'_read_kernel': (3, 5000.0)}, 1e9)
    assert out == {'read': {'launches': 3, 'us': pytest.approx(5000 / 3), 'floor_us': pytest.approx(4000 / 3),
                            'of_floor': pytest.approx(0.8)}}
    with pytest.raises(RuntimeError, match='2 launches on the card, 3 counted'):
        cuda.against_floor(launches, {'_read_kernel': (2, 1.0)}, 1e9)
    rows = {'full': {'kernels': out}, 'standard': {}}
    assert speed.kernel_cells(rows)[1] == ('full', 'read', '3', '1666.7', '1333.3', '80%')
    assert len(speed.kernel_cells({'standard': {}})) == 1


def test_the_kernels_that_are_timed_exist():
    if triton_kernels.triton is None:
        pytest.skip('the package triton is not installed')
    assert {k for k in vars(triton_kernels) if k.endswith('_kernel')} == {*cuda.LAUNCHES.values()}
