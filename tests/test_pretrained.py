""" GPT-2's weights in and out, and those of a standard run under another rule. Random GPT-2s: no network. """
import shutil
import sys
from pathlib import Path

import pytest
import torch

import baselines  # noqa: F401 - registers its rules
import sample
from data.tokenizer import CharTokenizer
from model import GPT, GPTConfig
from weights import initial_weights, model_config, package_kernels

hf = pytest.importorskip('transformers', reason="transformers is not installed: pip install 'transformers>=4.40'")
hf.utils.logging.disable_progress_bar()
with package_kernels():
    hf.GPT2LMHeadModel  # noqa: B018 - transformers imports it now
SIZES = {'vocab_size': 97, 'n_positions': 24, 'n_embd': 32, 'n_layer': 3, 'n_head': 4}
CHAR = {'kind': 'char', 'chars': 'ab'}
RULES = 'full', 'block', 'static', 'denseformer'  # those that are the standard one at the start
OURS = GPTConfig(n_ctx=24, vocab_size=97, n_layer=3, n_head=4, n_embd=32, norm_eps=1e-5)


def gpt2(**kwargs):
    """ transformers' own model, every parameter random, also those that start at zero or one. """
    config = hf.GPT2Config(**SIZES | {'bos_token_id': None, 'eos_token_id': None} | kwargs)
    model = hf.GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
    """ (folder, tokens, transformers' logits) """
    torch.manual_seed(1)
    folder, model, idx = tmp_path_factory.mktemp('gpt2'), gpt2(), torch.randint(97, (2, 24))
    model.save_pretrained(folder)
    with torch.no_grad():
        return str(folder), idx, model(idx).logits


@torch.no_grad()
def logits(model, idx):
    return model(idx)[0]


def test_parity(pretrained):
    folder, idx, expected = pretrained
    model = GPT.from_pretrained(folder)
    assert (logits(model, idx) - expected).abs().max() < 1e-5 < expected.std()
    assert not model.training and model.config == OURS
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize('residual', RULES)
@pytest.mark.parametrize('residual_blocks', [1, 2, 6])
def test_any_rule_starts_as_gpt2(pretrained, residual, residual_blocks):
    """ But for norm_eps: exact without it, and near with GPT-2's 1e-5 as its residual stream is not small. """
    folder, idx, expected = pretrained
    model = GPT.from_pretrained(folder, residual, residual_blocks=residual_blocks)
    assert model.config.residual == residual and model.config.norm_eps == 1e-5
    assert (logits(model, idx) - expected).abs().max() < 5e-3
    both = model.double(), GPT.from_pretrained(folder).double()
    for module in (*both[0].modules(), *both[1].modules()):
        if hasattr(module, 'eps'):
            module.eps = 0.0
    a, b = (logits(m, idx) for m in both)
    assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize('residual', ['full', 'block'])
def test_queries_keep_their_start_and_learn(pretrained, residual):
    folder, idx, _ = pretrained
    model = GPT.from_pretrained(folder, residual, residual_blocks=2).train()
    assert not model.residual.query.any() and (model.residual.key_gain == 1).all()
    model(idx, idx)[1].backward()
    assert model.residual.query.grad[1:].any(-1).all()


def test_what_may_be_chosen(pretrained):
    folder, idx, expected = pretrained
    model = GPT.from_pretrained(folder, 'block', n_ctx=10, residual_blocks=3, dropout=0.3, kernel='reference',
                                vocab_size=97, n_layer=3, bias=True, norm_eps=1e-5)
    c = model.config
    assert (c.n_ctx, c.residual_blocks, c.dropout, c.kernel) == (10, 3, 0.3, 'reference')
    assert model.transformer.wpe.weight.shape == (10, 32)
    assert (logits(model, idx[:, :10]) - expected[:, :10]).abs().max() < 5e-3


@pytest.mark.parametrize('key, value, must', [
    ('n_layer', 2, 3), ('n_head', 8, 4), ('n_embd', 64, 32), ('vocab_size', 128, 97), ('bias', False, True),
    ('norm_eps', 1e-10, 1e-5), ('n_ctx', 25, 'at most 24')])
def test_what_contradicts_the_weights_is_refused(pretrained, key, value, must):
    with pytest.raises(ValueError, match=f'{key}={value}: must be {must}, as in the weights of'):
        GPT.from_pretrained(pretrained[0], **{key: value})


@pytest.mark.parametrize('kwargs', [
    {'activation_function': 'relu'}, {'activation_function': 'gelu'}, {'n_inner': 64}, {'scale_attn_weights': False},
    {'scale_attn_by_inverse_layer_idx': True}, {'tie_word_embeddings': False}], ids=str)
