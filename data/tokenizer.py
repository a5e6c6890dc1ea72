""" Text to token ids and back: a table of characters, bytes, or GPT-2's byte-pair encoding (BPE). """
import codecs
import re
from functools import cache
from multiprocessing.pool import ThreadPool

import numpy as np

TIMEOUT = 60  # seconds that downloading GPT-2's vocabulary, 1.5 MB, may take
PIECE = 2**16  # characters that tiktoken gets at once, or few more
# Before the last blank of several, a word of GPT-2 ends whatever the text is. Blanks are what they are to tiktoken: to
# Python, four control characters are some, too.
CUT = re.compile(r'[^\S\x1c-\x1f](?=[\S\x1c-\x1f])')


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


class ByteTokenizer:
    """ One token per byte of the text's UTF-8: for large texts of many alphabets. """
    kind, n_vocab = 'bytes', 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode('utf-8'), np.uint8).astype(np.uint16)

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode('utf-8', errors='replace')

    def streamer(self):
        """ A function from the next id to the text it completes: a character may take several ids. """
        decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
        return lambda i: decoder.decode(bytes([int(i)]))

    def state(self) -> dict:
        return {'kind': self.kind}


class GPT2Tokenizer:
    """ GPT-2's byte-pair encoding; its vocabulary is loaded, or downloaded, at first use. """
    kind, n_vocab, end = 'gpt2', 50257, 50256  # end: the token <|endoftext|>, put after a document

    def encode(self, text: str) -> np.ndarray:
        encode = gpt2_bpe().encode_ordinary  # ordinary: '<|endoftext|>' is mere text
        return np.concatenate([np.array(encode(piece), np.uint16) for piece in pieces(text)])

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
    for cls in (ByteTokenizer, GPT2Tokenizer):
        if state.get('kind') == cls.kind:
            return cls()
    raise ValueError(f'tokenizer={state.get("kind")!r}: must be one of char, bytes, gpt2')


def pieces(text):
    """ text, cut where it makes no difference to GPT-2's BPE.

    tiktoken needs memory in proportion to what it gets at once, and panics at a million blanks before a word: they come
    to lie at the end of a piece.
    """
    start = 0
    while m := CUT.search(text, start + PIECE):
        yield text[start:m.start()]
        start = m.start()
    yield text[start:]


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
