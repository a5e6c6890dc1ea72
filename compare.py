"""
Compares residual rules.

    python compare.py                    trains standard, full and block: a table, a picture
    python compare.py --seeds=5 --modes=standard,block:4           paired seeds; N = 4 blocks
    python compare.py sweep --vary=learning_rate=1e-3,2e-3,4e-3    each mode over a key
    python compare.py scaling            a ladder of sizes, power laws, compute saved
    python compare.py speed --shape=B    cost of a training step by mode and kernel
    python compare.py depth DIR DIR --out=FOLDER                   what trained models read
    python compare.py results            writes RESULTS.md; --check: is it up to date?

VERB --help lists the keys of a verb. With --json stdout is JSON, all else goes to stderr.
"""
if __name__ == '__main__':
    from config import program
    program.begin()
import contextlib
import importlib
import json
import sys

import config as configuration

VERBS = ('loss', 'sweep', 'scaling', 'speed', 'depth', 'results')  # files in experiments/


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    verb, rest = (argv[0], argv[1:]) if argv and argv[0] in VERBS else ('loss', argv)
    if verb == 'loss' and rest and not rest[0].startswith('-') and not rest[0].endswith('.toml'):
        configuration.fail(f'unknown verb {rest[0]!r}: must be one of ' + ', '.join(VERBS))
    if argv in (['-h'], ['--help']):
        print(__doc__.strip() + '\n')
    as_json, keys = '--json' in rest, [key for key in rest if key != '--json']
    try:
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            data = importlib.import_module(f'experiments.{verb}').main(keys)
        if as_json:
            print(json.dumps(data))
        return data
    except BrokenPipeError:
        raise  # whoever read the output has gone
    except ValueError as e:
        configuration.fail(e)
    except (RuntimeError, OSError) as e:  # an OSError is from writing; bad input is a ValueError
        configuration.fail(e, code=1)
    except KeyboardInterrupt:
        goes_on = ': the same command goes on, without --overwrite' if verb in VERBS[:3] else ''
        configuration.fail(f'interrupted{goes_on}', code=130)


if __name__ == '__main__':
    program.run(main)
