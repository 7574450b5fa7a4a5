"""The journal's numbers as TensorBoard events while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import folder_name
from fedbayes.runs import journal
from fedbayes.runs.folder import Watch
from fedbayes.training.rounds import Task


def open_writer(folder: Path, after: int) -> Any:
    """A writer of events; what an earlier process wrote of the rounds after `after` is purged."""
    writer = _writer()
    return writer(str(folder), purge_step=after + 1 if after else None)


def _writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "--tensorboard needs the package tensorboard, which is not installed; "
            "install it with: pip install 'fedbayes[tensorboard]'"
        ) from error
    return SummaryWriter


def with_events(watch: Watch, folder: Path) -> Watch:
    """The watch, with each round's numbers also written to `folder/tensorboard/<method>`."""
    _writer()  # a missing package fails before the first round
    open_now: list[Any] = []

    def begun(method: str, task: Task, records: list[journal.Record]) -> None:
        watch.begun(method, task, records)
        if not task.rounds or len(records) < task.rounds:
            open_now.append(open_writer(folder / "tensorboard" / folder_name(method), len(records)))

    def round(record: journal.Record) -> None:
        watch.round(record)
        for name, value in journal.flat(record).items():
            if name != "round" and isinstance(value, int | float):
                open_now[-1].add_scalar(name.replace(".", "/"), value, record["round"])
        open_now[-1].flush()

    def ended(method: str, was_finished: bool) -> None:
        watch.ended(method, was_finished)
        while open_now:
            open_now.pop().close()

    return replace(watch, begun=begun, round=round, ended=ended)
