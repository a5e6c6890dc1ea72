"""
Turns collections of documents, which may be larger than memory, into token files.

    prepare_documents('owt', 'hf:Skylion007/openwebtext', num_proc=8)

Several processes encode. What is finished is kept: a call goes on where a stopped one ended.
"""
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import files
from data.files import DATA, SPLITS
from data.tokenizer import CharTokenizer, choose_tokenizer

EXPECTED = {'hf:Skylion007/openwebtext': (8_013_769, 18.1e9)}  # documents, bytes of tokens
CHUNK = 2**20  # characters that a process gets at once, or one document more
SAVE = 5  # seconds between two savings of progress


def json_lines(path):
    """ Yields the lines of a JSON Lines file, gzipped or not, without blanks at their ends. """
    opener = gzip.open if path.lower().endswith('.gz') else open
    with opener(path, 'rb') as f:
        for line in f:
            yield line.strip()


def parquet_rows(path):
    """ Yields {'text': ...} for each row of a Parquet file. """
    from pyarrow.parquet import ParquetFile
    for batch in ParquetFile(path).iter_batches(1000, columns=['text']):
        yield from batch.to_pylist()


class LocalFiles:
    """ Iterates over the rows of JSON Lines or Parquet files, from the one after place on.

    It has the methods of datasets.IterableDataset that are needed here.
    """
    def __init__(self, kind, paths):
        self.kind, self.paths = kind, paths
        self.place = (0, 0)  # the file, and the line or row in it, that was read last

    def state_dict(self):
        return self.place

    def load_state_dict(self, place):
        self.place = tuple(place)

    def __iter__(self):
        start = self.place
        items = json_lines if self.kind == 'jsonl' else parquet_rows
        for i in range(start[0], len(self.paths)):
            self.place = (i, 0)
            for number, item in enumerate(items(self.paths[i]), 1):
                if (i, number) > start and item:  # a blank line is no row
                    self.place = (i, number)
                    yield json.loads(item) if self.kind == 'jsonl' else item


def open_documents(source, paths):
    """ (the rows of source, their number if it is known). A row is a dict. """
    kind, _, rest = source.partition(':')
    if kind == 'jsonl':
        return LocalFiles(kind, paths), None
    if kind == 'parquet':
        import pyarrow  # noqa: F401  # that it is missing is said before anything is read
        return LocalFiles(kind, paths), None
    from datasets import load_dataset
    from huggingface_hub import HfApi
    name, _, config = rest.partition(':')
    if not os.path.isdir(name):
        HfApi().dataset_info(name, timeout=20)  # fails at once where load_dataset tries repeatedly
    how = {'path': name, 'name': config or None, 'split': 'train', 'streaming': True}
    try:
        rows = load_dataset(**how)
    except RuntimeError:  # it is a script, which datasets no longer runs; the Hub has converted it
        rows = load_dataset(**how, revision='refs/convert/parquet')
    total = rows.info.splits and rows.info.splits['train'].num_examples
    if source in EXPECTED:
        total = EXPECTED[source][0]
    return rows.select_columns('text'), total


class Reader:
    """ Iterates over the texts of rows, which it counts and hashes. Rows without one are skipped.

    Its digest after n documents is that of all n of them.
    """
    def __init__(self, rows):
        self.rows = rows
        self.documents, self.skipped, self.digest = 0, 0, ''

    def __iter__(self):
        try:
            for row in self.rows:
                if not isinstance(row, dict):
                    raise ValueError('it must be an object with a field called text')
                text = row.get('text')
                if text is None:
                    self.skipped += 1
                    continue
                if not isinstance(text, str):
                    raise ValueError('its field text must be a string')
                data = text.encode('utf-8', 'surrogatepass')  # JSON may hold half a surrogate pair
                self.digest = hashlib.sha256(self.digest.encode() + data).hexdigest()
                self.documents += 1
                yield text
        except Exception as e:  # the file, its format or the network may be at fault
            fault = f'{type(e).__name__}: {str(e)[:200]}'
            raise ValueError(f'{self.where()}: cannot be read ({fault}); what was finished before '
                             'is kept: once this can be read, the same command goes on') from e

    def where(self):
        """ The row that was read last, in an error message. """
        if not isinstance(self.rows, LocalFiles):
            return f'document {self.documents + self.skipped + 1}'
        i, number = self.rows.place
        unit = 'line' if self.rows.kind == 'jsonl' else 'row'
        return f'{self.rows.paths[i]}, {unit} {number}' if number else self.rows.paths[i]

    def progress(self):
        """ Plain values for progress.json, from which jump goes on. """
        return {'documents': self.documents, 'skipped': self.skipped, 'digest': self.digest,
                'place': self.rows.state_dict()}

    def jump(self, progress):
        """ Goes to where progress was taken, without reading what lies before. """
        self.documents, self.skipped = progress['documents'], progress['skipped']
        self.digest = progress['digest']
        self.rows.load_state_dict(progress['place'])


