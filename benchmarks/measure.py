"""What the benchmark scripts share: settings, timing of rounds, and the file of figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import eager
import plain
import torch

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

SHAPES: dict[str, tuple[int, ...]] = {**plain.SHAPES, "text_cnn": (32,)}  # of the inputs; a text is its tokens
WORDS = 50_000


def federation(shape: tuple[int, ...], sizes: list[int]) -> fb.data.Clients:
    """Random images, or texts, of a data set's shape: a benchmark of speed needs no real ones."""
    random, total = torch.Generator().manual_seed(0), sum(sizes)
    if len(shape) == 1:
        x = torch.randint(WORDS, (total, *shape), generator=random)
    else:
        x = torch.randint(256, (total, *shape), generator=random, dtype=torch.uint8)
    y = torch.randint(10, (total,), generator=random)
    pairs = list(zip(x.split(sizes), y.split(sizes)))
    return fb.data.from_clients(pairs, test=(x[:1000], y[:1000]), kind="classes", classes=10)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(f: Callable[[], object], device: str, times: int = 1) -> float:
    """The best of several runs, in seconds."""
    best = float("inf")
    for _ in range(times):
        wait(device)
        start = time.perf_counter()
        f()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def eager_round(
    network: str, draws: int, clients: fb.data.Clients, device: str, *, share: int, epochs: int, times: int = 1
) -> float:
    """Seconds of a round of the plain loop, measured on `share` clients and one epoch, scaled to all (it is linear)."""
    x, y = clients.data.x, clients.data.y
    held = [clients.train_rows(k) for k in range(share)]
    pairs = [(x[rows].to(device).float() / 255, y[rows].to(device)) for rows in held]
    model = getattr(eager, network)(bool(draws)).to(device)
    eager.round_of(model, [(a[:50], b[:50]) for a, b in pairs], batch=10, epochs=1, draws=draws)
    one = seconds(lambda: eager.round_of(model, pairs, batch=10, epochs=1, draws=draws), device, times)
    return one * epochs * 10 / share


def task_of(
    network: str, method: str, options: dict[str, Any], clients: fb.data.Clients, device: str, **rest: Any
) -> Task:
    made = fb.methods.method_named(method, options)
    module = network_named(network, clients.data.shape, 10, **({"words": WORDS} if network == "text_cnn" else {}))
    return prepare(module, clients, method=made, cohort=10, device=device, evaluate_every=10**9, **rest)


def our_round(task: Task, device: str, times: int = 3) -> tuple[float, float, list[str]]:
    """Seconds of a round (the best of several), of the first with its compilation, and the engine's notes."""
    taken, notes = [], []
    steps = rounds(task, task.begin(), Memory())
    for _ in range(times + 1):
        start = time.perf_counter()
        _, record = next(steps)
        wait(device)
        taken.append(time.perf_counter() - start)
        notes += record.get("notes", [])
    return min(taken[1:]), taken[0], notes


def one_round(task: Task) -> Callable[[], float]:
    """A function that runs the next round of a task and gives its seconds."""
    steps = rounds(task, task.begin(), Memory())

    def run() -> float:
        start = time.perf_counter()
        next(steps)
        return time.perf_counter() - start

    return run


class Others:
    """While it is open, how many cores other processes keep busy: a measurement beside them says little."""

    def __enter__(self) -> Others:
        self.start = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        wall, busy, own = (b - a for a, b in zip(self.start, self._now()))
        self.share = round(max(0.0, (busy - own) / wall), 2)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        found = Path("/proc/stat")
        fields = found.read_text().split("\n", 1)[0].split()[1:] if found.exists() else ["0"] * 10
        busy = sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, sum(os.times()[:4])


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def joined(paths: Iterable[Path]) -> dict[str, Any]:
    """One table of figures of the files that processes side by side wrote, later ones in place of earlier ones."""
    parts = [json.loads(path.read_text()) for path in sorted(paths)]
    rows = {row["what"]: row for part in parts for row in part["rows"]}
    return {**parts[0], "rows": sorted(rows.values(), key=lambda row: row["what"])}


class Figures:
    """Rows of a benchmark, printed as they come and written to a JSON file after each."""

    def __init__(self, path: Path, device: str, at: str | None = None, *, keep: bool = False) -> None:
        self.path = path
        self.head = {
            "device": machine(device),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "commit": at or commit(),
        }
        before = json.loads(path.read_text())["rows"] if keep and path.exists() else []
        self.rows: list[dict[str, Any]] = before  # kept until they are measured again
        self.tag = {"commit": self.head["commit"]} if before else {}

    def add(self, what: str, **figures: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
        row = {"what": what, **rounded, **self.tag}
        places = [i for i, old in enumerate(self.rows) if old["what"] == what]
        self.rows[slice(places[0], places[0] + 1) if places else slice(len(self.rows), None)] = [row]
        print(f"{what:58s}", "  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")
