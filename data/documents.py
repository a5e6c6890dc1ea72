"""
Collections of documents, larger than memory, to token files: by several processes, in order, going on where it stopped.

    prepare_documents('owt', 'hf:Skylion007/openwebtext', num_proc=8)
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
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import DATA, SPLITS, check_name, locked, when_parent_ends, write
from data.tokenizer import GPT2Tokenizer, gpt2_bpe

EXPECTED = {'hf:Skylion007/openwebtext': (8_013_769, 18.1e9)}  # documents, bytes of tokens
CHUNK = 2**20  # characters that a process gets at once, or one document more
SAVE = 5  # seconds between two savings of progress


class Lines:
    """ The rows of JSON Lines files, gzipped or not, with the methods of datasets.IterableDataset needed here. """
    def __init__(self, files):
        self.files, self.at = files, (0, 0)  # at: file and line that come next

    def open(self, path):
        return (gzip.open if path.endswith('.gz') else open)(path, 'rb')

    def __len__(self):
        return sum(bool(line.strip()) for path in self.files for line in self.open(path))

    def state_dict(self):
        return self.at

    def load_state_dict(self, at):
        self.at = tuple(at)

    def __iter__(self):
        start = self.at
        for i, path in enumerate(self.files[start[0]:], start[0]):
            with self.open(path) as f:
                for k, line in enumerate(f):
                    if (i, k) >= start and line.strip():
                        self.at = i, k + 1
                        yield json.loads(line)


def open_documents(source, files):
    """ (the rows of source, from the first on, their number if it is known). """
    kind, _, rest = source.partition(':')
    if kind == 'jsonl':
        return (rows := Lines(files)), len(rows)
    import pyarrow.parquet
    from datasets import load_dataset
    from huggingface_hub import HfApi
    if kind == 'parquet':
        total = sum(pyarrow.parquet.read_metadata(path).num_rows for path in files)
        return load_dataset('parquet', data_files=files, split='train', streaming=True).select_columns('text'), total
    name, _, config = rest.partition(':')
    if not os.path.isdir(name):
        HfApi().dataset_info(name, timeout=20)  # fails at once where load_dataset tries again and again
    how = {'path': name, 'name': config or None, 'split': 'train', 'streaming': True}
    try:
        rows = load_dataset(**how)
    except RuntimeError:  # the data set is a script, which is run no more: take the Hub's own conversion
        rows = load_dataset(**how, revision='refs/convert/parquet')
    known = rows.info.splits and rows.info.splits['train'].num_examples
    return rows.select_columns('text'), EXPECTED.get(source, (known, 0))[0]


def chunks(rows, done):
    """ Yields (number of documents before it, its documents, place after it) of CHUNK characters and what is over. """
    texts, size = [], 0
    try:
        for row in rows:
            if not isinstance(row, dict) or not isinstance(row.get('text'), str):
                raise ValueError('it has no string called text')
            texts.append(row['text'])
            size += len(row['text']) + 1
            if size >= CHUNK:
                yield done, texts, rows.state_dict()
                done, texts, size = done + len(texts), [], 0
    except Exception as e:  # the file's, the format's, the network's
        raise ValueError(f'document {done + len(texts) + 1}: cannot be read ({type(e).__name__}: {str(e)[:200]}); what '
                         'was finished before is kept, the same command goes on from there') from e
    if texts:
        yield done, texts, rows.state_dict()


def tokenize(chunk, val_every):
    """ (number of documents up to here, place, {split: the bytes of its tokens}). """
    done, texts, place = chunk
    tok, out = GPT2Tokenizer(), {split: bytearray() for split in SPLITS}
    for i, text in enumerate(texts, done + 1):
        ids = np.concatenate([tok.encode(text), tok.end])
        out['train' if i % val_every else 'val'] += ids.astype('<u2').tobytes()
    return done + len(texts), place, out


def worker():
    """ Prepares a worker process: Ctrl-C is its parent's business, and without a parent it ends. """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    when_parent_ends(lambda: os._exit(1))


def in_order(function, items, num_proc):
    """ map(function, items) by num_proc processes, with no more than twice as many items under way. """
    if num_proc == 1:
        yield from map(function, items)
        return
    spawn, waiting = multiprocessing.get_context('spawn'), deque()  # forking would copy the threads of datasets
    with ProcessPoolExecutor(num_proc, spawn, worker) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as e:
            raise ValueError(f'num_proc={num_proc}: a process died, perhaps for want of memory; with fewer, the same '
                             'command goes on from there') from e
        finally:
            pool.shutdown(cancel_futures=True)


