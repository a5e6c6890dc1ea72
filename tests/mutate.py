"""Breaks the code in one place at a time and reports every break that the tests do not notice. Run by hand:

    python tests/mutate.py [--list] [--jobs=2] [--only=SUBSTRING] [-k=TESTS]

Each change is tried in a temporary copy of the repository, never here. Operators and comparisons are swapped, constants
shifted, conditions forced, calls replaced by what they were called on; keyword arguments, tuple elements, slice bounds,
decorators and statements are dropped. A survivor needs a test, or a line in EQUIVALENT that says why none could tell.
"""
import argparse
import ast
import collections
import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  loaded once, so that each forked process starts at once
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

TARGETS = {  # file: (its functions, classes and methods to break, arguments of pytest)
    'model.py': ('GPTConfig Standard Sources AttnRes FullAttnRes BlockAttnRes layer_norm Cache CausalSelfAttention MLP '
                 'Block GPT check_sampling pick', ('tests/test_model.py', 'tests/test_rules.py')),
    'kernels.py': ('choose new_sources checked_kernel same_function same_on_an_example FastSources _Step '
                   'graph_is_retained _forward _backward _score _torch_read _torch_visit OneToken',
                   ('tests/test_kernels.py', 'tests/test_rules.py', 'tests/test_triton.py')),
    'triton_kernels.py': ('refusal _table _launch read visit', ('tests/test_triton.py', 'tests/test_kernels.py')),
    'weights.py': ('save from_checkpoint checkpoint_file load_checkpoint build_model model_config from_pretrained '
                   'load_gpt2 transpose save_pretrained settings_of_weights initial_weights partition',
                   ('tests/test_model.py', 'tests/test_pretrained.py', 'tests/test_train.py')),
    'sample.py': ('SampleConfig read_start default_start load Sampler columns show_depths sample show main',
                  ('tests/test_sample.py', 'tests/test_pretrained.py')),
    'train.py': ('training_loop learning_rate Run.write_log Run.save Run.begin Run.restore '
                 'Run.record_evaluation read_run run_identity check_identity complete main',
                 ('tests/test_train.py',)),
    'data/batches.py': ('Data.train_batch', ('tests/test_train.py',)),
}
EQUIVALENT = {  # (name, part of the line, old text, new text): why nothing can tell
    ('pick', '(-1', '-1', '1'): 'two dimensions: the last is 1',
    ('pick', 'top_k <', 'top_k < logits.size(-1)', '(top_k <= logits.size(-1))'): 'all of them or no cut',
    ('pick', 'top_p <', 'top_p < 1', '(top_p <= 1)'): 'all of them or no cut',
    ('pick', 'top_p <', '1', '2'): 'all of them or no cut',
    ('pick', 'scatter', 'torch.zeros_like(enough)', 'enough'): 'a permutation: every place is written',
    ('GPT.configure_optimizers', 'AdamW', 'tuple(betas)', 'betas'): 'AdamW makes it a tuple too',
    ('CausalSelfAttention.forward', 'if past', 'past and T > 1', 'True'): 'without a past it is the causal mask again',
    ('CausalSelfAttention.forward', 'if past', 'past and T > 1', '(past or T > 1)'): 'the same, or a mask of ones',
    ('CausalSelfAttention.forward', 'T > 1', 'T > 1', '(T >= 1)'): 'one query: a mask of ones',
    ('GPT.sublayers', 'checkpoint', 'False', 'True'): 'the other implementation, with the same gradients',
    ('GPT.sublayers', 'checkpoint', 'partial(checkpoint, f, use_reentrant=False)', 'partial(checkpoint, f)'): 'same',
    ('same_function', 'verbs <=', "verbs <= {*dir(FastSources), 'score'}", "(verbs < {*dir(FastSources), 'score'})"):
        'dir has more names than any class here',
    ('same_function', 'callable', 'callable(value)', 'value'): 'the key of the cache only: as different, or more',
    ('FastSources._new_row', 'empty_like', 'torch.empty_like(self.v)', 'self.v'): 'memory that is written first',
    ('FastSources._new_row', 'empty_like', 'torch.empty_like(self.scores)', 'self.scores'): 'the same',
    ('FastSources._allocate', 'n = ', '0 if self.triton else R', 'R'): 'memory that nobody uses',
    ('FastSources._allocate', 'n = ', '0', '1'): 'memory that nobody uses',
    ('FastSources._step', 'tuple(self.live)', 'tuple(self.live)', 'self.live'): 'only the forward asks for it',
    ('FastSources._step', 'row != NONE', 'row != NONE', 'True'): 'the dummies of no row, which nobody asks for',
    ('_Step', 'staticmethod', '@staticmethod', ''): 'autograd.Function calls it by the class',
    ('_Step.forward', 'v[0].shape', '0', '1'): 'all rows have one shape',
    ('_Step.backward', 'v[0].shape', '0', '1'): 'all rows have one shape',
    ('_Step.forward', 'run = ', '_forward_op if torch.compiler.is_compiling() else _forward', '_forward_op'):
        'the same function, for the price of a call',
    ('_Step.backward', 'run = ', '_backward_op if torch.compiler.is_compiling() else _backward', '_backward_op'):
        'the same function, for the price of a call',
    ('_Step.forward', 'materialize', 'ctx.set_materialize_grads(False)', 'pass'): 'zeros in place of None: more work',
    ('_Step.forward', 'materialize', 'ctx.set_materialize_grads(False)', 'ctx'): 'zeros in place of None: more work',
    ('_Step.forward', 'materialize', 'False', 'True'): 'zeros in place of None: more work',
    ('_Step.forward', 'y_dtype', 'v.dtype if y is None else y.dtype', 'v.dtype'): 'autograd casts a gradient',
    ('_Step.backward', 'y_dtype', 'dv.view(step.shape).to(ctx.y_dtype)', 'dv.view(step.shape)'): 'autograd casts it',
    ('_Step.forward', 't.detach()', 't.detach()', 't'): 'autograd makes a new tensor of an input that is returned',
    ('_Step.forward', 'return None', 'None if step.read == NONE else h.view(step.shape)', 'h.view(step.shape)'):
        'nobody takes it',
    ('_Step.backward', 'n_reads = ', 'step.first if step.read == NONE else step.read + 1', '(step.read + 1)'):
        'a backward pass begins at a step with a read: nothing else has a result to use',
    ('_Step.backward', 'skipped = ', 'float(R - n_reads)', '(R - n_reads)'): 'autograd casts a gradient',
    ('_Step.backward', 'ended = ', 'float(R - step.first)', '(R - step.first)'): 'autograd casts a gradient',
    ('_Step.backward', 'if step.read', 'step.read != NONE', 'True'): 'zeros that nobody uses',
    ('_forward', 'l == NONE', 'l == NONE', 'False'): 'a read that nobody takes',
    ('_forward', 'if use_triton:', 'use_triton', 'True'): 'scores anew, for the price of the products',
    ('_forward', 'empty', '0', '1'): 'all rows have one shape',
    ('_forward', 'empty', 'w.new_empty(v.size(1))', 'w'): 'memory that nobody uses',
    ('_forward', 'empty', '1', '2'): 'memory that nobody uses',
    ('_backward', 'l > first', 'l > first', '(l >= first)'): 'an empty slice',
    ('_backward', 'first:l', 'first:l', ':l'): 'earlier reads write theirs when it is their turn',
    ('_backward', 'dh_l * h', '-1', '1'): 'two dimensions: the last is 1',
    ('_backward', 'empty_like', 'torch.empty_like(v[0])', 'v[0]'): 'nobody takes it',
    ('_backward', 'empty_like', '0', '1'): 'all rows have one shape',
    ('_backward', 'own = ', 'max(l - first, 0)', '(l - first)'): 'another dot product is computed by a sum',
    ('_score', '-1', '-1', '1'): 'two dimensions: the last is 1',
    ('_torch_visit', '-1', '-1', '1'): 'two dimensions: the last is 1',
    ('_torch_visit', 'own + 1', '1', '2'): 'one more dot product is computed by a sum',
    ('_torch_visit', 'to(dtype)', '(dv if carry is None else dv.add_(carry)).to(dtype)',
     '(dv if carry is None else dv.add_(carry))'): 'autograd casts a gradient',
    ('OneToken.__init__', 'unbind', '(w * D ** 0.5).unbind()', '(w * D ** 0.5)'): 'the same rows, for a view each',
    ('OneToken._use', 'unbind', 'self.v.unbind()', 'self.v'): 'the same rows',
    ('OneToken._use', 'unbind', 'padded.unbind()', 'padded'): 'the same rows',
    ('OneToken._use', 'unbind', 'self.length.unbind()', 'self.length'): 'the same numbers',
    ('OneToken._use', 'triu', 'padded.new_full((len(padded), len(padded)), -torch.inf).triu(1).unbind()',
     'padded.new_full((len(padded), len(padded)), -torch.inf).triu(1)'): 'the same rows, for a view each',
    ('OneToken.push', 'repeat', '2', '3'): 'more rows in reserve',
    ('OneToken.drop', 'torch.cat', '[rows[:i], rows[i + 1:], rows[i:i + 1]]', '[rows[:i], rows[i + 1:]]'):
        'a row fewer in reserve',
    ('OneToken.drop', 'torch.cat', 'i:i + 1', ':i + 1'): 'more rows in reserve',
    ('OneToken.drop', 'torch.cat', 'i:i + 1', 'i:'): 'more rows in reserve',
    ('OneToken.read', 'h.dtype', 'h if h.dtype == self.dtype else h.to(self.dtype)', 'h.to(self.dtype)'):
        'the same, for the price of a call',
    ('SampleConfig.__post_init__', 'check_sampling', '1', '2'): 'any valid text and length',
    ('learning_rate', 'step < ', 'step < cfg.warmup_iters', '(step <= cfg.warmup_iters)'): 'learning_rate, either way',
    ('Data.train_batch', 'fraction = ', 'offset + k * GOLDEN', '(offset - k * GOLDEN)'): 'as even, backwards',
    ('Data.train_batch', 'fraction = ', 'k * GOLDEN', '(k / GOLDEN)'): '1 / GOLDEN is 1 + GOLDEN: the same modulo 1',
    ('check_identity', 'old.keys()', 'old.keys()', 'old'): 'a view subtracts from a dict as well',
    ('check_identity', 'old.keys()', 'new.keys()', 'new'): 'a dict subtracts as well',
    ('Run.write_log', 'rank', 'self.rank == 0', 'True'): 'these tests have one process',
    ('Run.save', 'better', 'False', 'True'): 'a run begins with an evaluation, the best so far',
    ('Run.save', 'rank', 'self.rank == 0', 'True'): 'these tests have one process',
    ('save', 'fsync', 'f.fileno()', 'f'): 'fsync asks the file itself',
}
PAIRS = 'Add Sub, Mult Div, FloorDiv Mod, BitOr BitAnd, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or'
SWAP = {getattr(ast, a): getattr(ast, b) for pair in PAIRS.split(', ') for a, b in itertools.permutations(pair.split())}
SWAP[ast.Pow] = ast.Mult
SAME = ('strict=True', "encoding='utf-8'")  # zips are equally long by construction; UTF-8 is the default in the tests
MODULES = {'torch', 'nn', 'F', 'math', 'kernels', 'triton_kernels', 'os', 'np', 'tl', 'triton',
           'super()'}  # no receivers
