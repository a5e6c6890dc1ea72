""" Text to token ids and back: a table of characters, bytes, or GPT-2's byte-pair encoding (BPE).

Each tokenizer has these attributes and methods:

    kind, n_vocab                its name in meta.json and the number of its tokens
    end                          the ids that prepare.py puts after each document
    encode(text, special=False)  the ids of a text, uint16; with special, <|endoftext|> in the text
                                 is the token of that name, if there is one
    decode(ids)                  the text of the ids
    streamer()                   a function from the next id to the text that it completes
    state()                      plain values from which tokenizer_from makes the tokenizer again
"""
import codecs
import os
import re
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from data.files import read_json

TIMEOUT = 60  # seconds that the download of GPT-2's vocabulary (1.5 MB) may take
END_OF_TEXT = '<|endoftext|>'
PIECE = 2**16  # characters that tiktoken gets at once, and some more up to the next cut
# GPT-2 splits a text into words before it merges bytes, so a text may be cut wherever a word ends
# for certain: before the last blank of several, and between a letter and an ASCII sign or digit.
# \s is a little more in Python than in tiktoken: it includes the characters \x1c to \x1f.
BLANK, NO_BLANK = r'[^\S\x1c-\x1f]', r'[\S\x1c-\x1f]'
LETTER, SIGN = r'[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]', r'[!-@\[-`{-~]'
CUT = re.compile(f'{BLANK}(?={NO_BLANK})|(?<={LETTER}){SIGN}')


def named(characters):
    """ The characters in an error message, for example 'é' (U+00E9), at most ten of them. """
    some = ', '.join(f'{c!r} (U+{ord(c):04X})' for c in characters[:10])
    return some if len(characters) <= 10 else f'{some} and {len(characters) - 10:,} more'


class CharTokenizer:
    """ One token per character; its id is its place in chars. """
    kind = 'char'

    def __init__(self, chars: str):
        if len(chars) > 2**16:
            raise ValueError(f"tokenizer='char': there are {len(chars):,} distinct characters, but "
                             'uint16 holds 65,536; use gpt2')
        self.chars, self.n_vocab = chars, len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    @classmethod
    def train(cls, text):
        """ The tokenizer of all characters of a text, or of a set of characters. """
        return cls(''.join(sorted(set(text))))

    @property
    def end(self):
        return self.encode('\n')

    def check(self, characters, before='', after=''):
        """ ValueError if some characters have no id. It names them between before and after. """
        if unknown := sorted(set(characters) - self.ids.keys()):
            which = f'character {named(unknown)} is'
            if len(unknown) > 1:
                which = f'{len(unknown):,} characters, {named(unknown)}, are'
            raise ValueError(f'{before}{which} none of the {self.n_vocab} known ones{after}')

    def encode(self, text: str, special=False) -> np.ndarray:
        try:
            return np.fromiter(map(self.ids.__getitem__, text), np.uint16, len(text))
        except KeyError:
            self.check(text)
            raise

    def decode(self, ids) -> str:
        return ''.join(self.chars[i] for i in ids)

    def streamer(self):
        return lambda i: self.chars[i]

    def state(self) -> dict:
        return {'kind': self.kind, 'chars': self.chars}


class ByteTokenizer:
    """ One token per byte of the text's UTF-8. It suits large texts of many alphabets. """
    kind, n_vocab, end = 'bytes', 256, np.array([ord('\n')], np.uint16)

    def encode(self, text: str, special=False) -> np.ndarray:
        data = text.encode('utf-8', errors='replace')  # JSON may hold half a surrogate pair
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode('utf-8', errors='replace')

    def streamer(self):
        decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # several ids a character
        return lambda i: decoder.decode(bytes([int(i)]))

    def state(self) -> dict:
        return {'kind': self.kind}


class GPT2Tokenizer:
    """ GPT-2's byte-pair encoding. Its vocabulary is loaded, or downloaded, at first use. """
    kind, n_vocab, end = 'gpt2', 50257, np.array([50256], np.uint16)  # the end is <|endoftext|>

    def encode(self, text: str, special=False) -> np.ndarray:
        """ The ids of a text. With special, <|endoftext|> is the one token of that name. """
        if special:
            first, *others = [self.encode(part) for part in text.split(END_OF_TEXT)]
            return np.concatenate([first, *(np.append(self.end, ids) for ids in others)])
        encode = gpt2_bpe().encode_ordinary
        return np.concatenate([np.array(encode(piece), np.uint16) for piece in pieces([text])])

    def decode(self, ids) -> str:
        return gpt2_bpe().decode([int(i) for i in ids], errors='replace')

    def streamer(self):
        decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # several ids a character
        return lambda i: decoder.decode(gpt2_bpe().decode_single_token_bytes(int(i)))

    def state(self) -> dict:
        return {'kind': self.kind}


def tokenizer_from(state: dict):
    """ The tokenizer whose state() this is. """
    if state.get('kind') == 'char':
        return CharTokenizer(state['chars'])
    for cls in (ByteTokenizer, GPT2Tokenizer):
        if state.get('kind') == cls.kind:
            return cls()
    raise ValueError(f'tokenizer={state.get("kind")!r}: must be one of char, bytes, gpt2')


def choose_tokenizer(name, root):
    """ The tokenizer for --tokenizer=NAME: bytes, gpt2, or that of a prepared folder (in root).

    None for char, whose table is yet to be made of the text.
    """
    if name == 'char':
        return None
    if name in ('bytes', 'gpt2'):
        tok = tokenizer_from({'kind': name})
    else:
        folders = [Path(os.path.expanduser(name)), Path(root) / name]
        metas = [read_json(folder / 'meta.json') for folder in folders]
        found = [meta['tokenizer'] for meta in metas if 'tokenizer' in meta]
        if not name or not found:
            raise ValueError(f'tokenizer={name!r}: must be one of char, bytes, gpt2, or a folder '
                             'that prepare.py made')
        tok = tokenizer_from(found[0])
    if tok.kind == 'gpt2':
        gpt2_bpe()  # if it cannot be had, that is said now
    return tok


def encode_stream(tok, texts):
    """ Yields the ids of ''.join(texts), an array at a time, so that it need not be in memory. """
    for piece in pieces(texts) if tok.kind == 'gpt2' else texts:
        yield tok.encode(piece)


def pieces(texts):
    """ Yields ''.join(texts), cut where it makes no difference to GPT-2's BPE.

    tiktoken needs memory in proportion to what it gets at once. Besides, it panics at a million
    blanks before a word; here they come to lie at the end of a piece, where it does not.
    """
    rest, searched = '', PIECE  # rest[:searched] needs no second search
    for text in texts:
        rest += text
        start = 0
        while found := CUT.search(rest, max(start + PIECE, searched)):
            yield rest[start:found.start()]
            start = found.start()
            searched = 0
        rest = rest[start:]
        searched = max(PIECE, len(rest) - 1)  # the last one may be a blank before a word
    yield rest


@cache
def gpt2_bpe():
    """ tiktoken's GPT-2 encoding. ValueError if it cannot be had within TIMEOUT seconds. """
    try:
        import tiktoken
        with ThreadPool(1) as pool:  # tiktoken's download has no time-out of its own
            return pool.apply_async(tiktoken.get_encoding, ['gpt2']).get(TIMEOUT)
    except Exception as e:  # the import, the cache or the network may fail
        raise ValueError("tokenizer='gpt2': tiktoken cannot get vocab.bpe and encoder.json; go "
                         'online once, set TIKTOKEN_CACHE_DIR to a folder that it filled before, '
                         f'or use --tokenizer=char ({type(e).__name__} {str(e)[:120]})') from e
