"""Ratios on a CUDA device, measured side by side in one run, and the time of whole runs at the paper's scale.

`python benchmarks/gpu.py --deadline 500` stops starting new sections when the seconds are used up. MNIST is read from
FEDBAYES_DATA where it is there; random images of its shape serve the same speed otherwise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from measure import Figures, eager_round, federation, our_round, task_of

import fedbayes as fb
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory, evaluate
from fedbayes.training.task import Task

DEVICE = "cuda"


def mnist() -> fb.data.Clients:
    try:
        data = fb.data.load("mnist")
    except (OSError, ValueError) as error:
        print(f"MNIST is not at hand ({error}); random images instead", flush=True)
        return federation((1, 28, 28), [600] * 100)
    return data.split(fb.partition.iid(), clients=100, seed=0)


def whole_run(task: Task, every: int) -> tuple[float, list[dict[str, Any]]]:
    """All rounds with an evaluation every so many: seconds without the first round (its compilation), and scores."""
    scores, start = [], time.perf_counter()
    for number, (progress, _) in enumerate(rounds(task, task.begin(), Memory())):
        if number == 0:
            torch.cuda.synchronize()
            start = time.perf_counter()
        if (number + 1) % every == 0:
            scores.append(evaluate(task, progress.state))
    torch.cuda.synchronize()
    return time.perf_counter() - start, scores


def speed_of_mlp(figures: Figures, clients: fb.data.Clients, share: int) -> None:
    for what, method, options, draws in (("FedUAB-1", "feduab", {"draws": 1}, 1), ("FedAvg", "fedavg", {}, 0)):
        plain = eager_round("mlp", draws, clients, DEVICE, share=share, epochs=5)
        figures.add(f"{what} MLP round: plain loop", seconds=plain)
        for name in ("off", "on", "graph"):
            task = task_of("mlp", method, options, clients, DEVICE, engine="stacked", compile=name, precision="tf32")
            best, first, notes = our_round(task, DEVICE, times=2 if name == "off" else 10)
            more = {"notes": notes} if notes else {}
            figures.add(
                f"{what} MLP round: stacked, compile {name}", seconds=best, first=first, ratio=plain / best, **more
            )


def speed_of_cnn(figures: Figures, share: int) -> None:
    clients = federation((3, 32, 32), [500] * 10)
    plain = eager_round("cnn", 1, clients, DEVICE, share=share, epochs=5, times=3)
    figures.add("FedUAB-1 CNN round: plain loop", seconds=plain)
    for precision, name in (("bf16", ", bf16"), ("tf32", "")):
        task = task_of(
            "cnn", "feduab", {"draws": 1}, clients, DEVICE, engine="stacked", compile="graph", precision=precision
        )
        best, first, notes = our_round(task, DEVICE, times=10)
        more = {"notes": notes} if notes else {}
        figures.add(f"FedUAB-1 CNN round: stacked, graph{name}", seconds=best, first=first, ratio=plain / best, **more)


def long_runs(figures: Figures, clients: fb.data.Clients, number: int) -> None:
    for what, options in (("FedUAB-1", {"draws": 1}), ("FedUAB-5", {"draws": 5})):
        task = task_of(
            "mlp",
            "feduab",
            options,
            clients,
            DEVICE,
            engine="stacked",
            compile="graph",
            precision="tf32",
            rounds=number,
        )
        taken, scores = whole_run(task, 20)
        last = {k: scores[-1][k] for k in ("accuracy", "nll", "ece")} if scores else {}
        figures.add(f"{what} MNIST IID, {number} rounds, evaluation every 20", seconds=taken, **last)


def sweep(figures: Figures, clients: fb.data.Clients, number: int) -> None:
    """Three scenarios (seeds) as one program against one alone."""
    taken = []
    for members in (1, 3):
        tasks = [
            task_of(
                "mlp", "feduab", {"draws": 1}, clients, DEVICE, engine="stacked", compile="graph", precision="tf32",
                rounds=number + 1, seed=seed,
            )
            for seed in range(members)
        ]  # fmt: skip
        together = rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks])
        next(together)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in together:
            pass
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / number)
    figures.add("FedUAB-1 round of three members as one program", seconds=taken[1], against_one=taken[1] / taken[0])


def evaluation(figures: Figures, clients: fb.data.Clients) -> None:
    """An evaluation on the whole test set captured as a graph against the same one as it comes, in turns."""
    images = federation((3, 32, 32), [500] * 10)
    for what, network, draws, data in (
        ("FedUAB-1 MLP", "mlp", 1, clients),
        ("FedUAB-20 MLP", "mlp", 20, clients),
        ("FedUAB-5 CNN", "cnn", 5, images),
    ):
        options = {"train_draws": 1, "test_draws": draws}
        task = task_of(network, "feduab", options, data, DEVICE, engine="stacked", compile="graph", precision="tf32")
        state, steps = task.begin().state, task.engine.steps
        taken: dict[str, list[float]] = {"graph": [], "eager": []}
        scores = {}
        for _ in range(6):
            for mode, times in taken.items():
                steps.mode = mode
                start = time.perf_counter()
                scores[mode] = evaluate(task, state)["nll"]
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        graph, plain = (min(times[1:]) for times in taken.values())
        figures.add(
            f"{what}: evaluation of {len(data.data.test_x)} rows, captured",
            seconds=graph,
            as_it_comes=plain,
            ratio=plain / graph,
            nll=scores["graph"],
            nll_as_it_comes=scores["eager"],
            notes=task.engine.take_notes(),
        )


def law(figures: Figures) -> None:
    """Graph and eager draw other noise: their answers agree in law. Five seeds each, difference of means in errors."""
    digits = fb.data.load("digits").split(fb.partition.iid(), clients=20, seed=0)
    found: dict[str, list[float]] = {}
    for name in ("off", "graph"):
        for seed in range(5):
            task = task_of(
                "mlp", "feduab", {"draws": 1}, digits, DEVICE, engine="stacked", compile=name, rounds=15, seed=seed
            )
            *_, (progress, _) = rounds(task, task.begin(), Memory())
            found.setdefault(name, []).append(evaluate(task, progress.state)["nll"])
    a, b = (torch.tensor(found[name]) for name in ("off", "graph"))
    error = float(((a.var() + b.var()) / 5).sqrt())
    figures.add(
        "NLL of eager and graph runs, 5 seeds", eager=float(a.mean()), graph=float(b.mean()), standard_error=error
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-gpu.json"))
    parser.add_argument("--deadline", type=float, default=3600)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--share", type=int, default=2, help="clients of the plain loop that are timed, of 10")
    parser.add_argument("--only", nargs="*", help="sections: mlp, long, sweep, cnn, law, evaluation")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is seen; `make bench` measures the CPU")
    began = time.perf_counter()
    figures = Figures(arguments.output, DEVICE, arguments.commit, keep=bool(arguments.only))
    clients = mnist()
    sections = {
        "mlp": lambda: speed_of_mlp(figures, clients, arguments.share),
        "long": lambda: long_runs(figures, clients, arguments.rounds),
        "sweep": lambda: sweep(figures, clients, 60),
        "cnn": lambda: speed_of_cnn(figures, arguments.share),
        "law": lambda: law(figures),
        "evaluation": lambda: evaluation(figures, clients),
    }
    for name, section in sections.items():
        if arguments.only and name not in arguments.only:
            continue
        if time.perf_counter() - began > arguments.deadline:
            print("the deadline has passed; the other sections were not started", flush=True)
            break
        section()
        print(f"{name} done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
