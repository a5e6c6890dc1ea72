""" Text to token files: the tokenizers, what prepare writes, what it refuses, what a kill leaves behind. """
import errno
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from data import documents as D
from data import prepare as P
from data import tokenizer as T
from data.documents import prepare_documents
from data.prepare import DATA, CharTokenizer, GPT2Tokenizer, load, prepare, tokenizer_from

FILES = 'meta.json', 'train.bin', 'val.bin'


def random_text(seed, n=500):
    """ n code points from all of Unicode that UTF-8 can hold, many of them awkward. """
    rng = random.Random(seed)
    some = '\n\r\t \0\u2028\x85\ufeffe\u0301\u200d\U0001f468\U0010ffff'
    anything = (chr(c) for c in iter(lambda: rng.randrange(0x110000), None) if not 0xd800 <= c < 0xe000)
    return 'x' + ''.join(rng.choice(some) if rng.random() < .5 else next(anything) for _ in range(n))


@pytest.fixture
def text(tmp_path):
    """ A function that writes a file and returns its path. """
    def make(content, name='my text.txt'):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode('utf-8'))
        return path
    return make


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def check_whole(folder):
    """ The set of files fits together. """
    meta = json.loads((folder / 'meta.json').read_bytes())
    for split in ('train', 'val'):
        data = (folder / f'{split}.bin').read_bytes()
        assert len(data) == 2 * meta['tokens'][split]
        assert hashlib.sha256(data).hexdigest() == meta['sha256'][split]
    return meta


# -----------------------------------------------------------------------------
# tokenizers


@pytest.mark.parametrize('seed', range(5))
def test_char_round_trip(seed):
    s = random_text(seed)
    tok = CharTokenizer.train(s)
    ids = tok.encode(s)
    assert ids.dtype == np.uint16 and len(ids) == len(s)
    assert tok.n_vocab == len(set(s)) == ids.max() + 1
    assert tok.decode(ids) == tok.decode(ids.tolist()) == s
    stream = tok.streamer()
    assert ''.join(stream(i) for i in ids.tolist()) == s
    again = tokenizer_from(json.loads(json.dumps(tok.state())))
    assert again.state() == tok.state() and again.decode(ids) == s and (again.encode(s) == ids).all()


def test_char_ids_are_the_places_in_chars():
    assert CharTokenizer.train('banana\n').state() == {'kind': 'char', 'chars': '\nabn'}
    tok = tokenizer_from({'kind': 'char', 'chars': 'ba'})  # an order that is not sorted is kept
    assert tok.encode('ab').tolist() == [1, 0] and tok.encode('').tolist() == []


def test_char_names_the_unknown_characters():
    with pytest.raises(ValueError, match=r"^character '\\t' \(U\+0009\) is none of the 3 known ones$"):
        CharTokenizer('abc').encode('ab\tc')
    with pytest.raises(ValueError, match=r'U\+1F468'):
        CharTokenizer('abc').encode('\U0001f468')
    with pytest.raises(ValueError, match=r"^2 characters, 'd' \(U\+0064\), 'é' \(U\+00E9\), are none of"):
        CharTokenizer('abc').encode('aéd')
    with pytest.raises(ValueError, match=r"^12 characters, .*'j' \(U\+006A\) and 2 more, are none of"):
        CharTokenizer('x').encode('abcdefghijkl')


def test_char_holds_65536_characters_and_no_more():
    chars = ''.join(map(chr, range(0x20000, 0x30001)))
    assert CharTokenizer(chars[:-1]).encode(chars[-2]).tolist() == [65535]
    with pytest.raises(ValueError, match="tokenizer='char': there are 65,537 distinct .* use gpt2"):
        CharTokenizer(chars)


@pytest.mark.parametrize('state', [{'kind': 'words'}, {}])
def test_unknown_tokenizer(state):
    with pytest.raises(ValueError, match=f'tokenizer={state.get("kind")!r}: must be one of char, bytes, gpt2'):
        tokenizer_from(state)


@pytest.mark.parametrize('seed', range(5))
def test_bytes_round_trip(seed):
    s, tok = random_text(seed), tokenizer_from({'kind': 'bytes'})
    ids = tok.encode(s)
    assert ids.dtype == np.uint16 and ids.tolist() == list(s.encode()) and tok.n_vocab == 256
    assert tok.decode(ids) == tok.decode(ids.tolist()) == s and tok.state() == {'kind': 'bytes'}
    stream = tok.streamer()
    assert ''.join(stream(i) for i in ids.tolist()) == s
    assert tok.decode([0xff]) == '\ufffd'


@pytest.mark.parametrize('seed', range(5))
def test_gpt2_round_trip(bpe, seed):
    s = random_text(seed)
    ids = bpe.encode(s)
    assert ids.dtype == np.uint16
    assert bpe.decode(ids) == s
    stream = bpe.streamer()
    pieces = [stream(i) for i in ids.tolist()]
    assert ''.join(pieces) == s  # no character is cut in two, though many span several tokens
    assert '' in pieces
    assert tokenizer_from(bpe.state()).encode(s).tolist() == ids.tolist()


def test_gpt2_facts(bpe):
    assert bpe.state() == {'kind': 'gpt2'} and bpe.n_vocab == 50257
    assert bpe.encode('Hello world').tolist() == [15496, 995]
    assert 50256 not in bpe.encode('<|endoftext|>')
    assert bpe.decode([50256]) == bpe.streamer()(np.int64(50256)) == '<|endoftext|>'
    half = bpe.encode('\U0001f468')[:1]
    assert bpe.decode(half) == '\ufffd' and bpe.streamer()(int(half[0])) == ''


@pytest.mark.parametrize('seed', range(20))
def test_gpt2_pieces_make_no_difference(bpe, monkeypatch, seed):
    """ Texts full of blanks, and of what only Python takes for blanks, cut every few characters. """
    rng = random.Random(seed)
    monkeypatch.setattr(T, 'PIECE', 5)
    alphabet = "\n\n  \t\r\x1c\x1f\x85\xa0\u3000\u2028\u200b\ufeffaéB1'!s\U0001f468"
    for _ in range(100):
        s = ''.join(rng.choice(alphabet) for _ in range(50))
        assert ''.join(T.pieces([s])) == s
        assert bpe.encode(s).tolist() == T.gpt2_bpe().encode_ordinary(s)


@pytest.mark.parametrize('seed', range(20))
def test_gpt2_stream_is_the_whole(bpe, monkeypatch, seed):
    """ A text that comes in parts, with and without blanks, has the tokens of the text at once. """
    rng = random.Random(seed)
    monkeypatch.setattr(T, 'PIECE', 5)
    some = ["\n \t\x1caé'1!中，。", "abé'", "ab中文'!s 1"][seed % 3]
    for _ in range(100):
        texts = [''.join(rng.choices(some, k=rng.randrange(20))) for _ in range(8)]
        ids = np.concatenate([*T.encode_stream(bpe, texts)])
        assert ids.tolist() == T.gpt2_bpe().encode_ordinary(''.join(texts))


