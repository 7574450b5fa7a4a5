"""Rounds of `fit` as a terminal or a notebook shows them, where training takes more than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS = 2.0  # before anything is shown
OFTEN = 0.5  # seconds between two lines of a notebook
SHOWN = ("accuracy", "concordance", "rmse", "nll")


class Follow(Protocol):
    """Called with each round's record."""

    def __call__(self, record: dict[str, Any]) -> None: ...


@contextmanager
def following(method: str, rounds: int) -> Iterator[Follow]:
    """A bar on the terminal's error stream, a line in a notebook; nothing where that is neither."""
    if "ipykernel" in sys.modules:
        with _line(method, rounds) as line:
            yield line
        return
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
        bar.update(task, completed=record["round"], scores=_scores(record) or bar.tasks[0].fields["scores"])
        if not bar.live.is_started and time.monotonic() - started > SECONDS:
            bar.start()

    try:
        yield follow
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def _line(method: str, rounds: int) -> Iterator[Follow]:
    """One line that is written over, and gone at the end; a notebook's widgets need not be installed."""
    shown, length, scores = time.monotonic() + SECONDS - OFTEN, 0, ""

    def follow(record: dict[str, Any]) -> None:
        nonlocal shown, length, scores
        scores = _scores(record) or scores
        if time.monotonic() - shown > OFTEN:
            text = f"{method} {record['round']}/{rounds}  {scores}"
            sys.stderr.write("\r" + text.ljust(length))
            sys.stderr.flush()
            shown, length = time.monotonic(), max(length, len(text))

    try:
        yield follow
    finally:
        if length:
            sys.stderr.write("\r" + " " * length + "\r")


def _scores(record: dict[str, Any]) -> str:
    tested = record.get("test", {})
    return "  ".join(f"{name} {tested[name]:.3f}" for name in SHOWN if name in tested)