def test_another_network_is_refused(tmp_path, kwargs):
    gpt2(**kwargs).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='must be a GPT-2 like those of OpenAI; its weights or its config.json differ'):
        GPT.from_pretrained(str(tmp_path))


@pytest.mark.parametrize('kwargs', [{'activation_function': 'gelu_pytorch_tanh'}, {'n_inner': 128},
                                    {'layer_norm_epsilon': 1e-3}], ids=str)
def test_the_same_network_in_other_words(tmp_path, kwargs):
    model, idx = gpt2(**kwargs), torch.randint(97, (2, 24))
    model.save_pretrained(tmp_path)
    assert (logits(GPT.from_pretrained(str(tmp_path)), idx) - model(idx).logits).abs().max() < 1e-5


def test_missing_weights_are_not_drawn(tmp_path):
    model = gpt2()
    weights = {k: v for k, v in model.state_dict().items() if k not in ('lm_head.weight', 'transformer.h.1.ln_2.bias')}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match='its weights or its config.json differ'):
        GPT.from_pretrained(str(tmp_path))


def test_no_gpt2_there(tmp_path):
    hf.GPT2Config().save_pretrained(tmp_path / 'bare')
    (tmp_path / 'empty').mkdir()
    for folder in ('empty', 'bare'):
        with pytest.raises(ValueError, match=rf'{folder}.: must be a GPT-2 that can be loaded \(OSError: ') as e:
            GPT.from_pretrained(str(tmp_path / folder))
        assert '\n' not in str(e.value)


def test_offline(monkeypatch):
    """ The first fault is told at once, before transformers tries again and again. """
    import huggingface_hub

    def fail(self, name, timeout):
        assert name == 'gpt2-none' and timeout <= 60
        raise ConnectionError('no route\nto host')
    monkeypatch.setattr(huggingface_hub.HfApi, 'model_info', fail)
    with pytest.raises(ValueError, match=r"'gpt2-none': must be .*\(ConnectionError: no route to host\)$"):
        GPT.from_pretrained('gpt2-none')


def test_a_download_shows_its_progress(monkeypatch):
    """ GPT-2 has 0.5 to 6 GB; a folder that is here is loaded without a bar. """
    import huggingface_hub
    bars = []

    def load(name, local_files_only=False, **_):
        bars.append(hf.utils.logging.is_progress_bar_enabled())
        raise OSError('not here' if local_files_only else 'not there')
    monkeypatch.setattr(hf.GPT2LMHeadModel, 'from_pretrained', load)
    monkeypatch.setattr(huggingface_hub.HfApi, 'model_info', lambda *_, **__: None)
    with pytest.raises(ValueError, match='OSError: not there'):
        GPT.from_pretrained('gpt2-none')
    assert bars == [False, True]


def test_without_transformers(monkeypatch, pretrained):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ValueError, match=r"\(ModuleNotFoundError.*; pip install 'transformers>=4.40'"):
        GPT.from_pretrained(pretrained[0])


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('vocab_size', [97, 50304])
def test_export(tmp_path, bias, vocab_size):
    model = GPT(GPTConfig(n_ctx=24, vocab_size=vocab_size, n_layer=3, n_head=4, n_embd=32, bias=bias, norm_eps=1e-4,
                          dropout=0.25)).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.save_pretrained(tmp_path)
    with package_kernels():
        there = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    idx = torch.randint(vocab_size, (2, 24))
    assert (there(idx).logits - logits(model, idx)).abs().max() < 1e-5
    c = there.config
    assert c.resid_pdrop == c.embd_pdrop == c.attn_pdrop == 0.25 and c.layer_norm_epsilon == 1e-4
    assert c.eos_token_id == c.bos_token_id == (50256 if vocab_size > 50256 else None)
    back = GPT.from_pretrained(str(tmp_path))
    assert torch.equal(logits(back, idx), logits(model, idx)) or not bias
    assert (logits(back, idx) - logits(model, idx)).abs().max() < 1e-5


