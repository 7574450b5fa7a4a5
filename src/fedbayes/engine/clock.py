"""Where a run's time goes: named shares that add up to the wall clock, taken only while somebody asks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

START, COMPILE, STEPS, SUM = "start", "compile", "steps", "sum"
EVALUATION, PERSONAL, FILES, OTHER = "evaluation", "personal models", "files", "other"
MEANING = {
    START: "imports, data, networks, checks",
    COMPILE: "tracing, compiling, capturing",
    STEPS: "clients' training",
    SUM: "terms, sum, closing of rounds",
    EVALUATION: "scores of the posterior",
    PERSONAL: "personal models and their scores",
    FILES: "journal, checkpoints, arrays, report",
    OTHER: "the rest",
}


class Shares:
    """Seconds by share; a share within another is taken out of it, but for the training of personal models."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(MEANING, 0.0)
        self._open = [OTHER]
        self._since = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds of the wall clock."""
        return sum(self.seconds.values())

    def turn(self) -> None:
        """Charge what has passed since the last turn to the innermost share."""
        _wait_for_devices()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Charge what passes within to a share."""
        self.turn()
        outer = self._open[-1]
        self._open.append(outer if outer in (EVALUATION, PERSONAL) and name in (STEPS, SUM) else name)
        try:
            yield
        finally:
            self.turn()
            self._open.pop()

    def __str__(self) -> str:
        rows = [(name, s) for name, s in self.seconds.items() if s > 0] + [("total", self.total)]
        return "\n".join(f"{name:<16}{s:9.2f} s {s / (self.total or 1):7.1%}" for name, s in rows)


_ASKED: ContextVar[Shares | None] = ContextVar("shares", default=None)


@contextmanager
def profile() -> Iterator[Shares]:
    """Measure where the time goes within: `with fb.profile() as shares: fb.fit(...)`, then `print(shares)`.

    A GPU is waited for where a share begins or ends, which costs a run on it a little of its speed. Threads that train
    clients side by side count as long as they are waited for.
    """
    shares = Shares()
    token = _ASKED.set(shares)
    try:
        yield shares
    finally:
        shares.turn()
        _ASKED.reset(token)


@contextmanager
def share(name: str) -> Iterator[None]:
    """What is done within belongs to a share of the time, where somebody asks."""
    shares = _ASKED.get()
    if shares is None:
        yield
        return
    with shares.within(name):
        yield


def _wait_for_devices() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize()