@pytest.mark.parametrize('word', ['ab ', 'ab,', '中文1'])
def test_gpt2_pieces_are_short(word):
    """ Texts without a blank are cut, too. """
    assert max(map(len, T.pieces([word * 10**5] * 3))) < T.PIECE + 4


def test_special_tokens_of_prompts(bpe):
    """ Only with special=True is <|endoftext|> the one token; other tokenizers know it as text. """
    s = '<|endoftext|>\n\nHello  <|endoftext|> world<|endoftext|>'
    ids = T.gpt2_bpe().encode(s, allowed_special='all')
    assert bpe.encode(s, special=True).tolist() == ids and ids.count(50256) == 3
    assert bpe.encode('a', special=True).tolist() == bpe.encode('a').tolist()
    for tok in (CharTokenizer.train(s), T.ByteTokenizer()):
        assert tok.decode(tok.encode(s, special=True)) == s


@pytest.mark.parametrize('s', ['\n' * 10**6 + 'x', 'x' + ' ' * 10**6 + '\x1cx', 'a\n' * 10 + '\n' * 10**6 + ' y'])
def test_gpt2_a_million_blanks(bpe, s):
    ids = bpe.encode(s)
    assert bpe.decode(ids) == s and len(ids) < 10**6 + 50
    assert bpe.encode('').tolist() == []
    for cut in range(10**6 - 1, 10**6 + 3):  # no piece has a word after many blanks
        assert not any(' ' * 99 + 'x' in p.replace('\n', ' ') for p in T.pieces([s[:cut], s[cut:]]))


def fake_tiktoken(monkeypatch, get_encoding):
    monkeypatch.setitem(sys.modules, 'tiktoken', type('tiktoken', (), {'get_encoding': staticmethod(get_encoding)}))
    T.gpt2_bpe.cache_clear()


@pytest.fixture
def forget_bpe():
    yield
    T.gpt2_bpe.cache_clear()


def test_gpt2_offline(monkeypatch, forget_bpe, text, tmp_path):
    def get_encoding(name):
        raise ConnectionError('no route\nto host ' + 999 * 'x')
    fake_tiktoken(monkeypatch, get_encoding)
    with pytest.raises(ValueError, match=r"tokenizer='gpt2'.*vocab.bpe.*TIKTOKEN_CACHE_DIR.*--tokenizer=char") as e:
        prepare('x', text('some text'), tokenizer='gpt2', root=tmp_path)
    assert 'ConnectionError' in str(e.value) and len(str(e.value)) < 400
    assert not (tmp_path / 'x').exists()


def test_gpt2_hanging(monkeypatch, forget_bpe):
    done = threading.Event()
    fake_tiktoken(monkeypatch, lambda name: done.wait(30))
    monkeypatch.setattr(T, 'TIMEOUT', 0.1)
    began = time.perf_counter()
    with pytest.raises(ValueError, match='TIKTOKEN_CACHE_DIR.*TimeoutError'):
        GPT2Tokenizer().encode('x')
    assert time.perf_counter() - began < 5
    done.set()


def test_gpt2_without_tiktoken(monkeypatch, forget_bpe):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    T.gpt2_bpe.cache_clear()
    with pytest.raises(ValueError, match='tiktoken.*--tokenizer=char.*ModuleNotFoundError'):
        GPT2Tokenizer().decode([1])


# -----------------------------------------------------------------------------
# what prepare writes


def test_bundled_text_is_pinned():
    data = (DATA / 'shakespeare.txt').read_bytes()
    digest = 'b2391a3ef513236fc2baa08b70cd204a77a96d57f833ca0bab95e8c583745755'
    assert hashlib.sha256(data).hexdigest() == digest
    assert len(data) == len(data.decode()) == 1_123_667 and len(set(data)) == 64
    assert digest in (DATA / 'README.md').read_text(encoding='utf-8')


def test_load_prepares_the_bundled_text(tmp_path):
    meta, tokens = load('shakespeare_char', root=tmp_path)
    assert meta['n_vocab'] == 64 and meta['characters'] == 1_123_667 and meta['origin'] == 'shakespeare.txt'
    assert meta['tokens'] == {'train': 1_011_300, 'val': 112_367}
    assert meta == check_whole(tmp_path / 'shakespeare_char')
    both = np.concatenate([tokens['train'], tokens['val']])
    assert isinstance(tokens['train'], np.memmap) and tokens['val'].dtype == np.uint16
    assert tokenizer_from(meta['tokenizer']).decode(both) == (DATA / 'shakespeare.txt').read_bytes().decode()
    before = (tmp_path / 'shakespeare_char' / 'meta.json').stat().st_mtime_ns
    assert load('shakespeare_char', root=tmp_path)[0] == meta
    assert (tmp_path / 'shakespeare_char' / 'meta.json').stat().st_mtime_ns == before  # not again


def test_load_prepares_the_bundled_text_by_bpe(bpe, tmp_path):
    meta, tokens = load('shakespeare', root=tmp_path)
    assert meta['tokenizer'] == {'kind': 'gpt2'} and meta['tokens']['train'] == len(tokens['train']) < 400_000
    assert bpe.decode(tokens['train']) == (DATA / 'shakespeare.txt').read_bytes().decode()[:1_011_300]


def test_load_names_the_command(tmp_path):
    for name, how in (('openwebtext', 'openwebtext'), ('mine', '--input=FILE --name=mine')):
        with pytest.raises(ValueError, match=f"dataset='{name}': missing .*; run python data/prepare.py {how}$"):
            load(name, root=tmp_path)


def test_load_keeps_what_is_prepared(text, tmp_path):
    meta = prepare('shakespeare_char', text('some text, some text'), val_fraction=0.5, root=tmp_path)
    assert load('shakespeare_char', root=tmp_path)[0] == meta


@pytest.mark.parametrize('seed', range(3))
def test_own_text_comes_back(text, tmp_path, seed):
    s = random_text(seed, 1000)
    meta = prepare('own', text(s), val_fraction=0.25, root=tmp_path)
    again, tokens = load('own', root=tmp_path)
    tok = tokenizer_from(again['tokenizer'])
    assert again == meta == check_whole(tmp_path / 'own')
    assert tok.decode(tokens['train']) == s[:750] and tok.decode(tokens['val']) == s[750:]
    assert meta['val_fraction'] == 0.25 and meta['origin'] == 'my text.txt' and meta['characters'] == 1001
    assert {p.name for p in (tmp_path / 'own').iterdir()} - {'.lock'} == set(FILES)


