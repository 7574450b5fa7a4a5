"""A process that trains on several cores holds one thread more than it has cores; in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (which loads OpenMP)

HELD = """
import os, threading
import torch
from fedbayes.engine.asleep import sleep_while_waiting
torch.set_num_threads(2)
done = sleep_while_waiting(), sleep_while_waiting()
other = []
thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
thread.start()
thread.join()
print(*done, len(os.listdir("/proc/self/task")) > len(os.sched_getaffinity(0)), torch.get_num_threads(), other[0])
"""


def held(**environment: str) -> list[str]:
    own = ("OMP_", "GOMP_", "FEDBAYES_S")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    run = subprocess.run(
        [sys.executable, "-c", HELD], env=clean | environment, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists() or "libgomp" not in Path("/proc/self/maps").read_text(encoding="utf-8"),
    reason="a matter of GNU's OpenMP",
)
def test_threads_are_held_once_and_nobody_gets_more_of_them() -> None:
    assert held() == ["True", "True", "True", "2", "2"]
    assert held(FEDBAYES_SLEEP="0")[:2] == ["False", "False"]
    assert held(GOMP_SPINCOUNT="100")[:2] == ["False", "False"]
