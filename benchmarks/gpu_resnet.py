"""ResNet-20 by Flipout, 10 clients: the stacked engine against the loop, several rules as one program, an evaluation.

`python benchmarks/gpu_resnet.py --deadline 400` stops starting new sections when the seconds are used up. Random images
of CIFAR's shape serve the same speed. `--device cpu --depth 8 --width 4 --rows 32` tries it out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from measure import Figures, federation, our_round, wait

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.papers.aggregation import CLIENTS, RULES, VARIATIONAL
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, evaluate
from fedbayes.training.task import Task

STEPS = 20  # of a client in a round: enough for one replay of a CUDA graph


def task_of(arguments: argparse.Namespace, data: fb.data.Clients, rule: str = "ws", **options: Any) -> Task:
    network = network_named("resnet", data.data.shape, 10, depth=arguments.depth, width=arguments.width)
    method = fb.methods.fedvi(**{**CLIENTS, **VARIATIONAL, "rule": rule})
    return prepare(
        network, data, method=method, device=arguments.device, evaluate_every=10**9, augment="crop_flip", **options
    )


def engines(figures: Figures, arguments: argparse.Namespace, data: fb.data.Clients) -> None:
    """Seconds of a round of every engine, and how many times the loop's."""
    loop, _, _ = our_round(task_of(arguments, data, engine="loop"), arguments.device, times=1)
    figures.add("loop, float32", seconds=loop)
    steps = -(-arguments.rows // CLIENTS["batch"])
    modes = ("off", "graph") if arguments.device == "cuda" else ("off",)
    for precision in ("float32", "tf32", "bf16") if arguments.device == "cuda" else ("float32",):
        for mode in modes:
            task = task_of(arguments, data, engine="stacked", compile=mode, precision=precision)
            best, first, notes = our_round(task, arguments.device, times=2)
            each = best / steps / len(data)
            more = {"notes": notes} if notes else {}
            figures.add(
                f"stacked, {mode}, {precision}", seconds=best, first=first, ratio=loop / best, client_step=each, **more
            )


def members(figures: Figures, arguments: argparse.Namespace, data: fb.data.Clients) -> None:
    """Five rules as one program: seconds of a round, and of a client's step."""
    mode, precision = ("graph", "bf16") if arguments.device == "cuda" else ("off", "float32")
    tasks = [
        task_of(arguments, data, rule, engine="stacked", compile=mode, precision=precision) for rule in RULES.values()
    ]
    trained = rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks])
    start = time.perf_counter()
    next(trained)
    wait(arguments.device)
    first = time.perf_counter() - start
    start = time.perf_counter()
    next(trained)
    wait(arguments.device)
    taken = time.perf_counter() - start
    seats, steps = len(tasks) * len(data), -(-arguments.rows // CLIENTS["batch"])
    figures.add(
        f"five rules as one program, {precision}", seconds=taken, first=first, client_step=taken / steps / seats
    )


def prediction(figures: Figures, arguments: argparse.Namespace, data: fb.data.Clients) -> None:
    """Seconds of an evaluation: a thousand test rows, twenty draws."""
    for precision in ("float32", "bf16"):
        task = task_of(arguments, data, engine="stacked", compile="off", precision=precision)
        state = task.begin().state
        evaluate(task, state)
        wait(arguments.device)
        start = time.perf_counter()
        evaluate(task, state)
        wait(arguments.device)
        figures.add(f"evaluation of 1,000 rows, 20 draws, {precision}", seconds=time.perf_counter() - start)


def chosen(figures: Figures, arguments: argparse.Namespace, data: fb.data.Clients) -> None:
    """The loop against the fastest way, the best of ten rounds: milliseconds of a step with all that a round is."""
    loop, _, _ = our_round(task_of(arguments, data, engine="loop"), arguments.device, times=1)
    task = task_of(arguments, data, engine="stacked", compile="graph", precision="bf16")
    best, first, notes = our_round(task, arguments.device, times=10)
    each = 1000 * best / -(-arguments.rows // CLIENTS["batch"])
    figures.add(
        "stacked, graph, bf16, of ten rounds", step_with_round_ms=each, first=first, loop=loop, ratio=loop / best,
        notes=notes,
    )  # fmt: skip


SECTIONS = {"engines": engines, "members": members, "prediction": prediction, "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-resnet.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=3600)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32 * STEPS, help="training rows of each of the ten clients")
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is seen; --device cpu tries it out")
    began = time.perf_counter()
    figures = Figures(arguments.output, arguments.device, arguments.commit)
    data = federation((3, 32, 32), [arguments.rows] * 10)
    for name in arguments.only:
        if time.perf_counter() - began > arguments.deadline:
            print("the deadline has passed; the other sections were not started", flush=True)
            break
        SECTIONS[name](figures, arguments, data)
        figures.add("section done", at=time.perf_counter() - began)


if __name__ == "__main__":
    main()
