""" The sampler: prompts, seeds, its own tokenizer, streaming, the depth line, what it refuses. """
import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import sample as S
from config import program
from data.tokenizer import ByteTokenizer, CharTokenizer
from model import GPT, GPTConfig
from sample import SampleConfig, Sampler, sample, show_depths
from train import save
from weights import model_config

CHARS = '\n abcdefghij'


def checkpoint(folder, residual='block', rows=16, chars=CHARS):
    """ A random model with 16 rows for 12 characters, its queries not zero. """
    torch.manual_seed(3)
    cfg = GPTConfig(n_ctx=16, vocab_size=rows, n_layer=2, n_head=2, n_embd=16, residual=residual, residual_blocks=2)
    model = GPT(cfg)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=2.0 if name == 'residual.query' else 0.4)
    folder.mkdir(exist_ok=True)
    state = {'model': model.state_dict(), 'model_config': model_config(cfg), 'tokenizer': CharTokenizer(chars).state()}
    save(state, str(folder / 'best.pt'))
    return model.eval()


@pytest.fixture
def out(tmp_path):
    checkpoint(tmp_path / 'run')
    return str(tmp_path / 'run')


def config(out, **keys):
    return SampleConfig(**{'out_dir': out, 'start': 'abc', 'max_new_tokens': 20, 'device': 'cpu'} | keys)


def refused(capsys, code=2, *argv):
    with pytest.raises(SystemExit) as e:
        S.main(list(argv))
    err = capsys.readouterr().err
    assert e.value.code == code and err.count('\n') == 1 and err.startswith('error: '), err
    return err


@pytest.mark.parametrize('residual', ['standard', 'full', 'block'])
def test_streaming_equals_generate(tmp_path, residual):
    model = checkpoint(tmp_path / 'run', residual)
    tok, pieces = CharTokenizer(CHARS), []
    text, = sample(config(str(tmp_path / 'run'), max_new_tokens=40, seed=5), pieces.append)
    idx = torch.tensor([tok.ids[c] for c in 'abc'])[None]
    ids = model.generate(idx, 40, 0.8, 200, None, tok.n_vocab, torch.Generator().manual_seed(5))
    assert text == tok.decode(ids[0].tolist()) and len(text) == 43
    assert ''.join(pieces).startswith(text) and len(pieces) >= 41  # one by one


def test_seeds(out):
    texts = [sample(config(out, seed=s)) for s in (1, 1, 2)]  # each call has a sampler of its own
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(99)
    assert sample(config(out, seed=1)) == texts[0]
    several = sample(config(out, num_samples=3))
    assert len(set(several)) == 3 and all(t.startswith('abc') for t in several)
    assert several == sample(config(out, num_samples=3))


def test_greedy_samples_are_all_alike_and_alone_or_together(out):
    assert sample(config(out, temperature=0.0, num_samples=3)) == 3 * sample(config(out, temperature=0.0))


def test_samples_share_one_prefill(out, monkeypatch):
    shapes, forward = [], GPT.forward

    def spied(self, idx, **caches):
        shapes.append(tuple(idx.shape))
        return forward(self, idx, **caches)
    monkeypatch.setattr(GPT, 'forward', spied)
    sample(config(out, num_samples=4, max_new_tokens=3))
    assert shapes == [(4, 3), (4, 1), (4, 1)]


def test_ids_past_the_vocabulary_are_never_drawn(tmp_path):
    """ Rows 12 to 15 of the embedding are padding, and here by far the most likely. """
    model = checkpoint(tmp_path / 'run')
    state = torch.load(tmp_path / 'run' / 'best.pt')
    state['model']['lm_head.weight'][12:] *= 100
    save(state, str(tmp_path / 'run' / 'best.pt'))
    assert model.config.vocab_size == 16
    text, = sample(config(str(tmp_path / 'run'), temperature=5.0, max_new_tokens=200))
    assert set(text) <= set(CHARS)


def test_the_checkpoint_brings_its_own_tokenizer(tmp_path):
    checkpoint(tmp_path / 'run', chars='ABCDEFGHIJKL')
    text, = sample(config(str(tmp_path / 'run'), start='ABC'))
    assert set(text) <= set('ABCDEFGHIJKL')
    with pytest.raises(ValueError, match="start='abc': .*'a'"):
        sample(config(str(tmp_path / 'run')))


