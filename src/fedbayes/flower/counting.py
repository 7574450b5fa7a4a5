"""Histograms under masks: a program whose clients train nothing and upload counts, so that a secure sum adds them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedbayes.clients.client import Info, Upload
from fedbayes.errors import InputError
from fedbayes.federation.program import FederationState, Order, Program
from fedbayes.federation.rule import Rule
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.flower.asking import Asking
from fedbayes.flower.kept import Kept
from fedbayes.flower.node import Node, Trained
from fedbayes.flower.wire import Coding, Head, Letter, Refused, read
from fedbayes.posterior.values import Point

PART = "histogram"
PURPOSE = "calibrate"  # in the head of a letter of a secure sum
AFTER = 2**32  # added to the round, so that no sum of training is taken for one of these
COUNT = Rule(
    encode=lambda q, weight, reference: {"counts": q.mean.double()},
    decode=lambda total, reference: Point(total["counts"]),
    about="counts, added",
    takes=(Point,),
    weighted=False,
)


def counting(program: Program, size: int) -> Program:
    """The program whose clients upload so many counts beside a posterior that nobody changes."""
    nothing = Point(torch.zeros(size, dtype=torch.float64))
    pooling = program.pooling.beside(rules={PART: COUNT}, weighting=WEIGHTINGS["equal"], buckets=0, over={})
    initial = {**program.initial, PART: nothing}
    uploaded = pooling._replace(uploaded=lambda broadcast: broadcast, reference=lambda broadcast, options: broadcast)
    return program._replace(initial=initial, pooling=uploaded, stages=())


class Counter(Node):
    """A client that answers the letters of a secure sum with its histogram."""

    def __init__(self, node: Node, size: int) -> None:
        self.client, self.head, self.secure = node.client, node.head, node.secure
        self.task = replace(node.task, program=counting(node.task.program, size))
        self.inner = node

    def trained(self, letter: Letter, kept: Kept) -> Trained:
        """The histogram of the rows that calibrate, where a round of training would have its upload."""
        from fedbayes.flower.looks import histograms

        head, program = letter.head, self.task.program
        broadcast = read(letter.arrays, program.initial, Coding(head["dtype"], head["delta"]), what="broadcast")
        posterior = {part: q for part, q in broadcast.items() if part != PART}
        counts = histograms(self.inner, FederationState(head["round"], posterior), head, kept)
        if counts.numel() != broadcast[PART].mean.numel():
            raise Refused("its histogram is of another size")
        info = Info(broadcast, {}, torch.tensor(head["round"]), torch.tensor(1), ())
        upload = Upload({**broadcast, PART: Point(counts.reshape(-1))}, {}, {})
        return Trained(upload, info, broadcast, None, False)


def counter_of(node: Node, head: Head) -> Node:
    """The client that a letter of a secure sum is for: one that counts, where its purpose is that."""
    if head.get("purpose") != PURPOSE:
        return node
    size = head.get("size")
    if type(size) is not int or not 0 < size < 2**24 or head["round"] < AFTER:
        raise Refused("a sum of histograms must say its size, and be of no round of training")
    return Counter(node, size)


class Looking(Asking):
    """Clients as they are asked beside training: every letter says what for."""

    about: Head = {}  # noqa: RUF012  set once, never changed

    def coded(self) -> Head:
        return {**super().coded(), **self.about}


def secure_counts(
    asking: Asking, state: FederationState, about: Head, shape: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """The histograms of all clients, added under masks, and of how many: whole numbers. Nobody's own is seen."""
    from fedbayes.flower.secure_round import SecureRound  # needs Flower's cryptography

    if state.kept.members or state.kept.noise is not None:
        raise InputError("flower: an ensemble or estimated noise can't be calibrated under masks; set secure = false")
    size = shape[0] * shape[1]
    program = counting(asking.program, size)
    task = replace(asking.task, program=program)
    looking = Looking(task, asking.roll, asking.settings, asking.head)
    looking.about = {**about, "purpose": PURPOSE, "size": size}
    looking.noisy = about["epsilon"] > 0
    broadcast = {**state.broadcast, PART: program.initial[PART]}
    everybody = tuple(range(len(asking.task.clients)))
    order = Order(state.round + AFTER, everybody, (), broadcast, {}, state.version)
    outcome = SecureRound(looking, order, lambda k: -1, lambda: None).run()
    asking.notes += [*looking.notes, *(f"client {k}: {why}" for k, why in outcome.left_out.items())]
    if outcome.terms is None:
        raise InputError(f"no secure sum of histograms came about ({'; '.join(asking.notes)[:500]})")
    counts = outcome.terms[PART]["counts"].reshape(shape)
    if not torch.equal(counts, counts.round()) or (not about["epsilon"] and bool((counts < 0).any())):
        raise InputError("the secure sum holds what are no counts: one of its clients has spoilt it under its masks")
    return counts, outcome.counted
