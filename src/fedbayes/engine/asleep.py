"""Threads of OpenMP that wait for one another go to sleep at once, instead of spinning.

A thread that spins keeps a core from the very thread that it waits for, as soon as another process is busy on the
machine: a compiled step of a small network takes up to a hundred times as long. GNU's OpenMP is told so by
OMP_WAIT_POLICY before torch is loaded, which `import fedbayes` sees to; where torch came first it is too late. But a
process that holds more threads than it has cores spins a hundredth as long. So a few more are held, which do nothing.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

SWITCH = "FEDBAYES_SLEEP"  # 0: leave OpenMP as it is
_LOCK = threading.Lock()
_held: threading.Thread | None = None


def sleep_while_waiting() -> bool:
    """Hold one thread more than there are cores; whether they are held. Once in a process."""
    global _held
    with _LOCK:
        if _held is None and _spins():
            before, there = torch.get_num_threads(), threading.Event()
            _held = threading.Thread(target=_hold, args=(len(os.sched_getaffinity(0)) + 1, there), daemon=True)
            _held.start()
            there.wait()
            torch.set_num_threads(before)  # which is also what threads get that are begun later
        return _held is not None


def _hold(number: int, there: threading.Event) -> None:
    torch.set_num_threads(number)
    torch.ones(number * 2**15).add_(1)  # in so many parts, by as many threads
    there.set()
    threading.Event().wait()


def _spins() -> bool:
    """Whether GNU's OpenMP is loaded, has more than one thread to wait for, and may have been told nothing."""
    if os.environ.get(SWITCH, "1") == "0" or torch.get_num_threads() == 1 or "GOMP_SPINCOUNT" in os.environ:
        return False
    maps = Path("/proc/self/maps")
    return maps.exists() and "libgomp" in maps.read_text(encoding="utf-8")
