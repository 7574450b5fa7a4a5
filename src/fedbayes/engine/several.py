"""The parts of a long step, compiled by several processes at once where there are cores for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fedbayes.engine.beside import Beside, Waiting
from fedbayes.engine.compiler import kernels
from fedbayes.engine.repeats import Part, computes

CORES = 2  # for a process: while it reads Python's libraries others do too
MOST = 8  # processes
EARLY = 4  # other processes that begin before there is anything to compile: of deep networks' steps few have more
OPERATIONS = 150  # that are worth a process, which takes seconds to begin


@contextmanager
def begun(device: str) -> Iterator[list[Waiting]]:
    """Processes that load the compiler while a step is traced, on a GPU with cores for them; unused ones are ended."""
    there = min(EARLY, processes_on(cores()) - 1) if device == "cuda" else 0
    waiting: list[Waiting] = []
    with suppress(OSError):
        for _ in range(there):
            waiting.append(Waiting(helpers_on(cores())))
    try:
        yield waiting
    finally:
        for one in waiting:
            one.end()


def made(
    parts: Sequence[Part], options: dict[str, Any], waiting: list[Waiting] | None = None
) -> list[Callable[..., Any]]:
    """The parts compiled. What other processes have made is found on disk; what they could not make is tried here.

    Parts that do nothing but take views are left as they are. Processes that are `waiting` are taken from the list.
    """
    worth = [n for n, part in enumerate(parts) if computes(part)]
    groups = [
        [worth[n] for n in group] for group in shared_out([len(parts[n].graph.graph.nodes) for n in worth], cores())
    ]

    def begin() -> Waiting:
        return waiting.pop() if waiting else Waiting(helpers_on(cores()))

    others = [Beside([parts[n] for n in group], options, begin) for group in groups[1:]]
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


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_on(cores: int) -> int:
    """How many processes share the parts of a step at most, this one among them."""
    return max(1, min(MOST, cores // CORES))


def helpers_on(cores: int) -> int:
    """How many kernels each of them makes at once."""
    return max(1, cores // processes_on(cores))


def shared_out(sizes: Sequence[int], cores: int) -> list[list[int]]:
    """Who compiles which parts, this process first: each next largest by whoever has least to do."""
    processes = max(1, min(processes_on(cores), len(sizes), sum(sizes) // OPERATIONS))
    groups: list[list[int]] = [[] for _ in range(processes)]
    work = [0] * processes
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = work.index(min(work))
        groups[least].append(n)
        work[least] += sizes[n]
    return groups
