""" Text to token files: the tokenizers, what prepare writes, what it refuses, what a kill leaves behind. """
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from data import prepare as P
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


@pytest.fixture(scope='module')
def bpe():
    folder = os.environ.get('TIKTOKEN_CACHE_DIR', '')
    if not os.path.isfile(os.path.join(folder, '6d1cbeee0f20b3d9449abfede4726ed8212e3aee')):  # tiktoken's name for it
        pytest.skip("TIKTOKEN_CACHE_DIR is not set to a folder that holds GPT-2's vocab.bpe and encoder.json")
    return GPT2Tokenizer()


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


def test_char_names_the_first_unknown_character():
    with pytest.raises(ValueError, match=r"^character '\\t' \(U\+0009\) is none of the 3 known ones$"):
        CharTokenizer('abc').encode('ab\tcé')
    with pytest.raises(ValueError, match=r'U\+1F468'):
        CharTokenizer('abc').encode('\U0001f468')


def test_char_holds_65536_characters_and_no_more():
    chars = ''.join(map(chr, range(0x20000, 0x30001)))
    assert CharTokenizer(chars[:-1]).encode(chars[-2]).tolist() == [65535]
    with pytest.raises(ValueError, match="tokenizer='char': 65,537 distinct .* use gpt2"):
        CharTokenizer(chars)


@pytest.mark.parametrize('state', [{'kind': 'bytes'}, {}])
def test_unknown_tokenizer(state):
    with pytest.raises(ValueError, match=f'tokenizer={state.get("kind")!r}: must be char or gpt2'):
        tokenizer_from(state)


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


def fake_tiktoken(monkeypatch, get_encoding):
    monkeypatch.setitem(sys.modules, 'tiktoken', type('tiktoken', (), {'get_encoding': staticmethod(get_encoding)}))
    P.gpt2_bpe.cache_clear()


@pytest.fixture
def forget_bpe():
    yield
    P.gpt2_bpe.cache_clear()


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
    monkeypatch.setattr(P, 'TIMEOUT', 0.1)
    began = time.perf_counter()
    with pytest.raises(ValueError, match='TIKTOKEN_CACHE_DIR.*TimeoutError'):
        GPT2Tokenizer().encode('x')
    assert time.perf_counter() - began < 5
    done.set()


def test_gpt2_without_tiktoken(monkeypatch, forget_bpe):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    P.gpt2_bpe.cache_clear()
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
    meta = prepare('x', text('another text'), val_fraction=0.5, root=tmp_path)
    assert meta == check_whole(tmp_path / 'x') and meta['origin'] == 'my text.txt'
    assert (tmp_path / 'x' / 'input.txt').read_text() == 'keep me, and train on me'
    (tmp_path / 'x' / 'val.bin').write_bytes(b'damage')
    prepare('x', text('another text'), val_fraction=0.5, root=tmp_path)
    check_whole(tmp_path / 'x')


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
        prepare('x', new, root=tmp_path)
    monkeypatch.undo()
    assert not list((tmp_path / 'x').glob('*.tmp'))
    if function == 'fsync':
        assert contents(tmp_path / 'x') == before
    else:
        assert not (tmp_path / 'x' / 'meta.json').exists()
    meta = prepare('x', new, root=tmp_path)
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
              f'prepare("x", {str(new)!r}, root={str(tmp_path)!r})')
    assert subprocess.run([sys.executable, '-c', script]).returncode == 9
    if (tmp_path / 'x' / 'meta.json').exists():
        assert contents(tmp_path / 'x') == before and function == 'fsync'
    else:
        with pytest.raises(ValueError, match="dataset='x': missing"):
            load('x', root=tmp_path)
    prepare('x', new, root=tmp_path)  # neither lock nor leftovers are in the way
    check_whole(tmp_path / 'x')
    assert not list((tmp_path / 'x').glob('*.tmp'))


