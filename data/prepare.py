"""
Turns texts into token files: data/NAME/train.bin, val.bin (uint16, little-endian) and meta.json.

    python data/prepare.py shakespeare_char                    the bundled text
    python data/prepare.py --input=my.txt --tokenizer=gpt2     any UTF-8 text, here as data/my
    python data/prepare.py openwebtext                         8 million documents; goes on where it was stopped
    python data/prepare.py 'jsonl:my/*.jsonl.gz' --name=my     your documents; also parquet:GLOB and hf:NAME[:CONFIG]
"""
import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == '__main__':  # run as a script: Python would look in data/ only
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.documents import prepare_documents  # noqa: E402
from data.files import DATA, SPLITS, check_name, locked, write  # noqa: E402
from data.tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, tokenizer_from  # noqa: E402, F401

BUNDLED = {'shakespeare_char': ('shakespeare.txt', 'char'), 'shakespeare': ('shakespeare.txt', 'gpt2')}
CORPORA = {'openwebtext': 'hf:Skylion007/openwebtext'}


def read(path):
    """ The text of a UTF-8 file, newlines as they are, without a byte order mark. """
    try:
        if text := path.read_bytes().decode('utf-8').removeprefix('\ufeff'):
            return text
        fault = 'is empty'
    except OSError as e:
        fault = e.strerror
    except UnicodeDecodeError as e:
        fault = f'is not UTF-8 at byte {e.start}'
    raise ValueError(f'input={str(path)!r}: {fault}; give a UTF-8 text file')


def prepare(name: str, input=None, tokenizer=None, val_fraction: float = 0.1, root=DATA) -> dict:
    """ Writes root/NAME from the text file input, or from the bundled text of that name. Returns its meta.

    tokenizer: char, bytes or gpt2; None: the bundled text's, else char. The last val_fraction of the characters is for
    validation. ValueError says what is wrong; then nothing is written.
    """
    if input is None and name not in BUNDLED:
        raise ValueError(f'name={name!r}: not a bundled text ({", ".join(BUNDLED)}); give your own: --input=FILE')
    bundled, kind = BUNDLED[name] if input is None else (None, 'char')
    path, kind = DATA / bundled if bundled else Path(input), kind if tokenizer is None else tokenizer
    text, folder = read(path), Path(root) / name
    check_name(name)
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction={val_fraction!r}: must be between 0 and 1, for example 0.1')
    tok = CharTokenizer.train(text) if kind == 'char' else tokenizer_from({'kind': kind})
    cut = int(len(text) * (1 - val_fraction))
    tokens = {'train': tok.encode(text[:cut]), 'val': tok.encode(text[cut:])}
    counts = {split: len(tokens[split]) for split in SPLITS}
    if min(counts.values()) < 2:
        raise ValueError(f'input={str(path)!r}: too short, {counts["train"]} + {counts["val"]} tokens (train + val), '
                         'each must have 2; give a longer text or another val_fraction')
    files = {f'{split}.bin': tokens[split].astype('<u2').tobytes() for split in SPLITS}
    meta = {'tokenizer': tok.state(), 'n_vocab': tok.n_vocab, 'characters': len(text), 'tokens': counts,
            'val_fraction': val_fraction, 'origin': path.name,
            'sha256': {split: hashlib.sha256(files[f'{split}.bin']).hexdigest() for split in SPLITS}}
    files['meta.json'] = json.dumps(meta, indent=1).encode()
    with locked(folder):
        if files != {p.name: p.read_bytes() for p in folder.iterdir() if p.name in files}:  # if so, another was first
            write(folder, files)
    return meta


