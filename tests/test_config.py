""" Settings: dataclass default < TOML < command line; every kind of bad input ends in one line and exit code 2. """
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import compare
import config as configuration
import experiments.loss
import experiments.scaling
import experiments.sweep
import sample
import train
from data import prepare

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Settings:
    size: int = 3  # how big
    rate: float = 0.5  # how fast, in % of nothing
    name: str = 'x'  # what it is called
    on: bool = False  # whether
    maybe: bool | None = None  # perhaps
    top: int | None = 7  # or none

    def __post_init__(self):
        configuration.checker(self)('size', self.size > 0, 'positive')


def refused(call, capsys):
    """ The one line on stderr of a call that must end with exit code 2. """
    with pytest.raises(SystemExit) as e:
        call()
    captured = capsys.readouterr()
    assert e.value.code == 2, captured
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and len(lines[0]) < 700, captured.err
    assert captured.err.isascii() or captured.err[:-1].isprintable()
    return lines[0]


def toml(folder, text, name='a.toml'):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_the_command_line_goes_over_files_over_defaults(tmp_path):
    a, b = toml(tmp_path, 'size = 5\nrate = 2\n'), toml(tmp_path, 'size = 6\non = true\n', 'b.toml')
    assert configuration.parse(Settings, []) == {}
    assert configuration.parse(Settings, [a, '--config=' + b]) == {'size': 6, 'rate': 2, 'on': True}
    assert configuration.parse(Settings, ['--size=7', a, '--on=false', b]) == {'size': 7, 'rate': 2, 'on': False}


def test_a_tilde_in_the_name_of_a_file_is_the_home_folder(tmp_path, monkeypatch):
    toml(tmp_path, 'size = 5')
    monkeypatch.setenv('HOME', str(tmp_path))
    for argument in ('~/a.toml', '--config=~/a.toml'):
        assert configuration.parse(Settings, [argument]) == {'size': 5}


def test_flags_and_values():
    parse = lambda *argv: configuration.parse(Settings, argv)  # noqa: E731
    assert parse('--on', '--maybe') == {'on': True, 'maybe': True}
    assert parse('--on=false', '--maybe=none', '--top=None') == {'on': False, 'maybe': None, 'top': None}
    assert parse('--name=a=b', '--rate=1e-3', '--top=2') == {'name': 'a=b', 'rate': 1e-3, 'top': 2}
    assert parse('--name=', '--on=1', '--maybe=0') == {'name': '', 'on': True, 'maybe': False}


def test_whole_numbers_will_do_for_floats_and_nothing_else_is_converted():
    assert type(Settings(rate=1).rate) is float
    for wrong in ({'rate': True}, {'size': 1.0}, {'on': 1}, {'name': None}, {'rate': 10**400}, {'top': [1]}):
        with pytest.raises(ValueError, match=f'^{next(iter(wrong))}=.*: must be of type'):
            Settings(**wrong)


def test_help_lists_every_key_with_meaning_and_default(capsys):
    for main, cls in ((train.main, train.TrainConfig), (sample.main, sample.SampleConfig)):
        with pytest.raises(SystemExit) as e:
            main(['--help'])
        assert e.value.code in (0, None)
        out = capsys.readouterr().out
        for key in cls.__dataclass_fields__:
            default = cls.__dataclass_fields__[key].default
            shown = str(default).lower() if default is None or type(default) is bool else default
            line, = re.findall(rf'^  --{key}={re.escape(str(shown))}\s+(.*)$', out, re.MULTILINE)
            assert len(line) > 3, key