WRAP = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp)


def variants(node):
    """The nodes that may stand in node's place."""
    def changed(node, **fields):
        return type(node)(**(vars(node) | fields))
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAP:
        yield changed(node, op=SWAP[type(node.op)]())
    for i, op in enumerate(getattr(node, 'ops', [])):
        yield changed(node, ops=[*node.ops[:i], SWAP[type(op)](), *node.ops[i + 1:]])
    if isinstance(node, ast.Constant) and node.value is not None and node.value is not ...:
        change = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 2 * x or 1.0, str: lambda x: x + '_'}
        yield ast.Constant(change[type(node.value)](node.value))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in MODULES:
            yield node.func.value
        elif node.args and not isinstance(node.args[0], ast.Starred):
            yield node.args[0]
        for i, k in enumerate(node.keywords):
            if k.arg in ('device', 'map_location') or ast.unparse(k) in SAME:  # there is one device
                continue
            yield changed(node, keywords=node.keywords[:i] + node.keywords[i + 1:])
    if isinstance(node, (ast.IfExp, ast.UnaryOp)):
        yield from (getattr(node, part) for part in ('body', 'orelse', 'operand') if hasattr(node, part))
    if isinstance(node, (ast.If, ast.While)):
        yield from (changed(node, test=ast.Constant(value)) for value in (True, False))
    if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
        for i in range(len(node.elts) if len(node.elts) > 1 else 0):
            yield changed(node, elts=node.elts[:i] + node.elts[i + 1:])
    if isinstance(node, ast.Slice):
        yield from (changed(node, **{bound: None}) for bound in ('lower', 'upper') if getattr(node, bound))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield ast.Pass()


