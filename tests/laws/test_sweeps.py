"""A sweep equals its members run alone: for every method, whatever its members may differ in.

`python tests/laws/test_sweeps.py` prints the worst difference of each method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from few_rows import fallbacks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbayes.clients.client import Info
from fedbayes.data import Clients, Dataset
from fedbayes.data.ragged import Ragged
from fedbayes.engine.graphs import own_memory
from fedbayes.engine.infos import Constants
from fedbayes.errors import InputError
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.methods import METHODS, Method
from fedbayes.methods.groups import Newton
from fedbayes.options import options_of
from fedbayes.runs.sweep import can_join, program_of
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

TOLERANCE = 1e-8  # of float64: stacked products are summed in another order
SHORT: dict[str, Any] = {
    **{"batch": 4, "epochs": 1, "test_draws": 2, "samples": 2, "kl_weight": 0.01},
    **{"server_batch": 4, "server_epochs": 1, "swa_start": 0},
    **{"weight_decay": 0.01, "proximal": 0.1, "clip": 2.0, "adversarial": 0.01},
    **{"server": "sgd", "lr_within": "steps", "beta2": 0.9, "clip_step": 1.0},
}
FLOW = {"flow_epochs": 2, "flow_batch": 4, "flow_length": 2, "flow_draws": 2}  # where the method refines
# Another value of each option in which members of one program may differ.
OTHER: dict[str, Any] = {
    **{"lr": 0.02, "kl_weight": 0.1, "prior_scale": 0.5, "lr_decay": 0.5, "lr_silent": 1, "initial": 0.3},
    **{"division": 3.0, "test_draws": 3, "student_lr": 0.02, "temperature": 0.5, "input_noise": 0.1},
    **{"lr_drop": 0.5, "lr_drop_every": 2, "shrinkage": 0.5, "burn_share": 0.2, "weighting": "equal"},
    **{"server": "adam", "server_lr": 0.3, "server_momentum": 0.5, "weight_decay": 0.1, "proximal": 0.5},
    **{"clip": 0.5, "adversarial": 0.1, "damping": 0.2, "global_lr": 0.002, "plain_rounds": 1, "pooled": "ws"},
    **{"swag_rounds": 2, "swag_every": 2, "swag_start": 0.2, "swag_lr": 0.01, "server_student_lr": 0.002},
    **{"flow_lr": 0.002, "prior_precision": 2.0, "walk_lr": 0.02},
    **{"beta1": 0.5, "beta2": 0.99, "curvature_memory": 2.0, "least_curvature": 0.5, "clip_step": 0.5},
    **{"lr_across": "cosine", "alpha": 0.5, "gamma": 0.3, "rho": 2.0},
}
SERVER = ("server", "server_lr", "server_momentum")
FIXED = {  # options that a method takes from another and refuses, or that are no numbers of its clients
    "pvi": ("rule", "weighting", "division", *SERVER),
    "fedlap_cov": (
        *("rule", "weighting", "division", *SERVER, "kl_weight", "lr_within", "lr_drop", "lr_drop_every"),
        *options_of(Newton),
    ),
    "bayes_admm": ("rule", "weighting", "division", *SERVER, "kl_weight"),
    "pfedbayes": tuple(options_of(Newton)),
    "feddyn": ("weighting", "proximal", "outliers", "buckets", "mixing", "twins", "gamma"),
    "fedlap": ("weighting", "proximal", "outliers", "buckets", "mixing", "twins"),
    "scaffold": ("weighting", "outliers", "buckets", "mixing", "twins", "lr_within", "lr_drop", "lr_drop_every"),
    "fedbe": ("server",),
}
RULES = {"fedavg": "fedag", "fedvi": "nwa", "feduab": "ws", "bpfed": "lp", "pfedbayes": "nwa", "fedivon": "nwa"}


class Member(NamedTuple):
    """An experiment with the network and the clients that it is trained with."""

    experiment: Experiment
    network: nn.Module
    clients: Clients


def data(rows: int = 60) -> Dataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=random, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=random, dtype=torch.float64)).argmax(1)
    return Dataset("rows", x, y, x[:24].clone(), y[:24].clone(), "classes", 3)


DATA = data()


def spread(sizes: list[int], seed: int = 0, rows: Dataset = DATA) -> Clients:
    """Clients of these sizes, and four test rows for each."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    train = Ragged.of_sizes(order[: sum(sizes)].numpy(), torch.tensor(sizes).numpy())
    test = Ragged.of_lists([torch.arange(4 * k, 4 * k + 4) % 24 for k in range(len(sizes))])
    return Clients(rows, train, test, order[sum(sizes) :])


