""" What the verbs of compare.py share. """
import json
import os
import statistics
import subprocess
from pathlib import Path

import torch

from data.files import write
from model import RESIDUALS


def mode_keys(modes):
    """ 'full,block:4' -> {'full': {'residual': 'full'}, 'block:4': {'residual': 'block', 'residual_blocks': 4}} """
    out = {}
    for mode in modes.split(','):
        rule, colon, n = mode.strip().partition(':')
        if mode.strip() in out:
            raise ValueError(f'modes={modes!r}: must name {mode.strip()!r} only once')
        if rule not in RESIDUALS or (colon and (rule != 'block' or not n.isdecimal())):
            raise ValueError(f'modes={modes!r}: {mode!r} is none of {", ".join(RESIDUALS)}, block:N')
        out[mode.strip()] = {'residual': rule} | ({'residual_blocks': int(n)} if n else {})
    return out


def preset(argv, name):
    """ argv with the settings of name that fit this machine, unless it names a TOML file itself. """
    if any(a.endswith('.toml') or a.startswith('--config') for a in argv):
        return argv
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    gpu = torch.cuda.is_available() and '--device=cpu' not in argv
    return [os.path.join(here, 'config', f'{name}_{"gpu" if gpu else "cpu"}.toml'), *argv]


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 97.5 %, 1 to 9 (and more) degrees


def student(degrees):
    """ Student's t that 97.5 % lie below; beyond 9 degrees of freedom that of 9. """
    return T95[min(degrees, len(T95)) - 1]


def paired(values, base):
    """ Mean paired difference and the half-width of its 95 % interval (None from one pair). """
    d = [v - b for v, b in zip(values, base, strict=True)]
    if len(d) < 2:
        return d[0], None
    return statistics.mean(d), student(len(d) - 1) * statistics.stdev(d) / len(d) ** 0.5


def signed(difference, half):
    """ What paired found, as text. """
    return f'{difference:+.4f}' + (f' +- {half:.4f}' if half is not None else '')


def write_json(path, value):
    """ Writes value whole or not at all; ValueError if it cannot be written. """
    try:
        write(Path(path).parent, {Path(path).name: json.dumps(value, indent=1).encode()})
    except OSError as e:
        raise ValueError(f'{path}: could not be written ({e.strerror})') from e


def commit():
    """ The checkout's commit, '+' if its code or settings have changes, or None outside git. """
    try:
        where = os.path.dirname(os.path.abspath(__file__))
        out = [subprocess.run(['git', '-C', where, *c], capture_output=True, text=True, check=True).stdout.strip()
               for c in (['rev-parse', '--short', 'HEAD'], ['diff', 'HEAD', '--name-only', '--', '*.py', '*.toml'])]
        return out[0] + ('+' if out[1] else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device):
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else \
        f'{device.type}, {os.cpu_count()} cores, threads: {torch.get_num_threads()}'
    return {'torch': torch.__version__, 'device': name, 'commit': commit()}


def table(rows):
    """ Rows of strings as aligned text, the first column left, the others right. """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows)
