"""A client on its own machine: how it answers the server's letters. Knows nothing of Flower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fedbayes.clients.client import Info, Own, Upload
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.loop import LEFT_OUT
from fedbayes.errors import InputError
from fedbayes.federation import LONE_NOISE, MEMBERS, NOISE_PART, FederationState, Order, Program, contribute
from fedbayes.flower.kept import Kept, Lost
from fedbayes.flower.wire import Coding, Head, Letter, Refused, check_head, head_of, layouts_of, read, write
from fedbayes.personalised import Federation, personal_sums
from fedbayes.posterior import Draws, Parts, Point
from fedbayes.study.build import build, keeps_apart, side_of
from fedbayes.study.experiment import Experiment, from_toml, to_toml
from fedbayes.trained import score_sums
from fedbayes.training import Task

QUERY, TRAIN, EVALUATE, REFINE = "query", "train", "evaluate", "evaluate.refine"
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
        here = to_toml(replace(experiment, pretrain={}))  # what the server trains before is in its broadcast
        self.task = _task(here, client if keeps_apart(experiment) else 0)
        if not 0 <= client < len(self.task.clients):
            raise InputError(f"partition-id is {client}, but there are {len(self.task.clients)} clients, from 0 on")
        self.head = head_of(experiment, layouts_of(self.task.program.initial))

    def answer(self, kind: str, letter: Letter, kept: Kept) -> Letter:
        """The reply to a letter; where the letter can't be used, one that says why."""
        try:
            check_head(letter.head, self.head | ({"client": self.client} if kind != QUERY else {}))
            if kind in SECURE:
                from fedbayes.flower import secure_node  # needs Flower's cryptography

                return secure_node.answer(self, kind, letter, kept)
            return ANSWERS[kind](self, letter, kept)
        except Refused as why:
            return Letter({"refused": str(why)}, {})

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
        order = Order(number, (self.client,), (), broadcast, program.options(number))
        with quick_cpu(), tensor_cores(task.precision):
            upload, info = task.engine.client(order, self.client, own)
        # The client looks itself: what is not finite need not travel, and its own state stays as it was.
        _, finite = contribute(program, upload, info, torch.ones((), dtype=torch.float64))
        if not bool(finite):
            raise Refused(LEFT_OUT)
        return Trained(upload, info, broadcast, own, lost)


@lru_cache(maxsize=4)
def _task(text: str, client: int) -> Task:
    """What a process that answers more than one message makes once, for all clients whose rows it knows."""
    experiment = from_toml(text)
    return replace(build(experiment, clients=side_of(experiment, client)), elsewhere=None)  # here they are at home


def introduce(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Who this is, and how many rows it has."""
    clients = node.task.clients
    rows, tests = len(clients.train_rows(node.client)), len(clients.test_rows(node.client))
    return Letter(node.reply(letter, rows=rows, test_rows=tests), {})


def train(node: Node, letter: Letter, kept: Kept) -> Letter:
    """A client's round: from the broadcast and what was kept to an upload."""
    head = letter.head
    upload, info, broadcast, own, lost = node.trained(letter, kept)
    shared = {part: upload.parts[part] for part in node.task.program.rules}
    arrays = write(shared, Coding(head["dtype"], head["delta"]), broadcast)
    kept.put(head["round"], upload.own, head["counted"], own)
    metrics = {f"metric.{name}": float(value) for name, value in upload.metrics.items()}
    return Letter(node.reply(letter, rows=int(info.n), own=bool(upload.own), lost=lost, **metrics), arrays)


def evaluate(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Sums of the posterior's scores over the client's test rows."""
    task, head = node.task, letter.head
    like = predicting_like(task.program, head["members"], head["noise"])
    parts = read(letter.arrays, like, Coding(head["dtype"], head["delta"]), what="broadcast")
    data, rows = task.clients.data, task.clients.test_rows(node.client)
    if not len(rows):
        raise Refused("it has no test rows")
    with quick_cpu(), tensor_cores(task.precision):
        sums = score_sums(task, parts, data.test_x[rows], data.test_y[rows], "test")
    return Letter(node.reply(letter), {name: t.double().cpu().numpy() for name, t in sums.items()})


def refine(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Sums of the personal model's scores over the client's test rows; what the client keeps is not changed."""
    task, head = node.task, letter.head
    like = predicting_like(task.program, 0, head["noise"])
    broadcast = read(letter.arrays, like, Coding(head["dtype"], head["delta"]), what="broadcast")
    if NOISE_PART in broadcast:
        broadcast[LONE_NOISE] = broadcast.pop(NOISE_PART)
    try:
        own = kept.after(head["counted"], task.device)
    except Lost as error:
        raise Refused("it has lost its own state") from error
    here = Federation(task, FederationState(head["round"], broadcast), lambda client: own)
    for _, _, sums in personal_sums([here], [node.client]):
        return Letter(node.reply(letter), {name: t.double().cpu().numpy() for name, t in sums.items()})
    raise Refused("it has no test rows, or its personal model is not finite")


def predicting_like(program: Program, members: int, noise: int) -> Parts:
    """Parts shaped as those that predict: the broadcast, an ensemble of so many members, so many noise figures."""
    like: Parts = dict(program.initial)
    if members:
        for part in program.rules:
            q = program.initial[part]
            if q.mean.is_floating_point():
                like[MEMBERS + part] = Draws(q.mean.new_zeros(members, q.mean.shape[-1]), q.layout)
    if noise:
        like[NOISE_PART] = Point(program.initial[program.main].mean.new_zeros(noise))
    return like


ANSWERS: dict[str, Callable[[Node, Letter, Kept], Letter]] = {
    QUERY: introduce,
    TRAIN: train,
    EVALUATE: evaluate,
    REFINE: refine,
}
