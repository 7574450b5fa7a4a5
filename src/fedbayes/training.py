"""Training from the first round to the last: `fit` in memory, and the generator of rounds that run folders use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedbayes.clients.client import Own
from fedbayes.data import Clients
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.stacked import train_within_memory
from fedbayes.errors import InputError
from fedbayes.federation import (
    BY_MEMBERS,
    Order,
    Outcome,
    close_round,
    predicting,
)
from fedbayes.observation import with_noise as observed
from fedbayes.personalised import Federation, personal_models, personal_scores, refined_task, sums_of
from fedbayes.posterior import Parts, Posterior, flatten_parts
from fedbayes.predict import Predictive, directly, predictive
from fedbayes.scores import SUMS
from fedbayes.scores.additive import Sums
from fedbayes.serving import at_server
from fedbayes.task import MONITORS, Best, Progress, Task, prepare

MONITORED = {"nll": "NLL", "accuracy": "accuracy"}


class OwnStore(Protocol):
    """Where the own state of clients lives between rounds."""

    def get(self, client: int) -> Own | None: ...
    def put(self, number: int, rows: Mapping[int, Own]) -> None: ...
    def expect(self, clients: Iterable[int]) -> None: ...


class Memory:
    """Own state in a dict: O(clients that took part)."""

    def __init__(self) -> None:
        self.rows: dict[int, Own] = {}

    def get(self, client: int) -> Own | None:
        return self.rows.get(client)

    def put(self, number: int, rows: Mapping[int, Own]) -> None:
        self.rows.update({k: own for k, own in rows.items() if own})

    def expect(self, clients: Iterable[int]) -> None:
        """It has all at hand."""


def rounds(
    task: Task, progress: Progress, own: OwnStore, after_client: Callable[[], None] = lambda: None
) -> Iterator[tuple[Progress, dict[str, Any]]]:
    """Train round after round: yields the progress after each, and its record for the journal.

    Own state is put into the store before the round is yielded.
    """
    while not task.done(progress):
        started = time.perf_counter()
        order = task.open(progress)
        own.expect(task.members_of(order.round + 1))
        with quick_cpu(), tensor_cores(task.precision):
            outcome = task.engine.train(order, own.get, after_client)
            progress, record = close(task, progress, own, order, outcome)
            _make_personal([task], [progress], [own], [record])
            progress = _stop(task, progress, record)
        record["seconds"] = time.perf_counter() - started
        yield progress, record


def rounds_together(
    tasks: Sequence[Task], starts: Sequence[Progress], owns: Sequence[OwnStore]
) -> Iterator[list[tuple[Progress, dict[str, Any]] | None]]:
    """Rounds of several federations as one program each: a sweep over seeds, splits and scalar options.

    Yields one entry a task and round, None where a task is done. All need the stacked engine, one network, one data
    set, and methods that differ in scalar options only.
    """
    progress = list(starts)
    while live := [m for m, task in enumerate(tasks) if not task.done(progress[m])]:
        started = time.perf_counter()
        lead = tasks[live[0]]
        orders = [tasks[m].open(progress[m]) for m in live]
        for m, order in zip(live, orders):
            owns[m].expect(tasks[m].members_of(order.round + 1))
        made: list[tuple[Progress, dict[str, Any]] | None] = [None] * len(tasks)
        with quick_cpu(), tensor_cores(lead.precision):
            outcomes = train_within_memory([tasks[m].engine for m in live], orders, [owns[m].get for m in live])
            for m, order, outcome in zip(live, orders, outcomes):
                progress[m], record = close(tasks[m], progress[m], owns[m], order, outcome)
                made[m] = (progress[m], record)
            records = [entry[1] for entry in made if entry is not None]
            _make_personal([tasks[m] for m in live], [progress[m] for m in live], [owns[m] for m in live], records)
            for m, record in zip(live, records):
                progress[m] = _stop(tasks[m], progress[m], record)
                made[m] = (progress[m], record)
        seconds = (time.perf_counter() - started) / len(live)
        for entry in made:
            if entry is not None:
                entry[1]["seconds"] = seconds
        yield made


def close(
    task: Task, progress: Progress, own: OwnStore, order: Order, outcome: Outcome
) -> tuple[Progress, dict[str, Any]]:
    """Close a round: aggregate, train at the server where the method does, evaluate when due."""
    state, report = close_round(task.program, progress.state, order, outcome)
    if task.server is not None:
        state = at_server(task.program, task.server, state, order.options, outcome)
    elif task.program.server_client is not None:
        upload = task.engine.server(task.program.server_client, state, order.options)
        state = state._replace(broadcast={**state.broadcast, **upload.parts})
    due = _due(task, state.round, task.evaluate_every)
    if due and outcome.uploads and task.program.noise in BY_MEMBERS:
        state = state._replace(broadcast=with_noise(task, state.broadcast, [u.client for u in outcome.uploads]))
    own.put(order.round, outcome.own)
    record = _record(task, order, outcome, report)
    if progress.pretrained:
        record["pretrained"] = dict(progress.pretrained)
    progress = progress._replace(state=state, pretrained={})
    if due and task.program.whole:
        record["test"] = evaluate(task, state.broadcast)
        progress = _validate(task, progress, record)
    return progress, record


def _due(task: Task, number: int, every: int) -> bool:
    return every > 0 and (number % every == 0 or number == task.rounds)


def _make_personal(
    tasks: Sequence[Task], progress: Sequence[Progress], owns: Sequence[OwnStore], records: Sequence[dict[str, Any]]
) -> None:
    """Evaluate personal models where they are due; without a global model they are all that is tested."""
    asked = []
    for m, (task, at) in enumerate(zip(tasks, progress)):
        instead = not task.program.whole and _due(task, at.state.round, task.evaluate_every)
        if instead or _due(task, at.state.round, task.personal_every):
            asked.append(m)
    # Federations of one sweep are evaluated together where they are at the same round.
    for number in sorted({progress[m].state.round for m in asked}):
        group = [m for m in asked if progress[m].state.round == number]
        homes = [Federation(tasks[m], progress[m].state, owns[m].get) for m in group]
        for m, scores in zip(group, personal_scores(homes)):
            records[m]["personal"] = scores
            if not tasks[m].program.whole:
                records[m]["test"] = {name: v for name, v in scores.items() if not name.startswith("clients")}


def _stop(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Stop where the training loss is low enough, or the accuracy high enough (FedUAB, algorithm 1)."""
    loss, accuracy = record["train"].get("loss"), record.get("test", {}).get("accuracy")
    why = None
    if task.target_loss is not None and loss is not None and loss <= task.target_loss:
        why = f"the training loss is {loss:.4f}, asked for {task.target_loss}"
    if task.target_accuracy is not None and accuracy is not None and accuracy >= task.target_accuracy:
        why = f"the accuracy is {accuracy:.4f}, asked for {task.target_accuracy}"
    if why is None:
        return progress
    record["stopped"] = why
    return progress._replace(stopped=True)