class Unfinished:
    """ Token files that grow, train.bin.part and val.bin.part, and progress.json: how much of them is finished. """
    def __init__(self, folder, what):
        self.folder, self.saved = folder, time.monotonic()
        self.state = what | {'documents': 0, 'place': None, 'bytes': dict.fromkeys(SPLITS, 0)}
        with suppress(FileNotFoundError):
            self.state = json.loads((folder / 'progress.json').read_bytes())
        if self.state != self.state | what:
            raise ValueError(f'name={folder.name!r}: holds an unfinished set from other files or with another val_every'
                             f' ({self.state["origin"]}, {self.state["val_every"]}); delete its progress.json, or give '
                             'another --name')
        for split, size in self.state['bytes'].items():
            whole, part = folder / f'{split}.bin', folder / f'{split}.bin.part'
            if size and not part.exists() and not (folder / 'meta.json').exists():
                os.replace(whole, part)  # it was stopped while the files got their names
            with open(part, 'ab') as f:
                if f.tell() < size:
                    raise ValueError(f'name={folder.name!r}: {part.name} is damaged; delete progress.json beside it')
                f.truncate(size)
        self.files = {split: open(folder / f'{split}.bin.part', 'ab') for split in SPLITS}

    def add(self, documents, place, tokens):
        for split in SPLITS:
            self.files[split].write(tokens[split])
            self.state['bytes'][split] += len(tokens[split])
        self.state |= {'documents': documents, 'place': place}
        if time.monotonic() - self.saved >= SAVE:
            self.save()

    def save(self):
        for f in self.files.values():  # the tokens first: progress.json never promises more than there is
            f.flush()
            os.fsync(f.fileno())
        write(self.folder, {'progress.json': json.dumps(self.state).encode()})
        self.saved = time.monotonic()

    def close(self):
        for f in self.files.values():
            f.close()

    def finish(self):
        """ Gives the files their names. Returns meta. """
        self.save()
        self.close()  # Windows gives no open file another name
        tokens = {split: self.state['bytes'][split] // 2 for split in SPLITS}
        if min(tokens.values()) < 2:
            for name in ('progress.json', *(f'{split}.bin.part' for split in SPLITS)):
                (self.folder / name).unlink()
            raise ValueError(f'{self.state["origin"]}: too short, {tokens["train"]} + {tokens["val"]} tokens (train + '
                             f'val) of {self.state["documents"]} documents; give more, or a smaller --val_every')
        meta = {'tokenizer': GPT2Tokenizer().state(), 'n_vocab': GPT2Tokenizer.n_vocab, 'tokens': tokens, 'sha256': {}}
        for split in SPLITS:
            with open(self.folder / f'{split}.bin.part', 'rb') as f:
                meta['sha256'][split] = hashlib.file_digest(f, 'sha256').hexdigest()
        meta |= {key: value for key, value in self.state.items() if key not in ('place', 'bytes')}
        write(self.folder, {'meta.json': json.dumps(meta, indent=1).encode()}, [f'{split}.bin' for split in SPLITS])
        (self.folder / 'progress.json').unlink()
        return meta


def prepare_documents(name: str, source: str, val_every: int = 2000, num_proc: int = 1, root=DATA) -> dict:
    """ Writes root/NAME from the documents of source by GPT-2's BPE, <|endoftext|> after each. Returns its meta.

    source: hf:NAME[:CONFIG], parquet:GLOB or jsonl:GLOB, with a field text. Every val_every-th document is for
    validation. What is finished is kept: a call after one that was stopped goes on from there, any number of processes
    gives the same files. ValueError says what is wrong.
    """
    check_name(name)
    for key, value, least in (('val_every', val_every, 2), ('num_proc', num_proc, 1)):
        if value < least:
            raise ValueError(f'{key}={value!r}: must be {least} or more')
    kind, _, pattern = source.partition(':')
    files = [] if kind == 'hf' else sorted(glob.glob(pattern, recursive=True))
    if kind != 'hf' and not files:
        raise ValueError(f'{source}: no such file; give a path, or a pattern in quotes')
    try:
        sizes = [[path, (s := os.stat(path)).st_size, s.st_mtime_ns] for path in files]
    except OSError as e:
        raise ValueError(f'{source}: {e.filename}: {e.strerror}') from e
    what = {'origin': source, 'val_every': val_every, 'files': sizes}
    folder = Path(root) / name
    gpt2_bpe()  # its complaint, or its download, comes before any process starts
    try:
        rows, total = open_documents(source, files)
    except Exception as e:  # the file's, the format's, the network's
        hint = "; pip install 'datasets>=4'" if isinstance(e, ImportError) else ''
        raise ValueError(f'{source}: cannot be opened ({type(e).__name__}: {str(e)[:300]}){hint}') from e
    with locked(folder, wait=False), ExitStack() as stack:
        with suppress(FileNotFoundError):
            meta = json.loads((folder / 'meta.json').read_bytes())
            tokens = {split: (folder / f'{split}.bin').stat().st_size // 2 for split in SPLITS}
            if meta == meta | what | {'tokens': tokens}:
                return meta  # it is all there
        out = stack.enter_context(closing(Unfinished(folder, what)))
        need = EXPECTED[source][1] if source in EXPECTED else sum(size for _, size, _ in sizes) / 2
        need -= sum(out.state['bytes'].values())
        if (free := shutil.disk_usage(folder).free) < need:
            raise ValueError(f'name={name!r}: must have room for about {need / 1e9:.1f} GB of tokens, the disk has '
                             f'{free / 1e9:.1f} GB free')
        if done := out.state['documents']:
            rows.load_state_dict(out.state['place'])
        bar = stack.enter_context(tqdm(total=total, initial=done, unit=' documents', mininterval=1))
        for result in in_order(partial(tokenize, val_every=val_every), chunks(rows, done), num_proc):
            out.add(*result)
            bar.update(out.state['documents'] - bar.n)
            bar.set_postfix_str(f'{sum(out.state["bytes"].values()) / 2e6:,.0f}M tokens', refresh=False)
        return out.finish()


