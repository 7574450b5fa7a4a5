"""A round of an earlier commit against a round of this checkout: `python benchmarks/before.py d650ea8`; a few minutes.

Each of the two is a process of its own that runs the cases of `cpu.py`, and more of wide networks and many clients,
steps not compiled. They take turns, so that
what else the machine does falls on both; a row has the median over the pairs of before / now, and the best of each.
`--compiled` has the chosen engine's compiled steps as well. The earlier commit runs with the packages of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from cpu import CASES, WAYS
from measure import Figures, Others

HOME = Path(__file__).parents[1]
# Both commits have these names in their own benchmarks/measure.py.
SERVER = """
import json, sys, time
from pathlib import Path
import fedbayes
from measure import SHAPES, federation, network_named, one_round, prepare

assert Path(fedbayes.__file__).is_relative_to(sys.argv[1]), fedbayes.__file__
network, more, method, options, rows, number, engine, compile = json.loads(sys.argv[2])
clients = federation(SHAPES[network], [rows] * number)
module = network_named(network, clients.data.shape, 10, **more)
made = fedbayes.methods.method_named(method, {"epochs": 1, **options})
how = {"engine": engine, "compile": compile, "evaluate_every": 10**9}
turn = one_round(prepare(module, clients, method=made, cohort=number, device="cpu", **how))
for line in sys.stdin:
    begun = time.process_time()
    seconds = turn()
    print(json.dumps([seconds, time.process_time() - begun]), flush=True)
"""

ADAM, ONE = {"optimiser": "adam", "lr": 0.001}, {"train_draws": 1}
# what, widths of hidden layers, method, options, rows a client, clients
WIDE: list[tuple[str, list[int], str, dict[str, Any], int, int]] = [
    ("FedUAB-1 MLP 50-50, 100 clients", [50, 50], "feduab", ONE, 60, 100),
    ("FedAvg MLP 200-100, 100 clients", [200, 100], "fedavg", {}, 60, 100),
    ("FedAvg by Adam MLP 200-100, 100 clients", [200, 100], "fedavg", ADAM, 60, 100),
    ("FedUAB-1 MLP 200-100, 10 clients", [200, 100], "feduab", ONE, 120, 10),
    ("FedAvg by Adam MLP 1000-300, 10 clients", [1000, 300], "fedavg", ADAM, 60, 10),
    ("FedUAB-1 MLP 1000-300, 10 clients", [1000, 300], "feduab", ONE, 60, 10),
]


def cases() -> Iterator[tuple[str, list[Any]]]:
    """What, and what a server is told."""
    for what, network, method, options, _, rows in CASES:
        yield what, [network, {}, method, options, rows, 10]
    for what, hidden, method, options, rows, number in WIDE:
        yield what, ["mlp", {"hidden": hidden}, method, options, rows, number]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of an earlier commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve() / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], cwd=HOME, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=HOME, check=True)


class Server:
    """The rounds of one case by one checkout."""

    def __init__(self, place: Path, case: list[Any]) -> None:
        found = os.pathsep.join(str(place / folder) for folder in ("src", "benchmarks"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(place), json.dumps(case)],
            env={**os.environ, "PYTHONPATH": found},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> tuple[float, float]:
        """Seconds of a round, by the clock and of the processor."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("round", file=self.process.stdin, flush=True)
        clock, processor = json.loads(self.process.stdout.readline())
        return clock, processor

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def compare(figures: Figures, place: Path, what: str, case: list[Any], pairs: int) -> None:
    servers = [Server(checkout, case) for checkout in (place, HOME)]
    try:
        for server in servers * 2:
            server()  # the first are slower
        with Others() as others:
            # Who begins changes from pair to pair.
            turns = [[server() for server in servers[:: 1 - 2 * (n % 2)]][:: 1 - 2 * (n % 2)] for n in range(pairs)]
    finally:
        for server in servers:
            server.end()
    (before, before_cpu), (now, now_cpu) = ([list(t) for t in zip(*side)] for side in zip(*turns))
    figures.add(
        what,
        pairs=pairs,
        before_s=min(before),
        now_s=min(now),
        before_over_now=median(a / b for a, b in zip(before, now)),
        before_over_now_best=min(before) / min(now),
        before_over_now_cpu=median(a / b for a, b in zip(before_cpu, now_cpu)),
        others_busy=max(0.0, others.share - sum(before_cpu + now_cpu) / sum(before + now)),  # but for the two
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-before.json"))
    parser.add_argument("--case", default="", help="only rows that start like this, as 'FedAvg CNN'")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    figures = Figures(arguments.output, "cpu", keep=arguments.case != "")
    with checkout(arguments.commit) as place:
        for what, case in cases():
            for name, *way in WAYS if arguments.compiled else WAYS[:2]:
                if f"{what}: {name}".startswith(arguments.case):
                    compare(figures, place, f"{what}: {name}", [*case, *way], arguments.pairs)


if __name__ == "__main__":
    main()