def with_noise(task: Task, parts: Parts, members: Sequence[int] | None = None) -> Parts:
    """The parts with the observation noise on the rows of the clients who trained them, all or `members`."""
    data = task.clients.data
    asked = range(len(task.clients)) if members is None else members
    rows = [task.clients.train_rows(k) for k in asked]
    return observed(task.program, parts, [(data.x[r].to(task.device), data.y[r].to(task.device)) for r in rows])


def _record(task: Task, order: Order, outcome: Outcome, report: dict[str, float]) -> dict[str, Any]:
    down = {part: order.broadcast[part] for part in task.program.rules}
    up = message_bytes(task.program.uploaded(down))
    return {
        "round": order.round + 1,
        "cohort": len(order.cohort),
        "dropped": list(order.dropped),
        "left_out": {str(k): why for k, why in outcome.left_out.items()},
        "train": {name: total / outcome.counted for name, total in outcome.metrics.items() if outcome.counted},
        **report,
        "bytes_down": message_bytes(down) * (len(order.cohort) + len(order.dropped)),
        "bytes_up": up * len(order.cohort),
        **({"notes": notes} if (notes := task.take_notes()) else {}),
    }


def pretrained(task: Task) -> tuple[Parts, dict[str, Any]]:
    """Train a task in memory for another to begin with: its best posterior, its epochs and validation scores."""
    run = train(task)
    best = run.progress.best
    kept = run.progress.state if best is None else best
    scores = run.journal[kept.round - 1].get("validation", {}) if kept.round else {}
    return kept.broadcast, {"epochs": len(run.journal), "best": kept.round, **scores}


