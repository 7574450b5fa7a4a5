"""Nodes that stop or die cost the others nothing: a SuperLink and four SuperNodes with TLS on this machine.

`python benchmarks/waiting_flower.py` needs `fedbayes[flower]`. Training takes two seconds in every node. In a first
window all nodes take part; then one is stopped (SIGSTOP) and one is killed, and contributions of the other two are
counted again. The same is done with rounds that wait, whose deadline is by quorum.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Figures

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))

import machines as parts  # the federation of processes that the tests start

SECONDS, NODES = 2.0, 4
SCHEDULES: dict[str, dict[str, Any]] = {
    "buffered": {"schedule": "buffered", "schedule_options": {"buffer": 1}, "flower": {"timeout": 600}},
    "synchronous": {"flower": {"timeout": 600, "quorum": 0.5, "slack": 2.0}},
}


def rate(records: list[dict[str, Any]], since: float, until: float) -> tuple[float, int]:
    """Contributions per second of nodes 0 and 1: one over the mean time between two of one node; and how many.

    Counted are those whose end lies between two times after the run began.
    """
    clock, last, intervals = 0.0, dict[int, float](), list[float]()
    for record in records:
        clock = record.get("clock", clock + record["seconds"])
        for k in record["took_part"]:
            if k in (0, 1):
                if k in last and since < clock <= until:
                    intervals.append(clock - last[k])
                last[k] = clock
    return len(intervals) / sum(intervals), len(intervals)


def now(records: list[dict[str, Any]]) -> float:
    return records[-1].get("clock") or sum(record["seconds"] for record in records)


def windows(schedule: str, window: float) -> dict[str, Any]:
    """Rates before and after one node stops and one dies."""
    parts.APP = parts.APP.replace(
        "    reply = inner(message, context)\n", f"    reply = inner(message, context)\n    time.sleep({SECONDS})\n"
    )
    with tempfile.TemporaryDirectory() as home:
        made = parts.Machines(Path(home) / "loop", nodes=NODES)
        try:
            made.superlink()
            for k in range(NODES):
                made.node(k)
            made.experiment(method="pvi", clients=NODES, rounds=10_000, evaluate_every=50, **SCHEDULES[schedule])
            run = made.train("runs/waiting")
            parts.until("all nodes take part", lambda: {k for r in run.journal for k in r["took_part"]} == {0, 1, 2, 3})
            began = now(run.journal)
            time.sleep(window)
            whole, many = rate(run.journal, began, began + window)
            os.killpg(made.running["node-2"].pid, signal.SIGSTOP)
            made.kill("node-3")
            began = now(run.journal)
            time.sleep(window)
            after, fewer = rate(run.journal, began, began + window)
            os.killpg(made.running["node-2"].pid, signal.SIGCONT)
        finally:
            made.stop()
    return {"before": whole, "after": after, "ratio": after / whole, "contributions": [many, fewer], "window": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/waiting.json"))
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--window", type=float, default=90.0)
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures = Figures(given.output, "cpu", given.commit, keep=True)
    for schedule in [given.schedule] if given.schedule else SCHEDULES:
        figures.add(f"Flower, one node stopped, one killed: {schedule}", **windows(schedule, given.window))


if __name__ == "__main__":
    main()
