"""A client on its own machine: its task, its rows, and one round of it. Knows nothing of Flower."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fedbayes.clients.client import Info, Own, Upload
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.loop import Loop
from fedbayes.errors import InputError, shown
from fedbayes.experiments.build import build, keeps_apart, side_of
from fedbayes.experiments.experiment import Experiment, from_toml, to_toml
from fedbayes.federation.contributions import LEFT_OUT, contribute
from fedbayes.federation.program import Order, Program
from fedbayes.federation.round import begin, told
from fedbayes.flower.kept import Kept, Lost
from fedbayes.flower.settings import checked
from fedbayes.flower.shown import LEAST
from fedbayes.flower.wire import Coding, Head, Letter, Refused, head_of, layouts_of, read
from fedbayes.posterior.values import Parts
from fedbayes.training.task import Task

TOLD = "told."  # before the name of a number in a head
QUERY, TRAIN, EVALUATE, REFINE = "query", "train", "evaluate", "evaluate.refine"
CALIBRATE, PROMISE, WATCH = "evaluate.calibrate", "evaluate.promise", "evaluate.watch"
SECURE = ("train.keys", "train.shares", "train.masked", "train.unmask")  # the letters of a secure sum


class Trained(NamedTuple):
    """What a client's round brought: its upload, what it had kept before, and whether that was lost."""

    upload: Upload
    info: Info
    broadcast: Parts
    own: Own | None
    lost: bool


class Node:
    """One client of an experiment, with its rows and nobody else's."""

    def __init__(self, experiment: Experiment, client: int) -> None:
        self.client = client
        settings = checked(experiment.flower)  # by its own file, whatever a letter says
        self.secure = settings.secure
        self.least, self.colluding = max(LEAST, settings.min_clients), settings.colluding
        self.stream: str | None = None  # a file that new rows come into, and the column of their labels
        self.label: str | None = None
        self.state: str | None = None  # a folder for what a watch has seen
        here = to_toml(replace(experiment, pretrain={}))  # what the server trains before is in its broadcast
        self.task = _task(here, client if keeps_apart(experiment) else 0)
        if not 0 <= client < len(self.task.clients):
            raise InputError(f"partition-id is {client}, but there are {len(self.task.clients)} clients, from 0 on")
        self.head = head_of(experiment, layouts_of(self.task.program.initial), self.task.program.model.body)

    def reply(self, letter: Letter, **more: Any) -> Head:
        """The head of a reply: what the federation has in common, which letter it answers, and more."""
        named: Head = {key: letter.head[key] for key in ("run", "round") if key in letter.head}
        return {**self.head, **named, "client": self.client, **more}

    def trained(self, letter: Letter, kept: Kept) -> Trained:
        """From the broadcast and what was kept to an upload; Refused where it is not finite."""
        task, head = self.task, letter.head
        program, number = task.program, head["round"]
        broadcast = read(letter.arrays, program.initial, Coding(head["dtype"], head["delta"]), what="broadcast")
        own, lost = None, False
        try:
            own = kept.after(head["counted"], task.device)
        except Lost:
            lost = True
        order = Order(number, (self.client,), (), broadcast, {**program.options(number), **told_in(head, program)})
        with quick_cpu(), tensor_cores(task.precision):
            assert isinstance(task.engine, Loop)  # which stands on each machine
            upload, info = task.engine.client(program, order, self.client, own)
        # The client looks itself: what is not finite need not travel, and its own state stays as it was.
        if not bool(contribute(program, upload, info, torch.ones((), dtype=torch.float64)).finite):
            raise Refused(LEFT_OUT)
        return Trained(upload, info, broadcast, own, lost)


def told_by(program: Program, order: Order) -> Head:
    """What the server's stages tell the clients of a round, as a letter's head carries it."""
    return {f"{TOLD}{name}": float(order.options[name]) for name in told(program, begin(program).stages)}


def told_in(head: Head, program: Program) -> dict[str, float]:
    """The inverse: numbers among a round's options that no experiment file knows, a bound that follows the changes."""
    numbers = {}
    for name in told(program, begin(program).stages):
        number = head.get(f"{TOLD}{name}")
        if type(number) is not float or not number > 0:
            raise Refused(f"{name} is {shown(number)}, not a positive number")
        numbers[name] = number
    return numbers


@lru_cache(maxsize=4)
def _task(text: str, client: int) -> Task:
    """What a process that answers more than one message makes once, for all clients whose rows it knows."""
    experiment = from_toml(text)
    return replace(build(experiment, clients=side_of(experiment, client)), elsewhere=None)  # here they are at home