def skipped(tree):
    """ids of the nodes that are words or choices: docstrings, messages, progress bars, annotations and defaults"""
    words = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or type(node) is ast.Expr and type(node.value) is ast.Constant:
            words.append(node)
        elif isinstance(node, ast.keyword) and ast.unparse(node) in SAME:
            words.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'tqdm':
            words.append(node)
        elif isinstance(node, (ast.arg, ast.FunctionDef)):
            words += filter(None, [getattr(node, 'annotation', None), getattr(node, 'returns', None)])
        elif isinstance(node, ast.AnnAssign):
            words += filter(None, [node.annotation, node.value])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'check':
            words += [node.func, node.args[-1], *(a for a in node.args if isinstance(a, ast.Constant))]
    return {id(x) for word in words for x in ast.walk(word)}


def mutants():
    """(file, name, line, whole changed source, old, new, tests) of every change"""
    for file, (names, tests) in TARGETS.items():
        source = (ROOT / file).read_bytes()
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
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

        for path in names.split():
            top = tree
            for part in path.split('.'):
                found = [node for node in top.body if getattr(node, 'name', None) == part]
                if not found:
                    sys.exit(f'{file} has no {path}: TARGETS names something that is gone')
                top, = found
            for decorator in (d for node in ast.walk(top) for d in getattr(node, 'decorator_list', [])):
                start, end = place(decorator)
                broken = source[:start - 1] + source[end:]
                yield file, path, decorator.lineno, broken, '@' + ast.unparse(decorator), '', tests
            for node, new, name in walk(top, path):
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
                    yield file, name, node.lineno, broken, old, text, tests


