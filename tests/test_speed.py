""" compare.py speed: the table, the JSON, and the traffic count at GPT-2's size. """
import json

import pytest

import compare
import kernels
from experiments import speed
from model import GPTConfig

SMALL = ['speed', '--shape=A', '--n_layer=2', '--n_embd=16', '--n_head=2', '--n_ctx=8', '--batch_size=2', '--rounds=2',
         '--device=cpu']


def test_a_row_for_every_mode_and_kernel(tmp_path, capsys):
    data = compare.main([*SMALL, '--modes=standard,full,block:2', '--kernels=reference,torch',
                         f'--out={tmp_path / "speed.json"}'])
    assert list(data['rows']) == ['standard', 'full reference', 'full torch', 'block:2 reference', 'block:2 torch']
    for row in data['rows'].values():
        assert all(row[k]['ms'] > 0 and row[k]['n'] == 2 for k in ('forward', 'forward + backward', 'step', 'decode'))
        assert row['kept']['bytes'] > 0
    assert data['rows']['standard']['step']['ratio'] == 1.0
    out = capsys.readouterr().out.strip().splitlines()
    assert json.loads(out[-1]) == json.loads((tmp_path / 'speed.json').read_text())


@pytest.mark.parametrize('residual, N, low, high', [('full', 24, 400, 520), ('block', 8, 300, 440)])
def test_traffic_of_gpt2(residual, N, low, high):
    """ The Triton path moves no more than promised, norms included, counted at 12,288 tokens of width 768. """
    if kernels.triton is None:
        pytest.skip('the package triton is not installed')
    config = GPTConfig(residual=residual, residual_blocks=N, bias=False)
    assert low < speed.traffic(config, 12) <= high


def test_without_standard_the_first_mode_is_the_base(capsys):
    data = compare.main([*SMALL, '--modes=full', '--decode=false'])
    assert data["rows"]["full"]["step"]["ratio"] == 1.0 and "decode" not in data["rows"]["full"]