@pytest.mark.parametrize(
    'argument, said',
    [
        ('--siz=3', "'siz': must be a key; did you mean size?"),
        ('--zzzz=3', "'zzzz': must be a key; --help"),
        ('--size=x', "size='x': must be of type int"),
        ('--size', 'size: must have a value: --size=INT'),
        ('--on=perhaps', "on='perhaps': must be of type bool"),
        ('-size=3', 'must be a key'),
        ('nothing.toml', "'nothing.toml': must be a TOML file: No such file"),
        ('--top=', "top='': must be of type int|none"),
        ('--size=-4', 'size=-4: must be positive'),
        ('--size=' + '9' * 5000, 'must be of type int'),
    ],
)
def test_refusals_name_the_key(argument, said, capsys):
    line = refused(lambda: configuration.build(Settings, configuration.parse(Settings, [argument])), capsys)
    assert said in line


@pytest.mark.parametrize('keys, near', [(train.TrainConfig, 'did you mean n_ctx?'), (Settings, '--help lists')])
def test_a_key_of_nanogpt_is_told_its_name_here(keys, near, capsys):
    assert near in refused(lambda: configuration.parse(keys, ['--block_size=64']), capsys)


def test_other_words_of_nanogpt():
    for word in ('resume', 'scratch'):
        with pytest.raises(ValueError, match=f"init_from='{word}': must be .*--resume goes on"):
            train.TrainConfig(init_from=word)


def test_a_key_given_twice_is_refused(capsys):
    assert 'size=' in refused(lambda: configuration.parse(Settings, ['--size=1', '--size=2']), capsys)


@pytest.mark.parametrize('text, said', [
    ('siz = 3', 'did you mean size?'), ('[model]\nsize = 3', "'model': must be a key"), ('size = 3\nsize = 4', 'TOML'),
    (b'name = "\xff"', 'TOML'), ('size = ', 'TOML'), ('name = 3', 'name=3: must be of type str'),
    ('size = "3"', "size='3': must be of type int"), ('on = 1', 'on=1: must be of type bool'),
    ('size = ' + '9' * 5000, 'TOML'), ('name = ' + '[' * 5000, 'TOML'), ('size = 1979-05-27', 'size=')])
def test_a_bad_file_is_refused(text, said, tmp_path, capsys):
    path = toml(tmp_path, text)
    assert said in refused(lambda: configuration.build(Settings, configuration.parse(Settings, [path])), capsys)


def test_no_file_is_executed(tmp_path, capsys):
    path = toml(tmp_path, f"import os; os.makedirs('{tmp_path}/pwned')", 'a.py')
    refused(lambda: configuration.parse(Settings, [path]), capsys)
    assert not (tmp_path / 'pwned').exists()


def test_every_file_in_config_is_good():
    for path in sorted((ROOT / 'config').glob('*.toml')):
        cls = {'compare': experiments.loss.CompareConfig, 'scaling': experiments.scaling.ScalingConfig}.get(
            path.name.split('_')[0], train.TrainConfig)
        cls(**configuration.parse(cls, [str(path)]))


AWKWARD = [
    '',
    ' ',
    '\0',
    '\n',
    'é\u0301\u202e',
    '\U0001f600',
    '\udcff',
    'nan',
    '-inf',
    '1e999',
    '-1',
    '0',
    '1.5',
    '9' * 30,
    '9' * 5000,
    '0x10',
    'None',
    'tru',
    '[]',
    '{}',
    '%s%n',
    '../..',
    '/dev/null/x',
    '"',
    "'",
    'a' * 3000,
    '=',
    '--',
]


