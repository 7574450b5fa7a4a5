"""What a step of stacked clients consists of on a CUDA device: kernels by kind, and the longest by name.

`python benchmarks/kernels.py`; `--only` names cases. It wants a device that nothing else is on: a kernel's time has in
it what others took of the device meanwhile.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import Figures, federation, our_round
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

import fedbayes as fb
from fedbayes.engine import compiled
from fedbayes.networks.papers import network_named
from fedbayes.papers.aggregation import CLIENTS, VARIATIONAL
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

JOINED = {"always": 2**62, "never": -1}  # numbers of the largest tensor of a step whose launches are joined
STEPS = 20  # of a client in a round
LONGEST = 12  # kernels that are named
POINTS = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


class Case(NamedTuple):
    """A step: its network, how its clients train, how many there are, and of how many rows a batch is."""

    network: str
    options: Mapping[str, Any]
    method: str
    settings: Mapping[str, Any]
    clients: int
    batch: int
    precision: str = "bf16"


CASES = {
    "FedUAB-1 CNN": Case("cnn", {}, "feduab", {"draws": 1}, 10, 10),
    "FedAvg CNN, three splits": Case("cnn", {}, "fedavg", {}, 30, 10, "tf32"),
    "Flipout ResNet-20": Case("resnet", {"depth": 20}, "fedvi", {**CLIENTS, **VARIATIONAL, "rule": "ws"}, 10, 32),
    "FedAvg ResNet-8 of 128 images": Case("resnet", {"depth": 8}, "fedavg", POINTS, 20, 128),
    "FedAvg WideResNet-10-2": Case("wide_resnet", {"depth": 10, "dropout": 0.3}, "fedavg", POINTS, 20, 128),
}
OWN = {"triton_red": "reductions", "triton_per": "reductions", "triton_poi": "elementwise"}  # by how names begin
OTHERS = {  # by words in the names of the rest
    "convolutions": ("forward", "to_input", "to_weight", "conv"),
    "normals": ("distribution", "normal"),
    "products": ("gemm", "gemv", "cutlass", "::mm", "::bmm", "::addmm"),
    "reductions": ("reduce", "::sum"),
    "elementwise": ("elementwise", "::add", "::mul"),
}


def kind_of(kernel: str) -> str:
    """A kernel's kind by its name.

    >>> kind_of("triton_red_fused_convolution_7"), kind_of("to_input"), kind_of("Memcpy DtoD")
    ('reductions', 'convolutions', 'other')
    """
    for start, kind in OWN.items():
        if kernel.startswith(start):
            return kind
    return next((kind for kind, words in OTHERS.items() if any(word in kernel for word in words)), "other")


def task_of(case: Case, device: str, small: bool) -> Task:
    clients, steps, batch = (2, 1, 4) if small else (case.clients, STEPS, case.batch)
    data = federation((3, 32, 32), [steps * batch] * clients)
    method = fb.methods.method_named(case.method, {**case.settings, "batch": batch, "epochs": 1})
    how = {"compile": "graph", "precision": case.precision} if device == "cuda" else {"compile": "off"}
    network = network_named(case.network, data.data.shape, 10, **case.options)
    return prepare(network, data, method=method, device=device, engine="stacked", evaluate_every=10**9, **how)


def seen(task: Task, device: str) -> Iterable[FunctionEventAvg]:
    """What ran in a round after the first two, by name."""
    trained = rounds(task, task.begin(), Memory())
    next(trained)
    next(trained)
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as taken:
        next(trained)
        if device == "cuda":
            torch.cuda.synchronize()
    return taken.key_averages()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-kernels.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--small", action="store_true", help="two clients and one step")
    parser.add_argument(
        "--joined", choices=JOINED, help="whether small operations are one launch; by default as chosen"
    )
    parser.add_argument("--commit")
    given = parser.parse_args()
    with joined(given.joined):
        measure(given)


@contextmanager
def joined(how: str | None) -> Iterator[None]:
    """Launches are joined in this way, afterwards as before; None: as chosen."""
    before = compiled.SMALL
    compiled.SMALL = before if how is None else JOINED[how]
    try:
        yield
    finally:
        compiled.SMALL = before


def measure(given: argparse.Namespace) -> None:
    """One row for each case."""
    figures, cuda = Figures(given.output, given.device, given.commit, keep=True), given.device == "cuda"
    for name in given.only:
        task, steps = task_of(CASES[name], given.device, given.small), 1 if given.small else STEPS
        best, first, notes = our_round(task, given.device, times=5)
        spent, launches, longest = Counter[str](), Counter[str](), Counter[str]()
        for event in seen(task, given.device):
            took = (event.self_device_time_total if cuda else event.self_cpu_time_total) / steps
            spent[kind_of(event.key)] += took
            launches[kind_of(event.key)] += event.count
            longest[event.key[:80]] += took
        title = f"{name}, {given.joined} joined" if given.joined else name
        figures.add(
            title, step=1e6 * best / steps, first=first, notes=notes,
            kernels={k: {"us": round(us, 1), "launches": round(launches[k] / steps, 1)} for k, us in spent.items()},
            longest={k: round(us, 1) for k, us in longest.most_common(LONGEST)},
        )  # fmt: skip


if __name__ == "__main__":
    main()
