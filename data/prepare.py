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
from contextlib import suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent
BUNDLED = {'shakespeare_char': 'shakespeare.txt'}
SPLITS = 'train', 'val'
TIMEOUT = 60  # seconds that downloading GPT-2's vocabulary, 1.5 MB, may take


class CharTokenizer:
    """ One token per character: its id is its place in chars. """
    kind = 'char'

    def __init__(self, chars: str):
        if len(chars) > 2**16:
            raise ValueError(f"tokenizer='char': {len(chars):,} distinct characters, uint16 holds 65,536; use gpt2")
        self.chars, self.n_vocab, self.ids = chars, len(chars), {c: i for i, c in enumerate(chars)}

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
    """ GPT-2's byte-pair encoding; its vocabulary is loaded, or downloaded, at first use. """
    kind, n_vocab = 'gpt2', 50257

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


def tokenizer_from(state: dict):
    """ The tokenizer whose state() this is. """
    if state.get('kind') == 'char':
        return CharTokenizer(state['chars'])
    if state.get('kind') == 'gpt2':
        return GPT2Tokenizer()
    raise ValueError(f'tokenizer={state.get("kind")!r}: must be char or gpt2')


@cache
def gpt2_bpe():
    """ tiktoken's GPT-2 encoding. ValueError if it cannot be had within TIMEOUT seconds. """
    try:
        import tiktoken
        with ThreadPool(1) as pool:  # tiktoken's download has no time-out of its own
            return pool.apply_async(tiktoken.get_encoding, ['gpt2']).get(TIMEOUT)
    except Exception as e:  # the import's, the cache's, the network's
        raise ValueError("tokenizer='gpt2': tiktoken cannot get vocab.bpe and encoder.json; go online once, set "
                         'TIKTOKEN_CACHE_DIR to a folder that it filled before, or use --tokenizer=char '
                         f'({type(e).__name__} {str(e)[:120]})') from e


def read(path):
    """ The text of a UTF-8 file, newlines as they are, without a byte order mark. """
    try:
        if text := path.read_bytes().decode('utf-8').removeprefix('\ufeff'):
            return text
        fault = 'is empty'
    except OSError as e:
        fault = e.strerror
    except UnicodeDecodeError as e:
        fault = f'is not UTF-8 at byte {e.start}'
    raise ValueError(f'input={str(path)!r}: {fault}; give a UTF-8 text file')


def write(folder, files):
    """ Puts files, {name: bytes}, into folder, all or none: without meta.json, the last, it counts as not prepared. """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'wb') as lock:
        with suppress(ImportError, OSError):  # Windows and some network file systems have no such lock
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time; it ends with the process, however that ends
        if files == {p.name: p.read_bytes() for p in folder.iterdir() if p.name in files}:
            return  # another process was first, and someone may be reading
        try:
            for name, data in files.items():
                with open(folder / f'{name}.tmp', 'wb') as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
            (folder / 'meta.json').unlink(missing_ok=True)  # so that it never describes other tokens
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
    path = DATA / BUNDLED[name] if input is None else Path(input)
    text, folder = read(path), Path(root) / name
    if name in ('', '..') or Path(name).name != name or '\\' in name:
        raise ValueError(f'name={name!r}: must be the plain name of a folder; give another --name')
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction={val_fraction!r}: must be between 0 and 1, for example 0.1')
    tok = CharTokenizer.train(text) if tokenizer == 'char' else tokenizer_from({'kind': tokenizer})
    cut = int(len(text) * (1 - val_fraction))
    tokens = {'train': tok.encode(text[:cut]), 'val': tok.encode(text[cut:])}
    counts = {split: len(tokens[split]) for split in SPLITS}
    if min(counts.values()) < 2:
        raise ValueError(f'input={str(path)!r}: too short, {counts["train"]} + {counts["val"]} tokens (train + val), '
                         'each must have 2; give a longer text or another val_fraction')
    files = {f'{split}.bin': tokens[split].astype('<u2').tobytes() for split in SPLITS}
    meta = {'tokenizer': tok.state(), 'n_vocab': tok.n_vocab, 'characters': len(text), 'tokens': counts,
            'val_fraction': val_fraction, 'origin': path.name,
            'sha256': {split: hashlib.sha256(files[f'{split}.bin']).hexdigest() for split in SPLITS}}
    try:
        write(folder, files | {'meta.json': json.dumps(meta, indent=1).encode()})
    except OSError as e:
        raise ValueError(f'name={name!r}: cannot write {str(folder)!r} ({e.strerror}); make room or make it writable, '
                         'or give another name') from e
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
        raise ValueError(f'dataset={name!r}: missing or damaged, {e}; run python data/prepare.py {how}') from e
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
    parser.add_argument('--tokenizer', default='char', help='char or gpt2 (default: char)')
    parser.add_argument('--val_fraction', type=float, default=0.1, help='the end of the text (default: 0.1)')
    args = parser.parse_args(argv)
    if args.dataset is None and args.input is None:
        fail('nothing to prepare: give the name of a bundled text or --input=FILE')
    name = next(n for n in (args.name, args.dataset, Path(args.input or '').stem) if n is not None)
    try:
        meta = prepare(name, args.input, args.tokenizer, args.val_fraction)
    except ValueError as e:
        fail(e)
    print(f'data/{name}: {meta["tokens"]["train"]:,} train and {meta["tokens"]["val"]:,} val tokens, '
          f'vocabulary {meta["n_vocab"]:,} ({meta["tokenizer"]["kind"]}), from {meta["origin"]}')


if __name__ == '__main__':
    main()
