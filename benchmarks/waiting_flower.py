"""Nodes that stop or die cost the others nothing: a SuperLink and four SuperNodes with TLS on this machine.

`python benchmarks/waiting_flower.py` needs `fedbayes[flower]` and about six idle cores: each order starts a process
that imports PyTorch. In a first window all nodes take part; then one is stopped (SIGSTOP) and one is killed, and
contributions of the other two are counted again. The same is done with rounds that wait, whose deadline is by quorum.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import Figures, Others

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))

import machines as parts  # the federation of processes that the tests start

NODES, STAY = 4, (0, 1)  # nodes that are neither stopped nor killed
TRAINED = "    reply = inner(message, context)\n"
APP = parts.APP
SCHEDULES: dict[str, dict[str, Any]] = {
    "buffered": {"schedule": "buffered", "schedule_options": {"buffer": 1}, "flower": {"timeout": 600}},
    "synchronous": {"flower": {"timeout": 600, "quorum": 0.5, "slack": 2.0}},
}


def ends(records: list[dict[str, Any]]) -> dict[int, list[float]]:
    """When each contribution came, in seconds since the run began, by node."""
    clock, times = 0.0, {k: list[float]() for k in range(NODES)}
    for record in records:
        clock = record.get("clock", clock + record["seconds"])
        for k in record["took_part"]:
            times[k].append(clock)
    return times


def rate(records: list[dict[str, Any]], since: float, until: float) -> dict[str, float]:
    """Contributions per second of each node that stays, with its standard error; from the times between two."""
    pairs = [pair for k in STAY for pair in zip(ends(records)[k], ends(records)[k][1:])]
    between = [b - a for a, b in pairs if since < b <= until]
    return {
        "rate": 1 / mean(between),
        "error": stdev(between) / mean(between) ** 2 / len(between) ** 0.5,
        "contributions": len(between),
    }


def now(records: list[dict[str, Any]]) -> float:
    return records[-1].get("clock") or sum(record["seconds"] for record in records)


def windows(schedule: str, window: float, seconds: float) -> dict[str, Any]:
    """Rates before and after one node stops and one dies; training takes so many seconds in every node."""
    parts.APP = APP.replace(TRAINED, f"{TRAINED}    time.sleep({seconds})\n")
    with tempfile.TemporaryDirectory() as home, Others() as others:
        made = parts.Machines(Path(home) / "loop", nodes=NODES)
        try:
            made.superlink()
            for k in range(NODES):
                made.node(k)
            made.experiment(method="pvi", clients=NODES, rounds=10_000, evaluate_every=50, **SCHEDULES[schedule])
            run = made.train("runs/waiting")
            parts.until("all take part twice", lambda: all(len(times) > 1 for times in ends(run.journal).values()))
            began = now(run.journal)
            time.sleep(window)
            before = rate(run.journal, began, began + window)
            os.killpg(made.running["node-2"].pid, signal.SIGSTOP)
            made.kill("node-3")
            began = now(run.journal)
            time.sleep(window)
            after = rate(run.journal, began, began + window)
            os.killpg(made.running["node-2"].pid, signal.SIGCONT)
        finally:
            made.stop()
    ratio = after["rate"] / before["rate"]
    error = ratio * sum((w["error"] / w["rate"]) ** 2 for w in (before, after)) ** 0.5
    return {
        "before": before, "after": after, "ratio": ratio, "error": error, "window": window, "training": seconds,
        "cores": os.cpu_count(), "cores_busy_with_others": others.share,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/waiting.json"))
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--window", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=0.5, help="of training in each node")
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures = Figures(given.output, "cpu", given.commit, keep=True)
    for schedule in [given.schedule] if given.schedule else SCHEDULES:
        row = windows(schedule, given.window, given.seconds)
        figures.add(f"Flower, one node stopped, one killed: {schedule}", **row)


if __name__ == "__main__":
    main()