def test_tokens_are_little_endian_and_the_table_covers_both_splits(text, tmp_path):
    prepare('x', text('aaaaab' + 'cd'), val_fraction=0.25, root=tmp_path)
    assert (tmp_path / 'x' / 'train.bin').read_bytes() == b'\0\0\0\0\0\0\0\0\0\0\1\0'
    assert (tmp_path / 'x' / 'val.bin').read_bytes() == b'\2\0\3\0'


def test_gpt2_files(bpe, text, tmp_path):
    meta = prepare('x', text('Hello world. ' * 100), tokenizer='gpt2', root=tmp_path)
    _, tokens = load('x', root=tmp_path)
    assert meta['n_vocab'] == 50257 and meta['tokenizer'] == {'kind': 'gpt2'}
    assert bpe.decode(tokens['train']) == ('Hello world. ' * 100)[:1170]
    assert check_whole(tmp_path / 'x')['tokens']['val'] == len(tokens['val']) < 130


def test_byte_order_mark_goes_and_newlines_stay(text, tmp_path):
    s = 'one\r\ntwo\rthree\n\ufeff' * 3
    meta = prepare('x', text(b'\xef\xbb\xbf' + s.encode()), root=tmp_path)
    assert meta['characters'] == len(s)
    assert tokenizer_from(meta['tokenizer']).decode(np.fromfile(tmp_path / 'x' / 'train.bin', '<u2')) == s[:43]


def test_determinism(text, tmp_path):
    s = random_text(7, 2000)
    for name in 'ab':
        prepare(name, text(s), root=tmp_path)
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b') and len(contents(tmp_path / 'a')) == 3


def test_preparing_again_replaces_and_spares_other_files(text, tmp_path):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / 'input.txt').write_text('keep me, and train on me')
    prepare('x', tmp_path / 'x' / 'input.txt', root=tmp_path)
    with pytest.raises(ValueError, match=r"name='x': holds a set already.*input.txt.*--overwrite"):
        prepare('x', text('another text'), val_fraction=0.5, root=tmp_path)
    meta = prepare('x', text('another text'), val_fraction=0.5, root=tmp_path, overwrite=True)
    assert meta == check_whole(tmp_path / 'x') and meta['origin'] == 'my text.txt'
    assert (tmp_path / 'x' / 'input.txt').read_text() == 'keep me, and train on me'
    (tmp_path / 'x' / 'val.bin').write_bytes(b'damage')
    prepare('x', text('another text'), val_fraction=0.5, root=tmp_path)
    check_whole(tmp_path / 'x')


def test_the_table_of_another_folder(text, tmp_path, monkeypatch):
    """ A second text gets the ids of the first one's table, so that a model of the first can go on. """
    first = prepare('a', text('the cat, the dog\n' * 9, 'a.txt'), root=tmp_path)
    for name in ('a', str(tmp_path / 'a'), '~/a'):
        monkeypatch.setenv('HOME', str(tmp_path))
        second = prepare('b', text('a dog hot\n' * 9, 'b.txt'), tokenizer=name, root=tmp_path)
        assert second['tokenizer'] == first['tokenizer']
    tok, tokens = tokenizer_from(first['tokenizer']), load('b', root=tmp_path)[1]
    assert tok.decode(tokens['train']) == ('a dog hot\n' * 9)[:81]
    with pytest.raises(ValueError, match=r"^input='.*c.txt': 2 characters, 'k' .*'é' \(U\+00E9\), are none of the 1. "
                                         'known ones of --tokenizer=a$'):
        prepare('c', text('a dog kéh\n' * 9, 'c.txt'), tokenizer='a', root=tmp_path)
    assert not (tmp_path / 'c').exists()
    assert prepare('d', text('ké' * 9, 'd.txt'), 'bytes', root=tmp_path)['n_vocab'] == 256
    assert prepare('e', text('ké' * 9, 'e.txt'), 'd', root=tmp_path)['tokenizer'] == {'kind': 'bytes'}


@pytest.mark.parametrize('tokenizer', ['char', 'bytes', 'gpt2'])
def test_a_text_is_read_in_pieces(request, text, tmp_path, monkeypatch, tokenizer):
    """ The tokens are those of the whole, wherever the pieces end, and few characters come at once. """
    if tokenizer == 'gpt2':
        request.getfixturevalue('bpe')
    monkeypatch.setattr(P, 'READ', 7)
    monkeypatch.setattr(T, 'PIECE', 5)
    s = "it's 12 été \n\n \U0001f468 中文，中文\r\n don't" * 50
    cls = {'char': CharTokenizer, 'bytes': T.ByteTokenizer, 'gpt2': GPT2Tokenizer}[tokenizer]
    lengths, real = [], cls.encode
    monkeypatch.setattr(cls, 'encode', lambda self, text: lengths.append(len(text)) or real(self, text))
    meta = prepare('x', text('\ufeff' + s), tokenizer, val_fraction=0.3, root=tmp_path)
    monkeypatch.undo()
    tok, cut = tokenizer_from(meta['tokenizer']), int(len(s) * 0.7)
    _, tokens = load('x', root=tmp_path)
    assert tokens['train'].tolist() == tok.encode(s[:cut]).tolist()
    assert tokens['val'].tolist() == tok.encode(s[cut:]).tolist()
    assert max(lengths) < 20 and meta['characters'] == len(s)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """ Of 40 MB, no more than a few are in memory. """
    resource = pytest.importorskip('resource')
    (tmp_path / 'big.txt').write_bytes((DATA / 'shakespeare.txt').read_bytes() * 36)
    script = ('import resource, sys; sys.path.insert(0, sys.argv[1])\n'
              'from data.prepare import prepare\n'
              'before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
              'prepare("x", sys.argv[2], root=sys.argv[3])\n'
              'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)')
    assert resource
    r = command('-c', script, DATA.parent, tmp_path / 'big.txt', tmp_path, cwd=tmp_path)
    assert int(r.stdout) < 25_000  # kilobytes


# -----------------------------------------------------------------------------
# interrupted, crowded


