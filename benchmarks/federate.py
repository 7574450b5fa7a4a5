"""One federation of pFedBayes with own state on disk, a round at a time: each line on stdin asks for one.

For `scale.py`, which lets federations of several populations take turns. Answers each round with a line of JSON:
seconds, resident memory and bytes on disk. Clients share a thousand rows and take one step a round, so that the store
is what is measured; `--touched` begins with rows of all clients on disk, 338 KB each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measure import federation
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.data.ragged import Ragged
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs import rows
from fedbayes.runs.recording import Recording
from fedbayes.training.rounds import rounds
from fedbayes.training.task import Task

EACH = 10  # rows of a client


def clients_of(population: int) -> Clients:
    """So many clients who hold ten of a thousand images each."""
    data = federation((1, 28, 28), [1000]).data
    flat = np.arange(EACH * population) % 1000
    nothing = Ragged.of_sizes(np.zeros(0, np.int64), np.zeros(population, np.int64))
    return Clients(data, Ragged.of_sizes(flat, np.full(population, EACH)), nothing, torch.zeros(0, dtype=torch.int64))


def resident(which: str = "RssAnon") -> int:
    """Bytes in memory without the pages of files, which the system may drop at any time; `VmHWM`: the most, with."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[which].split()[0]) * 1024


def touch_all(recording: Recording, task: Task, population: int) -> None:
    """Begin as if every client had taken part: files of a hundred rows."""
    store = recording.own
    own = task.program.client.first(task.program.initial)
    store.folder.mkdir(parents=True, exist_ok=True)
    hundred = [rows.Row.of(own)] * 100
    for file in range(1, population // 100 + 1):
        rows.write(store.path(file), hundred)
        store.index.point(range(100 * (file - 1), 100 * file), file)
    store._next = population // 100 + 1


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def digest(parts: dict[str, Tensor]) -> str:
    return rows.Row.of(parts).sum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("population", type=int)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--touched", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(
        data="made:up",
        network="mlp",
        clients=given.population,
        cohort=given.cohort,
        method="pfedbayes",
        rounds=10**6,
        evaluate_every=10**6,
        checkpoint_every=1,
        options={"epochs": 1, "batch": EACH},
        compile="off",
    )
    task = build(experiment, clients=clients_of(given.population))
    recording = Recording(experiment, task, given.folder)
    if given.touched:
        touch_all(recording, task, given.population)
    steps = rounds(task, recording.progress, recording.own)
    print(json.dumps({"round": recording.progress.state.round}), flush=True)
    for line in sys.stdin:
        if line.startswith("digest"):
            state = recording.progress.state
            recording.own.settle()
            kept = {str(k): recording.own.get(k) for k in recording.own.index.clients}
            print(json.dumps({"state": digest(state.broadcast), "own": digest(kept), "touched": len(kept)}), flush=True)
            continue
        started = time.perf_counter()
        progress, record = next(steps)
        recording.add(progress, record)
        seconds = time.perf_counter() - started
        found = {
            "seconds": seconds,
            "resident": resident(),
            "peak": resident("VmHWM"),
            "disk": bytes_in(given.folder / "own"),
        }
        print(json.dumps({"round": progress.state.round, "touched": len(recording.own.index), **found}), flush=True)


if __name__ == "__main__":
    main()
