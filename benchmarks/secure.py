"""The secure sum against the plain one: errors, seconds and bytes of a round, with a drop-out and with an outlier.

An MLP of 42 thousand weights and ten clients of unequal size that answer in this process, so that what is measured is
the sum and not a network. `protocol` counts messages and the bytes of keys, boxes, promises and shares beside the
arrays, by the number of clients. Needs `fedbayes[flower]`. Writes docs/results/bench-secure.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from measure import Figures, federation

import fedbayes as fb
from fedbayes.data import Dataset
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.answers import answer
from fedbayes.flower.federated import carried, run
from fedbayes.flower.kept import Kept, in_memory
from fedbayes.flower.node import Node, Trained
from fedbayes.flower.places import Who
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter
from fedbayes.posterior.values import Gaussian

HERE = Path(__file__).parent
CLIENTS = 10
RULES = ["nwa", "log_pool", "conflation", "lp"]
PROTOCOL, COHORTS = "protocol", (3, 5, 10, 20, 40, 65)
EXPERIMENT = Experiment(
    data="secure:images",
    network="mlp",
    partition="dirichlet",
    partition_options={"alpha": 1.0},
    clients=CLIENTS,
    rounds=3,
    evaluate_every=3,
    method="feduab",
    options={"epochs": 1, "batch": 10},
    flower={"wait": 1.0, "timeout": 60.0},
)


def images() -> Dataset:
    return federation((1, 28, 28), [1000]).data


class Here:
    """Nodes that answer at once; some are silent when they are asked for a vector, one is an outlier."""

    pause = 0.001

    def __init__(self, experiment: Experiment, silent: tuple[int, ...] = (), outlier: int | None = None) -> None:
        clients = range(experiment.clients)
        self.nodes_here = {k: Outlier(experiment, k) if k == outlier else Node(experiment, k) for k in clients}
        self.kept = {k: Kept(*in_memory()) for k in clients}
        self.silent, self.inbox = silent, dict[str, Answer]()
        self.heads: dict[str, list[int]] = {}  # bytes of heads that went down and up, by kind of letter

    def nodes(self) -> dict[int, Who]:
        return {k: Who(f"key of {k}") for k in self.nodes_here}

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        for k, letter in letters.items():
            gone = k in self.silent and kind in ("train", "train.masked")
            reply = answer(self.nodes_here[k], kind, letter, self.kept[k])
            self.inbox[f"{kind} {k}"] = "it is gone" if gone else reply
            for at, head in enumerate((letter.head, reply.head)):
                self.heads.setdefault(kind, [0, 0])[at] += weight(head)
        return {f"{kind} {k}": k for k in letters}

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        return [(key, self.inbox.pop(key)) for key in ids if key in self.inbox]


def weight(value: object) -> int:
    """Bytes of a head's values, without their names: text and bytes as they are long, numbers as 8."""
    if isinstance(value, dict | list):
        return sum(map(weight, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, str | bytes) else 8


class Outlier(Node):
    """A client that has gone astray: its means are a hundred million scales away, its scales far too small."""

    def trained(self, letter: Letter, kept: Kept) -> Trained:
        made = super().trained(letter, kept)
        q = made.upload.parts["model"]
        parts = {**made.upload.parts, "model": Gaussian(q.mean + 1e8 * q.scale, q.scale * 1e-5, q.layout)}
        return made._replace(upload=made.upload._replace(parts=parts))


def federate(x: Experiment, post: Here) -> fb.Run:
    with tempfile.TemporaryDirectory() as folder:
        return run(x, Path(folder) / "run", post)[x.method]


def protocol(figures: Figures) -> None:
    """Messages and bytes of a round beside the arrays, by the number of clients: a round of one small network."""
    for clients in COHORTS:
        x = replace(EXPERIMENT, clients=clients, rounds=1, partition="iid", partition_options={}, evaluate_every=1)
        x = carried(replace(x, flower={**x.flower, "secure": True}))
        post = Here(x)
        federate(x, post)
        letters = {kind: heads for kind, heads in post.heads.items() if kind.startswith("train.")}
        figures.add(
            f"{PROTOCOL}, {clients} clients",
            letters_a_client=len(letters),
            head_bytes_down_a_client=sum(down for down, _ in letters.values()) // clients,
            head_bytes_up_a_client=sum(up for _, up in letters.values()) // clients,
        )


def main() -> None:
    sys.modules["secure"] = sys.modules["__main__"]
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    every = [*RULES, PROTOCOL]
    parser.add_argument("--only", nargs="*", choices=every, default=every, help="keeps the file's other rows")
    only = parser.parse_args().only
    figures = Figures(HERE.parent / "docs/results/bench-secure.json", "cpu", keep=len(only) < len(every))
    cases: dict[str, tuple[tuple[int, ...], int | None]] = {
        "": ((), None),
        ", one drops out": ((4,), None),
        ", one would clip": ((), 4),
    }
    if PROTOCOL in only:
        protocol(figures)
    for rule in [rule for rule in RULES if rule in only]:
        x = carried(replace(EXPERIMENT, options={**EXPERIMENT.options, "rule": rule}))
        hidden = replace(x, flower={**x.flower, "secure": True})
        for what, (silent, outlier) in cases.items():
            plain = federate(x, Here(x, (4,) if what else ()))
            made = federate(hidden, Here(hidden, silent, outlier))
            a, b = made.posterior, plain.posterior
            assert isinstance(a, Gaussian)
            assert isinstance(b, Gaussian)
            last, before = made.journal[-1], plain.journal[-1]
            figures.add(
                f"{rule}{what}",
                error_of_mean=float(((a.mean - b.mean).abs() / b.scale).max()),
                error_of_scale=float((a.scale / b.scale - 1).abs().max()),
                seconds=last["seconds"],
                seconds_plain=before["seconds"],
                bytes_up_a_client=last["bytes_up"] // CLIENTS,
                bytes_up_plain=before["bytes_up"] // CLIENTS,
                left_out=last["left_out"],
            )


if __name__ == "__main__":
    main()
