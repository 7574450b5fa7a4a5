"""What a step needs of memory, what there is, and what would fit: found out where memory was too short."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedbayes.engine.compiled import Compiled


class Shortage(torch.OutOfMemoryError):
    """A step of so many clients that did not fit: bytes that it holds beside its inputs, and bytes that are free.

    `again` are the bytes with activations computed again; None where they are already, or nothing would be gained.
    """

    def __init__(self, clients: int, needed: int, free: int, again: int | None) -> None:
        self.clients, self.needed, self.free, self.again = clients, needed, free, again
        super().__init__(self.words)

    @property
    def fits(self) -> int:
        """How many clients at once would."""
        return self._fitting(self.needed)

    def _fitting(self, needed: int) -> int:
        return self.free * self.clients // max(needed, 1)

    @property
    def words(self) -> str:
        """Needs, what is free, and what would fit."""
        one = self.clients == 1
        who = "a client's step needs" if one else f"steps of {self.clients} clients at once need"
        line = f"out of memory: {who} about {_size(self.needed)}, {_size(self.free)} are free"
        if self.fits < self.clients and not one:
            line += f", enough for {self.fits}"
        if self.again is None:
            return line
        enough = "" if one else f", enough for {min(self._fitting(self.again), self.clients)}"
        return f"{line}; with recompute=True {_size(self.again)}{enough}"


def shortage(
    step: Callable[..., Any], arguments: tuple[Any, ...], clients: int, again: bool, error: torch.OutOfMemoryError
) -> torch.OutOfMemoryError:
    """The error with what the step needs and what would fit; as it is where that can't be found out."""
    traceback.clear_frames(error.__traceback__)  # which hold what was allocated
    try:
        free = available(next(a.device for a in tree_leaves(arguments) if isinstance(a, Tensor)))
        needed = Compiled(step, again=again).held(*arguments)
        less = None if again else Compiled(step, again=True).held(*arguments)
    except Exception:  # a network that can't be traced, or no memory for its inputs
        return error
    return Shortage(clients, needed, free, less if less is not None and less < 0.9 * needed else None)


def available(device: torch.device) -> int:
    """Bytes of a device that nothing uses, or that PyTorch holds for reuse."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
