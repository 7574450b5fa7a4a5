"""What code by hand brings on a CPU: the same rounds by it and by what would run without it, in turns.

`python benchmarks/hand.py`, about five minutes. A ratio is the median over turns of two rounds one after the other, in
processor seconds of this process: neighbours of a shared machine hardly count in it. Under 1.5 such code should go.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from measure import Figures, Others, federation
from torch import nn

import fedbayes as fb
from fedbayes.engine.steps import BY_HAND, ROWWISE, Steps
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

Round = Callable[[], tuple[float, float]]  # processor and wall seconds


class Job(NamedTuple):
    """A user's federation and method, the mode of its steps, and the modes that would be left without it."""

    network: Callable[[], nn.Module]
    clients: Callable[[], fb.data.Clients]
    method: fb.methods.Method
    mode: str
    others: Sequence[str]


def digits() -> fb.data.Clients:
    return fb.data.load("digits").split(fb.partition.dirichlet(0.3), clients=50, seed=0)


def diabetes() -> fb.data.Clients:
    return fb.data.load("diabetes").split(fb.partition.iid(), clients=10, seed=0)


JOBS = {
    "FedAvg, MLP 64-50-50-10 on digits": Job(
        lambda: network_named("mlp", (1, 8, 8), 10), digits, fb.methods.fedavg(), BY_HAND, ("eager", "compiled")
    ),
    "FedAvg, MLP 784-50-50-10 on 600 rows of MNIST's shape": Job(
        lambda: network_named("mlp", (1, 28, 28), 10),
        lambda: federation((1, 28, 28), [600] * 10),
        fb.methods.fedavg(epochs=1),
        BY_HAND,
        ("eager", "compiled"),
    ),
    "FedAG, one hidden layer of 50 on diabetes, single rows": Job(
        lambda: network_named("mlp", (10,), 1, hidden=(50,)), diabetes, fb.methods.fedag(epochs=5), ROWWISE,
        (BY_HAND, "compiled"),
    ),
}  # fmt: skip


def timed(task: Task) -> Round:
    """A function that runs the next round of a task and gives its processor and wall seconds."""
    steps = rounds(task, task.begin(), Memory())

    def run() -> tuple[float, float]:
        busy, wall = time.process_time(), time.perf_counter()
        next(steps)
        return time.process_time() - busy, time.perf_counter() - wall

    return run


def in_mode(job: Job, mode: str) -> Round:
    task = prepare(
        job.network(), job.clients(), method=job.method, rounds=10**6, cohort=10, compile="off", evaluate_every=10**6
    )
    task.engine.steps = Steps(mode)
    return timed(task)


def compared(figures: Figures, what: str, hand: Round, other: Round, turns: int) -> None:
    """Rounds in turns, after one of each that is not counted: it compiles."""
    hand()
    other()
    with Others() as others:
        pairs = [(hand(), other()) if turn % 2 else (other(), hand())[::-1] for turn in range(turns)]
    busy, wall = ([(a[i], b[i]) for a, b in pairs] for i in (0, 1))
    figures.add(
        what,
        by_hand=median(a for a, _ in busy),
        without=median(b for _, b in busy),
        ratio=median(b / a for a, b in busy),
        ratio_of_wall_seconds=median(b / a for a, b in wall),
        turns=turns,
        others_busy=others.share,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-hand.json"))
    parser.add_argument("--job", default="", help="only jobs that start like this, as 'FedAG'")
    parser.add_argument("--against", default="", help="only this other mode, as 'eager'")
    parser.add_argument("--turns", type=int, default=11)
    given = parser.parse_args()
    figures = Figures(given.output, "cpu", keep=True)
    for what, job in JOBS.items():
        if what.startswith(given.job):
            for other in job.others:
                if given.against in ("", other):
                    ways = in_mode(job, job.mode), in_mode(job, other)
                    compared(figures, f"{what}: against {other}", *ways, given.turns)


if __name__ == "__main__":
    main()
