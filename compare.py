"""
Compares residual rules.

    python compare.py                     trains standard, full and block on Shakespeare: one table, one picture
    python compare.py --seeds=5 --modes=standard,block:4      paired seeds; block:N: block mode with N residual blocks
    python compare.py sweep --vary=learning_rate=1e-3,2e-3,4e-3            each mode over the values of a key
    python compare.py scaling             a ladder of sizes, power laws, the compute that a rule saves
    python compare.py speed --shape=B     cost of a training step by mode and kernel
    python compare.py results --check     is RESULTS.md up to date? Without --check: writes it
    python compare.py depth DIR DIR --out=FOLDER              what the sublayers of trained models read: maps, dynamics

`python compare.py VERB --help` lists the keys of a verb.
"""
import contextlib
import importlib
import json
import sys

import config as configuration

VERBS = {name: f'experiments.{name}' for name in ('loss', 'speed', 'depth', 'sweep', 'scaling', 'results')}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    verb, rest = (argv[0], argv[1:]) if argv and argv[0] in VERBS else ('loss', argv)
    if rest and verb == 'loss' and not rest[0].startswith('-') and not rest[0].endswith('.toml'):
        configuration.fail(f'unknown verb {rest[0]!r}: one of ' + ', '.join(VERBS))
    as_json = '--json' in rest
    try:
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            data = importlib.import_module(VERBS[verb]).main([a for a in rest if a != '--json'])
        if as_json:
            print(json.dumps(data))
        return data
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)
    except OSError as e:  # its output's: what concerns files is a ValueError
        configuration.fail(e, code=1)
    except KeyboardInterrupt:
        configuration.fail('interrupted; what is done is kept: the same command goes on, without --overwrite', code=130)


if __name__ == '__main__':
    main()
