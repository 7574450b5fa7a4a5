"""A federation ready to train, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.engine.bound import Widths
from fedbayes.engine.choice import Carry
from fedbayes.engine.stacked import Stacked
from fedbayes.errors import InputError, unknown
from fedbayes.federation.kept import Kept
from fedbayes.federation.program import (
    AT_SERVER,
    GATHER,
    PERSONAL,
    STATISTICS,
    TRAIN,
    Engine,
    FederationState,
    Order,
    OwnState,
    Program,
)
from fedbayes.federation.round import at_home, begin, gathering, told
from fedbayes.federation.schedule import Plan, Scheduler
from fedbayes.posterior.values import Parts, Posterior, check, map_tensors
from fedbayes.scores.additive import Sums
from fedbayes.training.private import Accounts, PrivateRun
from fedbayes.training.settings import CLIENTS


class Best(NamedTuple):
    """The best validated posterior so far, by the score that is monitored."""

    score: float
    round: int
    broadcast: Parts
    kept: Kept = Kept()

    @property
    def state(self) -> FederationState:
        """The posterior as a state, for all that predicts."""
        return FederationState(self.round, self.broadcast, kept=self.kept)


class Progress(NamedTuple):
    """All that a run carries from round to round, beside its clients' own state."""

    state: FederationState
    best: Best | None = None
    stopped: bool = False
    pretrained: Mapping[str, Any] = {}  # what to report of training before the first round
    accounts: Accounts = {}  # noqa: RUF012  (what a private run has spent; never changed)
    beside: float = 0.0  # the epsilon that was spent beside its rounds, as its folder says


# What is called after each round with the run so far and its record; True, or a reason, stops the run.
OnRound = Callable[[Any, dict[str, Any]], "str | bool | None"]


def callbacks_of(given: OnRound | Sequence[OnRound]) -> tuple[OnRound, ...]:
    """One function, or several, as a tuple; checked."""
    functions = tuple(given) if isinstance(given, Iterable) and not callable(given) else (given,)
    for function in functions:
        if not callable(function):
            raise InputError(f"on_round must be a function (run, record), not a {type(function).__name__}")
    return functions


# Training at the server before the first round: the parts to begin with, and what to report of it.
Before = Callable[[], tuple[Parts, Mapping[str, Any]]]


@dataclass(frozen=True)
class Task:
    """A federation ready to train: a program, its clients' data on the device, and how many rounds of what."""

    program: Program
    clients: Clients
    validation: Tensor  # rows held out for early stopping, pooled over clients; empty without
    engine: Engine
    carry: Carry  # runs evaluations
    scheduler: Scheduler
    choice: str  # which engine runs, and why
    precision: str
    rounds: int
    cohort: int
    seed: int
    patience: int | None
    evaluate_every: int
    device: torch.device
    home: Program  # by which clients make their personal models
    gather: Program | None = None  # by which they send what those need of one another; None: nothing
    personal_every: int = 0  # rounds between evaluations of the personal models; 0: none
    target_loss: float | None = None  # stop when the training loss is as low
    target_accuracy: float | None = None  # stop when the accuracy on the test set is as high
    monitor: str = "nll"  # the validation score by which the best round is chosen
    before: Before | None = None
    elsewhere: Callable[[Federation], Iterator[tuple[int, Sums]]] | None = None  # personal models on other machines
    method: str = ""  # its name
    optimiser: str | None = None  # of its clients, where it has one
    idle: tuple[str, ...] = ()  # what is to be said of options that were set and change nothing
    on_round: tuple[OnRound, ...] = ()
    validation_sizes: Tensor | None = None  # rows of each client among those held out; None: there are none
    privacy: PrivateRun | None = None  # how it is private, where it is

    def begin(self) -> Progress:
        """The progress before the first round, after the server's pre-training where there is one."""
        if self.before is None:
            return Progress(begin(self.program))
        parts, figures = self.before()
        start = self.program._replace(initial=initial_of(self.program, parts, self.device))
        return Progress(begin(start), pretrained=figures)

    def widths(self) -> dict[str, Widths]:
        """How many clients run at once by now, for each purpose: a run that is resumed goes on with it."""
        if not isinstance(self.engine, Stacked):
            return {}
        beside = {PERSONAL, *(() if self.gather is None else (GATHER,))}
        stages = {stage.name for stage in self.program.stages} & {STATISTICS}
        server = {AT_SERVER} if any(stage.server is not None for stage in self.program.stages) else set()
        return {purpose: self.engine.widths[purpose] for purpose in sorted({TRAIN} | beside | stages | server)}

    def go_on_with(self, widths: Mapping[str, Sequence[int]]) -> None:
        """Run as many clients at once as a run before, whatever memory is free now."""
        if isinstance(self.engine, Stacked):
            self.engine.go_on_with(widths)

    @property
    def hides_cohorts(self) -> bool:
        """Whether nobody may learn who took part in a round, nor how many did."""
        return self.privacy is not None and self.privacy.level == CLIENTS

    def done(self, progress: Progress) -> bool:
        return progress.stopped or progress.state.round >= self.rounds

    def plan(self, progress: Progress) -> Plan:
        """The orders that the next round closes on, and what is on its way afterwards."""
        return self.scheduler.plan(self.program, progress.state)

    def orders(self, progress: Progress) -> tuple[Order, ...]:
        """The orders of that plan, the oldest first."""
        return self.plan(progress).orders


class Federation(NamedTuple):
    """A task at some round, and what its clients have at home."""

    task: Task
    state: FederationState
    own: OwnState
    gathered: Parts = {}  # noqa: RUF012  (what all clients sent for one another's personal models; never changed)

    def order(self, clients: Sequence[int], purpose: str = PERSONAL) -> Order:
        """An order to some clients beside the rounds."""
        program, number = self.task.program, self.state.round
        sent = {**self.state.broadcast, **self.gathered}
        options = {**program.options(number), **told(program, self.state.stages)}
        return Order(number, tuple(clients), (), sent, options, self.state.version, purpose)


def with_program(task: Task, program: Program) -> Task:
    """The task with the personal models of another program; what trains is not changed."""
    return replace(task, program=program, home=at_home(program), gather=gathering(program))


def initial_of(program: Program, init: Mapping[str, Posterior], device: torch.device) -> Parts:
    """The first broadcast, with posteriors to begin with in place of the program's own; checked."""
    parts = dict(program.initial)
    for part, q in init.items():
        if part not in parts:
            raise unknown("part of init", part, parts)
        ours = parts[part]
        if type(q) is not type(ours) or q.mean.shape != ours.mean.shape:
            theirs = f" over {q.mean.shape[-1]}" if hasattr(q, "mean") else ""
            raise InputError(
                f"init: part {part!r} must be a {type(ours).__name__} over {ours.mean.shape[-1]} weights, "
                f"not a {type(q).__name__}{theirs}; is it of another network?"
            )
        if q.layout is not None and ours.layout is not None and q.layout.fingerprint != ours.layout.fingerprint:
            raise InputError(f"init: part {part!r} was made for another network (layouts differ)")
        try:
            check(q, f"init: part {part!r}")
        except ValueError as error:
            raise InputError(f"{error}; give posteriors that are finite, with positive scales") from error
        parts[part] = map_tensors(q, lambda t: t.to(device))
    return parts
