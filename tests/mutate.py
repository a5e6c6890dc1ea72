"""Breaks the code in one place at a time and reports every break that the tests do not notice. Run by hand:

    python tests/mutate.py [--list] [--jobs=2] [--only=SUBSTRING]

Each change is tried in a temporary copy of the repository, never here. The changes are generic and made on the syntax
tree: operators and comparisons are swapped, constants shifted, conditions forced, calls replaced by what they were
called on, keyword arguments, tuple elements, slice bounds, decorators and statements dropped. A survivor is a line
without a test, or belongs into EQUIVALENT with the reason why no test could tell. To cover more code, add a file, the
names in it and its test files to TARGETS.
"""
import argparse
import ast
import collections
import contextlib
import copy
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # per change; longer means that it loops for ever, which is noticed

TARGETS = {  # file: (functions, classes or Class.method, test files)
    'model.py': ('GPTConfig Standard DepthAttention AttnRes FullAttnRes BlockAttnRes LayerNorm Cache '
                 'CausalSelfAttention MLP Sublayer Block GPT load_checkpoint model_config check_sampling pick',
                 ['tests/test_model.py']),
}
EQUIVALENT = {  # (name, old text, new text): why nothing can tell
    ('DepthAttention.forward', 'zip(self.alpha(w, v), v, strict=True)', 'zip(self.alpha(w, v), v)'): 'equally long',
    ('DepthAttention.forward', 'True', 'False'): 'strict: equally long',
    ('DepthAttention.forward', '0', '1'): 'v[0].dtype: sources have one dtype',
}

SWAP = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
        ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.MatMult: ast.Mult,
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
MODULES = {'torch', 'nn', 'F', 'math', 'kernels', 'os', 'np', 'tl', 'triton', 'super()'}
WRAP = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp)


def without(items, i):
    return items[:i] + items[i + 1:]


