"""
Turns a text into token files: data/NAME/train.bin, val.bin (uint16, little-endian) and meta.json.

    python data/prepare.py shakespeare_char                    the bundled text
    python data/prepare.py --input=my.txt --tokenizer=gpt2     any UTF-8 text, here as data/my
"""
import argparse
import codecs
import hashlib
import json
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:
    fcntl = None  # Windows

DATA = Path(__file__).resolve().parent
BUNDLED = {'shakespeare_char': 'shakespeare.txt'}
SPLITS = 'train', 'val'
TIMEOUT = 60  # seconds that downloading GPT-2's vocabulary, 1.5 MB, may take


class CharTokenizer:
    """ One token per character: its id is its place in chars. """
    kind = 'char'

    def __init__(self, chars: str):
        if len(chars) > 2**16:
            raise ValueError(f"tokenizer='char': {len(chars):,} distinct characters, uint16 holds 65,536; "
                             'use --tokenizer=gpt2')
        self.chars, self.n_vocab = chars, len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    @classmethod
    def train(cls, text: str):
        return cls(''.join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.fromiter(map(self.ids.__getitem__, text), np.uint16, len(text))
        except KeyError as e:
            c = e.args[0]
            raise ValueError(f'character {c!r} (U+{ord(c):04X}) is none of the {self.n_vocab} known ones') from None

    def decode(self, ids) -> str:
        return ''.join(self.chars[i] for i in ids)

    def streamer(self):
        """ A function from the next id to the text it completes. """
        return lambda i: self.chars[i]

    def state(self) -> dict:
        return {'kind': self.kind, 'chars': self.chars}


class GPT2Tokenizer:
    """ GPT-2's byte-pair encoding; the vocabulary is loaded, or downloaded, at first use. """
    kind, n_vocab = 'gpt2', 50257

    @classmethod
    def train(cls, text: str):
        return cls()

    def encode(self, text: str) -> np.ndarray:
        return np.array(gpt2_bpe().encode_ordinary(text), np.uint16)  # ordinary: '<|endoftext|>' is mere text

    def decode(self, ids) -> str:
        return gpt2_bpe().decode([int(i) for i in ids], errors='replace')

    def streamer(self):
        """ A function from the next id to the text it completes: a character may take several ids. """
        decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
        return lambda i: decoder.decode(gpt2_bpe().decode_single_token_bytes(int(i)))

    def state(self) -> dict:
        return {'kind': self.kind}


TOKENIZERS = {'char': CharTokenizer, 'gpt2': GPT2Tokenizer}


def tokenizer_class(kind):
    if kind not in TOKENIZERS:
        raise ValueError(f'tokenizer={kind!r}: must be one of ' + ', '.join(TOKENIZERS))
    return TOKENIZERS[kind]


def tokenizer_from(state: dict):
    """ The tokenizer whose state() this is. """
    return tokenizer_class(state.get('kind'))(**{key: state[key] for key in state if key != 'kind'})


@cache
def gpt2_bpe():
    """ tiktoken's GPT-2 encoding. ValueError if it cannot be had within TIMEOUT seconds. """
    got = []

    def work():  # in a thread, because tiktoken downloads without a time-out of its own
        try:
            import tiktoken
            got.append(tiktoken.get_encoding('gpt2'))
        except Exception as e:  # from import, cache or network: told below
            got.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if got and not isinstance(got[0], Exception):
        return got[0]
    reason = f'{type(got[0]).__name__}: {got[0]}'[:160] if got else f'no answer in {TIMEOUT} s'
    raise ValueError(f"tokenizer='gpt2': tiktoken cannot load GPT-2's vocab.bpe and encoder.json ({reason}); connect to "
                     'the internet once, set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=char')


def read(path):
    """ The text of a UTF-8 file, newlines as they are, without a byte order mark. """
    try:
        text = path.read_bytes().decode('utf-8').removeprefix('\ufeff')
    except OSError as e:
        raise ValueError(f'input={str(path)!r}: {e.strerror}; give a text file') from e
    except UnicodeDecodeError as e:
        raise ValueError(f'input={str(path)!r}: not UTF-8 at byte {e.start}; save it as UTF-8') from e
    if not text:
        raise ValueError(f'input={str(path)!r}: empty; give a file with text in it')
    return text


def write(folder, files):
    """ Puts files, {name: bytes}, into folder, all or none: without meta.json, the last, it counts as not prepared. """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'wb') as lock:  # one process at a time; the lock ends with it, however it ends
        with suppress(OSError):  # some network file systems have no locks
            fcntl and fcntl.flock(lock, fcntl.LOCK_EX)
        if files == {p.name: p.read_bytes() for p in folder.iterdir() if p.name in files}:
            return  # another process was first, and someone may be reading
        try:
            for name, data in files.items():
                with open(folder / f'{name}.tmp', 'wb') as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
            (folder / 'meta.json').unlink(missing_ok=True)  # so that it never stands over other tokens
            for name in files:
                os.replace(folder / f'{name}.tmp', folder / name)
        finally:
            for name in files:
                (folder / f'{name}.tmp').unlink(missing_ok=True)


