"""The parts of a long step, compiled by several processes at once where there are cores for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fedbayes.engine.beside import Beside
from fedbayes.engine.compiler import kernels
from fedbayes.engine.repeats import Part, computes

CORES = 2  # for a process: while it reads Python's libraries others do too
MOST = 8  # processes
OPERATIONS = 150  # that are worth a process, which takes seconds to begin


def made(parts: Sequence[Part], options: dict[str, Any]) -> list[Callable[..., Any]]:
    """The parts compiled. What other processes have made is found on disk; what they could not make is tried here.

    Parts that do nothing but take views are left as they are.
    """
    worth = [n for n, part in enumerate(parts) if computes(part)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = [
        [worth[n] for n in group] for group in shared_out([len(parts[n].graph.graph.nodes) for n in worth], cores)
    ]
    others = [Beside([parts[n] for n in group], options, helpers=False) for group in groups[1:]]
    ready: dict[int, Callable[..., Any]] = {n: part.graph for n, part in enumerate(parts) if n not in worth}
    try:
        for n in groups[0]:
            ready[n] = kernels(*parts[n], options)
        for group, other in zip(groups[1:], others):
            other.wait()
            ready.update((n, kernels(*parts[n], options)) for n in group)
            if other.fault is None:
                other.mark()
    finally:
        for other in others:
            other.end()
    return [ready[n] for n in range(len(parts))]


def shared_out(sizes: Sequence[int], cores: int) -> list[list[int]]:
    """Who compiles which parts, this process first: each next largest by whoever has least to do."""
    processes = max(1, min(MOST, cores // CORES, len(sizes), sum(sizes) // OPERATIONS))
    groups: list[list[int]] = [[] for _ in range(processes)]
    work = [0] * processes
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = work.index(min(work))
        groups[least].append(n)
        work[least] += sizes[n]
    return groups
