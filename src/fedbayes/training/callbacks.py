"""Calls back to the user after each round, who may stop the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedbayes.errors import InputError
from fedbayes.federation.ledger import Closed
from fedbayes.training.run import OwnStore, Run, observed
from fedbayes.training.task import Progress, Task

Step = tuple[Progress, dict[str, Any]]


def called_back(task: Task, steps: Iterator[Step], records: Sequence[dict[str, Any]], own: OwnStore) -> Iterator[Step]:
    """The rounds, each shown to the task's callbacks before it is kept; one that gives a reason stops the run.

    `records` are the rounds before, kept by the caller. What a callback adds to a record goes into the journal.
    """
    for progress, record in steps:
        why = None
        for function in task.on_round:
            answer = function(Run(task, progress, [*records, record], own, Closed()), record)
            why = why or _reason(answer, function)
        if why and not progress.stopped:
            record["stopped"] = why
            progress = progress._replace(state=observed(task, progress.state), stopped=True)
        yield progress, record
        if why:
            return


def _reason(answer: Any, function: Callable[..., Any]) -> str | None:
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(answer, np.bool_):  # as comparisons of NumPy's numbers give
        answer = bool(answer)
    if answer is None or answer is False:
        return None
    if answer is True:
        return f"{name} asked for it"
    if isinstance(answer, str) and answer:
        return answer
    raise InputError(f"on_round: {name} gave a {type(answer).__name__}; give None, or a reason to stop")
