"""Scale on a CPU: sums at memory bandwidth, cohorts in chunks, own state of 10^5 clients. Ten minutes, 40 GB of disk.

Sections: `sum`, a thousand uploads of a million weights; `chunks`, a cohort of a thousand; `population`, pFedBayes with
own state on disk, whose federations take turns (`federate.py`); `killed`, one of them ended by SIGKILL and resumed;
`rounds`, seconds a round against cohort, weights and draws. `--only` runs some of them and keeps the file's other rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from federate import clients_of, resident
from measure import Figures, Others
from torch import nn

import fedbayes as fb
from fedbayes.federation.cohorts import cohort_of
from fedbayes.federation.rules import RULES
from fedbayes.federation.sums import add_terms
from fedbayes.networks.papers import network_named
from fedbayes.posterior.values import Gaussian
from fedbayes.runs import rows
from fedbayes.runs.own import rows_on_disk
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

HERE = Path(__file__).parent
MILLION, UPLOADS = 10**6, 1000
TURNS, COHORT = 30, 100
# All clients have taken part before and have rows on disk, so that every member of a cohort reads its own and writes it
# anew; beside them a federation at its beginning, whose members have nothing to read yet.
FEDERATIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    f"{size:,}": (size, ("--touched",)) for size in (1000, 10_000, 100_000)
}
FEDERATIONS["100,000, from the beginning"] = (100_000, ())


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What a function gives, and by how many bytes it raised the process's highest use of memory over the present."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    made = work()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = int(status["RssFile"].split()[0]) + int(status["RssShmem"].split()[0])
    return made, int(status["VmHWM"].split()[0]) * 1024 - files * 1024 - before


def sums(figures: Figures) -> None:
    """Terms of a million weights, added one after another; in turns with a plain copy of as many bytes."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)

    def posterior() -> Gaussian:
        return Gaussian(torch.randn(MILLION, generator=random), torch.rand(MILLION, generator=random) + 0.5)

    reference, weight = posterior(), torch.tensor(3.0)
    for name in ("nwa", "lp", "conflation", "log_pool"):
        rule = RULES[name]
        # A name is needed for the program's parts, and nothing else of it.
        program: Any = SimpleNamespace(pooling=SimpleNamespace(rules={"model": rule}))
        uploads = [posterior() for _ in range(8)]  # more than a cache holds
        terms = [{"model": rule.encode(q, weight, reference)} for q in uploads]
        size = sum(t.numel() * t.element_size() for t in terms[0]["model"].values())
        copies = [t.clone() for t in terms[0]["model"].values()]
        taken: dict[str, float] = {"copy": 0.0, "add": 0.0}

        def all_of_them(terms: Any = terms, program: Any = program, taken: Any = taken, copies: Any = copies) -> Any:
            total = None
            for k in range(UPLOADS):
                one = terms[k % len(terms)]
                start = time.perf_counter()
                for target, t in zip(copies, one["model"].values()):
                    target.copy_(t)
                middle = time.perf_counter()
                total = add_terms(program, [one], total)
                taken["copy"] += middle - start
                taken["add"] += time.perf_counter() - middle
            return total

        with Others() as others:
            total, memory = peak(all_of_them)
        assert total["model"]["count"] == UPLOADS
        start = time.perf_counter()
        for q in uploads:
            rule.encode(q, weight, reference)
        encoding = (time.perf_counter() - start) / len(uploads)
        figures.add(
            f"sum of {UPLOADS} uploads, {name}",
            gigabytes_a_second=3 * UPLOADS * size / taken["add"] / 1e9,  # two are read and one is written
            copy_gigabytes_a_second=2 * UPLOADS * size / taken["copy"] / 1e9,
            ratio_of_bandwidth=1.5 * taken["copy"] / taken["add"],
            ratio_of_seconds=taken["copy"] / taken["add"],
            seconds_an_upload=taken["add"] / UPLOADS,
            seconds_to_encode=encoding,
            memory_over_sum=memory / size,
            others_busy=others.share,
        )


def task_of(
    method: str, clients: fb.data.Clients, cohort: int, network: nn.Module | None = None, **options: Any
) -> Task:
    made = fb.methods.method_named(method, {"epochs": 1, "batch": 10, **options})
    module = network or network_named("mlp", clients.data.shape, 10)
    return prepare(module, clients, method=made, cohort=cohort, evaluate_every=10**9, rounds=10**6, compile="off")


def chunks(figures: Figures) -> None:
    """A thousand clients in chunks of several sizes: one posterior, and memory that follows the chunk."""
    clients, first = clients_of(1000), None
    for chunk in (20, 64, 250):
        task = task_of("feduab", clients, 1000)
        task.engine.chunk = chunk
        steps = rounds(task, task.begin(), Memory())
        with Others() as others:
            start = time.perf_counter()
            (progress, _), memory = peak(lambda steps=steps: next(steps))
            taken = time.perf_counter() - start
        q = progress.state.broadcast["model"]
        first = first or q
        figures.add(
            f"cohort of 1,000, chunks of {chunk}",
            seconds=taken,
            megabytes=memory / 1e6,
            largest_difference_of_mean=float((q.mean - first.mean).abs().max() / first.scale.min()),
            largest_difference_of_scale=float((q.scale / first.scale - 1).abs().max()),
            others_busy=others.share,
        )


