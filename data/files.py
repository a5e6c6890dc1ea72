""" Token files in a folder: written whole or not at all, by one process at a time. """
import hashlib
import json
import multiprocessing
import os
import threading
from contextlib import contextmanager, suppress
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


def open_lock(folder, wait):
    """ The file folder/.lock, which this process alone holds until it is closed. """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / '.lock', 'wb')
        try:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock.close()
            raise ValueError(f'name={folder.name!r}: must be free, but another process is '
                             'preparing it') from None
        except (ImportError, OSError):
            return lock  # Windows and some network file systems have no such lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / '.lock')):
                return lock
        lock.close()  # the one who held it before has removed it


@contextmanager
def locked(folder, wait=True):
    """ Holds folder for this process, at the longest until it ends.

    If another process holds it, this one waits or gets a ValueError. So it does if folder cannot
    be written. A folder in which nothing was written is removed.
    """
    try:
        with open_lock(folder, wait):
            try:
                yield
            finally:
                if [path.name for path in folder.iterdir()] == ['.lock']:
                    with suppress(OSError):
                        (folder / '.lock').unlink()
                        folder.rmdir()
    except OSError as e:
        raise ValueError(f'name={folder.name!r}: cannot write {str(folder)!r} ({e.strerror}); make '
                         'room or make it writable, or give another name') from e


def write(folder, files, parts=()):
    """ Puts files, {name: bytes}, into folder, all or none.

    Before them, each of parts, which is there already as NAME.part, gets its name. meta.json comes
    last of all: a folder without it counts as not prepared.
    """
    try:
        for name, data in files.items():
            with open(folder / f'{name}.tmp', 'wb') as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        if 'meta.json' in files:
            (folder / 'meta.json').unlink(missing_ok=True)  # it never describes other tokens
        for name in parts:
            os.replace(folder / f'{name}.part', folder / name)
        for name in files:
            os.replace(folder / f'{name}.tmp', folder / name)
    finally:
        for name in files:
            (folder / f'{name}.tmp').unlink(missing_ok=True)


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
    if meta != meta | wanted:
        raise ValueError(f'name={folder.name!r}: holds a set already (from {meta.get("origin")}), '
                         'which may differ from this one; give --overwrite, or another --name')
    for split in SPLITS:
        path = folder / f'{split}.bin'
        if not path.exists() or path.stat().st_size != 2 * meta['tokens'][split]:
            return None  # it is damaged
    return meta


class TokenFiles:
    """ train.bin.part and val.bin.part, which grow until finish() gives them their names.

    sizes: {split: bytes} of the existing files that are kept; None begins new files.
    """
    def __init__(self, folder, sizes=None):
        self.folder, self.files = folder, {}
        self.sizes = sizes or dict.fromkeys(SPLITS, 0)
        if not sizes:
            (folder / 'progress.json').unlink(missing_ok=True)  # it describes the old files
        for split in SPLITS:
            self.files[split] = open(self.part(split), 'ab')
            self.files[split].truncate(self.sizes[split])

    def part(self, split):
        return self.folder / f'{split}.bin.part'

    def add(self, split, ids):
        data = ids.astype('<u2').tobytes()
        self.files[split].write(data)
        self.sizes[split] += len(data)

    def sync(self):
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())

    def close(self):
        for f in self.files.values():
            f.close()

    def discard(self):
        """ Removes the files that have no name yet. """
        self.close()
        for path in (self.folder / 'progress.json', *map(self.part, SPLITS)):
            path.unlink(missing_ok=True)

    def finish(self, meta, what, advice):
        """ Gives the files their names. Returns meta, which it writes with their sizes and hashes.

        ValueError, with what and advice in it, if they are too short.
        """
        tokens = {split: size // 2 for split, size in self.sizes.items()}
        if min(tokens.values()) < 2:
            self.discard()
            counts = f'{tokens["train"]} + {tokens["val"]} tokens (train + val)'
            raise ValueError(f'{what}: too short, {counts}, each must have 2; {advice}')
        self.sync()
        self.close()  # Windows gives no open file another name
        meta = meta | {'tokens': tokens, 'sha256': {}}
        for split in SPLITS:
            meta['sha256'][split] = sha256(self.part(split))
        names = [f'{split}.bin' for split in SPLITS]
        write(self.folder, {'meta.json': json.dumps(meta, indent=1).encode()}, names)
        (self.folder / 'progress.json').unlink(missing_ok=True)
        return meta
