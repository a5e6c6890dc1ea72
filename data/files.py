""" Token files in a folder: written whole or not at all, by one process at a time. """
import multiprocessing
import os
import threading
from contextlib import contextmanager
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
    """ Holds folder for one process; it ends with the process, however that ends. ValueError if it cannot be written.

    If another process holds it: waits, or raises ValueError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / '.lock', 'wb') as lock:
            try:
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ValueError(f'name={folder.name!r}: must be free, another process is preparing it') from None
            except (ImportError, OSError):
                pass  # Windows and some network file systems have no such lock
            yield
    except OSError as e:
        raise ValueError(f'name={folder.name!r}: cannot write {str(folder)!r} ({e.strerror}); make room or make it '
                         'writable, or give another name') from e


def write(folder, files, parts=()):
    """ Puts files, {name: bytes}, into folder, all or none: without meta.json, the last, it counts as not prepared.

    Before them, each of parts, which is there already as NAME.part, gets its name.
    """
    try:
        for name, data in files.items():
            with open(folder / f'{name}.tmp', 'wb') as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        if 'meta.json' in files:
            (folder / 'meta.json').unlink(missing_ok=True)  # so that it never describes other tokens
        for name in parts:
            os.replace(folder / f'{name}.part', folder / name)
        for name in files:
            os.replace(folder / f'{name}.tmp', folder / name)
    finally:
        for name in files:
            (folder / f'{name}.tmp').unlink(missing_ok=True)
