"""Chunks of a round side by side on a CPU: Python threads that share its cores, each with its part of PyTorch's own.

The products of one small client are too short to be shared by cores: every parallel region waits for its slowest
thread, and for a multiple of its time where another process is busy. Clients that share nothing wait for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
AHEAD = 8  # items of a worker that are begun, or done and not yet asked for


@contextmanager
def threads(number: int) -> Iterator[None]:
    """PyTorch's own threads within an operation, and afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share(items: int, most: int, *, small: bool) -> tuple[int, int]:
    """Workers for so many items, at most `most`, and the threads that each gets of those that PyTorch has.

    With no more threads than items and than `most` each worker gets one, however many there are: the bits of a result
    do not depend on the machine. `small`: one thread each, for products that are not worth a second.
    """
    cores = torch.get_num_threads()
    workers = max(1, min(items, most, cores))
    return workers, 1 if small else cores // workers


def side_by_side(f: Callable[[Item], Any], items: Sequence[Item], workers: int) -> Iterator[Any]:
    """f of each item, in order, by so many workers; each has as many threads as its caller.

    Results wait for those of earlier items, but only AHEAD of them for each worker: however many items there are, they
    take the memory of a few.
    """
    if not items:
        return
    with ThreadPoolExecutor(workers, "client", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for item in items:
                if len(waiting) == AHEAD * workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(f, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