def test_prompts_from_files(out, tmp_path, capsys):
    (tmp_path / 'p.txt').write_text('abc\n', encoding='utf-8')
    assert sample(config(out, start=f'FILE:{tmp_path}/p.txt'))[0].startswith('abc\n')
    (tmp_path / 'bad.txt').write_bytes(b'\xff')
    (tmp_path / 'empty.txt').write_bytes(b'')
    for name in ('bad.txt', 'empty.txt', 'none.txt', '', 'a\0b'):
        assert "start='FILE:" in refused(capsys, 2, f'--out_dir={out}', f'--start=FILE:{tmp_path}/{name}')


def test_a_prompt_keeps_its_line_ends_and_its_file_may_lie_at_home(out, tmp_path, monkeypatch):
    (tmp_path / 'p.txt').write_bytes(b'\xef\xbb\xbfab\r\nc\r')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert S.read_start('FILE:~/p.txt') == 'ab\r\nc\r'
    assert SampleConfig(out_dir='~/run').out_dir == out


@pytest.mark.parametrize('chars, first', [(CHARS, '\n'), ('ABCDEFGHIJKL', 'A')])
def test_without_a_prompt_a_known_character_is_taken(chars, first, tmp_path, capsys):
    checkpoint(tmp_path / 'run', chars=chars)
    S.main([f'--out_dir={tmp_path}/run', '--max_new_tokens=5', '--device=cpu'])
    assert capsys.readouterr().out.startswith(first)
    assert S.default_start(ByteTokenizer()) == '\n'


@pytest.mark.parametrize(
    'argv, said',
    [
        (['--start=abz'], "'z' (U+007A)"),
        (['--start=é'], 'U+00E9'),
        (['--start='], "start='': must"),
        (['--temperature=-1'], 'temperature=-1.0: must be'),
        (['--top_k=0'], 'top_k=0'),
        (['--top_p=1.5'], 'top_p=1.5'),
        (['--temperature=nan'], 'temperature=nan'),
        (['--num_samples=0'], 'num_samples=0'),
        (['--which=worst'], "which='worst'"),
        (['--max_new_tokens=0'], 'max_new_tokens=0'),
        (['--seed=-1'], 'seed=-1'),
        (['--which=latest'], 'must hold ckpt.pt; python train.py makes one'),
        (['--device=abacus'], "device='abacus'"),
        (['--kernel=fast'], "kernel='fast'"),
        (['--out_dir=/nowhere'], "out_dir='/nowhere': must hold best.pt; python train.py makes one"),
        (['--residual=block'], "residual='block': must be left out unless init_from is given"),
        (['--residual_blocks=2'], 'residual_blocks=2: must be left out unless init_from is given'),
        (['--init_from=gpt2'], 'must be left out if init_from is given'),
        (['--init_from=resume'], "init_from='resume': must be the name of a GPT-2"),
    ],
)
def test_refusals(argv, said, out, capsys):
    assert said in refused(capsys, 2, *([] if 'out_dir' in argv[0] else [f'--out_dir={out}']), *argv)


def test_a_run_is_no_gpt2(out, capsys):
    assert '--out_dir samples a run' in refused(capsys, 2, f'--init_from={out}')


@pytest.mark.parametrize('key, right, wrong', [
    ('out_dir', ['a', ' a'], ['', ' ', 'a\0b']), ('which', ['best', 'latest'], ['worst']),
    ('num_samples', [1, 4096], [0, 4097]), ('max_new_tokens', [1, 2**31 - 1], [0, 2**31]),
    ('seed', [0, 2**63 - 1], [-1, 2**63]), ('temperature', [0.0, 100.0], [-0.1, float('inf')]),
    ('top_k', [None, 1], [0]), ('top_p', [None, 1.0], [0.0, 1.1])])
def test_limits(key, right, wrong):
    for x in right:
        SampleConfig(**{key: x})
    for x in wrong:
        with pytest.raises(ValueError, match=f'^{key}=.*must '):
            SampleConfig(**{key: x})


def test_a_prompt_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / 'bad.txt').write_bytes(b'\xff')
    for name, why in (('none.txt', 'No such file or directory'), ('bad.txt', "'utf-8' codec can't decode byte 0xff"),
                      ('', 'Is a directory')):
        with pytest.raises(ValueError, match=f'^start=.*: must be a readable UTF-8 file: {why}'):
            S.read_start(f'FILE:{tmp_path}/{name}')


