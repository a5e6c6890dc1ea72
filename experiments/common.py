""" What the verbs of compare.py share. """
import json
import os
import statistics
import subprocess
from pathlib import Path

import torch

import baselines  # noqa: F401 - importing it registers its rules
from model import RESIDUALS

ROOT = Path(__file__).resolve().parents[1]


def mode_keys(modes):
    """ The settings of each mode: of 'full,block:4' {'full': {'residual': 'full'},
    'block:4': {'residual': 'block', 'residual_blocks': 4}}.
    """
    out = {}
    for label in (mode.strip() for mode in modes.split(',')):
        rule, colon, number = label.partition(':')
        if label in out:
            raise ValueError(f'modes={modes!r}: must name {label!r} only once')
        if rule not in RESIDUALS or (colon and (rule != 'block' or not number.isdecimal())):
            known = ', '.join(RESIDUALS)
            raise ValueError(f'modes={modes!r}: {label!r} is none of {known}, block:N')
        out[label] = {'residual': rule}
        if number:
            out[label]['residual_blocks'] = int(number)
    return out


def preset(argv, name):
    """ argv, with config/NAME_cpu.toml or NAME_gpu.toml first unless it names a TOML file. """
    if any(a.endswith('.toml') or a.startswith('--config') for a in argv):
        return argv
    gpu = torch.cuda.is_available() and '--device=cpu' not in argv
    return [str(ROOT / 'config' / f'{name}_{"gpu" if gpu else "cpu"}.toml'), *argv]


# -----------------------------------------------------------------------------
# Statistics.

# The 97.5 % quantile of Student's t: T95[d - 1] for d degrees of freedom.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def student(degrees):
    """ The 97.5 % quantile of Student's t; beyond 9 degrees that of 9, a little wide. """
    return T95[min(degrees, len(T95)) - 1]


def paired(values, base):
    """ Mean paired difference and the half-width of its 95 % interval (None from one pair). """
    d = [v - b for v, b in zip(values, base, strict=True)]
    if len(d) < 2:
        return d[0], None
    return statistics.mean(d), student(len(d) - 1) * statistics.stdev(d) / len(d) ** 0.5


def signed(difference, half):
    """ What paired found, as text. """
    text = f'{difference:+.4f}'
    return text if half is None else f'{text} +- {half:.4f}'


# -----------------------------------------------------------------------------
# Results and where they are from.

def write_json(path, value):
    """ Writes value whole or not at all. """
    Path(f'{path}.tmp').write_text(json.dumps(value, indent=1), encoding='utf-8')
    os.replace(f'{path}.tmp', path)


def git(*command):
    command = ['git', '-C', str(ROOT), *command]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()


def commit():
    """ The checkout's commit, '+' if its code or settings have changes, or None outside git. """
    try:
        changed = git('diff', 'HEAD', '--name-only', '--', '*.py', '*.toml')
        return git('rev-parse', '--short', 'HEAD') + ('+' if changed else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device):
    if device.type == 'cuda':
        name = torch.cuda.get_device_name(device)
    else:
        name = f'{device.type}, {os.cpu_count()} cores, threads: {torch.get_num_threads()}'
    return {'torch': torch.__version__, 'device': name, 'commit': commit()}


def table(rows):
    """ Rows of strings as aligned text, the first column left, the others right. """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append('  '.join(cells))
    return '\n'.join(lines)