@pytest.mark.parametrize('function', ['replace', 'fsync'])
@pytest.mark.parametrize('step', range(3))
@pytest.mark.parametrize('old', [False, True])
def test_failure_half_way(monkeypatch, text, tmp_path, function, step, old):
    """ The third file is meta.json: whatever fails, the old set is there, or none counts. """
    path, new = text('old text, old text', 'old.txt'), text('the new one, longer than it', 'new.txt')
    if old:
        prepare('x', path, root=tmp_path)
    before, calls, real = contents(tmp_path / 'x'), [], getattr(os, function)

    def fail(*args):
        calls.append(args)
        if len(calls) > step:
            raise OSError(errno.ENOSPC, 'No space left on device')
        return real(*args)
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(ValueError, match=r"name='x': cannot write '.*x' \(No space left on device\); make room"):
        prepare('x', new, root=tmp_path, overwrite=True)
    monkeypatch.undo()
    assert not [*(tmp_path / 'x').glob('*.tmp'), *(tmp_path / 'x').glob('*.part')]
    if function == 'fsync':
        assert contents(tmp_path / 'x') == before
    else:
        assert not (tmp_path / 'x' / 'meta.json').exists()
    meta = prepare('x', new, root=tmp_path, overwrite=True)
    assert meta == check_whole(tmp_path / 'x')


@pytest.mark.parametrize('function, step', [('replace', 0), ('replace', 1), ('replace', 2), ('fsync', 1)])
def test_kill_half_way(text, tmp_path, function, step):
    """ A process that dies on the spot, without a chance to clean up. """
    prepare('x', text('old text, old text', 'old.txt'), root=tmp_path)
    before, new = contents(tmp_path / 'x'), text('the new one, longer than it', 'new.txt')
    script = (f'import os, sys; sys.path.insert(0, {str(DATA.parent)!r})\n'
              'from data.prepare import prepare\n'
              f'n, real = [], os.{function}\n'
              f'os.{function} = lambda *a: os._exit(9) if len(n) == {step} else (n.append(a), real(*a))\n'
              f'prepare("x", {str(new)!r}, root={str(tmp_path)!r}, overwrite=True)')
    assert subprocess.run([sys.executable, '-c', script]).returncode == 9
    if (tmp_path / 'x' / 'meta.json').exists():
        assert contents(tmp_path / 'x') == before and function == 'fsync'
    else:
        with pytest.raises(ValueError, match="dataset='x': missing"):
            load('x', root=tmp_path)
    prepare('x', new, root=tmp_path, overwrite=True)  # neither lock nor leftovers are in the way
    check_whole(tmp_path / 'x')
    assert not list((tmp_path / 'x').glob('*.tmp'))


def test_writers_take_turns(text, tmp_path):
    fcntl = pytest.importorskip('fcntl')
    path = text('some text, some text')
    prepare('x', path, root=tmp_path)
    before = contents(tmp_path / 'x')
    with open(tmp_path / 'x' / '.lock', 'wb') as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the weaker lock: a writer must ask for all of it
        keys = {'val_fraction': 0.5, 'root': tmp_path, 'overwrite': True}
        other = threading.Thread(target=prepare, args=('x', path), kwargs=keys)
        other.start()
        other.join(0.2)
        assert other.is_alive() and contents(tmp_path / 'x') == before
        assert load('x', root=tmp_path)[0]['val_fraction'] == 0.1  # readers do not wait
    other.join(10)
    assert not other.is_alive() and check_whole(tmp_path / 'x')['val_fraction'] == 0.5


def test_an_equal_set_is_left_alone(text, tmp_path, monkeypatch):
    """ So a process that was second takes nothing away from one that already reads. """
    meta = prepare('x', text('some text, some text'), root=tmp_path)
    monkeypatch.setattr(os, 'replace', None)
    assert prepare('x', text('some text, some text'), root=tmp_path) == meta


def test_processes_at_once(text, tmp_path):
    """ Four of them, two settings: none is disturbed, and what is left is one whole set. """
    script = (f'import sys; sys.path.insert(0, {str(DATA.parent)!r})\n'
              'from data.prepare import prepare\n'
              'for i in range(20):\n'
              '    prepare("x", sys.argv[1], val_fraction=float(sys.argv[2]), root=sys.argv[3], overwrite=True)')
    path = text('some text, some text')
    ps = [subprocess.Popen([sys.executable, '-c', script, path, f, tmp_path]) for f in ('0.1', '0.5', '0.1', '0.5')]
    assert [p.wait(60) for p in ps] == [0] * 4
    check_whole(tmp_path / 'x')
    assert {p.name for p in (tmp_path / 'x').iterdir()} == {'.lock', *FILES}


# -----------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize('content, kwargs, message', [
    (b'',                {}, r"input='.*my text.txt': is empty; give"),
    (b'\xef\xbb\xbf',    {}, r"input='.*my text.txt': is empty; give"),
    (b'ab\xffc' * 9,     {}, r"input='.*my text.txt': is not UTF-8, invalid start byte 0xff; give"),
    (b'\xef\xbb\xbfa\xe9' * 9, {}, r'is not UTF-8, invalid continuation byte 0xe9;'),
    ('ab'.encode('utf-16'), {}, r'is not UTF-8, invalid start byte 0xff;'),
    (b'abc',             {}, r"input='.*': too short, 2 \+ 1 tokens .* give a longer text or another val_fraction"),
    (b'a' * 100,         {'val_fraction': 0.985}, r'too short, 1 \+ 99 tokens'),
    (b'a' * 100,         {'val_fraction': 0.0}, r'val_fraction=0.0: must be between 0 and 1'),
    (b'a' * 100,         {'val_fraction': 1.0}, r'val_fraction=1.0: must be between 0 and 1'),
    (b'a' * 100,         {'val_fraction': float('nan')}, r'val_fraction=nan: must be between 0 and 1'),
    (b'a' * 100,         {'tokenizer': 'bpe'}, r"tokenizer='bpe': must be one of char, bytes, gpt2"),
    (b'a' * 100,         {'tokenizer': ''}, r"tokenizer='': must be one of char, bytes, gpt2"),
    (b'a' * 100,         {'name': ''}, r"name='': must be the plain name of a folder"),
    (b'a' * 100,         {'name': '.'}, r"name='\.': must be the plain name"),
    (b'a' * 100,         {'name': '..'}, r"name='\.\.': must be the plain name"),
    (b'a' * 100,         {'name': 'a/b'}, r"name='a/b': must be the plain name"),
    (b'a' * 100,         {'name': 'a/'}, r"name='a/': must be the plain name"),
    (b'a' * 100,         {'name': '/a'}, r"name='/a': must be the plain name"),
    (b'a' * 100,         {'name': 'a\\b'}, r"name='a\\\\b': must be the plain name"),
    (b'a' * 100,         {'name': 'a' * 999}, r"name='a+': cannot write '.*' \(File name too long\)"),
    (b'a' * 100,         {'name': 'my text.txt'}, r"name='my text.txt': cannot write '.*' \(File exists\); make"),
    (''.join(map(chr, range(0x20000, 0x30001))).encode(), {}, "tokenizer='char': there are 65,537 distinct characters"),
])
def test_refused(text, tmp_path, content, kwargs, message):
    path = text(content)
    with pytest.raises(ValueError, match=message) as e:
        prepare(**{'name': 'x', 'input': path, 'root': tmp_path} | kwargs)
    assert '\n' not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ['my text.txt']