@pytest.mark.parametrize('spoil', [
    lambda s: s | {'tokenizer': {'kind': 'words'}}, lambda s: {k: v for k, v in s.items() if k != 'tokenizer'},
    lambda s: s | {'model_config': s['model_config'] | {'depth': 3}}, lambda s: s | {'model_config': {'n_layer': -1}},
    lambda s: s | {'model_config': s['model_config'] | {'n_layer': 3}}, lambda s: s | {'tokenizer': {'kind': 'char'}},
    lambda s: s | {'tokenizer': CharTokenizer('abcdefghijklmnopqrst').state()}, lambda s: [1],
    lambda s: s | {'model': {5: torch.zeros(1)}}])
def test_foreign_checkpoints(spoil, out, capsys):
    save(spoil(torch.load(out + '/best.pt')), out + '/best.pt')
    assert len(refused(capsys, 2, f'--out_dir={out}', '--start=a')) < len(out) + 300  # not torch's whole list


def test_the_command(out, capsys, monkeypatch):
    argv = [f'--out_dir={out}', '--start=abc', '--max_new_tokens=10', '--num_samples=3', '--device=cpu']
    monkeypatch.setattr(sys, 'argv', ['sample.py', *argv])
    S.main()
    captured = capsys.readouterr()
    texts = captured.out.split('\n---------------\n')
    assert texts[:3] == sample(config(out, max_new_tokens=10, num_samples=3)) and texts[3:] == ['']
    assert re.fullmatch(r'[\d,]+ tokens/s\n', captured.err)


def test_text_streams_and_the_rate_counts_all_samples(out, capsys, monkeypatch):
    flushed = []
    monkeypatch.setattr(S, 'time', SimpleNamespace(perf_counter=iter([3, 3 + 1 / 64]).__next__))
    monkeypatch.setattr(sys.stdout, 'flush', lambda: flushed.append(1))
    S.main([f'--out_dir={out}', '--start=abc', '--max_new_tokens=16', '--num_samples=2', '--device=cpu'])
    assert capsys.readouterr().err == '2,048 tokens/s\n'
    assert len(flushed) >= 17  # the prompt, then each token at once


@pytest.mark.parametrize('end, code, said', [
    (KeyboardInterrupt(), 130, 'error: interrupted\n'),
    (RuntimeError('no\nroom'), 1, 'error: no'), (ValueError('start=1: must not'), 2, 'error: start=1: must not\n')])
def test_how_it_ends(end, code, said, out, capsys, monkeypatch):
    def broken(*_):
        raise end
    monkeypatch.setattr(Sampler, '__call__', broken)
    with pytest.raises(SystemExit) as e:
        program.run(lambda: S.main([f'--out_dir={out}', '--start=a']))
    err = capsys.readouterr().err
    assert e.value.code == code and err.startswith(said) and err.count('\n') == bool(said)


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as e:
        S.main(['--help'])
    said = capsys.readouterr().out
    assert not e.value.code and 'Continues a text with a trained model' in said
    assert 'python sample.py --out' not in said


def test_interactive(out, tmp_path, capsys, monkeypatch):
    (tmp_path / 'p.txt').write_text('bad', encoding='utf-8')
    monkeypatch.setattr(sys, 'stdin', io.StringIO(f'abc\nxyz\n\nFILE:{tmp_path}/p.txt\n'))
    S.main([f'--out_dir={out}', '--interactive', '--max_new_tokens=5'])
    captured = capsys.readouterr()
    assert captured.out.count('---------------') == 2 and captured.out.count('> ') == 5
    assert captured.out.startswith('> abc')
    assert captured.err.count('tokens/s') == 2 and captured.err.count('error: ') == 2 and "'x'" in captured.err


def test_interactive_goes_on_drawing(out, capsys, monkeypatch):
    """ The same prompt is continued in two ways, and the same seed gives the same session. """
    sessions = []
    for _ in range(2):
        monkeypatch.setattr(sys, 'stdin', io.StringIO('abc\nabc\n'))
        S.main([f'--out_dir={out}', '--interactive', '--max_new_tokens=20'])
        sessions.append(capsys.readouterr().out)
    first, second, _ = sessions[0].split('> ')[1:]
    assert first.startswith('abc') and second.startswith('abc') and first != second
    assert sessions[0] == sessions[1]