def load(name: str, root=DATA) -> tuple[dict, dict]:
    """ (meta, {'train': tokens, 'val': tokens}), memory-mapped uint16. Prepares a bundled text that is missing. """
    folder = Path(root) / name
    if name in BUNDLED and not (folder / 'meta.json').exists():
        prepare(name, root=root)
    try:
        meta = json.loads((folder / 'meta.json').read_bytes())
        tokens = {split: np.memmap(folder / f'{split}.bin', '<u2', 'r') for split in SPLITS}
        if any(len(tokens[split]) != meta['tokens'][split] for split in SPLITS):
            raise ValueError('sizes differ from meta.json')
        if tokenizer_from(meta['tokenizer']).n_vocab != meta['n_vocab'] or {*meta['sha256']} != {*SPLITS}:
            raise ValueError('meta.json does not fit itself')
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        how = name if name in {**BUNDLED, **CORPORA} else f'--input=FILE --name={name}'
        raise ValueError(f'dataset={name!r}: missing or damaged, {e}; run python data/prepare.py {how}') from e
    return meta, tokens


def main(argv=None):
    def fail(message, code=2):
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
        raise SystemExit(code)

    parser = argparse.ArgumentParser(description='Turns texts into token files in data/NAME.', allow_abbrev=False)
    parser.error = fail  # argparse would print its usage, too
    parser.add_argument('dataset', nargs='?', metavar='NAME', help='a bundled text: ' + ', '.join(BUNDLED) + '; '
                        'documents: ' + ', '.join(CORPORA) + ', hf:NAME[:CONFIG], parquet:GLOB, jsonl:GLOB')
    parser.add_argument('--input', metavar='FILE', help='a UTF-8 text file of your own')
    parser.add_argument('--name', help="of the folder in data/ (default: the file's or data set's)")
    parser.add_argument('--tokenizer', help='char, bytes or gpt2 (default: char; of shakespeare and documents: gpt2)')
    parser.add_argument('--val_fraction', type=float, help='text: its end (default: 0.1)')
    parser.add_argument('--val_every', type=int, help='documents: every 2000th (the default)')
    parser.add_argument('--num_proc', type=int, help='documents: processes (default: one a core, 16 at most)')
    args = parser.parse_args(argv)
    source = CORPORA.get(args.dataset, args.dataset or '')
    documents = source.startswith(('hf:', 'parquet:', 'jsonl:'))
    if args.dataset is None and args.input is None:
        fail('nothing to prepare: give the name of a bundled text or --input=FILE')
    if documents and (args.input is not None or args.tokenizer not in (None, 'gpt2')):
        fail('input, tokenizer: must be left out with ' + args.dataset)
    of_text, of_documents = ({k: v for k in names if (v := getattr(args, k)) is not None}
                             for names in (('val_fraction',), ('val_every', 'num_proc')))
    ours, others = (of_documents, of_text) if documents else (of_text, of_documents)
    if others:
        fail(', '.join(others) + ': must be left out with ' + ('documents' if documents else 'a text'))
    if documents and args.name is None and not source.startswith('hf:'):
        fail('name: must be given with ' + args.dataset)
    default = source.split('/')[-1].replace(':', '-') if documents and args.dataset == source else args.dataset
    name = next(n for n in (args.name, default, Path(args.input or '').stem) if n is not None)
    if args.input is not None and name in {**BUNDLED, **CORPORA}:
        fail(f'name={name!r}: is that of a data set that comes with this; give another --name')
    try:
        meta = prepare_documents(name, source, **{'num_proc': min(os.cpu_count() or 1, 16)} | ours) \
            if documents else prepare(name, args.input, args.tokenizer, **ours)
        print(f'data/{name}: {meta["tokens"]["train"]:,} train and {meta["tokens"]["val"]:,} val tokens, '
              f'vocabulary {meta["n_vocab"]:,} ({meta["tokenizer"]["kind"]}), from {meta["origin"]}', flush=True)
    except ValueError as e:
        fail(e)
    except KeyboardInterrupt:
        fail('stopped; of documents, what is finished is kept: the same command goes on from there', 130)
    except OSError as e:  # of the line above; what concerns files is a ValueError
        fail(e, 1)


if __name__ == '__main__':
    main()