class Federated:
    """A federation in a process of its own, which makes a round when it is asked to."""

    def __init__(self, folder: Path, population: int, *more: str) -> None:
        command = [sys.executable, str(HERE / "federate.py"), str(folder), str(population), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE
        )
        self.begun = self.answer()

    def ask(self, what: str = "round") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def round(self) -> dict[str, Any]:
        self.ask()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def population(figures: Figures) -> None:
    """Seconds a round and resident memory of federations that take turns; bytes on disk against those computed."""
    task = task_of("pfedbayes", clients_of(COHORT), COHORT)
    row = rows.Row.of(task.program.client.first(task.program.initial)).size
    del task
    with tempfile.TemporaryDirectory() as place, Others() as others:
        running = {
            name: Federated(Path(place) / str(n), size, *more)
            for n, (name, (size, more)) in enumerate(FEDERATIONS.items())
        }
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for turn in range(TURNS):
            for name in running if turn % 2 else reversed(running):
                turns[name].append(running[name].round())
        for one in running.values():
            one.end()
    least = turns["1,000"]
    for name, made in turns.items():
        size, more = FEDERATIONS[name]
        later = range(TURNS // 3, TURNS)  # once all is loaded and files begin to wear
        drawn = [cohort_of(r, clients=size, cohort=COHORT, seed=0, dropout=0.0)[0] for r in range(TURNS)]
        before = [range(first, first + 100) for first in range(0, size, 100)] if more else []
        planned = list(rows_on_disk([*before, *drawn]))[-1] * row
        figures.add(
            f"population {name}",
            seconds_a_round=statistics.median(made[t]["seconds"] for t in later),
            against_1000=statistics.median(made[t]["seconds"] / least[t]["seconds"] for t in later),
            resident_megabytes=max(made[t]["resident"] for t in later) / 1e6,
            resident_against_1000=max(made[t]["resident"] for t in later) / max(least[t]["resident"] for t in later),
            peak_megabytes=made[-1]["peak"] / 1e6,
            peak_against_1000=made[-1]["peak"] / least[-1]["peak"],
            touched=made[-1]["touched"],
            bytes_planned=planned,
            bytes_on_disk=made[-1]["disk"],
            others_busy=others.share,
        )


def killed(figures: Figures) -> None:
    """A federation of 1,000 ended by SIGKILL in the middle of a round, resumed, and compared with one that was not."""
    with tempfile.TemporaryDirectory() as place:
        whole, cut = (Federated(Path(place) / name, 1000) for name in ("whole", "cut"))
        for _ in range(8):
            last = whole.round()
        for _ in range(5):
            cut.round()
        cut.ask()
        time.sleep(last["seconds"] / 2)
        cut.end()
        cut = Federated(Path(place) / "cut", 1000)
        resumed = cut.begun["round"]
        for _ in range(8 - resumed):
            cut.round()
        for one in (whole, cut):
            one.ask("digest")
        a, b = whole.answer(), cut.answer()
        for one in (whole, cut):
            one.end()
    figures.add(
        "killed by SIGKILL in round 6", resumed_after_round=resumed, equal=a == b, clients_compared=a["touched"]
    )


def round_seconds(task: Task, times: int = 3) -> float:
    """The best of several rounds after the first."""
    steps = rounds(task, task.begin(), Memory())
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        next(steps)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def curves(figures: Figures) -> None:
    """Seconds a round of FedUAB, ten rows and one step a client: against cohort, weights and draws."""
    clients = clients_of(1000)
    for cohort in (10, 30, 100, 300, 1000):
        figures.add(f"cohort {cohort}", x=cohort, seconds=round_seconds(task_of("feduab", clients, cohort)))
    for hidden in (10, 50, 200, 700):
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        weights = sum(p.numel() for p in network.parameters())
        task = task_of("feduab", clients, 10, network)
        figures.add(f"weights {weights}", x=weights, seconds=round_seconds(task))
    for draws in (1, 2, 5, 10, 20):
        task = task_of("feduab", clients, 10, train_draws=draws)
        figures.add(f"draws {draws}", x=draws, seconds=round_seconds(task))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sections = {"sum": sums, "chunks": chunks, "population": population, "killed": killed, "rounds": curves}
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs/results/bench-scale.json")
    parser.add_argument("--only", nargs="*", choices=sections, default=list(sections))
    arguments = parser.parse_args()
    figures = Figures(arguments.output, "cpu", keep=len(arguments.only) < len(sections))
    for name in arguments.only:
        sections[name](figures)


if __name__ == "__main__":
    main()
