"""
Turns collections of documents, which may be larger than memory, into token files.

    prepare_documents('owt', 'hf:Skylion007/openwebtext', num_proc=8)

Several processes encode. A document is in memory only until it is encoded.
"""
import glob
import gzip
import json
import multiprocessing
import os
import shutil
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import (
    DATA,
    SPLITS,
    check_name,
    find_set,
    locked,
    sha256,
    when_parent_ends,
    write_set,
)
from data.tokenizer import CharTokenizer, choose_tokenizer

OPENWEBTEXT = 'hf:Skylion007/openwebtext'  # its card does not tell how large it is:
OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_BYTES = 8_013_769, 18.1e9  # bytes of tokens
CHUNK = 2**20  # characters that a process gets at once, or one document more


# -----------------------------------------------------------------------------
# Reading.

def text_of(row):
    """ The text of a document, None if it has none. """
    if not isinstance(row, dict):
        raise ValueError('it must be an object with a field called text')
    text = row.get('text')
    if not isinstance(text, str | None):
        raise ValueError('its field text must be a string')
    return text


def unreadable(place, fault):
    return ValueError(f'{place}: cannot be read ({type(fault).__name__}: {str(fault)[:200]})')


def read_jsonl(path):
    """ Yields the texts of a JSON Lines file, gzipped or not; None for a row without one. """
    opener = gzip.open if path.lower().endswith('.gz') else open
    number = 0
    try:
        with opener(path, 'rb') as f:
            for line in f:
                number += 1
                if line.strip():
                    yield text_of(json.loads(line))
    except Exception as e:  # the file or its format may be at fault
        raise unreadable(f'{path}, line {number}' if number else path, e) from e


def read_parquet(path):
    """ Yields the texts of a Parquet file, None for a row without one. """
    from pyarrow.parquet import ParquetFile
    try:
        for batch in ParquetFile(path).iter_batches(1000, columns=['text']):
            yield from map(text_of, batch.to_pylist())
    except Exception as e:
        raise unreadable(path, e) from e


def open_hub(name):
    """ (the rows of a data set of the Hub, NAME[:CONFIG], their number if it is known) """
    from datasets import load_dataset
    from huggingface_hub import HfApi
    path, _, config = name.partition(':')
    if not os.path.isdir(path):
        HfApi().dataset_info(path, timeout=20)  # fails at once where load_dataset tries repeatedly
    how = {'path': path, 'name': config or None, 'split': 'train', 'streaming': True}
    try:
        rows = load_dataset(**how)
    except RuntimeError:  # it is a script, which datasets no longer runs; the Hub has converted it
        rows = load_dataset(**how, revision='refs/convert/parquet')
    total = rows.info.splits and rows.info.splits['train'].num_examples
    if f'hf:{name}' == OPENWEBTEXT:
        total = OPENWEBTEXT_DOCUMENTS
    return rows.select_columns('text'), total


class Documents:
    """ The texts of a source, in order. Rows without one are skipped, and counted. """
    def __init__(self, source, paths):
        self.source, self.paths = source, paths
        kind, _, name = source.partition(':')
        self.read = read_jsonl if kind == 'jsonl' else read_parquet
        self.rows, self.total = None, None  # of the Hub
        if kind == 'hf':
            self.rows, self.total = open_hub(name)
        elif kind == 'parquet':
            import pyarrow  # noqa: F401  # that it is missing is said before anything is read

    def texts(self):
        for path in self.paths:
            yield from self.read(path)
        if self.rows is not None:
            try:
                yield from map(text_of, self.rows)
            except Exception as e:  # perhaps of the network
                raise unreadable(self.source, e) from e

    def __iter__(self):
        self.documents, self.skipped = 0, 0
        for text in self.texts():
            if text is None:
                self.skipped += 1
            else:
                self.documents += 1
                yield text

    def chunks(self):
        """ Yields (number of documents before, documents of CHUNK characters). """
        before, texts, size = 0, [], 0
        for text in tqdm(self, 'documents', self.total, mininterval=1):
            texts.append(text)
            size += len(text) + 1
            if size >= CHUNK:
                yield before, texts
                before, texts, size = before + len(texts), [], 0
        if texts:
            yield before, texts


