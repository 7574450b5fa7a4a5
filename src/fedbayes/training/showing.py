"""Rounds of `fit` as a terminal shows them: a bar that comes when training takes more than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS = 2.0  # before the bar comes
SHOWN = ("accuracy", "concordance", "rmse", "nll")


class Follow(Protocol):
    """Called with each round's record."""

    def __call__(self, record: dict[str, Any]) -> None: ...


@contextmanager
def following(method: str, rounds: int) -> Iterator[Follow]:
    """A bar on the terminal's error stream; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=14), TextColumn("{task.completed}/{task.total}"))
    scores = (TextColumn("{task.fields[scores]}", style="cyan"), TimeRemainingColumn(compact=True))
    bar = Progress(*columns, *scores, console=Console(stderr=True), transient=True)
    task = bar.add_task(method, total=rounds, scores="")

    def follow(record: dict[str, Any]) -> None:
        tested = record.get("test", {})
        shown = "  ".join(f"{name} {tested[name]:.3f}" for name in SHOWN if name in tested)
        bar.update(task, completed=record["round"], scores=shown or bar.tasks[0].fields["scores"])
        if not bar.live.is_started and time.monotonic() - started > SECONDS:
            bar.start()

    try:
        yield follow
    finally:
        if bar.live.is_started:
            bar.stop()