def test_writers_take_turns(text, tmp_path):
    fcntl = pytest.importorskip('fcntl')
    path = text('some text, some text')
    prepare('x', path, root=tmp_path)
    before = contents(tmp_path / 'x')
    with open(tmp_path / 'x' / '.lock', 'wb') as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the weaker lock: a writer must ask for all of it
        other = threading.Thread(target=prepare, args=('x', path), kwargs={'val_fraction': 0.5, 'root': tmp_path})
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
              '    prepare("x", sys.argv[1], val_fraction=float(sys.argv[2]), root=sys.argv[3])')
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
    (b'ab\xffc' * 9,     {}, r"input='.*my text.txt': is not UTF-8 at byte 2; give"),
    (b'\xef\xbb\xbfa\xe9' * 9, {}, r'is not UTF-8 at byte 4;'),
    ('ab'.encode('utf-16'), {}, r'is not UTF-8 at byte 0;'),
    (b'abc',             {}, r"input='.*': too short, 2 \+ 1 tokens .* give a longer text or another val_fraction"),
    (b'a' * 100,         {'val_fraction': 0.985}, r'too short, 1 \+ 99 tokens'),
    (b'a' * 100,         {'val_fraction': 0.0}, r'val_fraction=0.0: must be between 0 and 1'),
    (b'a' * 100,         {'val_fraction': 1.0}, r'val_fraction=1.0: must be between 0 and 1'),
    (b'a' * 100,         {'val_fraction': float('nan')}, r'val_fraction=nan: must be between 0 and 1'),
    (b'a' * 100,         {'tokenizer': 'bpe'}, r"tokenizer='bpe': must be char or gpt2"),
    (b'a' * 100,         {'name': ''}, r"name='': must be the plain name of a folder"),
    (b'a' * 100,         {'name': '.'}, r"name='\.': must be the plain name"),
    (b'a' * 100,         {'name': '..'}, r"name='\.\.': must be the plain name"),
    (b'a' * 100,         {'name': 'a/b'}, r"name='a/b': must be the plain name"),
    (b'a' * 100,         {'name': 'a/'}, r"name='a/': must be the plain name"),
    (b'a' * 100,         {'name': '/a'}, r"name='/a': must be the plain name"),
    (b'a' * 100,         {'name': 'a\\b'}, r"name='a\\\\b': must be the plain name"),
    (b'a' * 100,         {'name': 'a' * 999}, r"name='a+': cannot write '.*' \(File name too long\)"),
    (b'a' * 100,         {'name': 'my text.txt'}, r"name='my text.txt': cannot write '.*' \(File exists\); make"),
    (''.join(map(chr, range(0x20000, 0x30001))).encode(), {}, "tokenizer='char': 65,537 distinct characters"),
])
def test_refused(text, tmp_path, content, kwargs, message):
    path = text(content)
    with pytest.raises(ValueError, match=message) as e:
        prepare(**{'name': 'x', 'input': path, 'root': tmp_path} | kwargs)
    assert '\n' not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ['my text.txt']


def test_refused_places(text, tmp_path):
    with pytest.raises(ValueError, match=r"input='.*nowhere': No such file or directory; give"):
        prepare('x', tmp_path / 'nowhere', root=tmp_path)
    with pytest.raises(ValueError, match=r"input='.*': Is a directory; give"):
        prepare('x', tmp_path, root=tmp_path)
    with pytest.raises(ValueError, match=r"name='x': not a bundled text \(shakespeare_char\).*--input=FILE"):
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
    lambda f: (f / 'val.bin').write_bytes(b'abcd')])
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
    for name in ('prepare.py', 'shakespeare.txt'):
        shutil.copy(DATA / name, home)
    r = command(home / 'prepare.py', 'shakespeare_char', cwd=tmp_path)
    assert r.returncode == 0 and r.stderr == '' and r.stdout.count('\n') == 1
    assert '1,011,300 train and 112,367 val tokens, vocabulary 64' in r.stdout
    assert check_whole(home / 'shakespeare_char')['val_fraction'] == 0.1
    text('my own text')
    r = command(home / 'prepare.py', '--input=my text.txt', '--val_fraction=0.5', cwd=tmp_path)
    assert r.returncode == 0 and r.stderr == '' and 'data/my text: 5 train and 6 val' in r.stdout
    assert check_whole(home / 'my text')['val_fraction'] == 0.5


def test_command_refuses_in_one_line(tmp_path):
    r = command(DATA / 'prepare.py', '--input=nowhere.txt', cwd=tmp_path)
    assert (r.returncode, r.stdout) == (2, '')
    assert r.stderr == "error: input='nowhere.txt': No such file or directory; give a UTF-8 text file\n"


@pytest.mark.parametrize('argv, message', [
    ([], 'nothing to prepare: give the name of a bundled text or --input=FILE'),
    (['shakespear'], "name='shakespear': not a bundled text (shakespeare_char); give your own: --input=FILE"),
    (['--input='], "input='.': Is a directory"),
    (['--input=.'], "input='.': Is a directory"),
    (['--input=FILE', '--name='], "name='': must be the plain name of a folder"),
    (['--input=FILE', '--name=../x'], "name='../x': must be the plain name of a folder"),
    (['--input=FILE', '--tokenizer=bpe'], "tokenizer='bpe': must be char or gpt2"),
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