def prepare(name: str, input=None, tokenizer: str = 'char', val_fraction: float = 0.1, root=DATA) -> dict:
    """ Writes root/NAME from the text file input, or from the bundled text of that name. Returns its meta.

    The last val_fraction of the characters is for validation. ValueError says what is wrong; then nothing is written.
    """
    if input is None and name not in BUNDLED:
        raise ValueError(f'name={name!r}: not a bundled text ({", ".join(BUNDLED)}); give your own: --input=FILE')
    if name in ('', '..') or Path(name).name != name or '\\' in name:
        raise ValueError(f'name={name!r}: must be the plain name of a folder; give another --name')
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction={val_fraction!r}: must be between 0 and 1, for example 0.1')
    cls, path, folder = tokenizer_class(tokenizer), Path(input or DATA / BUNDLED[name]), Path(root) / name
    text = read(path)
    tok, cut = cls.train(text), int(len(text) * (1 - val_fraction))
    tokens = {'train': tok.encode(text[:cut]), 'val': tok.encode(text[cut:])}
    counts = {split: len(tokens[split]) for split in SPLITS}
    if min(counts.values()) < 2:
        raise ValueError(f'input={str(path)!r}: too short: {counts["train"]} tokens to train on, {counts["val"]} to '
                         f'validate on, 2 are the least; give a longer text or another val_fraction')
    files = {f'{split}.bin': tokens[split].astype('<u2').tobytes() for split in SPLITS}
    meta = {'tokenizer': tok.state(), 'n_vocab': tok.n_vocab, 'characters': len(text), 'tokens': counts,
            'val_fraction': val_fraction, 'origin': path.name,
            'sha256': {split: hashlib.sha256(files[f'{split}.bin']).hexdigest() for split in SPLITS}}
    try:
        write(folder, files | {'meta.json': json.dumps(meta, indent=1).encode()})
    except OSError as e:
        raise ValueError(f'name={name!r}: cannot write {str(folder)!r} ({e.strerror}); make room there, make it '
                         'writable, or give another name') from e
    return meta


def load(name: str, root=DATA) -> tuple[dict, dict]:
    """ (meta, {'train': tokens, 'val': tokens}), memory-mapped uint16. Prepares a bundled text that is missing. """
    folder = Path(root) / name
    if name in BUNDLED and not (folder / 'meta.json').exists():
        prepare(name, root=root)
    try:
        meta = json.loads((folder / 'meta.json').read_bytes())
        tokens = {split: np.memmap(folder / f'{split}.bin', '<u2', 'r') for split in SPLITS}
        if any(len(tokens[split]) != meta['tokens'][split] for split in SPLITS):
            raise ValueError('sizes differ from meta.json')
    except (OSError, ValueError, KeyError, TypeError) as e:
        how = name if name in BUNDLED else f'--input=FILE --name={name}'
        raise ValueError(f'dataset={name!r}: token files missing or damaged ({e}); python data/prepare.py {how}') from e
    return meta, tokens


def main(argv=None):
    def fail(message):
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
        raise SystemExit(2)

    parser = argparse.ArgumentParser(description='Turns a text into token files in data/NAME.', allow_abbrev=False)
    parser.error = fail  # argparse would print its usage, too
    parser.add_argument('dataset', nargs='?', metavar='NAME', help='a bundled text: ' + ', '.join(BUNDLED))
    parser.add_argument('--input', metavar='FILE', help='a UTF-8 text file of your own')
    parser.add_argument('--name', help="of the folder in data/ (default: the file's, without its ending)")
    parser.add_argument('--tokenizer', default='char', help=' or '.join(TOKENIZERS) + ' (default: char)')
    parser.add_argument('--val_fraction', type=float, default=0.1, help='the end of the text (default: 0.1)')
    args = parser.parse_args(argv)
    names = [n for n in (args.name, args.dataset, args.input and Path(args.input).stem) if n is not None]
    if not names:
        fail('nothing to prepare: give shakespeare_char or --input=FILE')
    try:
        meta = prepare(names[0], args.input, args.tokenizer, args.val_fraction)
    except ValueError as e:
        fail(e)
    print(f'data/{names[0]}: {meta["tokens"]["train"]:,} train and {meta["tokens"]["val"]:,} val tokens, '
          f'vocabulary {meta["n_vocab"]:,} ({meta["tokenizer"]["kind"]}), from {meta["origin"]}')


if __name__ == '__main__':
    main()
