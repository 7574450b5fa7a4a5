"""What the journal says of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbayes.federation.influence import is_shown
from fedbayes.federation.program import FederationState, Order, Outcome
from fedbayes.federation.round import message_bytes
from fedbayes.posterior.values import Parts
from fedbayes.training import influence, scales
from fedbayes.training.task import Task


def record_of(task: Task, order: Order, outcome: Outcome, report: dict[str, Any]) -> dict[str, Any]:
    """A round's record, but for its scores; stages' reports go into it."""
    names = task.clients.names
    down = {part: order.broadcast[part] for part in task.program.pooling.rules}
    came = task.cohort if task.hides_cohorts else len(order.cohort)
    moved = {
        "bytes_down": message_bytes(down) * (came + len(order.dropped)),
        "bytes_up": message_bytes(task.program.pooling.uploaded(down)) * came,
    }
    rows, twins = report.pop("influence", None), report.pop("twins", ())
    attacked = task.program.pooling.attacked
    first = () if order.round else task.idle
    lied = [] if attacked is None else [k for k in order.cohort if k in attacked.clients]
    return {
        "round": order.round + 1,
        "cohort": len(order.cohort),
        "dropped": [names[k] if names else k for k in order.dropped],
        "left_out": {task.clients.name(k): why for k, why in outcome.left_out.items()},
        **(
            {} if attacked is None else {"attack": attacked.name, "attackers": [names[k] if names else k for k in lied]}
        ),
        "train": {name: total / outcome.counted for name, total in outcome.metrics.items() if outcome.counted},
        **_influence(task, outcome, rows, twins),
        **report,
        **{name: count + int(report.get(name, 0)) for name, count in moved.items()},  # stages may have moved more
        **({"notes": notes} if (notes := [*first, *task.engine.take_notes()]) else {}),
    }


def _influence(
    task: Task, outcome: Outcome, rows: Mapping[int, influence.Row] | None, twins: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Who moved the model in a round, for its journal."""
    program = task.program
    if not outcome.counted or not is_shown(program):
        return {}
    if rows is None:
        return {"influence": {"hidden": influence.HIDDEN}}
    sure = program.pooling.rules[program.prediction.part].weighs_precision and not program.pooling.buckets
    named = {task.clients.name(k): row for k, row in rows.items()}
    groups = [[task.clients.name(k) for k in group] for group in twins]
    return {"influence": influence.record_of(named, influence.PRECISION if sure else influence.WEIGHT, groups)}


def follow_scales(task: Task, before: Parts, state: FederationState, record: dict[str, Any]) -> None:
    """How far scales have moved, for the journal; a note after the last round where that should be known."""
    figures = scales.moves(task.program, before, state.broadcast)
    if figures:
        record["scales"] = figures
    words = scales.note(figures, state.round, task.rounds, task.optimiser)
    if words:
        record["notes"] = [*record.get("notes", ()), words]