def survey(rows, n, characters):
    """ Reads all documents once. Returns the reader's progress after n of them, and after all.

    Puts their characters into the set characters, unless it is None.
    """
    start, reader = rows.state_dict(), Reader(rows)
    after_n = reader.progress()
    for text in tqdm(reader, 'reading', unit=' documents', mininterval=1):
        if characters is not None:
            characters.update(text)
        if reader.documents == n:
            after_n = reader.progress()
    after_all = reader.progress()
    rows.load_state_dict(start)
    return after_n, after_all


def chunks(reader):
    """ Yields (number of documents before, documents of CHUNK characters, progress after them). """
    before, texts, size = reader.documents, [], 0
    for text in reader:
        texts.append(text)
        size += len(text) + 1
        if size >= CHUNK:
            yield before, texts, reader.progress()
            before, texts, size = reader.documents, [], 0
    if texts:
        yield before, texts, reader.progress()


def tokenize(chunk, tok, val_every):
    """ (progress after the chunk, {split: ids}). Every val_every-th document is for validation. """
    before, texts, progress = chunk
    ids = {split: [np.empty(0, np.uint16)] for split in SPLITS}
    for number, text in enumerate(texts, before + 1):
        split = 'val' if number % val_every == 0 else 'train'
        try:
            ids[split] += [tok.encode(text), tok.end]
        except ValueError as e:
            raise ValueError(f'document {number}: {e}; give another --tokenizer') from e
    return progress, {split: np.concatenate(arrays) for split, arrays in ids.items()}


@contextmanager
def interrupts_held_back():
    """ Lets Ctrl-C wait. A process that starts meanwhile never gets it, not even at its start. """
    if not hasattr(signal, 'pthread_sigmask'):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker():
    """ Prepares a worker process: it leaves Ctrl-C to its parent and ends when its parent ends. """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files.when_parent_ends(lambda: os._exit(1))


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
                with interrupts_held_back():  # submit may start a process
                    waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as e:
            raise ValueError(f'num_proc={num_proc}: a process died, perhaps for want of memory; '
                             'with a smaller number, the same command goes on from there') from e
        finally:
            pool.shutdown(cancel_futures=True)


class Unfinished(files.TokenFiles):
    """ Token files that grow, and progress.json, which says how much of them is finished. """
    def __init__(self, folder, state):
        super().__init__(folder, state.get('bytes'))
        self.state, self.saved = state, time.monotonic()

    def save(self):
        self.sync()  # the tokens come first: progress.json never promises more than there is
        self.state['bytes'] = self.sizes
        files.write(self.folder, {'progress.json': json.dumps(self.state).encode()})
        self.saved = time.monotonic()


def parts_are_there(folder, sizes):
    """ Whether the token files of an unfinished set are as large as progress.json says. """
    for split, size in sizes.items():
        whole, part = folder / f'{split}.bin', folder / f'{split}.bin.part'
        if not part.exists() and whole.exists() and not (folder / 'meta.json').exists():
            os.replace(whole, part)  # it was stopped while the files got their names
        if not part.exists() or part.stat().st_size < size:
            return False
    return True


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


