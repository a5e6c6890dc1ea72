"""
Where a run's settings come from: dataclass default < TOML file < --key=value. Nothing is executed.

    python train.py config/shakespeare_char.toml --residual=block --batch_size=32 --compile

The dataclass is the whole specification: field name = key, annotation = type, comment at the line's end = help.
"""
import difflib
import inspect
import os
import re
import reprlib
import sys
import tomllib
import types
from contextlib import suppress
from dataclasses import fields

brief = reprlib.Repr()  # repr, but never longer than a line
brief.maxstring, brief.maxlong, brief.maxother = 100, 40, 100
NANOGPT = {'block_size': 'n_ctx', 'eval_only': 'max_iters=0'}  # its keys that have another name here


def parse(cls, argv, description=None):
    """ The settings given in TOML files and on the command line, {key: value}, all known to cls; defaults left out.

    argv: TOML files, --key=value, bare --flag. Bad input ends the program: exit code 2, one line that names the key.
    """
    kinds = {f.name: f.type for f in fields(cls)}
    given, files = {}, {}
    for a in argv:
        key, has_value, text = a.removeprefix('--').partition('=')
        if a in ('-h', '--help'):
            raise SystemExit(print(usage(cls, description)))
        if not a.startswith('-') or key == 'config':
            files |= read(a.removeprefix('--config='), kinds)
        elif not a.startswith('--') or key not in kinds:
            fail(unknown(key, kinds))
        elif key in given:
            fail(f'{key}={brief.repr(text)}: must be given only once')
        elif not has_value and bool not in union(kinds[key]):
            fail(f'{key}: must have a value: --{key}={spell(kinds[key]).upper()}')
        else:
            given[key] = convert(key, text if has_value else 'true', kinds[key])
    return files | given


def expand(path):
    """ path with a leading ~ replaced by the home folder, wherever the user names a file or a folder. """
    return os.path.expanduser(path)


def read(path, kinds):
    """ The settings in one TOML file, all of them keys. Their types are checked with everything else, in checker. """
    try:
        with open(expand(path), 'rb') as f:
            values = tomllib.load(f)
    except (OSError, ValueError, RecursionError) as e:  # not there, malformed, not UTF-8, a number of 5000 digits
        fail(f'{brief.repr(path)}: must be a TOML file: {getattr(e, "strerror", None) or e}')
    for key in (k for k in values if k not in kinds):
        fail(f'{brief.repr(path)}: {unknown(key, kinds)}')
    return values


def convert(key, text, kind):
    """ A command line's text as a value of type kind, for example int | None. """
    for k in union(kind):
        if k is types.NoneType and text.lower() == 'none':
            return None
        if k is bool and text.lower() in ('true', 'false', '1', '0'):
            return text.lower() in ('true', '1')
        if k in (int, float, str):
            with suppress(ValueError):  # the next kind may fit
                return k(text)
    fail(f'{key}={brief.repr(text)}: must be of type {spell(kind)}')


def checker(settings):
    """ Checks the types of all settings; returns check(key, ok, allowed), a ValueError that names key unless ok. """
    def check(key, ok, allowed):
        if not ok:
            raise ValueError(f'{key}={brief.repr(getattr(settings, key))}: must be {allowed}')

    for f in fields(settings):
        if float in union(f.type) and type(value := getattr(settings, f.name)) is int and abs(value) < 2**1000:
            setattr(settings, f.name, float(value))
        check(f.name, type(getattr(settings, f.name)) in union(f.type), 'of type ' + spell(f.type))
    return check


def build(cls, values):
    """ cls(**values); a ValueError ends the program. """
    try:
        return cls(**values)
    except ValueError as e:
        fail(e)


def fail(message, code=2):
    """ Ends the program with one line on stderr. Code 2: bad input; 1: a failed run. """
    line = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in ' '.join(str(message).split()))
    print('error:', line if len(line) <= 600 else line[:300] + ' ... ' + line[-300:], file=sys.stderr)
    raise SystemExit(code)


def unknown(key, kinds):
    ours = NANOGPT.get(key, '')
    near = [ours] if ours.split('=')[0] in kinds else difflib.get_close_matches(key[:100], kinds, 1)
    return f'{brief.repr(key)}: must be a key; ' + (f'did you mean {near[0]}?' if near else '--help lists them all')


def usage(cls, description):
    """ The help: every key with its type, its meaning and its default. """
    source = ''.join(inspect.getsource(c) for c in reversed(cls.__mro__[:-1]))  # base classes first
    found = dict(re.findall(r'^    (\w+): [^#\n]*# (.*)$', source, re.MULTILINE))
    lines = [f'usage: {os.path.basename(sys.argv[0])} [FILE.toml ...] [--key=value ...]', description or '']
    return '\n'.join(lines + [f'  --{f.name}={spell(f.type).upper()}\n        {found.get(f.name, "")} '
                              f'(default: {f.default!r})' for f in fields(cls)])


def union(kind):
    return kind.__args__ if isinstance(kind, types.UnionType) else (kind,)


def spell(kind):
    return '|'.join('none' if k is types.NoneType else k.__name__ for k in union(kind))
