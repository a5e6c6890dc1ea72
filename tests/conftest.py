"""Makes every test see the repository, one thread, a fixed seed and, without a GPU, Triton's interpreter."""
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # reference.py
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # read when triton is imported, so before any test file is
torch.set_num_threads(1)  # sizes here are far too small for a second one


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1337)
