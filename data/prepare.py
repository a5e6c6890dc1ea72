"""
Turns texts into token files: data/NAME/train.bin, val.bin (uint16, little-endian) and meta.json.

    python data/prepare.py shakespeare_char                   the bundled text
    python data/prepare.py --input=my.txt --tokenizer=gpt2    any UTF-8 text, here as data/my
    python data/prepare.py --input=b.txt --tokenizer=data/my  another, with the characters of my
    python data/prepare.py openwebtext                        8 million documents
    python data/prepare.py 'jsonl:my/*.jsonl.gz' --name=my    your documents; also parquet: and hf:
"""
import argparse
import json
import os
import re
import sys
from pathlib import Path

if __name__ == '__main__':  # Python looks in data/ only for what a script there imports
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from config import program
    program.begin()
import numpy as np  # noqa: E402

import config as configuration  # noqa: E402
from data.documents import prepare_documents  # noqa: E402
from data.files import (  # noqa: E402
    DATA,
    SPLITS,
    check_name,
    find_set,
    locked,
    read_json,
    sha256,
    write_set,
)
from data.tokenizer import (  # noqa: E402, F401
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    choose_tokenizer,
    encode_stream,
    tokenizer_from,
)

BUNDLED = {'shakespeare_char': 'char', 'shakespeare': 'gpt2'}  # shakespeare.txt by these tokenizers
CORPORA = {'openwebtext': 'hf:Skylion007/openwebtext'}
OF_TEXTS, OF_DOCUMENTS = ('val_fraction',), ('val_every', 'num_proc')  # keys of one of them only
READ = 2**20  # characters of a text that are in memory at once


def read(path):
    """ Yields a UTF-8 file in pieces, newlines as they are, without a byte order mark. """
    try:
        with open(path, encoding='utf-8-sig', newline='') as f:
            while text := f.read(READ):
                yield text
    except OSError as e:
        raise ValueError(f'input={str(path)!r}: {e.strerror}; give a UTF-8 text file') from e
    except UnicodeDecodeError as e:
        raise ValueError(f'input={str(path)!r}: is not UTF-8, {e.reason} {e.object[e.start]:#x}; '
                         'give a UTF-8 text file') from e


def read_range(path, start, stop):
    """ Yields the characters of a text file from start to stop, in pieces. """
    position = 0
    for text in read(path):
        yield text[max(start - position, 0):max(stop - position, 0)]
        position += len(text)


def check_input(path):
    """ ValueError if path is not a text that can be read more than once. """
    if kind := re.search(r'\.(jsonl|ndjson|parquet)(\.gz)?$', path.name, re.IGNORECASE):
        source = 'parquet' if kind[1].lower() == 'parquet' else 'jsonl'
        raise ValueError(f'input={str(path)!r}: holds documents, which are no plain text; give '
                         f"'{source}:{path}' --name=NAME in place of --input")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f'input={str(path)!r}: must be a file, since it is read more than once')


def prepare(name: str, input=None, tokenizer=None, val_fraction: float = 0.1, root=DATA,
            overwrite: bool = False) -> dict:
    """ Writes root/NAME from the text file input, or the bundled text of that name. Returns meta.

    tokenizer: char, bytes, gpt2, or a prepared folder, whose own is taken; None: the bundled
    text's, else char. The last val_fraction of the characters is for validation. A set of other
    content or options is replaced with overwrite only. ValueError says what is wrong; then no set
    is written.
    """
    if input is None and name not in BUNDLED:
        raise ValueError(f'name={name!r}: not a bundled text ({", ".join(BUNDLED)}); give your '
                         'own: --input=FILE')
    path = DATA / 'shakespeare.txt' if input is None else Path(os.path.expanduser(input))
    check_input(path)
    known, characters = set(), 0
    for text in read(path):
        known.update(text)
        characters += len(text)
    label = f'input={str(path)!r}'
    if not characters:
        raise ValueError(f'{label}: is empty; give a UTF-8 text file')
    check_name(name)
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction={val_fraction!r}: must be between 0 and 1, for example 0.1')
    if tokenizer is None:
        tokenizer = BUNDLED[name] if input is None else 'char'
    tok = choose_tokenizer(tokenizer, root) or CharTokenizer.train(known)
    if tok.kind == 'char':
        tok.check(known, f'{label}: ', f' of --tokenizer={tokenizer}')
    wanted = {'tokenizer': tok.state(), 'characters': characters, 'val_fraction': val_fraction,
              'text_sha256': sha256(path)}
    cut, folder = int(characters * (1 - val_fraction)), Path(root) / name

    def tokens():
        for split, start, stop in (('train', 0, cut), ('val', cut, characters)):
            for ids in encode_stream(tok, read_range(path, start, stop)):
                yield split, ids

    def meta():
        return wanted | {'n_vocab': tok.n_vocab, 'origin': path.name}

    with locked(folder):
        if there := find_set(folder, wanted, overwrite):
            return there
        return write_set(folder, tokens(), meta, label,
                         'give a longer text or another val_fraction')