def network(seed: int, body: int | None = None) -> nn.Module:
    """A network by its seed, its first layer by another where that is given."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    if body is not None:
        torch.manual_seed(100 + body)
        made[0] = nn.Linear(6, 5)
    return made.double()


def member(method: str, *, seed: int = 0, clients: Clients | None = None, **changes: Any) -> Member:
    options = {name: v for name, v in SHORT.items() if name in options_of(METHODS[method])}
    options = {name: v for name, v in options.items() if name not in FIXED.get(method, ())}
    options |= {**(FLOW if method.endswith("_pf") else {}), **changes.pop("options", {})}
    there = clients or spread([5, 9, 4, 7])
    body = changes.pop("body", None)
    x = Experiment(
        method=method, seed=seed, clients=len(there), cohort=3, rounds=2, evaluate_every=2, personal_every=2,
        engine="stacked", compile="off", options=options,
    )  # fmt: skip
    return Member(replace(x, **changes), network(seed, body), there)


def another(method: type[Method], name: str) -> Any:
    """Another number than an option's default that passes its check."""
    default = getattr(method(), name)
    for value in (default + 1, default + 0.1, default / 2):
        with suppress(InputError):
            method(**{name: value})
            return value
    raise AssertionError(f"{name}: give another value of it in OTHER")


def other_options(method: str) -> list[dict[str, Any]]:
    """In two halves, another value of every option that the sweep calls free."""
    refines = method.endswith("_pf")
    known = {n: f.metadata for n, f in options_of(METHODS[method]).items()}
    names = [n for n, m in known.items() if m["kind"] != "program" and (refines or not m["rare"])]
    # Buckets, mixing and twins need a robust rule: test_buckets.py has a sweep over them.
    free = [n for n in names if n not in ("rule", "buckets", "mixing", "twins") and n not in FIXED.get(method, ())]
    others = {n: OTHER[n] if n in OTHER else another(METHODS[method], n) for n in free}
    if "rule" in names and method in RULES:
        others["rule"] = RULES[method]
    return [dict(list(others.items())[place::2]) for place in range(2)]


def sweeps(method: str) -> dict[str, dict[str, Member]]:
    """Sweeps by what their members have in common."""
    some, rest = other_options(method)
    several, many = spread([3, 14, 6, 8], seed=2), spread([4, 5, 3, 6, 4, 5])
    return {
        "one client": {
            "as it is": member(method),
            f"seed, split, sizes and options {', '.join(some)}": member(method, seed=1, clients=several, options=some),
            f"more clients and options {', '.join(rest)}": member(method, clients=many, cohort=5, options=rest),
            "fewer clients and rounds": member(method, seed=2, clients=spread([6, 4, 5]), cohort=2, rounds=1),
        },
        "frozen layer": {f"its weights by seed {s}": member(method, seed=s, frozen=("0.*",)) for s in (0, 1)},
        "frozen weights": {f"seed {s}": member(method, seed=s, frozen=("0.*",), body=1) for s in (0, 1)},
    }


def built(one: Member) -> Task:
    return build(one.experiment, network=one.network, clients=one.clients)