def find_files(source):
    """ The paths of the files that source names, none for hf:. """
    kind, _, pattern = source.partition(':')
    if kind == 'hf':
        return []
    pattern = os.path.expanduser(pattern)
    if os.path.exists(pattern):  # then it is no pattern, whatever signs are in it
        return [pattern]
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f'{source}: no such file; give a path, or a pattern in quotes')
    return paths


# -----------------------------------------------------------------------------
# Encoding.

def tokenize(chunk, tok, val_every):
    """ [(split, ids)] of a chunk. Every val_every-th document is for validation. """
    before, texts = chunk
    ids = {split: [np.empty(0, np.uint16)] for split in SPLITS}
    for number, text in enumerate(texts, before + 1):
        split = 'val' if number % val_every == 0 else 'train'
        try:
            ids[split] += [tok.encode(text), tok.end]
        except ValueError as e:
            raise ValueError(f'document {number}: {e}; give another --tokenizer') from e
    return [(split, np.concatenate(arrays)) for split, arrays in ids.items()]


def worker():
    """ Prepares a worker process: it leaves Ctrl-C to its parent and ends when its parent ends. """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    when_parent_ends(lambda: os._exit(1))


def in_order(function, items, num_proc):
    """ map(function, items) by num_proc processes, with at most 2 num_proc + 1 items under way. """
    if num_proc == 1:
        yield from map(function, items)
        return
    spawn = multiprocessing.get_context('spawn')  # forking would copy the threads of datasets
    waiting = deque()
    with ProcessPoolExecutor(num_proc, spawn, worker) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as e:
            raise ValueError(f'num_proc={num_proc}: a process died, perhaps for want of memory; '
                             'give a smaller number') from e
        finally:
            pool.shutdown(cancel_futures=True)


def check_room(folder, need):
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ValueError(f'name={folder.name!r}: must have room for about {need / 1e9:.1f} GB of '
                         f'tokens, the disk has {free / 1e9:.1f} GB free')


def prepare_documents(name: str, source: str, tokenizer: str = 'gpt2', val_every: int = 2000,
                      num_proc: int = 1, root=DATA, overwrite: bool = False) -> dict:
    """ Writes root/NAME from the documents of source, the tokenizer's end after each. Returns meta.

    source: hf:NAME[:CONFIG], parquet:GLOB or jsonl:GLOB, with a field text; rows without one are
    skipped and counted. Every val_every-th document is for validation. The files are the same for
    any num_proc. ValueError says what is wrong.
    """
    check_name(name)
    for key, value, least in (('val_every', val_every, 2), ('num_proc', num_proc, 1)):
        if value < least:
            raise ValueError(f'{key}={value!r}: must be {least} or more')
    paths, folder = find_files(source), Path(root) / name
    tok = choose_tokenizer(tokenizer, root)
    try:
        wanted = {'origin': source, 'val_every': val_every,
                  'text_sha256': [sha256(path) for path in paths]}
        docs = Documents(source, paths)
    except Exception as e:  # a file or the network may be at fault
        hint = "; pip install 'datasets>=4'" if isinstance(e, ImportError) else ''
        fault = f'{type(e).__name__}: {str(e)[:300]}'
        raise ValueError(f'{source}: cannot be opened ({fault}){hint}') from e
    if tok is None:
        characters = {'\n'}
        for text in docs:
            characters.update(text)
        tok = CharTokenizer.train(characters)
    wanted['tokenizer'] = tok.state()
    need = sum(map(os.path.getsize, paths)) * (0.5 if tok.kind == 'gpt2' else 2)
    if source == OPENWEBTEXT:
        need = OPENWEBTEXT_BYTES

    def tokens():
        function = partial(tokenize, tok=tok, val_every=val_every)
        for of_chunk in in_order(function, docs.chunks(), num_proc):
            yield from of_chunk

    def meta():
        return wanted | {'n_vocab': tok.n_vocab, 'documents': docs.documents,
                         'skipped': docs.skipped}

    with locked(folder, wait=False):
        if there := find_set(folder, wanted, overwrite):
            return there
        check_room(folder, need)
        return write_set(folder, tokens(), meta, source,
                         'give more documents, or a smaller --val_every')
