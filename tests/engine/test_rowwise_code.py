"""The compiled code for single rows keeps to itself."""

import subprocess
import sys

import pytest

from fedbayes.engine.fast.rowwise import compiler

LOADED = """
from fedbayes.engine.fast.rowwise import library
library()
smallest = 5e-324
assert smallest * 1.0 != 0.0 and 2.0**-1074 / 1.0 > 0.0
import torch
assert float(torch.tensor([1e-310], dtype=torch.float64) * 1.0) != 0.0
"""


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler here")
def test_loading_it_leaves_subnormal_numbers_alone() -> None:
    made = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False, timeout=1000)
    assert made.returncode == 0, made.stderr
