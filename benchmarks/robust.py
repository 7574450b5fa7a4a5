"""Robust rules and buckets on a CPU: seconds and memory of pooling 100 Gaussians over a million weights. One minute.

Memory is what a rule needs beside the uploads, which it is given. `--weights` and `--clients` make it smaller.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
from measure import Figures, Others
from scale import peak

import fedbayes as fb
from fedbayes.federation.rules import RULES
from fedbayes.posterior.values import Gaussian

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "bench-robust.json"
BUCKETS = 50


def uploads(clients: int, weights: int) -> list[Gaussian]:
    """Honest clients near one another, and a fifth far off."""
    random = torch.Generator().manual_seed(0)

    def one(shift: float) -> Gaussian:
        return Gaussian(
            shift + 0.1 * torch.randn(weights, generator=random), 0.05 + 0.05 * torch.rand(weights, generator=random)
        )

    return [one(5.0 if k < clients // 5 else 0.0) for k in range(clients)]


def measured(figures: Figures, what: str, pooling: Any, held: int) -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that an earlier rule has freed would hide what this one takes
    with Others() as others:
        start, busy = time.perf_counter(), time.process_time()
        q, memory = peak(pooling)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    figures.add(
        what,
        seconds=seconds,
        processor_seconds=busy,
        megabytes_beside_uploads=memory / 1e6,
        megabytes_of_uploads=held / 1e6,
        mean_of_means=float(q.mean.mean()),
        others_busy=others.share,
    )


def in_buckets(qs: list[Gaussian], buckets: int, reference: Gaussian) -> Any:
    """The median over buckets, each of whose sums has come by itself; only the buckets' posteriors are held."""
    return fb.pool("median", [fb.pool("log_pool", qs[b::buckets], reference=reference) for b in range(buckets)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--weights", type=int, default=10**6)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clients, weights = arguments.clients, arguments.weights
    figures = Figures(arguments.output, "cpu")
    qs = uploads(clients, weights)
    held, reference = 8 * clients * weights, qs[-1]
    size = f"{clients} clients, {weights:,} weights"
    for name in ("log_pool", *(name for name, rule in RULES.items() if rule.robust)):
        measured(figures, f"{name}, {size}", lambda name=name: fb.pool(name, qs, reference=reference), held)
    buckets = min(BUCKETS, clients // 2)
    measured(figures, f"median of {buckets} buckets, {size}", lambda: in_buckets(qs, buckets, reference), held)


if __name__ == "__main__":
    main()