def results(progress: Any, own: Memory, record: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """All that a run leaves behind, as tensors by name."""
    for part, q in progress.state.broadcast.items():
        yield from ((f"{part}.{i}", t) for i, t in enumerate(tree_leaves(q)))
    for k, kept in own.rows.items():
        yield from ((f"own {k}.{i}", t) for i, t in enumerate(tree_leaves(kept)))
    for table in ("train", "test", "personal"):
        yield from ((f"{table} {n}", torch.tensor(v, dtype=torch.float64)) for n, v in record.get(table, {}).items())


def trained_alone(one: Member) -> dict[str, Tensor]:
    task, own = built(one), Memory()
    *_, (progress, record) = rounds(task, task.begin(), own)
    return dict(results(progress, own, record))


def trained_together(members: list[Member]) -> list[dict[str, Tensor]]:
    """The members as `sweep` trains them: as one program where they can be, else one after another."""
    tasks, owns = [built(one) for one in members], [Memory() for _ in members]
    assert len({program_of(one.experiment) for one in members}) == 1, "they are not one sweep"
    if not all(map(can_join, tasks)):
        return [trained_alone(one) for one in members]
    last: list[Any] = [None] * len(tasks)
    for entries in rounds_together(tasks, [task.begin() for task in tasks], owns):
        last = [entry or before for entry, before in zip(entries, last)]
        assert not fallbacks(*(entry[1] for entry in entries if entry)), "the engine fell back"
    return [dict(results(progress, own, record)) for (progress, record), own in zip(last, owns)]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative where values are large."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0


def differences(members: dict[str, Member]) -> dict[str, tuple[float, str]]:
    """For each member the largest difference from its run alone, and where it is."""
    found = {}
    for (name, one), ours in zip(members.items(), trained_together(list(members.values()))):
        alone = trained_alone(one)
        assert ours.keys() == alone.keys(), name
        assert len(alone) > 1
        found[name] = max((difference(ours[n], alone[n]), n) for n in alone)
    return found


# How constants are held does not depend on the method: all of them with weights of their own are in `make test-slow`.
SOME = ("fedavg", "feduab", "fedper", "fedavg_pf", "fedppd", "laplace", "pvi")
EVERY = [
    pytest.param(method, sweep, marks=pytest.mark.slow if sweep == "frozen layer" and method not in SOME else [])
    for method in METHODS
    for sweep in sweeps("fedavg")
]


@pytest.mark.parametrize(("method", "sweep"), EVERY)
def test_a_sweep_equals_its_members_run_alone(method: str, sweep: str) -> None:
    gaps = differences(sweeps(method)[sweep])
    assert not {name: gap for name, gap in gaps.items() if gap[0] > TOLERANCE}


def test_a_member_may_have_more_rows_at_a_client_than_the_first_has_room_for() -> None:
    """Flows are fitted to rows that a client keeps, in whole batches of 500."""
    many = data(rows=1100)
    sizes = {"equal": [300, 300, 300], "unequal": [900, 40, 60]}
    large = {"batch": 100, "flow_batch": 100}
    gaps = differences(
        {name: member("fedavg_pf", clients=spread(s, rows=many), options=large) for name, s in sizes.items()}
    )
    assert not {name: gap for name, gap in gaps.items() if gap[0] > TOLERANCE}


def test_constants_that_members_have_in_common_are_held_once() -> None:
    one, other = (built(member("fedper", seed=s, frozen=("0.*",), body=1)).program for s in (0, 1))
    alike, apart = Constants.of([one, other]), Constants.of([one, built(member("fedper", frozen=("0.*",))).program])
    assert alike.axes == {"frozen": None}
    assert alike.values["frozen"]["0.weight"] is one.model.frozen["frozen"]["0.weight"]
    assert apart.axes == {"frozen": 0}
    assert apart.values["frozen"]["0.weight"].shape == (2, 5, 6)
    info = Info({}, {}, torch.zeros(()), torch.ones(2), (), {"frozen": alike.values["frozen"], "own": torch.ones(2)})
    kept = own_memory(info, {"frozen": None, "own": 0})
    assert kept.constants["frozen"]["0.weight"] is info.constants["frozen"]["0.weight"]
    assert kept.constants["own"] is not info.constants["own"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("method", "sweep", "compile"),  # methods of points: a GPU's own noise depends on who is trained beside
    [("fedavg", "one client", "off"), ("fedper", "frozen layer", "graph"), ("fedper", "frozen weights", "graph")],
)
def test_so_it_does_on_a_gpu(method: str, sweep: str, compile: str) -> None:
    there = {"device": "cuda", "compile": compile}
    members = [one._replace(experiment=replace(one.experiment, **there)) for one in sweeps(method)[sweep].values()]
    for one, ours in zip(members, trained_together(members)):
        alone = trained_alone(one)
        assert max(difference(ours[n], alone[n]) for n in alone) <= TOLERANCE


def main() -> None:
    heads = ("seed, split", "more clients", "fewer clients", "its weights", "seed ")
    print(
        "| method | "
        + " | ".join(("seed, sizes, options", "more clients, options", heads[2], "frozen weights", "one frozen body"))
        + " |\n|---"
        + "|---" * 5
        + "|"
    )
    for method in METHODS:
        gaps = [gap for sweep in sweeps(method) for gap in differences(sweeps(method)[sweep]).items()]
        found = [max(gap for name, (gap, _) in gaps if name.startswith(head)) for head in heads]
        print(f"| {method} | " + " | ".join(f"{gap:.0e}" for gap in found) + " |", flush=True)


if __name__ == "__main__":
    main()