def bad_lines(rng, cls, folder):
    """ Command lines with at least one fault each that no reading of the documentation allows. """
    keys = list(cls.__dataclass_fields__.values())
    numbers = [f for f in keys if f.type in (int, float)]
    for i in range(80):
        f, kind = rng.choice(numbers), rng.randrange(7)
        junk = rng.choice([a for a in AWKWARD if a.strip() not in ('0', '1.5', '9' * 30)])
        junk = '-1' if junk == '-1' and f.name != 'temperature' else junk
        if kind == 0:
            yield [f'--{f.name}={junk}x']
        elif kind == 1:
            yield [f'--{f.name}={rng.choice(["nan", "inf", "-inf", "1e999", "-1", "-7", "[1]"])}']
        elif kind == 2:
            yield [rng.choice(['-', '--', '---']) + junk.replace('=', '') + f.name + 'q']
        elif kind == 3:
            yield [f'--{f.name}=1', f'--{f.name}=1']
        elif kind == 4:
            text = rng.choice(
                [
                    f'{f.name} = ',
                    f'{f.name} = "1"',
                    f'{f.name} = true',
                    f'{f.name} = [1, 2]',
                    f'{f.name} = 1\n{f.name} = 1',
                    f'{f.name}_ = 1',
                    '\0',
                    '\ufeff',
                    f'{f.name} = {{a = 1}}',
                ]
            )
            yield [toml(folder, text, f'{i}.toml')]
        elif kind == 5:
            yield [toml(folder, bytes(rng.randrange(128, 256) for _ in range(20)), f'{i}.toml')]
        else:
            files = str(folder), str(folder / 'none.toml'), junk.strip('-') + '.toml', f'--config={folder}'
            yield [rng.choice(files)]


@pytest.mark.parametrize('program', ['train', 'sample', 'compare', 'sweep', 'scaling'])
def test_malformed_command_lines_end_in_one_line(program, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cls, main = {'train': (train.TrainConfig, train.main), 'sample': (sample.SampleConfig, sample.main),
                 'compare': (experiments.loss.CompareConfig, compare.main),
                 'sweep': (experiments.sweep.SweepConfig, lambda argv: compare.main(['sweep', *argv])),
                 'scaling': (experiments.scaling.ScalingConfig, lambda argv: compare.main(['scaling', *argv]))}[program]
    (tmp_path / 'toml').mkdir()
    for argv in bad_lines(random.Random(program), cls, tmp_path / 'toml'):
        try:
            refused(lambda argv=argv: main(list(argv)), capsys)
        except BaseException as e:
            raise AssertionError(f'{program} {[a[:200] for a in argv]}: {type(e).__name__} {e}') from e
    assert {p.name for p in tmp_path.iterdir()} == {'toml'}  # nothing written


def test_malformed_texts_end_in_one_line(tmp_path, capsys, monkeypatch):
    for i, data in enumerate((b'', b'\xff\xfe', b'\xef\xbb\xbf', b'a', b'ab', 'é'.encode()[:1], b'\xc0\x80' * 9)):
        path = toml(tmp_path, data, f'{i}.txt')
        refused(lambda path=path: prepare.main([f'--input={path}', '--name=malformed_text']), capsys)
    for argv in ([], ['nothing'], ['--input=/'], ['--input='], ['--input=\0'], ['--val_fraction=2', 'shakespeare_char'],
                 ['--val_fraction=nan', 'shakespeare_char'], ['--nam=x'], ['--tokenizer=bpe', 'shakespeare_char']):
        refused(lambda argv=argv: prepare.main(argv), capsys)
    assert not (prepare.DATA / 'malformed_text').exists()


@pytest.mark.slow
def test_real_processes_too(tmp_path):
    out = tmp_path / 'out'
    for argv in (['train.py', '--n_layr=3'], ['train.py', '--learning_rate=nan'], ['train.py', str(tmp_path)],
                 ['train.py', '--out_dir=/dev/null/x'], ['train.py', '--n_ctx=2000000', f'--out_dir={out}'],
                 ['train.py', '--n_layer=1000000', f'--out_dir={out}'], ['train.py', '--resume', f'--out_dir={out}'],
                 ['sample.py', f'--out_dir={out}'], ['compare.py', '--modes=none'], ['data/prepare.py', '--input=/']):
        r = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
        assert r.returncode == 2 and len(r.stderr.splitlines()) == 1 and r.stderr.startswith('error: '), (argv, r)
        assert not out.exists() or not [p for p in out.iterdir() if p.name != 'lock']
