"""Makes every test see the repository, one thread, a fixed seed and, without a GPU, Triton's interpreter."""
import os
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # reference.py
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # read when triton is imported, so before any test file is
torch.set_num_threads(1)  # sizes here are far too small for a second one


START = time.monotonic()


def pytest_addoption(parser):
    parser.addoption('--seconds', type=float, default=float('inf'), help='skip tests that would begin later than this')


@pytest.hookimpl(tryfirst=True)  # before its fixtures are made
def pytest_runtest_setup(item):
    if time.monotonic() - START > item.config.getoption('seconds'):
        pytest.skip('not begun: the time that --seconds gives is over')


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1337)
    torch.set_num_threads(1)  # experiments change it


@pytest.fixture
def nan_in_new_memory():
    """torch.empty is full of NaN, so a number that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # an error on a GPU, where not all is deterministic
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope='session')
def bpe():
    """GPT-2's tokenizer, where its files are at hand."""
    folder = os.environ.get('TIKTOKEN_CACHE_DIR', '')
    if not os.path.isfile(os.path.join(folder, '6d1cbeee0f20b3d9449abfede4726ed8212e3aee')):  # tiktoken's name for it
        pytest.skip("TIKTOKEN_CACHE_DIR is not set to a folder that holds GPT-2's vocab.bpe and encoder.json")
    from data.tokenizer import GPT2Tokenizer
    return GPT2Tokenizer()
