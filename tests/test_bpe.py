""" The bundled text through GPT-2's BPE, on the command line: prepare, train, stop, resume, sample in every mode. """
import json

import pytest
import torch

import compare
import sample
import train
from data import prepare
from model import RESIDUALS
from weights import load_checkpoint

pytestmark = pytest.mark.slow

KEYS = ['--dataset=shakespeare', '--n_layer=2', '--n_embd=16', '--n_head=2', '--n_ctx=16', '--batch_size=4',
        '--eval_interval=2', '--eval_iters=2', '--residual_blocks=2', '--device=cpu', '--learning_rate=1e-2',
        '--warmup_iters=1', '--lr_decay_iters=4']


@pytest.fixture(scope='module')
def root(bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    meta = prepare.prepare('shakespeare', root=folder)
    assert meta['tokenizer'] == {'kind': 'gpt2'} and meta['n_vocab'] == 50257 and meta['tokens']['train'] > 250_000
    return folder


@pytest.fixture
def loaded(root, monkeypatch):
    monkeypatch.setattr('data.batches.load', lambda name: prepare.load(name, root=root))


@pytest.mark.parametrize('mode', RESIDUALS)
def test_trains_resumes_and_samples(mode, loaded, tmp_path, monkeypatch, capsys):
    """ What is stopped half-way and resumed ends in the same weights; only ids of the tokenizer are sampled. """
    whole, half = tmp_path / 'whole', tmp_path / 'half'
    a = train.main([*KEYS, f'--residual={mode}', '--max_iters=4', f'--out_dir={whole}'])
    assert a['final_loss'] < a['first_loss']
    seed_dropout = train.seed_dropout

    def interrupted(seed, step, micro):
        if step == 2:
            raise KeyboardInterrupt
        seed_dropout(seed, step, micro)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'seed_dropout', interrupted)
        with pytest.raises(SystemExit):
            train.main([*KEYS, f'--residual={mode}', '--max_iters=4', f'--out_dir={half}'])
    b = train.main([f'--out_dir={half}', '--resume'])
    assert b['final_loss'] == a['final_loss'] and b['step'] == 4
    one, two = (load_checkpoint(str(folder / 'ckpt.pt')) for folder in (whole, half))
    assert one['model_config']['vocab_size'] == 50304  # 50257, padded to a multiple of 64
    assert all(torch.equal(x, two['model'][k]) for k, x in one['model'].items())
    capsys.readouterr()
    sample.main([f'--out_dir={half}', '--start=ROMEO:', '--max_new_tokens=20', '--num_samples=2', '--device=cpu'])
    out = capsys.readouterr().out
    assert out.count('ROMEO:') == 2 and '\N{REPLACEMENT CHARACTER}' * 20 not in out


def test_compare_on_bpe(loaded, tmp_path, monkeypatch, capsys, root):
    """ The comparison, too, takes such a text. """
    from experiments import runs
    monkeypatch.setattr(runs, 'load', lambda name: prepare.load(name, root=root))
    monkeypatch.setattr('experiments.depth.Data', train.Data)
    compare.main(['config/compare_cpu.toml', *KEYS, '--max_iters=2', '--timing_rounds=0', '--noise=false',
                  '--workers=1', '--modes=standard,block', '--json', f'--out_dir={tmp_path}'])
    assert json.loads(capsys.readouterr().out)['modes']['block']['params'] > 800_000