def changed(node, **fields):
    """a shallow copy with other fields"""
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def variants(node):
    """The nodes that may stand in node's place."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAP:
        yield changed(node, op=SWAP[type(node.op)]())
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield changed(node, ops=[*node.ops[:i], SWAP[type(op)](), *node.ops[i + 1:]])
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.Constant) and not isinstance(node.value, str) and node.value is not None:
        value = node.value
        yield ast.Constant(not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else
                           2 * value if value else 1.0)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield ast.Constant(node.value + '_')
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in MODULES:
            yield node.func.value
        elif node.args and not isinstance(node.args[0], ast.Starred):
            yield node.args[0]
        for i in range(len(node.keywords)):
            yield changed(node, keywords=without(node.keywords, i))
    if isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    if isinstance(node, (ast.If, ast.While)):
        yield from (changed(node, test=ast.Constant(value)) for value in (True, False))
    if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
        yield from (changed(node, elts=without(node.elts, i)) for i in range(len(node.elts)) if len(node.elts) > 1)
    if isinstance(node, ast.Slice):
        yield from (changed(node, **{bound: None}) for bound in ('lower', 'upper') if getattr(node, bound))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield ast.Pass()


def skipped(tree):
    """ids of the nodes that are words, not deeds: docstrings, messages of errors, annotations"""
    ids = set()
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words = [node]
        elif isinstance(node, (ast.Raise, ast.JoinedStr)):
            words = [node]
        elif isinstance(node, ast.AnnAssign):
            words = [node.annotation]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'check':
            words = [node.func, node.args[-1], *(a for a in node.args if isinstance(a, ast.Constant))]
        elif isinstance(node, ast.FunctionDef):
            words = [a.annotation for a in node.args.args if a.annotation]
        ids.update(id(x) for word in words for x in ast.walk(word))
    return ids


def mutants():
    """(file, name, line, start byte, end byte, old, new, tests) of every change"""
    for file, (names, tests) in TARGETS.items():
        source = (ROOT / file).read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tree = ast.parse(source)
        skip, seen = skipped(tree), {source}

        def place(node, starts=starts):
            return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

        def walk(node, name, skip=skip):  # bound now: the loop goes on
            for child in ast.iter_child_nodes(node):
                inner = f'{name}.{child.name}' if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
                if id(child) not in skip:
                    yield from ((child, new, name) for new in variants(child))
                    yield from walk(child, inner)

        for top in tree.body:
            if getattr(top, 'name', None) not in names.split():
                continue
            for node in ast.walk(top):
                for decorator in getattr(node, 'decorator_list', []):
                    start, end = place(decorator)
                    yield file, top.name, node.lineno, start - 1, end, '@' + ast.unparse(decorator), '', tests
            for node, new, name in walk(top, top.name):
                (start, end), old = place(node), ast.unparse(node)
                if isinstance(new, (ast.If, ast.While)):  # the condition only: the body keeps its layout
                    (start, end), old, new = place(node.test), ast.unparse(node.test), new.test
                text = ast.unparse(new)
                if any(isinstance(x, ast.Slice) for x in getattr(new, 'elts', [])):
                    text = text[1:-1]  # x[(:, 1)] is not Python
                text = f'({text})' if isinstance(new, WRAP) else text
                broken = source[:start] + text.encode() + source[end:]
                if broken not in seen:
                    seen.add(broken)
                    compile(broken, file, 'exec')  # a change that is no Python would prove nothing
                    yield file, name, node.lineno, start, end, old, text, tests


class BreadthFirst:
    """One case of every test comes first, then the second cases, and so on: a broken line is found sooner."""
    @staticmethod
    def pytest_collection_modifyitems(items):
        seen, order = collections.Counter(), {}
        for item in items:
            order[item] = seen[item.function]
            seen[item.function] += 1
        items.sort(key=order.get)


def run(mutant):
    """Whether the tests pass with the change made; runs in a process of its own."""
    file, _, _, start, end, _, new, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / 'repo'
        shutil.copytree(ROOT, here, ignore=shutil.ignore_patterns('.*', '__pycache__', 'out', '*.bin', 'assets'))
        source = (here / file).read_bytes()
        (here / file).write_bytes(source[:start] + new.encode() + source[end:])
        os.chdir(here)
        sys.dont_write_bytecode = True  # a stale .pyc would hide the change
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(SECONDS)
        import pytest
        with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            code = pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '--assert=plain', *tests], [BreadthFirst()])
        signal.alarm(0)
        os.chdir('/')
    return mutant, int(code) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--list', action='store_true', help='show the changes, run nothing')
    parser.add_argument('--only', action='append',
                        help='only changes whose "file:line name: old -> new" contains this (repeatable)')
    parser.add_argument('--jobs', type=int, default=1)
    args = parser.parse_args()

    def show(m):
        return f'{m[0]}:{m[2]} {m[1]}: {m[5]} -> {m[6] or "(nothing)"}'
    todo = [m for m in mutants() if any(part in show(m) for part in args.only or [''])]
    known = [m for m in todo if (m[1], m[5], m[6]) in EQUIVALENT]
    if args.list:
        print('\n'.join(map(show, todo)))
        return
    import pytest  # noqa: F401  loaded once, here, so that each forked process starts at once
    import torch._dynamo  # noqa: F401
    start, survivors = time.time(), []
    with multiprocessing.get_context('fork').Pool(args.jobs, maxtasksperchild=1) as pool:
        same = {m[0]: (*m[:3], 0, 0, '', '', m[7]) for m in todo}
        if not all(passed for _, passed in pool.map(run, same.values())):
            sys.exit('the tests fail already without a change')
        for i, (m, passed) in enumerate(pool.imap_unordered(run, [m for m in todo if m not in known])):
            if passed:
                survivors.append(m)
                print('SURVIVED', show(m), flush=True)
            elif i % 20 == 0:
                print(f'{i} of {len(todo)}, {time.time() - start:.0f} s', file=sys.stderr, flush=True)
    print(f'\n{len(todo)} changes, {len(known)} explained, {len(survivors)} survived')
    for m in known:
        print('explained', show(m), '|', EQUIVALENT[m[1], m[5], m[6]])
    sys.exit(bool(survivors))


if __name__ == '__main__':
    main()
