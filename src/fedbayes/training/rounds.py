"""Round after round: the generators that `fit`, run folders and sweeps train by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.clock import EVALUATION, FILES, PERSONAL, STEPS, SUM, share
from fedbayes.engine.stacked import compiling_beside, run_all
from fedbayes.errors import NotFinite
from fedbayes.federation.contributions import LEFT_OUT, as_told
from fedbayes.federation.program import Context, Outcome, nothing
from fedbayes.federation.round import close_round
from fedbayes.federation.schedule import Plan
from fedbayes.federation.staleness import closed_on
from fedbayes.training.personal import personal_scores
from fedbayes.training.private_scores import noisy_scores
from fedbayes.training.records import follow_scales, record_of
from fedbayes.training.run import OwnStore, evaluate, observed, scores_on
from fedbayes.training.settings import MONITORS
from fedbayes.training.task import Best, Federation, Progress, Task

MONITORED = {"nll": "NLL", "accuracy": "accuracy"}


def rounds(
    task: Task, progress: Progress, own: OwnStore, after_client: Callable[[], None] = lambda: None
) -> Iterator[tuple[Progress, dict[str, Any]]]:
    """Train round after round: yields the progress after each, and its record for the journal.

    Own state is put into the store before the round is yielded.
    """
    with compiling_beside([task.engine]):
        while not task.done(progress):
            started = time.perf_counter()
            plan = task.plan(progress)
            own.expect(task.scheduler.cohort(progress.state.round + 1))
            after = nothing if task.hides_cohorts else after_client
            with quick_cpu(), tensor_cores(task.precision):
                with share(STEPS):
                    outcomes = _run_plans([task], [plan], [own], after)
                progress, record = close(task, progress, own, plan, outcomes[0])
                progress = judged(task, progress, own, record)
            if not task.hides_cohorts:  # which tell how many there were
                record["seconds"] = time.perf_counter() - started
            yield progress, record


def judged(task: Task, progress: Progress, own: OwnStore, record: dict[str, Any]) -> Progress:
    """The progress after what is looked at when a round is closed: personal models, and whether to stop."""
    _make_personal([task], [progress], [own], [record])
    return _stop(task, progress, record)


def rounds_together(
    tasks: Sequence[Task], starts: Sequence[Progress], owns: Sequence[OwnStore]
) -> Iterator[list[tuple[Progress, dict[str, Any]] | None]]:
    """Rounds of several federations as one program each: a sweep over seeds, splits and scalar options.

    Yields one entry per task and round, None where a task is done. All need the stacked engine, one network, one data
    set, and methods that differ in scalar options only.
    """
    progress = list(starts)
    with compiling_beside([task.engine for task in tasks]):
        while live := [m for m, task in enumerate(tasks) if not task.done(progress[m])]:
            started = time.perf_counter()
            lead = tasks[live[0]]
            plans = [tasks[m].plan(progress[m]) for m in live]
            for m in live:
                owns[m].expect(tasks[m].scheduler.cohort(progress[m].state.round + 1))
            entries: list[tuple[Progress, dict[str, Any]] | None] = [None] * len(tasks)
            with quick_cpu(), tensor_cores(lead.precision):
                with share(STEPS):
                    outcomes = _run_plans([tasks[m] for m in live], plans, [owns[m] for m in live])
                for m, plan, outcome in zip(live, plans, outcomes):
                    progress[m], record = close(tasks[m], progress[m], owns[m], plan, outcome)
                    entries[m] = (progress[m], record)
                records = [entry[1] for entry in entries if entry is not None]
                _make_personal([tasks[m] for m in live], [progress[m] for m in live], [owns[m] for m in live], records)
                for m, record in zip(live, records):
                    progress[m] = _stop(tasks[m], progress[m], record)
                    entries[m] = (progress[m], record)
            seconds = (time.perf_counter() - started) / len(live)
            for task, entry in zip(tasks, entries):
                if entry is not None and not task.hides_cohorts:
                    entry[1]["seconds"] = seconds
            yield entries


def _run_plans(
    tasks: Sequence[Task], plans: Sequence[Plan], owns: Sequence[OwnStore], after: Callable[[], None] = nothing
) -> list[Outcome]:
    """What each task's round is closed on; the orders of all, of whatever versions, are one program if they can be."""
    lines = [(m, order) for m, plan in enumerate(plans) for order in plan.orders]
    engines, programs = [tasks[m].engine for m, _ in lines], [tasks[m].program for m, _ in lines]
    brought = run_all(engines, programs, [order for _, order in lines], [owns[m].get for m, _ in lines], after)
    outcomes = []
    for m, (task, plan) in enumerate(zip(tasks, plans)):
        own = [outcome for (member, _), outcome in zip(lines, brought) if member == m]
        outcomes.append(closed_on(task.program, plan.orders, own, plan.closing, plan.discount))
    return outcomes


