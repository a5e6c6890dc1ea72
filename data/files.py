""" Token files in a folder: written whole or not at all, by one process at a time. """
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

DATA = Path(__file__).resolve().parent
SPLITS = 'train', 'val'


def check_name(name):
    if name in ('', '..') or Path(name).name != name or '\\' in name:
        raise ValueError(f'name={name!r}: must be the plain name of a folder; give another --name')


def when_parent_ends(act):
    """ Calls act once the parent process has ended, however it ended: no child outlives it. """
    parent = multiprocessing.parent_process()

    def watch():
        parent.join()
        act()
    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def locked(folder, wait=True):
    """ Makes folder and holds it for this process; the lock ends with the process at the latest.

    If another process holds it, this one waits or gets a ValueError. ValueError, too, if folder
    cannot be written. A folder in which nothing was written is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / '.lock', 'wb') as lock:
            try:
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ValueError(f'name={folder.name!r}: must be free, but another process is '
                                 'preparing it') from None
            except (ImportError, OSError):
                pass  # Windows and some network file systems have no such lock
            try:
                yield
            finally:
                if [path.name for path in folder.iterdir()] == ['.lock']:
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as e:
        raise ValueError(f'name={folder.name!r}: cannot write {str(folder)!r} ({e.strerror}); make '
                         'room or make it writable, or give another name') from e


def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def read_json(path):
    """ The dict in a JSON file, {} if there is none. """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def find_set(folder, wanted, overwrite):
    """ The meta of the set in folder if it has the wanted values. None if a set is to be written.

    ValueError if the one in folder has other values and must not be overwritten.
    """
    meta = read_json(folder / 'meta.json')
    if not meta or overwrite:
        return None
    if any(meta.get(key) != value for key, value in wanted.items()):
        raise ValueError(f'name={folder.name!r}: holds a set already (from {meta.get("origin")}), '
                         'which may differ from this one; give --overwrite, or another --name')
    for split in SPLITS:
        path = folder / f'{split}.bin'
        if not path.exists() or path.stat().st_size != 2 * meta['tokens'][split]:
            return None  # it is damaged
    return meta


def write_set(folder, tokens, meta, label, advice):
    """ Puts tokens, an iterable of (split, ids), into folder. Returns what meta.json says.

    meta: a function that gives, after all tokens, what the set is. Its sizes and hashes are added.
    The old meta.json goes first and the new one comes last: a folder without it is not prepared.
    ValueError, with label and advice, if there are too few tokens.
    """
    parts = {name: folder / f'{name}.part' for name in ('train.bin', 'val.bin', 'meta.json')}
    try:
        with ExitStack() as stack:
            files = {split: stack.enter_context(open(parts[f'{split}.bin'], 'wb'))
                     for split in SPLITS}
            for split, ids in tokens:
                files[split].write(ids.astype('<u2').tobytes())
        sizes = {split: parts[f'{split}.bin'].stat().st_size // 2 for split in SPLITS}
        if min(sizes.values()) < 2:
            counts = f'{sizes["train"]} + {sizes["val"]} tokens (train + val)'
            raise ValueError(f'{label}: too short, {counts}, each must have 2; {advice}')
        hashes = {split: sha256(parts[f'{split}.bin']) for split in SPLITS}
        out = meta() | {'tokens': sizes, 'sha256': hashes}
        parts['meta.json'].write_text(json.dumps(out, indent=1), encoding='utf-8')
        for part in parts.values():
            with open(part, 'rb+') as f:
                os.fsync(f.fileno())
        (folder / 'meta.json').unlink(missing_ok=True)  # it never describes other tokens
        for name, part in parts.items():
            os.replace(part, folder / name)
        return out
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
