""" The repository keeps its promises: budgets, README, names, no traces of the workshop. """
import ast
import inspect
import re
import subprocess
from pathlib import Path

import claims
import pytest

import model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
BUDGETS = {
    'model.py': 441,
    'kernels.py': 487,
    'triton_kernels.py': 172,
    'weights.py': 254,
    'baselines.py': 375,
    'train.py': 640,
    'sample.py': 243,
    'compare.py': 53,
    'config/__init__.py': 180,
    'data/prepare.py': 230,
    'README.md': 170,
    'LEARN.md': 150,
}


def tracked():
    """ The files of the project: git's list, or what a source archive holds. """
    try:
        run = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True)
        return [ROOT / name for name in run.stdout.split('\n') if name and (ROOT / name).exists()]
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob('*') if p.is_file() and not {'.venv', 'out', '__pycache__'} & set(p.parts)]


@pytest.mark.parametrize('name', BUDGETS)
def test_budget(name):
    """ A budget is a promise to the reader: raising one is a change of its own, with a reason. """
    path = ROOT / name
    if path.exists():
        text = path.read_text(encoding='utf-8')
        text = re.sub(r'<!-- begin: (\w+) -->.*?<!-- end: \1 -->', '', text, flags=re.DOTALL)  # generated parts apart
        assert len(text.splitlines()) <= BUDGETS[name]


def test_budget_of_experiments():
    """ Seven verbs, two studies and their pictures, one idea a line. """
    files = (ROOT / 'experiments').glob('*.py')
    assert sum(len(p.read_text(encoding='utf-8').splitlines()) for p in files) <= 2563


def test_no_surprises_at_the_top():
    known = {'model.py', 'kernels.py', 'triton_kernels.py', 'weights.py', 'baselines.py', 'train.py',
             'sample.py', 'compare.py', 'README.md', 'RESULTS.md', 'LEARN.md', 'pyproject.toml', 'LICENSE',
             'CITATION.cff', '.gitignore'}
    assert {p.name for p in tracked() if p.parent == ROOT} <= known


@pytest.mark.parametrize('name', ['FullAttnRes', 'BlockAttnRes'])
def test_readme_shows_the_rules_that_run(name):
    cls = getattr(model, name)
    head, doc, _ = inspect.getsource(cls).split('"""', 2)
    shown = f'{head}"""{doc}"""\n' + inspect.getsource(cls.forward)
    assert shown in README


def test_two_commands_do_everything():
    blocks = re.findall(r'^```sh\n(.*?)^```', README, re.MULTILINE | re.DOTALL)
    compares, = (block for block in blocks if 'venv' in block and 'compare.py' in block)
    tests, = (block for block in blocks if 'pytest' in block)
    for command in (compares, tests):
        assert command.count('\n') == 1 and 'torch==' in command and 'venv' in command


def test_numbers_of_the_front_page_come_from_the_assets():
    front = README[README.index('![Validation loss'):README.index('**Everything measured**')]
    assert front.count('<!-- quiet: ') >= 5
    assert claims.wrong(re.sub(r'```.*?```', '', front, flags=re.DOTALL)) == []


@pytest.mark.parametrize('name', ['README.md', 'RESULTS.md', 'LEARN.md'])
def test_no_comment_breaks_a_paragraph(name):
    """ In Markdown a line that begins with a comment ends the paragraph before it. """
    text = (ROOT / name).read_text(encoding='utf-8')
    assert not re.findall(r'^.*\S.*\n<!--.*', text, re.MULTILINE)


def test_readme_names_files_that_exist():
    folders = r'\b(?:config|data|tests|assets|experiments)'
    for name in re.findall(folders + r'/[\w./]+\.(?:py|toml|md|txt|png|json)\b', README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r'^python (\w+\.py)', README, re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_rule_in_your_own_transformer_runs():
    """ The README's example, executed as it stands. """
    code, = re.findall(r'own transformer.*?```python\n(.*?)```', README, re.DOTALL)
    scope = {}
    exec(compile(code, 'README.md', 'exec'), scope)  # the project's own text
    assert scope['h'].shape == (2, 10, 64)
    assert len(code.strip().splitlines()) <= 12


def test_stair():
    """ Nothing imports upward: data and config know nothing of the model, the model nothing of the trainer.

    One exception: three methods of GPT hand their call on to weights.py, which they import when they are called.
    """
    order = ['config', 'data', 'triton_kernels', 'kernels', 'model', 'weights', 'baselines', 'train',
             'sample', 'experiments', 'compare']
    for name in order:
        files = [ROOT / f'{name}.py'] if (ROOT / f'{name}.py').exists() else list((ROOT / name).glob('*.py'))
        for path in files:
            for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
                modules = [node.module or ''] if isinstance(node, ast.ImportFrom) else \
                    [a.name for a in node.names] if isinstance(node, ast.Import) else []
                for module in modules:
                    top = module.split('.')[0]
                    upward = top in order and order.index(top) > order.index(name)
                    assert not upward or (name, top) == ('model', 'weights'), f'{path.name} imports {module}'


def test_no_exec_of_settings_and_no_unsafe_loading():
    for path in tracked():
        if path.suffix == '.py' and path.parent.name != 'tests':
            text = path.read_text(encoding='utf-8')
            assert not re.search(r'\b(exec|eval)\(', text.replace('.eval()', '')), path
            assert 'weights_only=False' not in text, path


def test_no_placeholders_or_machine_paths():
    words = r'TO' r'DO|FIX' r'ME|XX' r'X|/ro' r'ot/|/ho' r'me/|/wo' r'rk/'
    for path in tracked():
        if path.suffix in ('.py', '.md', '.toml', '.cff') or path.name == 'run':
            found = re.search(words, path.read_text(encoding='utf-8'))
            assert not found, f'{path}: {found}'


def test_tiny_shakespeare_is_not_committed():
    assert not [p for p in tracked() if 'tinyshakespeare' in p.name]