@pytest.mark.parametrize('name, source', [
    ('my.jsonl', 'jsonl'), ('MY.JSONL.GZ', 'jsonl'), ('my.ndjson', 'jsonl'), ('my.Parquet', 'parquet')])
def test_a_collection_is_no_text(text, tmp_path, name, source):
    path = text('{"text": "some text"}\n' * 9, name)
    with pytest.raises(ValueError, match=f"input='.*{name}': holds documents, .*give '{source}:.*{name}' --name=NAME"):
        prepare('x', path, root=tmp_path)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(ValueError, match="input='.*pipe': must be a file, since it is read more than once"):
        prepare('x', tmp_path / 'pipe', root=tmp_path)


def test_refused_places(text, tmp_path):
    with pytest.raises(ValueError, match=r"input='.*nowhere': No such file or directory; give"):
        prepare('x', tmp_path / 'nowhere', root=tmp_path)
    with pytest.raises(ValueError, match=r"input='.*': Is a directory; give"):
        prepare('x', tmp_path, root=tmp_path)
    with pytest.raises(ValueError, match=r"name='x': not a bundled text \(shakespeare_char, shakespeare\).*--input="):
        prepare('x', root=tmp_path)
    with pytest.raises(ValueError, match=r"name='x': cannot write '.*' \(Not a directory\)"):
        prepare('x', text('some text, some text'), root=text('a file', 'root'))


@pytest.mark.skipif(not hasattr(os, 'geteuid') or os.geteuid() == 0, reason='root may write anywhere')
def test_unwritable(text, tmp_path):
    (tmp_path / 'root').mkdir(mode=0o555)
    with pytest.raises(ValueError, match=r"name='x': cannot write '.*x' \(Permission denied\); make"):
        prepare('x', text('some text, some text'), root=tmp_path / 'root')


@pytest.mark.parametrize('damage', [
    lambda f: (f / 'meta.json').unlink(), lambda f: (f / 'meta.json').write_text(''),
    lambda f: (f / 'meta.json').write_text('{}'), lambda f: (f / 'meta.json').write_text('[]'),
    lambda f: (f / 'train.bin').unlink(), lambda f: (f / 'train.bin').write_bytes(b'abcd'),
    lambda f: (f / 'val.bin').write_bytes(b''), lambda f: (f / 'val.bin').write_bytes(b'abc'),
    lambda f: (f / 'val.bin').write_bytes(b'abcd'), lambda f: (f / 'meta.json').write_text('[' * 10**5),
    *(lambda f, change=change: (f / 'meta.json').write_text(json.dumps(
        {k: v for k, v in (json.loads((f / 'meta.json').read_bytes()) | change).items() if v is not None}))
      for change in ({'n_vocab': None}, {'n_vocab': '11'}, {'tokenizer': None}, {'tokenizer': 'char'}, {'sha256': None},
                     {'tokenizer': {'kind': 'words'}}, {'tokenizer': {'kind': 'char', 'chars': 'abc'}}))])
def test_load_refuses_what_is_damaged(text, tmp_path, damage):
    prepare('x', text('some text, some text, some text'), root=tmp_path)
    damage(tmp_path / 'x')
    with pytest.raises(ValueError, match=r"dataset='x': .*run python data/prepare.py --input=FILE --name=x"):
        load('x', root=tmp_path)


# -----------------------------------------------------------------------------
# the command line


def command(script, *args, cwd):
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    return subprocess.run([sys.executable, script, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)


def test_command_writes_beside_itself(text, tmp_path):
    home = tmp_path / 'repository' / 'data'
    home.mkdir(parents=True)
    shutil.copytree(DATA.parent / 'config', home.parent / 'config')
    for path in (*DATA.glob('*.py'), DATA / 'shakespeare.txt'):
        shutil.copy(path, home)
    r = command(home / 'prepare.py', 'shakespeare_char', cwd=tmp_path)
    assert r.returncode == 0 and r.stderr == '' and r.stdout.count('\n') == 1
    assert '1,011,300 train and 112,367 val tokens, vocabulary 64' in r.stdout
    assert check_whole(home / 'shakespeare_char')['val_fraction'] == 0.1
    text('my own text')
    r = command(home / 'prepare.py', '--input=my text.txt', '--val_fraction=0.5', cwd=tmp_path)
    assert r.returncode == 0 and r.stderr == '' and 'data/my text: 5 train and 6 val' in r.stdout
    assert check_whole(home / 'my text')['val_fraction'] == 0.5


def test_command_asks_before_it_replaces(text, tmp_path, monkeypatch, capsys):
    """ ~ in --input is the home folder; what is there already is said, another set stays. """
    text('some text, some text', 'my.txt')
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setattr(P, 'DATA', tmp_path)
    monkeypatch.setattr(P.prepare, '__defaults__', (None, None, 0.1, tmp_path, False))
    P.main(['--input=~/my.txt'])
    assert capsys.readouterr().out.startswith('data/my: 18 train and 2 val tokens')
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / 'my').iterdir() if p.name != '.lock'}
    P.main(['--input=~/my.txt'])
    assert capsys.readouterr().out.startswith('data/my is there already: 18 train and 2 val tokens')
    for changed in (['--val_fraction=0.5'], ['--tokenizer=bytes'], []):
        if not changed:
            text('text some, text some', 'my.txt')
        with pytest.raises(SystemExit) as e:
            P.main(['--input=~/my.txt', *changed])
        assert e.value.code == 2 and '--overwrite' in capsys.readouterr().err
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / 'my').iterdir() if p.name != '.lock'} == before
    P.main(['--input=~/my.txt', '--overwrite'])
    assert capsys.readouterr().out.startswith('data/my: 18 train and 2 val tokens, vocabulary 8 (char)')
    P.main(['--input=~/my.txt', '--overwrite'])
    assert capsys.readouterr().out.startswith('data/my: 18')