def close(
    task: Task, progress: Progress, own: OwnStore, plan: Plan, outcome: Outcome
) -> tuple[Progress, dict[str, Any]]:
    """Close a round: pool, follow the program's stages, evaluate when due.

    Of a private round only what is released goes further, and it is no longer known who took part.
    """
    order, privacy = plan.closing, task.privacy
    took_part = order.cohort
    if privacy is not None:
        with share(SUM):
            order, outcome = privacy.release(task.program, order, outcome)
        progress = progress._replace(accounts=privacy.after(progress.accounts, took_part))
    with share(FILES):
        own.put(order.round, outcome.own)
    with share(SUM):
        outcome = as_told(task.program, order, outcome)
        state, report = close_round(Context(task.program, order, outcome, task.engine, own.get), progress.state)
        state = state._replace(flight=plan.flight)
    due = _due(task, state.round, task.evaluate_every)
    if due or _due(task, state.round, task.personal_every):
        with share(EVALUATION):
            state = observed(task, state)
    record = {**record_of(task, order, outcome, report), **plan.told}
    if progress.pretrained:
        record["pretrained"] = dict(progress.pretrained)
    before, progress = progress.state, progress._replace(state=state, pretrained={})
    if due:
        follow_scales(task, before.broadcast, state, record)
    if due and task.program.prediction.whole and (privacy is None or privacy.public_test):
        with share(EVALUATION):
            try:
                record["test"] = evaluate(task, state)
                progress = _validate(task, progress, record)
            except NotFinite:
                what = "what the posterior predicts is not finite; training diverged: try a smaller lr"
                record["diverged"] = f"round {state.round}: {what}"
                progress = progress._replace(state=before._replace(round=state.round, flight=plan.flight))
    if privacy is not None:
        scores = {}
        if due and privacy.scoring is not None:
            with share(EVALUATION):
                scores = noisy_scores(task, privacy, state)
            progress = progress._replace(accounts=privacy.after_scores(progress.accounts))
        record = privacy.public(record, outcome, progress.accounts, due)
        record["train"] = scores
    return progress, record


def _due(task: Task, number: int, every: int) -> bool:
    return every > 0 and (number % every == 0 or number == task.rounds)


def _make_personal(
    tasks: Sequence[Task], progress: Sequence[Progress], owns: Sequence[OwnStore], records: Sequence[dict[str, Any]]
) -> None:
    """Evaluate personal models where they are due; without a global model they are all that is tested."""
    due = []
    for m, (task, at) in enumerate(zip(tasks, progress)):
        instead = not task.program.prediction.whole and _due(task, at.state.round, task.evaluate_every)
        if instead or _due(task, at.state.round, task.personal_every):
            due.append(m)
    # Federations of one sweep are evaluated together where they are at the same round.
    for number in sorted({progress[m].state.round for m in due}):
        group = [m for m in due if progress[m].state.round == number]
        homes = [Federation(tasks[m], progress[m].state, owns[m].get) for m in group]
        with share(PERSONAL):
            by_member = personal_scores(homes)
        for m, scores in zip(group, by_member):
            records[m]["personal"] = scores
            if not tasks[m].program.prediction.whole:
                records[m]["test"] = {name: v for name, v in scores.items() if not name.startswith("clients")}
            if notes := tasks[m].engine.take_notes():
                records[m]["notes"] = [*records[m].get("notes", ()), *notes]


def _stop(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Stop where the loss is low enough, or the accuracy high enough (FedUAB, algorithm 1), or where nobody is left."""
    loss, accuracy = record["train"].get("loss"), record.get("test", {}).get("accuracy")
    why = record.get("diverged")
    if task.target_loss is not None and loss is not None and loss <= task.target_loss:
        why = f"the training loss is {loss:.4f}, asked for {task.target_loss}"
    if task.target_accuracy is not None and accuracy is not None and accuracy >= task.target_accuracy:
        reached = f"the accuracy is {accuracy:.4f}, asked for {task.target_accuracy}"
        if task.elsewhere is None or task.program.prediction.whole:
            why = reached
        else:  # one of those who scored their personal models could end everybody's training by a lie
            record["notes"] = [*record.get("notes", ()), f"{reached}, by the clients' own word: it stops nobody"]
    if record["cohort"] and list(record["left_out"].values()) == [LEFT_OUT] * record["cohort"]:
        why = record["diverged"] = (
            f"round {record['round']}: nobody is left, the uploads of all {record['cohort']} clients were not finite; "
            "training diverged: try a smaller lr"
        )
    left = task.rounds - progress.state.round
    if task.privacy is not None and left and not task.privacy.rounds_left(progress.accounts, left, progress.beside):
        spent = task.privacy.epsilon(progress.accounts)
        record["epsilon"], record["delta"] = spent, task.privacy.delta
        beside = f" and {progress.beside:.4g} beside the rounds" if progress.beside else ""
        why = f"epsilon is {spent:.4g}{beside}, and one more round would pass the budget of {task.privacy.budget:g}"
    if why is None:
        return progress
    record["stopped"] = why
    return progress._replace(state=observed(task, progress.state), stopped=True)


def _validate(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Keep the best posterior by a validation score; stop after `patience` evaluations without a better one."""
    if not len(task.validation):
        return progress
    data, state = task.clients.data, progress.state
    scores = scores_on(task, state, data.x[task.validation], data.y[task.validation], "validation")
    record["validation"] = scores
    best = progress.best
    if state.round <= task.program.prediction.made:
        return progress
    score, sign = scores[task.monitor], MONITORS[task.monitor]
    if best is None or sign * score < sign * best.score or math.isnan(best.score):
        return progress._replace(best=Best(score, state.round, state.broadcast, state.kept))
    waited = (state.round - best.round) // task.evaluate_every
    stopped = task.patience is not None and waited >= task.patience
    if stopped:
        record["stopped"] = (
            f"no better validation {MONITORED[task.monitor]} than {best.score:.4f} (round {best.round}) "
            f"for {waited} evaluations"
        )
    return progress._replace(stopped=stopped)