def load(name: str, root=DATA) -> tuple[dict, dict]:
    """ (meta, {'train': tokens, 'val': tokens}), memory-mapped uint16.

    A bundled text that is missing is prepared.
    """
    folder = Path(root) / name
    if name in BUNDLED and not (folder / 'meta.json').exists():
        prepare(name, root=root)
    try:
        meta = json.loads((folder / 'meta.json').read_bytes())
        tokens = {split: np.memmap(folder / f'{split}.bin', '<u2', 'r') for split in SPLITS}
        if any(len(tokens[split]) != meta['tokens'][split] for split in SPLITS):
            raise ValueError('sizes differ from meta.json')
        n_vocab = tokenizer_from(meta['tokenizer']).n_vocab
        if n_vocab != meta['n_vocab'] or set(meta['sha256']) != set(SPLITS):
            raise ValueError('meta.json does not fit itself')
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        how = name if name in BUNDLED or name in CORPORA else f'--input=FILE --name={name}'
        raise ValueError(f'dataset={name!r}: missing or damaged, {e}; run python data/prepare.py '
                         f'{how}') from e
    return meta, tokens


def parse(argv):
    """ The command line as a namespace; --help ends the program. """
    parser = argparse.ArgumentParser(
        description='Turns texts into token files in data/NAME.', allow_abbrev=False)
    parser.error = configuration.fail  # argparse would print its usage, too
    add = parser.add_argument
    add('dataset', nargs='?', metavar='NAME',
        help=f'a bundled text ({", ".join(BUNDLED)}), or documents: {", ".join(CORPORA)}, '
             'hf:NAME[:CONFIG], parquet:GLOB or jsonl:GLOB')
    add('--input', metavar='FILE', help='a UTF-8 text file of your own')
    add('--name', help="name of the folder in data/ (default: the file's or the data set's)")
    add('--tokenizer', help='char, bytes, gpt2, or a folder that was prepared, to take its own '
        '(default: char; for shakespeare and documents: gpt2)')
    add('--overwrite', action='store_true', help='replace what data/NAME holds')
    add('--val_fraction', type=float,
        help='of a text, this fraction at its end is for validation (default: 0.1)')
    add('--val_every', type=int,
        help='of documents, every n-th is for validation (default: every 2000th)')
    add('--num_proc', type=int,
        help='number of processes for documents (default: one a core, at most 16)')
    return parser.parse_args(argv)


def choose_name(args, source):
    """ The name of the folder: --name, or else one made of the file's or the data set's. """
    if args.name is not None:
        return args.name
    if args.dataset is None:
        return Path(args.input).stem
    if args.dataset != source or ':' not in source:
        return args.dataset
    if not source.startswith('hf:'):
        configuration.fail(f'name: must be given with {args.dataset}')
    return source.split('/')[-1].replace(':', '-')


def run(args):
    """ Does what the command line asks for and says what came of it. """
    source = CORPORA.get(args.dataset, args.dataset or '')
    documents = source.startswith(('hf:', 'parquet:', 'jsonl:'))
    if args.dataset is None and args.input is None:
        configuration.fail('nothing to prepare: give the name of a bundled text or --input=FILE')
    if documents and args.input is not None:
        configuration.fail(f'input: must be left out with {args.dataset}')
    name = choose_name(args, source)
    if args.input is not None and (name in BUNDLED or name in CORPORA):
        configuration.fail(f'name={name!r}: is that of a data set that comes with this; give '
                           'another --name')
    options = {key: getattr(args, key) for key in ('tokenizer', *OF_TEXTS, *OF_DOCUMENTS)}
    given = {key: value for key, value in options.items() if value is not None}
    kind, foreign = ('documents', OF_TEXTS) if documents else ('a text', OF_DOCUMENTS)
    if wrong := [key for key in foreign if key in given]:
        configuration.fail(f'{", ".join(wrong)}: must be left out with {kind}')
    before = read_json(DATA / name / 'meta.json')
    if documents:
        given.setdefault('num_proc', min(os.cpu_count() or 1, 16))
        meta = prepare_documents(name, source, overwrite=args.overwrite, **given)
    else:
        meta = prepare(name, args.input, overwrite=args.overwrite, **given)
    there = ' is there already' if meta == before and not args.overwrite else ''
    tokens = meta['tokens']
    print(f'data/{name}{there}: {tokens["train"]:,} train and {tokens["val"]:,} val tokens, '
          f'vocabulary {meta["n_vocab"]:,} ({meta["tokenizer"]["kind"]}), from {meta["origin"]}')
    if skipped := meta.get('skipped'):
        print(f'{skipped:,} of {meta["documents"] + skipped:,} documents had no text')


def main(argv=None):
    try:
        run(parse(argv))
    except ValueError as e:
        configuration.fail(e)


if __name__ == '__main__':
    program.run(main)