class BreadthFirst:  # one case of every test, then their second cases, and so on: a broken line is found sooner
    @staticmethod
    def pytest_collection_modifyitems(items):
        count = collections.defaultdict(itertools.count)
        items.sort(key={item: next(count[item.function]) for item in items}.get)


def run(mutant, seconds, more):
    """Whether the tests pass with the change made; runs in a process of its own. Too long is noticed: it may loop."""
    file, _, _, source, _, _, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns('.*', '__pycache__', 'out', '*.bin', 'assets')
        os.chdir(shutil.copytree(ROOT, Path(folder) / 'repo', ignore=ignore))
        Path(file).write_bytes(source)
        sys.dont_write_bytecode = True  # a stale .pyc would hide the change
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(seconds)
        with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            argv = ['-x', '-q', '-p', 'no:cacheprovider', '--assert=plain', *tests, *more]
            code = pytest.main(argv, [BreadthFirst()])
        signal.alarm(0)
        os.chdir('/')
    return mutant, int(code) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--list', action='store_true', help='show the changes, run nothing')
    parser.add_argument('--only', action='append', help='part of a "file:line name: old -> new" (repeatable)')
    parser.add_argument('--jobs', type=int, default=1)
    parser.add_argument('--seconds', type=int, default=120, help='that the tests may take; longer counts as noticed')
    parser.add_argument('-k', help="pytest's -k: leave out tests that take long")
    args = parser.parse_args()

    def show(m):
        return f'{m[0]}:{m[2]} {m[1]}: {m[4]} -> {m[5] or "(nothing)"}'
    todo = [m for m in mutants() if any(part in show(m) for part in args.only or [''])]
    line = {m: (ROOT / m[0]).read_text().splitlines()[m[2] - 1] for m in todo}
    known, used = {}, set()
    for m in todo:
        for key, why in EQUIVALENT.items():
            name, part, old, new = key
            if name == m[1] and part in line[m] and (old, new) == (m[4], m[5]):
                known[m] = why
                used.add(key)
    if not args.only:
        for key in EQUIVALENT.keys() - used:
            print(f'EQUIVALENT explains a change that is not made: {key}', file=sys.stderr)
    if args.list:
        return print(*map(show, todo), sep='\n')
    torch.set_num_threads(1)  # before the fork
    gc.freeze()  # a collection in a forked process would copy every page of this one
    survivors, rest = [], [m for m in todo if m not in known]
    with multiprocessing.get_context('fork').Pool(args.jobs, maxtasksperchild=1) as pool:
        same = {m[0]: (m[0], '', 0, (ROOT / m[0]).read_bytes(), '', '', m[6]) for m in todo}
        attempt = functools.partial(run, seconds=args.seconds, more=['-k', args.k] if args.k else [])
        if not all(passed for _, passed in pool.map(attempt, same.values())):
            sys.exit('the tests fail already without a change')
        for m, passed in tqdm(pool.imap_unordered(attempt, rest), total=len(rest), mininterval=5):
            if passed:
                survivors.append(m)
                tqdm.write(f'SURVIVED {show(m)}')
    print(f'\n{len(todo)} changes, {len(known)} explained, {len(survivors)} survived')
    print(*(f'explained {show(m)} | {why}' for m, why in known.items()), sep='\n')
    sys.exit(bool(survivors))


if __name__ == '__main__':
    main()