def message_bytes(parts: Mapping[str, Posterior]) -> int:
    """Bytes of a broadcast, or of an upload, in the dtypes it is held in."""
    return sum(t.numel() * t.element_size() for t in flatten_parts(parts)[0].values())


def _validate(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Keep the best posterior by a validation score; stop after `patience` evaluations without a better one."""
    if not len(task.validation):
        return progress
    data, state = task.clients.data, progress.state
    scores = _scores(task, state.broadcast, data.x[task.validation], data.y[task.validation], "validation")
    record["validation"] = scores
    best = progress.best
    score, sign = scores[task.monitor], MONITORS[task.monitor]
    if best is None or sign * score < sign * best.score or math.isnan(best.score):
        return progress._replace(best=Best(score, state.round, state.broadcast))
    waited = (state.round - best.round) // task.evaluate_every
    stopped = task.patience is not None and waited >= task.patience
    if stopped:
        record["stopped"] = (
            f"no better validation {MONITORED[task.monitor]} than {best.score:.4f} (round {best.round}) "
            f"for {waited} evaluations"
        )
    return progress._replace(stopped=stopped)


def evaluate(task: Task, parts: Parts, *, draws: int | None = None) -> dict[str, float]:
    """Scores of a posterior on the whole test set; empty where there is none."""
    data = task.clients.data
    return _scores(task, parts, data.test_x, data.test_y, "test", draws) if len(data.test_x) else {}


def _scores(task: Task, parts: Parts, x: Tensor, y: Tensor, which: str, draws: int | None = None) -> dict[str, float]:
    return SUMS[task.program.model.likelihood.kind][1](score_sums(task, parts, x, y, which, draws))


def score_sums(task: Task, parts: Parts, x: Tensor, y: Tensor, which: str, draws: int | None = None) -> Sums:
    """The sums behind a posterior's scores on rows; those of several clients add up to the federation's."""
    return sums_of(task, predict_with(task, predicting(task.program, parts), x, draws=draws, which=which), y)


def predict_with(
    task: Task, parts: Parts, x: Tensor, *, draws: int | None = None, which: str | None = None
) -> Predictive:
    """What the parts say of x. `which` is a name for x where it is asked about again and again: a graph pays then."""
    program = task.program
    draws = program.test_draws if draws is None else draws
    return predictive(
        program.model,
        parts,
        x.to(task.device),
        draws=draws,
        seed=task.seed,
        dropout=program.dropout,
        closed=program.closed,
        carry=directly if which is None else partial(task.engine.carry, (which, draws, task.seed)),
    )


@dataclass(frozen=True)
class Run:
    """A trained federation: its posterior, its journal, and predictions."""

    task: Task
    progress: Progress
    journal: list[dict[str, Any]]
    own: OwnStore = field(default_factory=Memory, repr=False)

    @property
    def parts(self) -> Parts:
        """All parts that predict: the best validated ones where there was a validation split."""
        return predicting(self.task.program, self._final)

    @property
    def _final(self) -> Parts:
        best = self.progress.best
        return self.progress.state.broadcast if best is None else best.broadcast

    @property
    def posterior(self) -> Posterior:
        """The posterior over the network's weights; under FedAG the normal, also where the uploads predict."""
        return self._final[self.task.program.main]

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """Predictions with their uncertainty parts for inputs [N, ...], stored as the training inputs were."""
        if not self.task.program.whole:
            raise InputError("this method has no global model, only personal ones: use run.personal(client).predict(x)")
        return predict_with(self.task, self.parts, self._stored(x), draws=draws)

    def _stored(self, x: Any) -> Tensor:
        """Inputs in the dtype of the training inputs, checked."""
        x = torch.as_tensor(x)
        shape = self.task.clients.data.shape
        if tuple(x.shape[1:]) != shape:
            raise InputError(
                f"x has shape {list(x.shape)}; the network was trained on inputs [N, {', '.join(map(str, shape))}]"
            )
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise InputError("x holds values that are not finite; drop or fill them")
        stored = x.to(self.task.clients.data.x.dtype)
        if not stored.is_floating_point() and not torch.equal(stored.to(x.dtype), x):
            kind = str(stored.dtype).removeprefix("torch.")
            raise InputError(f"x holds values that {kind} can't; give inputs as the training inputs were stored")
        return stored

    def scores(self, *, draws: int | None = None) -> dict[str, float]:
        """Scores on the whole test set; of the personal models where there is no global one."""
        if not self.task.program.whole:
            return self.personal_scores()
        return evaluate(self.task, self._final, draws=draws)

    def personal(self, client: int) -> Personal:
        """The model that a client makes its own, by training on its rows once more."""
        if not 0 <= client < len(self.task.clients):
            raise InputError(f"client {client}: there are {len(self.task.clients)}, numbered from 0")
        for cohort in personal_models([self.home], [client]):
            for _, parts in cohort[0]:
                return Personal(self, parts)
        raise InputError(f"client {client}: its personal model is not finite (did it diverge? try a smaller lr)")

    def personal_scores(self) -> dict[str, float]:
        """Scores of all clients' personal models on their own test rows."""
        return personal_scores([self.home])[0]

    def refined(self, refine: str = "flow", **options: Any) -> Run:
        """The same run with personal models that are refined in another way; options as in `methods.refined`."""
        return replace(self, task=refined_task(self.task, refine=refine, **options))

    @property
    def home(self) -> Federation:
        """The federation as its personal models see it."""
        return Federation(self.task, self.progress.state._replace(broadcast=self._final), self.own.get)


@dataclass(frozen=True)
class Personal:
    """A client's personal model: its parts, and predictions by them."""

    run: Run
    parts: Parts

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """Predictions with their uncertainty parts, as `Run.predict`."""
        return predict_with(self.run.task, self.parts, self.run._stored(x), draws=draws)

    @property
    def as_run(self) -> Run:
        """A run that predicts by this model, for all that takes runs: OOD scores, calibration."""
        task = self.run.task
        program = task.program._replace(whole=True, predictor=lambda parts: parts, members=False)
        state = self.run.progress.state._replace(broadcast=self.parts)
        return Run(replace(task, program=program), self.run.progress._replace(state=state, best=None), [])


def fit(network: nn.Module, clients: Clients | list[Any], **options: Any) -> Run:
    """Train a network across clients and return the run; options as in `prepare`.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits").split(fb.partition.dirichlet(0.3), clients=20, seed=0)
    >>> run = fb.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), clients, method="feduab", rounds=1, cohort=2)
    >>> run.predict(clients.data.test_x[:3]).probs.shape
    torch.Size([3, 10])
    """
    return train(prepare(network, clients, **options))


def train(task: Task) -> Run:
    """Train a task in memory, from its first round to its last."""
    last, journal, own = task.begin(), [], Memory()
    for progress, record in rounds(task, last, own):
        last = progress
        journal.append(record)
    return Run(task, last, journal, own)