def test_command_into_a_closed_pipe(text, tmp_path):
    """ prepare.py --help | true """
    home = tmp_path / 'repository' / 'data'
    home.mkdir(parents=True)
    shutil.copytree(DATA.parent / 'config', home.parent / 'config')
    for path in DATA.glob('*.py'):
        shutil.copy(path, home)
    for args in (['--help'], [f'--input={text("some text, some text")}']):
        read, write = os.pipe()
        os.close(read)
        p = subprocess.run([sys.executable, home / 'prepare.py', *args], stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert (p.returncode, p.stderr) == (0, b'')


def test_command_interrupted_while_it_imports(tmp_path):
    """ numpy here is a module that takes its time. """
    (tmp_path / 'numpy.py').write_text('import time\nprint("importing", flush=True)\ntime.sleep(300)')
    env = os.environ | {'PYTHONPATH': str(tmp_path)}
    p = subprocess.Popen([sys.executable, DATA / 'prepare.py', '--help'], env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.readline() == b'importing\n'
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=100)
    assert err == b'' and p.returncode != 0


def test_command_refuses_in_one_line(tmp_path):
    r = command(DATA / 'prepare.py', '--input=nowhere.txt', cwd=tmp_path)
    assert (r.returncode, r.stdout) == (2, '')
    assert r.stderr == "error: input='nowhere.txt': No such file or directory; give a UTF-8 text file\n"


@pytest.mark.parametrize('argv, message', [
    ([], 'nothing to prepare: give the name of a bundled text or --input=FILE'),
    (['shakespear'], "name='shakespear': not a bundled text (shakespeare_char, shakespeare); give your own: --input"),
    (['--input='], "input='.': Is a directory"),
    (['--input=.'], "input='.': Is a directory"),
    (['--input=FILE', '--name='], "name='': must be the plain name of a folder"),
    (['--input=FILE', '--name=../x'], "name='../x': must be the plain name of a folder"),
    (['--input=FILE', '--tokenizer=bpe'], "tokenizer='bpe': must be one of char, bytes, gpt2"),
    (['--input=FILE', '--val_fraction=2'], 'val_fraction=2.0: must be between 0 and 1'),
    (['--input=FILE', '--val_fraction=x'], "--val_fraction: invalid float value: 'x'"),
    (['--input=FILE', '--valfraction=1'], 'unrecognized arguments: --valfraction=1'),
    (['x', 'y\nz'], 'unrecognized arguments: y z'),
    (['--in=FILE'], 'unrecognized arguments: --in=FILE'),
])
def test_command_names_the_key(text, capsys, monkeypatch, tmp_path, argv, message):
    text('some text', 'FILE')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        P.main(argv)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == ''
    assert err.startswith(f'error: {message}') or err.startswith(f'error: argument {message}')
    assert err.count('\n') == 1


# -----------------------------------------------------------------------------
# collections of documents


def documents(n=120, seed=0):
    """ Short ones, an empty one, one longer than a chunk of the tests, a text that looks like the end token. """
    rng = random.Random(seed)
    words = ['word', 'été', '\n\n', '\U0001f468', '12', "don't"]
    some = [' '.join(rng.choices(words, k=rng.randrange(60))) for _ in range(n)]
    return some[:-3] + ['', 'long ' * 3000, '<|endoftext|>']


def write_jsonl(folder, docs, files=3):
    """ As *.jsonl, one of them gzipped, with blank lines and another field whose type varies. """
    folder.mkdir()
    size = -(-len(docs) // files)
    for i in range(files):
        lines = [json.dumps({'meta': k if k % 2 else {'a': [k]}, 'text': text}) + '\n' * (1 + (k % 5 == 0))
                 for k, text in enumerate(docs[i * size:(i + 1) * size])]
        name, opener = (f'{i}.jsonl.gz', gzip.open) if i == 1 else (f'{i}.jsonl', open)
        with opener(folder / name, 'wb') as f:
            f.write(''.join(lines).encode())
    return f'jsonl:{folder}/*.jsonl*'


def write_parquet(folder, docs, files=2):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    pytest.importorskip('datasets')
    folder.mkdir()
    size = -(-len(docs) // files)
    for i in range(files):
        part = docs[i * size:(i + 1) * size]
        table = pa.table({'id': list(range(len(part))), 'text': part})
        pq.write_table(table, folder / f'{i}.parquet', row_group_size=7)
    return f'parquet:{folder}/*.parquet'


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(D, 'CHUNK', 2000)


def expected(docs, val_every):
    """ The token files, document by document. """
    out = {'train': b'', 'val': b''}
    for number, text in enumerate(docs, 1):
        ids = [*T.gpt2_bpe().encode_ordinary(text), 50256]
        out['val' if number % val_every == 0 else 'train'] += b''.join(i.to_bytes(2, 'little') for i in ids)
    return out


def tokens_of(folder):
    return {split: (folder / f'{split}.bin').read_bytes() for split in ('train', 'val')}


def test_documents_from_jsonl(bpe, tmp_path, small_chunks):
    docs = documents()
    meta = prepare_documents('x', write_jsonl(tmp_path / 'in', docs), val_every=7, root=tmp_path)
    assert tokens_of(tmp_path / 'x') == expected(docs, 7)
    assert meta == load('x', root=tmp_path)[0] == check_whole(tmp_path / 'x')
    assert meta['documents'] == 120 and meta['val_every'] == 7 and meta['n_vocab'] == 50257
    assert {p.name for p in (tmp_path / 'x').iterdir()} - {'.lock'} == set(FILES)


@pytest.mark.parametrize('chunk', [1, 300, 10**6])
def test_documents_chunks_do_not_matter(bpe, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(D, 'CHUNK', chunk)
    docs = documents()
    prepare_documents('x', write_jsonl(tmp_path / 'in', docs), val_every=2, root=tmp_path)
    assert tokens_of(tmp_path / 'x') == expected(docs, 2)


def test_documents_processes_do_not_matter(bpe, tmp_path, small_chunks):
    docs = documents()
    prepare_documents('x', write_jsonl(tmp_path / 'in', docs), val_every=7, num_proc=2, root=tmp_path)
    assert tokens_of(tmp_path / 'x') == expected(docs, 7)


def test_in_order_keeps_few_under_way():
    taken = []
    results = D.in_order(abs, (taken.append(i) or -i for i in range(50)), num_proc=2)
    for i, x in enumerate(results):
        assert x == i and len(taken) <= i + 5
    assert len(taken) == 50


@pytest.mark.parametrize('kind', ['parquet', 'hf'])
def test_documents_from_parquet(bpe, tmp_path, small_chunks, kind):
    docs = documents()
    source = write_parquet(tmp_path / 'in', docs)
    meta = prepare_documents('x', source if kind == 'parquet' else f'hf:{tmp_path}/in', val_every=7, root=tmp_path)
    assert tokens_of(tmp_path / 'x') == expected(docs, 7) and meta['documents'] == 120


def test_documents_that_are_prepared_are_left_alone(bpe, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / 'in', documents())
    meta = prepare_documents('x', source, val_every=7, root=tmp_path)
    with monkeypatch.context() as m:
        m.setattr(D, 'tokenize', lambda *a, **kw: 1 / 0)
        assert prepare_documents('x', source, val_every=7, root=tmp_path) == meta
    (tmp_path / 'x' / 'val.bin').write_bytes(b'damage')
    assert prepare_documents('x', source, val_every=7, root=tmp_path) == meta == check_whole(tmp_path / 'x')
    with pytest.raises(ValueError, match="name='x': holds a set already .*--overwrite"):
        prepare_documents('x', source, val_every=3, root=tmp_path)
    assert check_whole(tmp_path / 'x') == meta
    assert prepare_documents('x', source, val_every=3, root=tmp_path, overwrite=True)['val_every'] == 3


@pytest.mark.slow
def test_documents_of_a_killed_process_end_its_workers(bpe, tmp_path):
    script = (f'import itertools, os, sys; sys.path.insert(0, {str(DATA.parent)!r})\n'
              'from data.documents import in_order\n'
              'for x in in_order(os.getpgid, itertools.repeat(0), 2): print(x, flush=True)')
    p = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, start_new_session=True)
    p.stdout.readline()
    p.kill()
    p.wait(60)
    for _ in range(600):
        try:
            os.killpg(p.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError('its workers live on')


@pytest.mark.parametrize('rows, message', [
    (['{"text": "a"}', '{"text": 1}'], 'a.jsonl, line 2: cannot be read .ValueError: its field text must be'),
    (['', '["text"]'], 'a.jsonl, line 2: .*it must be an object with a field called text'),
    (['{"text": "a"}', '', '{"text": "a'], 'a.jsonl, line 3: cannot be .*JSONDecodeError'),
    (['{"text": "a"}'], r'a.jsonl: too short, 2 \+ 0 tokens .*give more documents, or a smaller --val_every'),
    ([''], r'a.jsonl: too short, 0 \+ 0 tokens'),
    (['{"txt": "a"}', '{"text": null}'], r'a.jsonl: too short, 0 \+ 0 tokens'),
])
def test_documents_refused(bpe, text, tmp_path, rows, message):
    text('\n'.join(rows), 'a.jsonl')
    with pytest.raises(ValueError, match=message) as e:
        prepare_documents('x', f'jsonl:{tmp_path}/a.jsonl', root=tmp_path)
    assert '\n' not in str(e.value)
    assert not (tmp_path / 'x').exists()


def test_documents_a_fault_names_its_file(bpe, text, tmp_path):
    """ Also that of the second of two files, compressed or not. """
    good = '{"text": "a"}\n'
    text(20 * good, 'a.jsonl')
    for name, content, message in (
            ('b.jsonl', 9 * good + '{"text" "a"}\n', 'b.jsonl, line 10: cannot be read .JSONDecodeError'),
            ('b.jsonl.gz', b'plain', 'b.jsonl.gz: cannot be read .BadGzipFile'),
            ('B.JSONL.GZ', gzip.compress(999 * good.encode())[:-9], 'B.JSONL.GZ.*: cannot be read .EOFError')):
        path = text(content, name)
        with pytest.raises(ValueError, match=message):
            prepare_documents('x', f'jsonl:{tmp_path}/?.*', root=tmp_path)
        path.unlink()


@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'hf'])
def test_documents_without_a_text_are_skipped_and_counted(bpe, tmp_path, small_chunks, monkeypatch, capsys, kind):
    docs = documents()
    rows = docs.copy()
    for at in (0, 50, 122):
        rows.insert(at, None)
    source = (write_jsonl if kind == 'jsonl' else write_parquet)(tmp_path / 'in', rows)
    if kind == 'jsonl':
        path = tmp_path / 'in' / '2.jsonl'
        path.write_bytes(path.read_bytes().replace(b'"text": null', b'"txt": "a"'))
    if kind == 'hf':
        source = f'hf:{tmp_path}/in'
    monkeypatch.setattr(P.prepare_documents, '__defaults__', ('gpt2', 7, 1, tmp_path, False))
    P.main([source, '--name=x', '--num_proc=1'])
    assert tokens_of(tmp_path / 'x') == expected(docs, 7)
    assert check_whole(tmp_path / 'x')['documents'] == 120
    assert capsys.readouterr().out.endswith('\n3 of 123 documents had no text\n')


def test_documents_a_path_is_taken_literally(bpe, tmp_path, text, monkeypatch):
    """ Brackets are a pattern only if there is no file of that name; ~ is the home folder. """
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'my docs [v1]').mkdir()
    text(9 * '{"text": "a"}\n', 'my docs [v1]/a.jsonl')
    for name, source in (('x', f'jsonl:{tmp_path}/my docs [v1]/a.jsonl'), ('y', 'jsonl:~/my docs [[]v1]/*.jsonl')):
        assert prepare_documents(name, source, val_every=2, root=tmp_path)['documents'] == 9


@pytest.mark.parametrize('num_proc', [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', ['char', 'bytes', 'folder'])
def test_documents_take_every_tokenizer(tmp_path, text, small_chunks, monkeypatch, kind, num_proc):
    """ Characters get the table of all documents, or that of a folder; a newline ends a document. """
    docs = [*documents(), '\ud800'] if kind == 'bytes' else documents()
    source = write_jsonl(tmp_path / 'in', docs)
    if kind == 'folder':
        prepare('a', text('zyx\n' + ''.join(docs)), root=tmp_path)
    tokenizer = str(tmp_path / 'a') if kind == 'folder' else kind
    meta = prepare_documents('x', source, tokenizer, val_every=7, num_proc=num_proc, root=tmp_path)
    tok = tokenizer_from(meta['tokenizer'])
    assert meta['n_vocab'] == {'char': len(set('\n'.join(docs))), 'bytes': 256}.get(kind, tok.n_vocab)
    assert kind != 'folder' or tok.state() == load('a', root=tmp_path)[0]['tokenizer']
    _, tokens = load('x', root=tmp_path)
    kept = [d.replace('\ud800', '?') for d in docs]
    assert tok.decode(tokens['val']) == ''.join(d + '\n' for d in kept[6::7])
    assert tok.decode(tokens['train']) == ''.join(d + '\n' for i, d in enumerate(kept, 1) if i % 7)


def test_documents_name_what_a_table_lacks(tmp_path, text):
    prepare('a', text('ab\n' * 9), root=tmp_path)
    source = text('{"text": "ab"}\n{"text": "aéz"}', 'a.jsonl')
    with pytest.raises(ValueError, match=r"document 2: 2 characters, 'z' .*'é' .* none of the 3 .*another --tokenizer"):
        prepare_documents('x', f'jsonl:{source}', 'a', root=tmp_path)


def test_documents_refused_before_anything_is_made(bpe, text, tmp_path, monkeypatch):
    source = f'jsonl:{text("{}", "a.jsonl")}'
    for kwargs, message in (({'name': '../x'}, "name='../x': must be"), ({'val_every': 1}, 'val_every=1: must be 2'),
                            ({'num_proc': 0}, 'num_proc=0: must be 1'), ({'source': 'jsonl:nowhere/*'}, 'no such file'),
                            ({'tokenizer': 'bpe'}, "tokenizer='bpe': must be one of char, bytes, gpt2, or a folder")):
        with pytest.raises(ValueError, match=message):
            prepare_documents(**{'name': 'x', 'source': source, 'root': tmp_path} | kwargs)
    monkeypatch.setitem(sys.modules, 'datasets', None)
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    for source in (f'parquet:{tmp_path}/a.jsonl', 'hf:some/thing'):
        with pytest.raises(ValueError, match=r"cannot be opened \(ModuleNotFoundError.*; pip install 'datasets"):
            prepare_documents('x', source, root=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['a.jsonl']
    with pytest.raises(ValueError, match=f'{tmp_path}: cannot be opened .IsADirectoryError'):
        prepare_documents('x', f'jsonl:{tmp_path}', root=tmp_path)


def test_documents_offline(bpe, tmp_path, monkeypatch):
    """ One line, at once: the first request's fault is told, nothing is tried again. """
    pytest.importorskip('datasets')
    hub = pytest.importorskip('huggingface_hub')

    def fail(self, name, timeout):
        assert name == 'Skylion007/openwebtext' and timeout <= 60
        raise ConnectionError('no route\nto host')
    monkeypatch.setattr(hub.HfApi, 'dataset_info', fail)
    with pytest.raises(ValueError, match=r'hf:Skylion007/openwebtext: cannot be opened \(ConnectionError: no route'):
        prepare_documents('openwebtext', P.CORPORA['openwebtext'], root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('script', [False, True])
def test_documents_of_the_hub(monkeypatch, script):
    """ NAME:CONFIG is taken apart; where a script is all there is, its conversion to Parquet serves. """
    datasets, hub, calls = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub'), []

    def load_dataset(path, name, split, streaming, revision=None):
        calls.append((path, name, split, streaming, revision))
        if script and not revision:
            raise RuntimeError('Dataset scripts are no longer supported')
        splits = {'train': type('', (), {'num_examples': 17})}
        return type('', (), {'info': type('', (), {'splits': splits}), 'select_columns': lambda self, c: [{c: 'a'}]})()
    monkeypatch.setattr(hub.HfApi, 'dataset_info', lambda self, name, timeout: None)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    assert D.open_hub('some/thing:part') == ([{'text': 'a'}], 17)
    assert D.open_hub('Skylion007/openwebtext') == ([{'text': 'a'}], 8_013_769)
    revisions = [None, 'refs/convert/parquet'] if script else [None]
    assert calls == [('some/thing', 'part', 'train', True, r) for r in revisions] + [
        ('Skylion007/openwebtext', None, 'train', True, r) for r in revisions]


def test_documents_need_room(bpe, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / 'in', documents())
    monkeypatch.setattr(D, 'OPENWEBTEXT', source)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: type('', (), {'free': 17e9}))
    with pytest.raises(ValueError, match="name='x': must have room for about 18.1 GB of tokens, .* 17.0 GB free"):
        prepare_documents('x', source, root=tmp_path)


def test_documents_that_were_edited_ask_for_overwrite(bpe, tmp_path):
    source = write_jsonl(tmp_path / 'in', documents())
    before = prepare_documents('x', source, val_every=7, root=tmp_path)
    file, *_ = sorted((tmp_path / 'in').iterdir())
    os.utime(file, ns=(1, 1))
    assert prepare_documents('x', source, val_every=7, root=tmp_path) == before
    file.write_bytes(b'\n'.join(reversed(file.read_bytes().split(b'\n'))))  # as long as before
    with pytest.raises(ValueError, match="name='x': holds a set already .*--overwrite"):
        prepare_documents('x', source, val_every=7, root=tmp_path)
    after = prepare_documents('x', source, val_every=7, root=tmp_path, overwrite=True)
    assert after['sha256'] != before['sha256']


def test_documents_a_link_to_nothing(bpe, tmp_path):
    os.symlink(tmp_path / 'nowhere', tmp_path / 'a.jsonl')
    with pytest.raises(ValueError, match=r'cannot be opened \(FileNotFoundError.*a\.jsonl'):
        prepare_documents('x', f'jsonl:{tmp_path}/*.jsonl', root=tmp_path)


def test_documents_in_use(bpe, tmp_path):
    fcntl = pytest.importorskip('fcntl')
    source = write_jsonl(tmp_path / 'in', documents())
    (tmp_path / 'x').mkdir()
    with open(tmp_path / 'x' / '.lock', 'wb') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="name='x': must be free, but another process"):
            prepare_documents('x', source, root=tmp_path)
    prepare_documents('x', source, val_every=7, root=tmp_path)


@pytest.mark.parametrize('argv, message', [
    (['jsonl:x'], 'name: must be given with jsonl:x'),
    (['parquet:nowhere/*', '--name=x'], 'parquet:nowhere/*: no such file'),
    (['hf:a/b', '--input=FILE'], 'input: must be left out with hf:a/b'),
    (['openwebtext', '--val_every=1'], 'val_every=1: must be 2 or more'),
    (['openwebtext', '--val_fraction=0.2'], 'val_fraction: must be left out with documents'),
    (['shakespeare_char', '--val_every=9', '--num_proc=2'], 'val_every, num_proc: must be left out with a text'),
    (['--input=shakespeare.txt'], "name='shakespeare': is that of a data set that comes with this"),
    (['openwebtext', '--num_proc=x'], "argument --num_proc: invalid int value: 'x'"),
])
def test_documents_command_names_the_key(capsys, argv, message):
    with pytest.raises(SystemExit) as e:
        P.main(argv)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == '' and err.startswith(f'error: {message}') and err.count('\n') == 1


@pytest.mark.parametrize('argv, name, source', [
    (['openwebtext'], 'openwebtext', 'hf:Skylion007/openwebtext'),
    (['hf:Some/fine-web:10BT'], 'fine-web-10BT', 'hf:Some/fine-web:10BT'),
    (['hf:a/b', '--name=c'], 'c', 'hf:a/b'),
    (['jsonl:a/*', '--name=c', '--overwrite'], 'c', 'jsonl:a/*')])
def test_documents_command(monkeypatch, capsys, argv, name, source):
    def fake(*args, **keys):
        assert args == (name, source)
        assert keys == {'val_every': 9, 'num_proc': 3, 'tokenizer': 'bytes', 'overwrite': '--overwrite' in argv}
        return {'tokens': {'train': 1, 'val': 2}, 'n_vocab': 256, 'tokenizer': {'kind': 'bytes'}, 'origin': source}
    monkeypatch.setattr(P, 'prepare_documents', fake)
    P.main([*argv, '--val_every=9', '--num_proc=3', '--tokenizer=bytes'])
    assert capsys.readouterr().out.startswith(f'data/{name}: 1 train and 2 val tokens')
