"""Ratios on this machine's CPU, each measured side by side in one run: `make bench`. Under five minutes on two cores.

FedUAB's settings: MLP 784-50-50-10 on MNIST shapes (600 rows a client) and the CNN on CIFAR shapes, 10 clients a round,
batch 10. The denominator is the plain loop of `eager.py` in a process of its own, run as PyTorch comes, with one thread
and without oneDNN: the fastest of the three. Sections: `speed`; `beside`, a round alone and beside a busy process;
`choice` and `compiled`, what is chosen against the loop engine. `--only` runs some of them and keeps the file's other
rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from measure import SHAPES, Figures, Others, federation, one_round, our_round, task_of
from plain import WAYS as WAYS_OF_PLAIN
from plain import seconds

import fedbayes as fb
from fedbayes.training.task import Task

CASES = [
    # what, network, method, options, draws of the plain loop, rows a client
    ("FedAvg MLP", "mlp", "fedavg", {}, 0, 600),
    ("FedUAB-1 MLP", "mlp", "feduab", {"train_draws": 1}, 1, 600),
    ("FedAvg CNN", "cnn", "fedavg", {}, 0, 100),
    ("FedUAB-1 CNN", "cnn", "feduab", {"train_draws": 1}, 1, 50),
]
WAYS = (("loop", "loop", "off"), ("auto", "auto", "off"), ("auto, compiled", "auto", "on"))
SIZES = {"equal": [40] * 10, "unequal": [6 * k for k in range(1, 11)]}  # rows a client; tenfold, and padded batches
CHOICES = list(product(("fedavg", "feduab"), SHAPES, SIZES))
HARDER = "unequal"  # where compiled choices are tried: compiling takes longer than all else here


def case_of(network: str, method: str, options: dict[str, Any], clients: fb.data.Clients, *way: str) -> Task:
    engine, compile = way
    return task_of(network, method, {"epochs": 1, **options}, clients, "cpu", engine=engine, compile=compile)


def speed(figures: Figures) -> None:
    for what, network, method, options, draws, each in CASES:
        clients = federation(SHAPES[network], [each] * 10)
        with Others() as others:
            ways = {way: min(seconds(network, draws, each, 3, way)) for way in WAYS_OF_PLAIN}
        fastest = min(ways, key=lambda way: ways[way])
        plain, as_it_comes = ways[fastest], ways[WAYS_OF_PLAIN[0]]
        row = {"seconds_an_epoch": plain, "as_pytorch_comes": as_it_comes, "fastest": fastest}
        figures.add(f"{what}: plain loop", **row, others_busy=others.share)
        for name, *way in WAYS:
            with Others() as others:
                task = case_of(network, method, options, clients, *way)
                best, first, notes = our_round(task, "cpu", times=1 if name == "loop" else 3)
            more = {"notes": notes} if notes else {}
            figures.add(
                f"{what}: {name}",
                seconds_an_epoch=best,
                first=first,
                ratio=plain / best,
                ratio_as_pytorch_comes=as_it_comes / best,
                others_busy=others.share,
                **more,
            )


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """One process that never rests, but ends with this one, however that ends."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    spinning = subprocess.Popen([sys.executable, "-c", spin])
    time.sleep(0.3)
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def several(turn: Callable[[], float], times: int) -> list[float]:
    """Seconds of some rounds."""
    return [turn() for _ in range(times)]


def beside(figures: Figures) -> None:
    """With one busy neighbour on two cores, two threads can have three quarters of their time; one has all of it."""
    for what, network, method, options, draws, each in CASES[:3]:
        clients = federation(SHAPES[network], [each // 2] * 10)
        ours = {name: one_round(case_of(network, method, options, clients, *way)) for name, *way in WAYS[1:]}
        some = {name: partial(several, turn) for name, turn in ours.items()}
        for name, rounds in {"plain loop": partial(seconds, network, draws, each // 2), **some}.items():
            rounds(1)
            with Others() as others:
                alone = min(rounds(5))
            with busy_neighbour():
                crowded = mean(rounds(5))
            row = f"{what}: {name}, beside a busy process"
            figures.add(row, seconds_an_epoch=crowded, against_alone=crowded / alone, others_busy=others.share)


def choice(figures: Figures, name: str, *way: str) -> None:
    """What is chosen, against the loop engine, round by round in turns."""
    for method, network, kind in CHOICES:
        if way[1] == "on" and kind != HARDER:
            continue
        clients = federation(SHAPES[network], SIZES[kind])
        loop, ours = (one_round(case_of(network, method, {}, clients, *w)) for w in (("loop", "off"), way))
        with Others() as others:
            pairs = [(loop(), ours()) for _ in range(6)][1:]
        a, b = (min(times) for times in zip(*pairs))
        row = f"{method} {network}, {kind} clients: {name}, against the loop engine"
        figures.add(row, seconds_an_epoch=b, ratio=a / b, others_busy=others.share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sections = {
        "speed": speed,
        "beside": beside,
        "choice": lambda figures: choice(figures, *WAYS[1]),
        "compiled": lambda figures: choice(figures, *WAYS[2]),
    }
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-cpu.json"))
    parser.add_argument("--only", nargs="*", choices=sections, default=list(sections))
    parser.add_argument(
        "--case", default="", help="only rows that start like this, as 'FedAvg CNN' or 'fedavg mlp, equal'"
    )
    arguments = parser.parse_args()
    CASES[:] = [case for case in CASES if case[0].startswith(arguments.case)]
    CHOICES[:] = [case for case in CHOICES if f"{case[0]} {case[1]}, {case[2]}".startswith(arguments.case)]
    figures = Figures(arguments.output, "cpu", keep=len(arguments.only) < len(sections) or arguments.case != "")
    for name in arguments.only:
        sections[name](figures)


if __name__ == "__main__":
    main()
