"""
Where a run's settings come from: dataclass default < TOML file < --key=value. Nothing is executed.

    python train.py config/shakespeare_char.toml --residual=block --batch_size=32 --compile

The dataclass is the whole specification: a field's name is the key, its annotation the type, the
comment at the end of its line the help. A comment on a line of its own begins a group of keys.
"""
import difflib
import inspect
import os
import re
import reprlib
import sys
import textwrap
import tomllib
import types
from contextlib import suppress
from dataclasses import fields

brief = reprlib.Repr()  # repr, but never longer than a line
brief.maxstring, brief.maxlong, brief.maxother = 100, 40, 100
NANOGPT = {'block_size': 'n_ctx'}


def parse(cls, argv, description=None, program=None):
    """ The settings given in TOML files and on the command line, {key: value}; defaults left out.

    argv: TOML files, --key=value, bare --flag. program: what --help calls the program. Bad input
    ends it: exit code 2, one line that names the key.
    """
    kinds = {f.name: f.type for f in fields(cls)}
    given, from_files = {}, {}
    for argument in argv:
        key, has_value, text = argument.removeprefix('--').partition('=')
        if argument in ('-h', '--help'):
            print(usage(cls, description, program or os.path.basename(sys.argv[0])))
            raise SystemExit(0)
        if names_file(argument):
            from_files |= read(argument.removeprefix('--config='), kinds)
        elif not argument.startswith('--') or key not in kinds:
            fail(unknown(key, kinds))
        elif key in given:
            fail(f'{key}={brief.repr(text)}: must be given only once')
        elif not has_value and bool not in union(kinds[key]):
            fail(f'{key}: must have a value: --{key}={spell(kinds[key]).upper()}')
        else:
            given[key] = convert(key, text if has_value else 'true', kinds[key])
    return from_files | given


def names_file(argument):
    """ Whether an argument is a TOML file: FILE or --config=FILE (or a bare --config). """
    return not argument.startswith('-') or argument.removeprefix('--').partition('=')[0] == 'config'


def expand(path):
    """ path with ~ at its start replaced by the home folder, as for any path that a user gives. """
    return os.path.expanduser(path)


def read(path, kinds):
    """ The settings in a TOML file. Their types are checked with all others, in checker. """
    try:
        with open(expand(path), 'rb') as f:
            values = tomllib.load(f)
    except (OSError, ValueError, RecursionError) as e:  # ValueError: malformed or not UTF-8
        fail(f'{brief.repr(path)}: must be a TOML file: {getattr(e, "strerror", None) or e}')
    for key in values:
        if key not in kinds:
            fail(f'{brief.repr(path)}: {unknown(key, kinds)}')
    return values


def origin(message, argv):
    """ If message is about a key that a file among argv has set: words that say so; else ''. """
    key = str(message).partition('=')[0]
    if any(a.startswith(f'--{key}=') for a in argv):
        return ''
    for argument in reversed(argv):
        if names_file(argument):
            path = expand(argument.removeprefix('--config='))
            with suppress(OSError, ValueError), open(path, 'rb') as f:
                if key in tomllib.load(f):
                    return f' ({key} is set in {path})'
    return ''


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
    """ Checks all types; makes an int a float where one is wanted. Returns check(key, ok, allowed),
    which raises a ValueError that names key unless ok.
    """
    def check(key, ok, allowed):
        if not ok:
            raise ValueError(f'{key}={brief.repr(getattr(settings, key))}: must be {allowed}')

    for f in fields(settings):
        value = getattr(settings, f.name)
        fits = type(value) is int and abs(value) < 2**1000  # a float holds it
        if float in union(f.type) and fits:
            value = float(value)
            setattr(settings, f.name, value)
        check(f.name, type(value) in union(f.type), 'of type ' + spell(f.type))
    return check


def build(cls, values, argv=()):
    """ cls(**values); a ValueError ends the program. argv: to say which file a value is from. """
    try:
        return cls(**values)
    except ValueError as e:
        fail(f'{e}{origin(e, argv)}')


def fail(message, code=2):
    """ Ends the program with one line on stderr. Code 2: bad input; 1: a failed run. """
    one_line = ' '.join(str(message).split())
    line = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in one_line)
    if len(line) > 600:
        line = line[:300] + ' ... ' + line[-300:]
    print('error:', line, file=sys.stderr)
    raise SystemExit(code)


def unknown(key, kinds):
    near = difflib.get_close_matches(key[:100], kinds, 1)
    if NANOGPT.get(key) in kinds:  # a name of nanoGPT's
        near = [NANOGPT[key]]
    hint = f'did you mean {near[0]}?' if near else '--help lists them all'
    return f'{brief.repr(key)}: must be a key; {hint}'


def usage(cls, description, program):
    """ The help: every key with its default and its meaning, by groups, a class's own before those
    of its base.
    """
    groups, seen = {}, set()
    for c in cls.__mro__[:-1]:
        group = ''
        for line in inspect.getsource(c).splitlines():
            field = re.match(r'    (\w+): [^#]*# (.*)', line)
            if heading := re.fullmatch(r'    # (\w+)', line):
                group = heading[1]
            elif field and field[1] not in seen:
                seen.add(field[1])
                groups.setdefault(group, []).append(field.groups())
    lines = [f'usage: {program} [FILE.toml ...] [--key=value ...]', (description or '').strip(),
             'Every key with its default; a bare --key is --key=true.']
    defaults = {f.name: f.default for f in fields(cls)}
    for group, keys in groups.items():
        lines += ['', f'{group}:'] if group else ['']
        for key, meaning in keys:
            default = defaults[key]
            if default is None or isinstance(default, bool):
                default = str(default).lower()
            lines += textwrap.wrap(f'  --{key}={default}'.ljust(31) + f' {meaning}', 100,
                                   subsequent_indent=' ' * 32, break_on_hyphens=False)
    return '\n'.join(lines)


def union(kind):
    return kind.__args__ if isinstance(kind, types.UnionType) else (kind,)


def spell(kind):
    return '|'.join('none' if k is types.NoneType else k.__name__ for k in union(kind))
