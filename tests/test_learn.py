""" LEARN.md: its edits apply and take effect, its example and its numbers are right. """
import importlib.util
import json
import re
import sys

import claims
import pytest
import torch

import model
from experiments import learn

PAGE = (learn.ROOT / 'LEARN.md').read_text(encoding='utf-8')
EDITS = learn.edits()
START_ELSEWHERE = 'edit 1', 'edit 3', 'edit 5'  # the others start as the standard network


def test_example_by_hand():
    """ The code of the worked example gives the numbers in its comments. """
    code, = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
    scope = {}
    exec(compile(code, 'LEARN.md', 'exec'), scope)  # the project's own text
    for name, numbers in re.findall(r'^(\w+) = .*# (.*)$', code, re.MULTILINE):
        said = [float(number) for number in numbers.split(',')]
        assert scope[name].tolist() == pytest.approx(said, abs=1e-3), name


def test_there_are_six_edits_and_each_is_asked_about():
    assert list(EDITS) == [f'edit {i}' for i in range(1, 7)]
    assert PAGE.count('<summary>') == 6
    source = (learn.ROOT / 'model.py').read_text(encoding='utf-8')
    for _, diff in EDITS.values():
        assert learn.apply(diff, source) != source
        with pytest.raises(ValueError, match='once'):
            learn.apply(diff, learn.apply(diff, source))


def answers():
    """ {'edit 1': its answer} and so on. """
    found = re.findall(r'<summary>Answer</summary>\n(.*?)</details>', PAGE, re.DOTALL)
    return {f'edit {number}': text for number, text in enumerate(found, 1)}


def test_numbers_are_those_measured():
    measured = PAGE[PAGE.index('## Six edits'):]
    prose = re.sub(r'```.*?```', '', measured, flags=re.DOTALL)
    assert claims.wrong(prose) == []
    data = json.loads((claims.ASSETS / 'learn.json').read_text(encoding='utf-8'))
    assert f'{len(data["seeds"])} paired seeds' in prose
    assert list(learn.SEEDS) == data['seeds']
    preset = (learn.ROOT / 'config' / 'learn.toml').read_text(encoding='utf-8')
    steps, = re.findall(r'max_iters = (\d+)', preset)
    assert f'loss after {steps} steps' in ' '.join(prose.split()) and f'after {steps} steps' in PAGE


@pytest.mark.parametrize('name', EDITS)
def test_answer_says_what_was_measured(name):
    """ Each answer says how the edit begins, and in words what its interval says. """
    answer = answers()[name]
    begins = 'another function' if name in START_ELSEWHERE else 'the standard network'
    assert answer.startswith(f'It starts as {begins}')
    said = re.findall(r'([^.±]*\d\.\d+ ± \d\.\d+[^<]*)<!-- learn: (.*?) -->([^<]*)', answer)
    assert f'{name} - {EDITS[name][0]}' in [what for _, what, _ in said]
    for before, what, after in said:
        difference, half_width = claims.named('learn', what)
        words = {True: r'\b(above|higher)\b', False: r'\b(below|lower)\b'}[difference > 0]
        assert re.search(words, before + after), what
        assert ('not resolved' in after) == (abs(difference) <= half_width), what


def edited(diff, folder):
    """ model.py with the lines of diff changed, as a module. """
    path = folder / 'edited_model.py'
    source = (learn.ROOT / 'model.py').read_text(encoding='utf-8')
    path.write_text(learn.apply(diff, source), encoding='utf-8')
    spec = importlib.util.spec_from_file_location('edited_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['edited_model'] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def first_losses(module, residual):
    """ The losses of the first three steps with the default kernel. """
    torch.manual_seed(1)
    config = module.GPTConfig(n_ctx=8, vocab_size=11, n_layer=4, n_head=1, n_embd=16,
                              residual=residual, residual_blocks=4)
    net = module.GPT(config)
    idx, targets = torch.randint(11, (2, 4, 8)).unbind()
    optimizer = net.configure_optimizers(0.0, 0.05, (0.9, 0.99))
    losses = []
    for _ in range(3):
        loss = net(idx, targets)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings('ignore:.*kernel=reference runs')
@pytest.mark.parametrize('name', EDITS)
def test_edit_takes_effect(name, tmp_path):
    residual, diff = EDITS[name]
    before, after = first_losses(model, residual), first_losses(edited(diff, tmp_path), residual)
    assert abs(before[-1] - after[-1]) > 1e-5
    same_start = abs(before[0] - after[0]) < 1e-5
    assert same_start == (name not in START_ELSEWHERE)  # as LEARN.md says
