"""Rounds of the plain loop in a process of their own: this library, once imported, changes how threads wait.

`python benchmarks/plain.py mlp 1 600 3` prints the seconds of three rounds of one epoch with one draw, for ten clients
of 600 rows each; two of them are run, for it is linear in clients. `cpu.py` calls it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import eager
import torch

SHAPES = {"mlp": (1, 28, 28), "cnn": (3, 32, 32)}
SHARE, ALL = 2, 10  # clients that are run, and for which seconds are told
ONE_THREAD, NO_ONEDNN = "one thread", "without oneDNN"
WAYS = ("as PyTorch comes", ONE_THREAD, NO_ONEDNN)


def seconds(network: str, draws: int, rows: int, times: int, way: str = WAYS[0]) -> list[float]:
    """Seconds of some rounds in a new process, in which nobody has said how threads wait."""
    told = {"OMP_NUM_THREADS": "1"} if way == ONE_THREAD else {}
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | told
    words = [sys.executable, str(Path(__file__)), network, str(draws), str(rows), str(times), way]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return [float(value) for value in json.loads(done.stdout)]


def main() -> None:
    network, (draws, rows, times) = sys.argv[1], map(int, sys.argv[2:5])
    if NO_ONEDNN in sys.argv[5:]:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    random = torch.Generator().manual_seed(0)
    clients = [
        (torch.rand(rows, *SHAPES[network], generator=random), torch.randint(10, (rows,), generator=random))
        for _ in range(SHARE)
    ]
    model = getattr(eager, network)(bool(draws))
    eager.round_of(model, [(x[:50], y[:50]) for x, y in clients], batch=10, epochs=1, draws=draws)
    told = []
    for _ in range(times):
        start = time.perf_counter()
        eager.round_of(model, clients, batch=10, epochs=1, draws=draws)
        told.append((time.perf_counter() - start) * ALL / SHARE)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