def unfinished_state(folder, wanted, overwrite):
    """ The progress.json of the unfinished set in folder, {} if a new set begins.

    ValueError if the one in folder has other than the wanted values, or is damaged, and must not
    be overwritten.
    """
    state = files.read_json(folder / 'progress.json')
    if not state:
        return {}
    if state == state | wanted and parts_are_there(folder, state['bytes']):
        return state
    if not overwrite:
        raise ValueError(f'name={folder.name!r}: holds an unfinished set of other documents or '
                         f'options, or a damaged one (from {state.get("origin")}); give '
                         '--overwrite to begin anew, or another --name')
    return {}


def check_room(folder, need):
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ValueError(f'name={folder.name!r}: must have room for about {need / 1e9:.1f} GB of '
                         f'tokens, the disk has {free / 1e9:.1f} GB free')


def encode(reader, out, total, function, num_proc):
    """ Adds the tokens of all that reader gives to out, with a progress bar. """
    read = reader.documents + reader.skipped
    with tqdm(total=total, initial=read, unit=' documents', mininterval=1) as bar:
        for progress, ids in in_order(function, chunks(reader), num_proc):
            for split in SPLITS:
                out.add(split, ids[split])
            out.state |= progress
            if time.monotonic() - out.saved >= SAVE:
                out.save()
            bar.update(progress['documents'] + progress['skipped'] - bar.n)
            bar.set_postfix_str(f'{sum(out.sizes.values()) / 2e6:,.0f}M tokens', refresh=False)
    out.save()


def prepare_documents(name: str, source: str, tokenizer: str = 'gpt2', val_every: int = 2000,
                      num_proc: int = 1, root=DATA, overwrite: bool = False) -> dict:
    """ Writes root/NAME from the documents of source, the tokenizer's end after each. Returns meta.

    source: hf:NAME[:CONFIG], parquet:GLOB or jsonl:GLOB, with a field text; rows without one are
    skipped and counted. Every val_every-th document is for validation. The files are the same for
    any num_proc and however often a call was stopped. ValueError says what is wrong.

    Files are read twice. The first time shows faults before the work begins, and whether an
    unfinished set in root/NAME still holds their first documents; then it goes on. The second time
    encodes what is missing. A data set of the Hub is read once and trusted to stay the same.
    """
    files.check_name(name)
    for key, value, least in (('val_every', val_every, 2), ('num_proc', num_proc, 1)):
        if value < least:
            raise ValueError(f'{key}={value!r}: must be {least} or more')
    paths, folder = find_files(source), Path(root) / name
    tok = choose_tokenizer(tokenizer, root)
    try:
        source_bytes = sum(os.path.getsize(path) for path in paths)
        rows, total = open_documents(source, paths)
    except Exception as e:  # a file, its format or the network may be at fault
        hint = "; pip install 'datasets>=4'" if isinstance(e, ImportError) else ''
        fault = f'{type(e).__name__}: {str(e)[:300]}'
        raise ValueError(f'{source}: cannot be opened ({fault}){hint}') from e
    with files.locked(folder, wait=False):
        begin = files.read_json(folder / 'progress.json')
        wanted = {'origin': source, 'val_every': val_every}
        all_of_it, first_of_it = {}, {}
        if paths or tok is None:
            characters = {'\n'} if tok is None else None
            begin, end = survey(rows, begin.get('documents'), characters)
            tok = tok or CharTokenizer.train(characters)
            total = end['documents'] + end['skipped']
            all_of_it, first_of_it = {'digest': end['digest']}, {'digest': begin['digest']}
        wanted['tokenizer'] = tok.state()
        if meta := files.find_set(folder, wanted | all_of_it, overwrite):
            return meta
        state = unfinished_state(folder, wanted | first_of_it, overwrite)
        reader = Reader(rows)
        if state:
            reader.jump(begin)
        need = source_bytes * (0.5 if tok.kind == 'gpt2' else 2)
        if source in EXPECTED:
            need = EXPECTED[source][1]
        check_room(folder, need - sum(state.get('bytes', {}).values()))
        with closing(Unfinished(folder, state | wanted)) as out:
            encode(reader, out, total, partial(tokenize, tok=tok, val_every=val_every), num_proc)
            meta = wanted | {'n_vocab': tok.n_vocab, 'documents': reader.documents,
                             'skipped': reader.skipped, 'digest': reader.digest}
            return out.finish(meta, f'{source}: the set of {reader.documents:,} documents',
                              'give more documents, or a smaller --val_every')
