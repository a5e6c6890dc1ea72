"""
Where a run's settings come from: dataclass default < TOML file < --key=value. Nothing is executed.

    python train.py config/shakespeare_char.toml --residual=block --batch_size=32 --compile

The dataclass is the whole specification: field name = key, annotation = type, comment at the line's end = help. What
standard argparse does not do is little: read those comments, take both --flag and --flag=false, name the nearest key.
"""
import argparse
import difflib
import inspect
import re
import sys
import tomllib
import types
from dataclasses import fields


def parse(cls, argv, description=None, positional=()):
    """ The settings given in TOML files and on the command line, {key: value}, all known to cls; defaults left out.

    argv: arguments without the program's name: TOML files, --key=value, bare --flag. positional: names of arguments
    without dashes that come before the files. Bad input ends the program: exit code 2, one line that names the key.
    """
    parser = Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    usage='%(prog)s ' + ' '.join((*positional, '[FILE.toml ...] [--key=value ...]')))
    for name in positional:
        parser.add_argument(name)
    parser.add_argument('files', nargs='*', metavar='FILE.toml', help='settings, later ones over earlier ones')
    parser.add_argument('--config', action='append', metavar='FILE.toml', help='the same, as a key')
    helps = comments(cls)
    for f in fields(cls):
        parser.add_argument(f'--{f.name}', type=converter(f.type), metavar=spell(f.type).upper(),
                            help=f'{helps.get(f.name, "")} (default: {f.default})'.replace('%', '%%'))
    parser.keys = [f.name for f in fields(cls)]
    bare = {f'--{f.name}' for f in fields(cls) if bool in union(f.type)}
    given = vars(parser.parse_args([a + '=true' if a in bare else a for a in argv]))
    values = {}
    for path in given.pop('files', []) + given.pop('config', []):
        values |= parser.read(path)
    return values | given


def build(cls, values):
    """ cls(**values); a ValueError it raises ends the program like any other bad input. """
    try:
        return cls(**values)
    except ValueError as e:
        fail(e)


def fail(message, code=2):
    """ Ends the program with one line on stderr. Code 2: bad input; 1: a failed run. """
    print(f'error: {" ".join(str(message).split())}', file=sys.stderr)
    raise SystemExit(code)


class Parser(argparse.ArgumentParser):
    keys = ()

    def error(self, message):
        unknown = re.match(r'unrecognized arguments: --([^=\s]+)', message)
        if unknown:
            message = self.unknown(unknown[1])
        fail(message.replace('argument --', '').replace('unrecognized arguments', 'not a key (--key=value) or a file'))

    def unknown(self, key, where=''):
        near = difflib.get_close_matches(key, self.keys, 1)
        return f'unknown key {key!r}{where}' + (f': did you mean {near[0]}?' if near else ' (--help lists every key)')

    def read(self, path):
        """ The settings in one TOML file; its values must have the types of the keys. """
        try:
            with open(path, 'rb') as f:
                values = tomllib.load(f)
        except OSError as e:
            self.error(f'{path!r}: {e.strerror}')
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as e:
            self.error(f'{path!r} is not valid TOML: {e}')
        for key in values:
            if key not in self.keys:
                self.error(self.unknown(key, f' in {path}'))
        return values


def comments(cls):
    """ {field: the comment at the end of its line}, base classes included. """
    found = {}
    for c in reversed(cls.__mro__[:-1]):
        found |= dict(re.findall(r'^    (\w+): [^#\n]*# (.*)$', inspect.getsource(c), re.MULTILINE))
    return found


def union(kind):
    return kind.__args__ if isinstance(kind, types.UnionType) else (kind,)


def spell(kind):
    return '|'.join('none' if k is types.NoneType else k.__name__ for k in union(kind))


def converter(kind):
    """ A function from a command line's text to a value of type kind, for example int | None. """
    def convert(text):
        for k in union(kind):
            if k is types.NoneType and text.lower() == 'none':
                return None
            if k is bool and text.lower() in ('true', 'false', '1', '0'):
                return text.lower() in ('true', '1')
            if k in (int, float, str):
                try:
                    return k(text)
                except ValueError:
                    pass
        raise argparse.ArgumentTypeError(f'{text!r} is not of type {spell(kind)}')
    return convert
