"""Memory that steps leave is kept by the process, as page faults tell; in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

# Forty pieces of a MiB, used and freed, as the activations of a step; the faults of ten such steps.
STEPS = """
from resource import RUSAGE_SELF, getrusage
from fedbayes.engine.heap import keep_memory
done = keep_memory(), keep_memory()
def step():
    pieces = [bytearray(2**20) for _ in range(40)]
    del pieces
step()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(*done, getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[bool, int]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "FEDBAYES_K"))
    }
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env=clean | environment, capture_output=True, text=True, check=True
    )
    first, again, count = run.stdout.split()
    assert first == again
    return first == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_steps_fetch_no_page_twice():
    done, count = faults()
    assert done
    assert count < 1000
    for said in ({"FEDBAYES_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        done, many = faults(**said)
        assert not done
        assert many > 20 * (count + 1)