@pytest.mark.parametrize('residual', ['full', 'block'])
def test_export_of_another_rule_is_refused(tmp_path, residual):
    model = GPT(GPTConfig(n_ctx=8, vocab_size=11, n_layer=2, n_head=2, n_embd=8, residual=residual, residual_blocks=2))
    with pytest.raises(ValueError, match=f"residual='{residual}': must be standard"):
        model.save_pretrained(tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


# -----------------------------------------------------------------------------
# sampling from GPT-2's weights


@pytest.mark.parametrize('residual, blocks', [
    ('standard', None), ('block', 3), ('block', None), ('full', None)])
def test_samples_at_once_under_any_rule(pretrained, residual, blocks, monkeypatch, capsys):
    """ The tokenizer stands in for GPT-2's, whose files may not be here: 97 tokens, one a character. """
    chars = ''.join(map(chr, range(97)))
    monkeypatch.setattr(sample, 'GPT2Tokenizer', lambda: CharTokenizer(chars))
    rule = [f'--residual={residual}'] + ([f'--residual_blocks={blocks}'] if blocks else [])
    sample.main([f'--init_from={pretrained[0]}', *rule, '--start=A B', '--max_new_tokens=10',
                 '--temperature=0', '--device=cpu'])
    model = GPT.from_pretrained(pretrained[0], residual, **({'residual_blocks': blocks} if blocks else {}))
    ids = model.generate(torch.tensor([[65, 32, 66]]), 10, temperature=0, n_vocab=97)
    assert capsys.readouterr().out.split(sample.SEPARATOR)[0] == CharTokenizer(chars).decode(ids[0].tolist())


def test_samples_with_the_tokenizer_of_gpt2(tmp_path, bpe, capsys):
    gpt2(vocab_size=50257, n_embd=4, n_layer=1).save_pretrained(tmp_path)
    sample.main([f'--init_from={tmp_path}', '--start=Hello world', '--max_new_tokens=3', '--device=cpu'])
    assert capsys.readouterr().out.startswith('Hello world')
    cfg = sample.SampleConfig(init_from=str(tmp_path), residual='full', device='cpu')
    sampler = sample.Sampler(cfg)
    assert sampler.tokenizer.kind == 'gpt2' and sampler.model.config.residual == 'full'
    read = []
    sampler.model.stream = lambda idx, *how: read.extend(idx[0].tolist()) or []
    sampler('<|endoftext|>Hello')
    assert read == [50256, 15496]  # one token, not the seven of its letters


def test_another_vocabulary_is_not_sampled(pretrained, capsys):
    with pytest.raises(SystemExit) as e:
        sample.main([f'--init_from={pretrained[0]}', '--start=Hello'])
    assert e.value.code == 2
    assert 'must have an embedding for each of the 50257 tokens of its tokenizer, it has 97' in capsys.readouterr().err


@pytest.mark.parametrize('key, said', [
    ('residual=blok', "residual='blok': must be one of standard, full, block"),
    ('residual=block --residual_blocks=7', 'residual_blocks=7: must be from 1 to 2 * n_layer = 6'),
    ('kernel=fast', "kernel='fast': must be one of")])
def test_what_is_asked_of_the_weights_is_checked(pretrained, key, said, capsys):
    with pytest.raises(SystemExit) as e:
        sample.main([f'--init_from={pretrained[0]}', *f'--{key}'.split()])
    assert e.value.code == 2 and said in capsys.readouterr().err


# -----------------------------------------------------------------------------
# the weights of a standard run


@pytest.fixture
def run(tmp_path):
    """ A function that saves a checkpoint and returns (folder, model). """
    def make(residual='standard', file='ckpt.pt', **kwargs):
        model = GPT(GPTConfig(**vars(OURS) | {'residual': residual, 'residual_blocks': 2} | kwargs)).eval()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        torch.save({'model': model.state_dict(), 'model_config': model_config(model.config), 'tokenizer': CHAR},
                   tmp_path / file)
        return str(tmp_path), model
    return make


def like(**kwargs):
    return GPTConfig(**vars(OURS) | kwargs)


@pytest.mark.parametrize('residual', ['standard', *RULES])
def test_a_standard_run_goes_on_under_any_rule(run, residual):
    folder, old = run(norm_eps=0.0)
    config = like(residual=residual, residual_blocks=3, dropout=0.2, norm_eps=0.0)
    new, idx = initial_weights(folder, config, CHAR).eval(), torch.randint(97, (2, 24))
    assert new.config == config
    assert (logits(new, idx) - logits(old, idx)).abs().max() < 1e-4
    fresh = GPT(config).state_dict()
    assert all(torch.equal(p, fresh[k]) for k, p in new.state_dict().items() if k.startswith('residual.'))


def test_the_best_checkpoint_goes_on(run):
    run()
    folder, best = run(file='best.pt')
    new = initial_weights(folder, like(), CHAR)
    assert all(torch.equal(p, best.state_dict()[k]) for k, p in new.state_dict().items())


@pytest.mark.parametrize('key, value', [
    ('n_ctx', 12), ('vocab_size', 98), ('n_layer', 4), ('n_head', 8), ('n_embd', 64), ('bias', False),
    ('norm_eps', 1e-10)])
def test_another_shape_is_refused(run, key, value):
    with pytest.raises(ValueError, match=f'{key}={value}: must be {getattr(OURS, key)}, as in'):
        initial_weights(run()[0], like(**{key: value}), CHAR)


@pytest.mark.parametrize('residual', ['full', 'block'])
def test_another_rule_is_refused(run, residual):
    with pytest.raises(ValueError, match=f"residual='standard': must be '{residual}', as in '.*'"):
        initial_weights(run(residual)[0], like(), CHAR)


@pytest.mark.parametrize('residual', ['full', 'block', 'denseformer'])
def test_the_same_rule_goes_on_with_what_it_has_learned(run, residual):
    folder, model = run(residual)
    again = initial_weights(folder, like(residual=residual, residual_blocks=2), CHAR)
    for name, w in model.state_dict().items():
        assert torch.equal(w, again.state_dict()[name]), name


def test_the_number_of_residual_blocks_may_change_if_their_size_does_not(run):
    """ Of 6 sublayers, 4 or 3 residual blocks have two each. """
    folder, _ = run('block', residual_blocks=4)
    initial_weights(folder, like(residual='block', residual_blocks=3), CHAR)
    with pytest.raises(ValueError, match='residual_blocks=2: must be 4, as in'):
        initial_weights(folder, like(residual='block', residual_blocks=2), CHAR)


@pytest.mark.parametrize('tokenizer', [{'kind': 'gpt2'}, {'kind': 'char', 'chars': 'ac'}], ids=str)
def test_another_tokenizer_is_refused(run, tokenizer):
    with pytest.raises(ValueError, match=f"tokenizer='{tokenizer['kind']}': must be the one of"):
        initial_weights(run()[0], like(), tokenizer)


def test_weights_that_are_damaged_or_missing_are_refused(run):
    folder, model = run()
    path = Path(folder, 'ckpt.pt')
    whole, weight = path.read_bytes(), model.state_dict()['transformer.wte.weight'].numpy().tobytes()
    at = whole.index(weight) + 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    with pytest.raises(ValueError, match='ckpt.pt: not a whole checkpoint .damage: '):
        initial_weights(folder, like(residual='full'), CHAR)
    with pytest.raises(ValueError, match='ckpt.pt: not a whole checkpoint .damage: '):
        GPT.from_checkpoint(folder)
    path.write_bytes(whole)
    good = torch.load(path)
    weights = good['model']
    bad = [{k: v for k, v in weights.items() if k != 'transformer.h.0.attn.c_attn.weight'}, weights | {'x': weights[
        'lm_head.weight']}, weights | {'lm_head.weight': torch.zeros(3)}, weights | {5: torch.zeros(3)}, 5, [weights]]
    for model in bad:
        torch.save(good | {'model': model}, path)
        with pytest.raises(ValueError, match='ckpt.pt: (model and model_config do not fit|not a checkpoint of this)'):
            initial_weights(folder, like(residual='full'), CHAR)
    for change in ({'model_config': 5}, {'model': 5}):
        torch.save(good | change, path)
        with pytest.raises(ValueError, match='ckpt.pt: not a checkpoint of this project'):
            initial_weights(folder, like(), CHAR)


def test_half_of_a_gpt2_is_refused(pretrained, tmp_path, capfd):
    folder = shutil.copytree(pretrained[0], tmp_path / 'half')
    text = (folder / 'config.json').read_text()
    (folder / 'config.json').write_text(text.replace('"n_layer": 3', '"n_layer": 2'))
    with pytest.raises(ValueError, match='its weights or its config.json differ'):
        GPT.from_pretrained(str(folder))
    assert capfd.readouterr().err == ''  # the reader gets our line alone


def test_no_run_there(tmp_path):
    with pytest.raises(ValueError, match='ckpt.pt: no such checkpoint'):
        initial_weights(str(tmp_path), like(), CHAR)


@pytest.mark.slow
def test_deviation_at_the_size_of_gpt2(tmp_path):
    """ What norm_eps costs at GPT-2's size and initialisation, where its residual stream is as small as it gets. """
    torch.manual_seed(0)
    idx = torch.randint(50257, (1, 32))
    hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=64)).save_pretrained(tmp_path)
    expected = logits(GPT.from_pretrained(str(tmp_path)), idx).log_softmax(-1)
    for residual, kl, most in (('full', 1e-3, 0.3), ('block', 1e-4, 0.1)):
        out = logits(GPT.from_pretrained(str(tmp_path), residual), idx).log_softmax(-1)
        assert 0 < (expected.exp() * (expected - out)).sum(-1).mean() < kl  # KL divergence, nats a token
        assert (out - expected).abs().max() < most


def test_a_package_that_is_called_kernels_too(tmp_path, monkeypatch):
    """ transformers gets the package; this project gets its own file, before and after. """
    import kernels as ours
    (tmp_path / 'kernels.py').write_text('package = True')
    monkeypatch.setattr(sys, 'path', ['', str(tmp_path), *sys.path])
    monkeypatch.chdir(Path(ours.__file__).parent)
    before = sys.path[:]
    with package_kernels():
        import kernels
        assert kernels.package and kernels is not ours
    import kernels
    assert kernels is ours and sys.path == before
