"""A federation of five in this process that adds under masks, one of whose clients says what a test makes it say.

Training is remembered, for it is the same each time: what takes time is the secure sum alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbayes.data import Dataset, from_arrays
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.program import Order, Outcome
from fedbayes.federation.round import begin, open_round
from fedbayes.flower.answers import answer
from fedbayes.flower.federated import carried, federated
from fedbayes.flower.fixed import flat
from fedbayes.flower.kept import Kept, in_memory
from fedbayes.flower.node import Node, Trained
from fedbayes.flower.places import Who
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter

CLIENTS, EVIL = 5, 1
Spoil = Callable[[str, int, Letter, Answer], Answer | None]


def plane() -> Dataset:
    """Three classes around three corners of a plane."""
    random = torch.Generator().manual_seed(3)
    y = torch.arange(84) % 3
    x = torch.eye(3)[y][:, :2] * 2 + 0.7 * torch.randn(84, 2, generator=random)
    return from_arrays(x[:60], y[:60], x[60:], y[60:], name="plane")


def net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


EXPERIMENT = carried(
    Experiment(
        data="secure_federation:plane",
        network="secure_federation:net",
        clients=CLIENTS,
        rounds=1,
        method="feduab",
        options={"epochs": 1, "batch": 8, "test_draws": 2, "rule": "wc"},  # one statistic travels in the clear
        flower={"wait": 0.05, "timeout": 0.05, "secure": True},
    )
)


class Quick(Node):
    """A client that remembers what came of a broadcast."""

    memory: dict[tuple[int, int, str], Trained] = {}  # noqa: RUF012

    def trained(self, letter: Letter, kept: Kept) -> Trained:
        arrays = b"".join(a.tobytes() for _, a in sorted(letter.arrays.items()))
        key = self.client, letter.head["round"], str(hash(arrays))
        if key not in self.memory:
            self.memory[key] = super().trained(letter, kept)
        return self.memory[key]


@cache
def nodes() -> dict[int, Node]:
    return {k: Quick(EXPERIMENT, k) for k in range(CLIENTS)}


@cache
def task() -> Any:
    return build(EXPERIMENT)


class Post:
    """Nodes that answer at once; `spoil` changes what the evil one says, `under` what it does."""

    pause = 0.001

    def __init__(self, spoil: Spoil, under: Callable[[str], Any] = lambda kind: nullcontext()) -> None:
        self.spoil, self.under = spoil, under
        self.kept = {k: Kept(*in_memory()) for k in range(CLIENTS)}
        self.inbox: dict[str, Answer] = {}
        self.said: dict[tuple[str, int], list[Answer]] = {}
        self.asked: list[tuple[str, int, Letter]] = []

    def nodes(self) -> dict[int, Who]:
        return {k: Who(f"key of {k}") for k in range(CLIENTS)}

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        # The evil one is asked last, and has seen what the others say.
        ids = {}
        for k in sorted(letters, key=lambda k: k == EVIL):
            self.asked.append((kind, k, letters[k]))
            with self.under(kind) if k == EVIL else nullcontext():
                reply: Answer | None = answer(nodes()[k], kind, letters[k], self.kept[k])
            self.said.setdefault((kind, k), []).append(reply)
            if k == EVIL:
                reply = self.spoil(kind, k, letters[k], reply)
            ids[f"{len(self.asked)}"] = k
            if reply is not None:
                self.inbox[f"{len(self.asked)}"] = reply
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        return [(key, self.inbox.pop(key)) for key in ids if key in self.inbox]


def order() -> Order:
    program = task().program
    return open_round(program, begin(program), clients=CLIENTS, cohort=CLIENTS, seed=0)


def summed(post: Post) -> tuple[Outcome, list[str]]:
    """A round's outcome, and what is noted beside it."""
    with tempfile.TemporaryDirectory() as folder:
        remote: Any = federated(post).bind(EXPERIMENT, task(), Path(folder)).engine
        return remote.run(task().program, order(), lambda k: None), remote.take_notes()


def bits(outcome: Outcome) -> bytes:
    """A sum, to the last bit."""
    assert outcome.terms is not None
    return b"".join(t.numpy().tobytes() for t in flat(outcome.terms).values())


@cache
def whole() -> bytes:
    """The sum of all."""
    return bits(summed(Post(lambda kind, k, letter, reply: reply))[0])


@cache
def others() -> bytes:
    """The sum without the evil one."""
    return bits(summed(Post(lambda kind, k, letter, reply: None if kind == "train.masked" else reply))[0])


def verdict(outcome: Outcome) -> str:
    """What became of the evil one: refused or counted, each to the bit; or in words what must not be."""
    if honest := {k: why for k, why in outcome.left_out.items() if k != EVIL}:
        return f"honest clients are left out: {honest}"
    if not outcome.counted:
        return "skipped"
    if EVIL in outcome.left_out:
        return "refused" if bits(outcome) == others() else "the sum of the others is not theirs"
    return "counted" if bits(outcome) == whole() else "changed"


__all__ = ["CLIENTS", "EVIL", "Post", "bits", "others", "summed", "verdict", "whole"]
