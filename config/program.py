"""
How a program begins, is stopped and ends; without a traceback when it is the user who stops it.

A script that imports torch, which takes seconds, imports this first:

    if __name__ == '__main__':
        from config import program
        program.begin()
    import torch
    ...
    if __name__ == '__main__':
        program.run(main)
"""
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress


def begin():
    """ Until run, Ctrl-C ends the program at once and silently: there is nothing to save yet. """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(main):
    """ Calls main() and ends the program. A reader that has gone away (| head) is no error. """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # or Python complains when it flushes stdout at exit
    except KeyboardInterrupt:
        print('error: interrupted', file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def stoppable(acknowledge=None, second_kills=True):
    """ Yields a list that gets the name of SIGINT or SIGTERM when one arrives.

    acknowledge: a line for the user, written at once; the program looks at the list when it can.
    second_kills: a second signal ends the program as it would have without this.
    """
    received, before = [], {}

    def handler(number, frame):
        received.append(signal.Signals(number).name)
        if acknowledge and len(received) == 1:
            with suppress(OSError):  # print is not safe in a signal handler
                os.write(2, f'\n{received[0]}: {acknowledge}\n'.encode())
        if second_kills:
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def only_run_in(folder):
    """ Holds folder, which is made, for one run at a time; ValueError if another one is there.

    The operating system lets go when the process ends, however it ends.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, 'lock'), 'w')
    except OSError as e:
        raise ValueError(f'out_dir={folder!r}: must be a writable folder ({e.strerror})') from e
    with lock:
        with suppress(ImportError):  # Windows has no such lock: there it is up to the user
            import fcntl
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f'out_dir={folder!r}: must be free, but another run is writing '
                                 'there') from None
            except OSError:
                pass  # some network file systems have no such lock
        yield