@pytest.mark.parametrize('encoding', ['ascii', 'cp1252'])
def test_what_the_terminal_cannot_show_is_replaced(encoding, tmp_path, monkeypatch):
    checkpoint(tmp_path / 'run', chars='\n床前明月光疑是地上霜é')
    printed = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(printed, encoding))
    S.main([f'--out_dir={tmp_path}/run', '--start=é明', '--max_new_tokens=9'])
    text = printed.getvalue().decode(encoding)
    assert text.startswith({'ascii': '??', 'cp1252': 'é?'}[encoding]) and text.count('?') > 3


@pytest.mark.parametrize('kernel', ['reference', 'torch', 'auto'])
@pytest.mark.parametrize('residual', ['full', 'block'])
def test_show_depth_is_the_largest_weight_of_the_outputs_read(residual, kernel, tmp_path, capsys):
    model = checkpoint(tmp_path / 'run', residual)
    cfg = config(str(tmp_path / 'run'), show_depth=True, kernel=kernel, max_new_tokens=12, num_samples=2)
    sampler = Sampler(cfg)
    assert sampler.model.config.kernel == kernel and capsys.readouterr().err == ''
    out = []
    text = sampler('abc', out.append)[0]
    shown, line = re.search(r'\ntext  (.+)\ndepth (\w+)\n', ''.join(out)).groups()
    assert shown == text[3:].replace('\n', ' ').rstrip()
    seen = []
    model.residual.on_read = lambda l, alpha: seen.append(alpha[:, 0].argmax(0))
    ids = torch.tensor([[CHARS.index(c) for c in text[:14]]])  # the tokens before each generated one; no window is cut
    model(ids)
    assert [int(c) for c in line] == seen[-1][2:].tolist() and len(set(line)) > 1
    assert sampler.top_source == int(line[-1])
    assert text == sample(config(str(tmp_path / 'run'), max_new_tokens=12, num_samples=2))[0]  # it changes nothing


def test_show_depth_is_refused_without_depth_attention(tmp_path, capsys):
    checkpoint(tmp_path / 'run', 'standard')
    err = refused(capsys, 2, f'--out_dir={tmp_path}/run', '--show_depth', '--start=a')
    assert 'show_depth=True: must be off' in err


def test_the_signs_of_the_sources():
    def show(depths):
        return show_depths(list(zip('abcd', depths, strict=False)))
    assert show([0, 3, 12, 40]).startswith('text  abcd\ndepth 03c+\n')
    assert show([9, 10, 35, 36]).startswith('text  abcd\ndepth 9az+\n')
    assert show([0]) == 'text  a\ndepth 0\n(0: the embedding, n: the n-th sublayer or residual block)'


def test_wide_characters_take_two_columns_and_combining_marks_none():
    seen = [('床前', 1), ('ｅ', 2), ('e\u0301', 3), ('\u0301', 4), ('x', 5)]
    text, signs = show_depths(seen).split('\n')[:2]
    assert text == 'text  床前ｅe\u0301\u0301 x' and signs == 'depth 1   2 345'
    assert S.columns('床前ｅe\u0301\u0301 x') == len('1   2 345') == 9
    lines = show_depths([('床', 0)] * 3, width=5).split('\n')[:4]
    assert lines == ['text  床床', 'depth 0 0', 'text  床', 'depth 0']


def test_each_sign_stands_under_the_start_of_its_token():
    seen = [('Now ', 1), ('', 2), ('\n', 3), ('is\tthe', 4)]  # '': a token that ends in the middle of a character
    assert show_depths(seen).split('\n')[:2] == ['text  Now   is the', 'depth 1   234']
    assert show_depths(seen, width=6).split('\n')[:-1] == [
        'text  Now', 'depth 1   23', 'text  is the', 'depth 4']
    assert [len(line) for line in show_depths([('x', 0)] * 81).split('\n')[:4]] == [86, 86, 7, 7]
    assert show_depths([('abc', 1), ('d', 2)], width=3).split('\n')[:-1] == [
        'text  abc', 'depth 1', 'text  d', 'depth 2']
