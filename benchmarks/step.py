"""Microseconds of a step of FedUAB's and FedAvg's MLP on a CUDA device, 10 to 1000 clients: fused, compiled, in turns.

`python benchmarks/step.py`. Both run as CUDA graphs. `round` is a whole round by the engine: schedules, steps, the sum.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from measure import SHAPES, Figures, federation

import fedbayes as fb
from fedbayes.engine.steps import Steps
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare

ROWS, EPOCHS, BATCH = 600, 5, 10
STEPS = EPOCHS * ROWS // BATCH


class Timed(Steps):
    """Steps that wait for the device, and say how long they took."""

    def run(self, work: Any, state: Any) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = super().run(work, state)
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        return made


def measure(clients: fb.data.Clients, precision: str, draws: int, times: int) -> dict[str, dict[str, float]]:
    """The best microseconds of a step, and of a round for each step, by way. Without draws it is FedAvg's."""
    taken: dict[str, dict[str, float]] = {}
    ways = {}
    for way in ("compiled", "fused"):
        task = prepare(
            network_named("mlp", clients.data.shape, 10),
            clients,
            method=fb.methods.feduab(draws=draws) if draws else fb.methods.fedavg(),
            rounds=1,
            cohort=len(clients),
            device="cuda",
            engine="stacked",
            compile="graph",
            precision=precision,
        )
        engine: Any = task.engine
        engine.steps = Timed("graph")
        engine.steps.fused = way == "fused"
        ways[way] = task
        taken[way] = {"step": float("inf"), "round": float("inf")}
    for _ in range(times):
        for way, task in ways.items():
            engine, best = task.engine, taken[way]
            order = task.orders(task.begin())[0]
            torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
            start = time.perf_counter()
            outcome = engine.run(task.program, order, lambda k: None)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            assert outcome.counted == len(clients)
            best.setdefault("first", seconds)
            best["round"] = min(best["round"], seconds / STEPS * 1e6)
            best["step"] = min(best["step"], engine.steps.seconds / STEPS * 1e6)
            if notes := engine.take_notes():
                print(way, notes, flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-step.json"))
    parser.add_argument("--commit")
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is seen")
    figures = Figures(given.output, "cuda", given.commit)
    for count in given.clients:
        clients = federation(SHAPES["mlp"], [ROWS] * count)
        for precision, draws in (("tf32", 1), ("float32", 1), ("tf32", 5), ("tf32", 0)):
            taken = measure(clients, precision, draws, given.times)
            ratio = taken["compiled"]["step"] / taken["fused"]["step"]
            for way, best in taken.items():
                name = f"FedUAB-{draws}" if draws else "FedAvg"
                figures.add(f"{name} MLP, {count} clients, {precision}: {way}", **best, ratio=ratio)


if __name__ == "__main__":
    main()
