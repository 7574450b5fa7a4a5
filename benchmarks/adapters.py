"""Adapters against full fine-tuning and other baselines, at 20 sites with different labels each.

Two cases: `svhn`, a ResNet-20 trained on CIFAR-10 (SVHN, CIFAR-100, DTD and `weights` in the folder named by
FEDBAYES_DATA; for a GPU), and `digits`, a perceptron trained on scikit-learn's digits turned by 90 degrees, which then
learns upright ones (two cores, minutes). `python benchmarks/adapters.py digits tune` scores options on a seventh of the
training rows, `... digits test` what CASES says, or what was best in the file of `--chosen`, on the test rows.
`--list` prints the single jobs (`--only`, with `--change` or `--seeds`) for processes side by side, each with a file of
its own; `... digits join part-*.json` makes them one. `--small` tries it out.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import Figures, joined
from safetensors.torch import load_file
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data.fetch import here
from fedbayes.errors import Diverged
from fedbayes.evaluate.one_scale import one_scale
from fedbayes.networks.papers import network_named
from fedbayes.noise import seeded
from fedbayes.scores.ranking import auroc
from fedbayes.training.fit import train
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

SITES = 20
WIDTHS = (0.003, 0.01, 0.03, 0.1, 0.3)  # of which one is fitted afterwards
DRAWN = {"estimator": "weight"}  # for all rows of a step at once: less to compute and to hold than draws of outputs
ONCE = {**DRAWN, "train_draws": 1}  # as long as points take; fedvi needs pairs to see curvature with little noise
LATER = {"pattern": ["blocks.[3-8].*"], "full": ["head.*", "blocks.[3-8].norm*"]}  # what is before stays as it was
AVERAGED = {**ONCE, "test_draws": 20, "division": 1.0}  # of feduab: scales are pooled as they are
ONE_SCALE = "adapters, one scale fitted afterwards"
Options = dict[str, Any]


class Case(NamedTuple):
    """A body, the digits that it is fine-tuned on, the adapters, and the options that `tune` chose."""

    body: Callable[[], nn.Module]
    rows: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]  # of training and of testing
    prepare: fb.data.Prepare
    adapters: Options
    rounds: int
    batch: int
    chosen: dict[str, Options]  # by the Brier score of rows held out
    more: dict[str, tuple[str, Options, Options]]  # ways of this case: method, options, what differs of the adapters
    strangers: Callable[[], dict[str, Tensor]]


def resnet20() -> nn.Module:
    """Names of the file as the library's network has them."""
    network = network_named("resnet", (3, 32, 32), 10, depth=20)
    renamed = {}
    for name, weight in load_file(here("weights/resnet20-cifar10.safetensors")).items():
        name = re.sub(r"layer(\d)\.(\d)", lambda m: f"blocks.{3 * int(m[1]) - 3 + int(m[2])}", name)
        name = re.sub(r"\bbn(\d)", r"norm\1", re.sub(r"^bn1", "norm", re.sub(r"^conv1", "conv", name)))
        renamed[name.replace("linear", "head")] = weight
    network.load_state_dict(renamed)
    return network


def house_numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    svhn = fb.data.load("svhn")
    return svhn.test_x[:7000], svhn.test_y[:7000], svhn.test_x[7000:], svhn.test_y[7000:]


def perceptron() -> nn.Module:
    """Trained on digits that lie on their side: half of the training rows, which sites do not have."""
    data = fb.data.load("digits")
    x, y = data.prepare(data.x[::2]).rot90(1, (-2, -1)), data.y[::2]
    with seeded(0, "perceptron"):
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        optimiser = torch.optim.Adam(network.parameters(), 1e-3, weight_decay=1e-4)
        for _ in range(30):
            for rows in torch.randperm(len(x)).split(32):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimiser.step()
    return network


def upright() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = fb.data.load("digits")
    return data.x[1::2], data.y[1::2], data.test_x, data.test_y


CASES = {
    "svhn": Case(
        resnet20,
        house_numbers,
        fb.data.Prepare((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # as the body was trained
        {"pattern": ["blocks.*"], "rank": 16, "full": ["conv.*", "head.*", "*norm*"]},
        40,
        32,
        {
            "full fine-tuning": {"lr": 1.0},
            **{way: {"lr": 0.3} for way in ("adapters, points", "adapters, points, rank 32")},
        },
        {  # in as many numbers as a posterior of rank 16 has
            "adapters, points, rank 32": ("fedavg", {}, {"rank": 32}),
            "adapters, posterior of feduab, rank 32": ("feduab", AVERAGED, {"rank": 32}),
            "adapters, posterior over the last layer, rank 32": (
                "fedvi",
                {**DRAWN, "points": ("*.lora_B", "conv.*")},
                {"rank": 32},
            ),
            "later blocks, points, rank 40": ("fedavg", {}, {**LATER, "rank": 40}),
            "later blocks, posterior, rank 20": ("fedvi", DRAWN, {**LATER, "rank": 20}),
        },
        lambda: {name: fb.data.load(name).test_x for name in ("cifar100", "dtd")},
    ),
    "digits": Case(
        perceptron,
        upright,
        fb.data.load("digits").prepare,
        {"pattern": ["1", "3"], "rank": 3},
        40,
        16,
        {  # by the Brier score
            "full fine-tuning": {"lr": 0.1},
            "adapters, points": {"lr": 0.1},
            "adapters, posterior": {"lr": 0.3, "prior_scale": 0.3, "kl_weight": 0.1},
            "adapters, posterior by drawn weights": {"lr": 0.1, "prior_scale": 0.3, "kl_weight": 0.001},
            "adapters, posterior by sgd": {"lr": 0.1, "prior_scale": 0.3, "initial": 0.02},
            "adapters, posterior of feduab": {"lr": 0.1, "initial": 0.03},
        },
        {},
        lambda: {"turned": fb.data.load("digits").test_x.rot90(1, (-2, -1))},
    ),
}


def ways(case: Case) -> dict[str, tuple[str, Options, Options]]:
    """What is compared: method, options, adapters."""
    low, steps = case.adapters, {"epochs": 2, "batch": case.batch}
    named: dict[str, tuple[str, Options, Options]] = {
        "full fine-tuning": ("fedavg", {"lr": 0.05}, {}),
        "adapters, points": ("fedavg", {"lr": 0.1}, low),
        "adapters, posterior": ("fedvi", {}, low),
        "adapters, posterior by drawn weights": ("fedvi", DRAWN, low),
        "adapters, posterior by sgd": ("fedvi", {"optimiser": "sgd"}, low),
        "adapters, posterior of fedivon": ("fedivon", ONCE, low),
        "adapters, posterior of feduab": ("feduab", AVERAGED, low),
        "both factors averaged": ("fedavg", {"lr": 0.05}, {**low, "both": True}),
        "last layer, points": ("fedavg", {"lr": 0.1}, {"rank": 0}),
        "last layer, posterior": ("fedvi", {}, {"rank": 0}),
    }
    named |= {way: (method, options, {**low, **adapters}) for way, (method, options, adapters) in case.more.items()}
    named = {
        way: (method, {**steps, **options, **case.chosen.get(way, {})}, low)
        for way, (method, options, low) in named.items()
    }
    return {**named, ONE_SCALE: named["adapters, points"]}


def grid_of(way: str) -> list[Options]:
    """What is tried for a way, whatever its rank."""
    return GRID[way.partition(", rank ")[0]]


# In the order in which they are tried: `--most 2` takes the first two of each.
RATES = [{"lr": v} for v in (0.1, 0.3, 0.03, 1.0)]
PRIORS = [
    {"lr": lr, "prior_scale": s, "kl_weight": w} for s, w in ((0.1, 1.0), (0.1, 0.1), (0.3, 0.1)) for lr in (0.3, 0.1)
]
GRID: dict[str, list[Options]] = {
    "full fine-tuning": RATES,
    "adapters, points": RATES,
    "adapters, posterior": PRIORS,
    "adapters, posterior by drawn weights": PRIORS,
    "adapters, posterior by sgd": [{"lr": 0.1, "prior_scale": 0.3, "initial": s} for s in (0.02, 0.05)],
    "adapters, posterior of fedivon": PRIORS,
    "adapters, posterior over the last layer": PRIORS,
    "later blocks, points": RATES,
    "later blocks, posterior": PRIORS,
    "adapters, posterior of feduab": [  # the narrower, the less it is held: its prior is as narrow
        {"lr": lr, "initial": s, "kl_weight": w}
        for s, w in ((0.01, 1e-6), (0.01, 1e-5), (0.02, 1e-5), (0.005, 1e-7), (0.03, 1e-4), (0.01, 1e-4))
        for lr in (0.3, 0.1)
    ],
    "both factors averaged": RATES,
    "last layer, points": RATES,
    "last layer, posterior": [{"lr": lr} for lr in (0.1, 0.3)],
}


def data_of(case: Case, tuning: bool, most: int | None) -> fb.data.Dataset:
    """The digits that are trained and tested on; for tuning a seventh of the training rows is the test set."""
    x, y, test_x, test_y = (t[:most] for t in case.rows())
    if tuning:
        cut = len(x) - len(x) // 7
        x, y, test_x, test_y = x[:cut], y[:cut], x[cut:], y[cut:]
    return fb.data.from_arrays(x, y, test_x, test_y, prepare=case.prepare, classes=10)


def task_of(case: Case, way: str, data: fb.data.Dataset, seed: int, given: argparse.Namespace, change: Options) -> Task:
    method, options, adapters = ways(case)[way]
    gpu = given.device == "cuda"
    return prepare(
        case.body(),
        data.split(fb.partition.dirichlet(0.3), clients=SITES, seed=seed),
        method=fb.methods.method_named(method, {**options, **change}),
        rounds=given.rounds or case.rounds,
        seed=seed,
        device=given.device,
        engine="stacked" if gpu else "auto",
        compile=given.compile or ("captured" if gpu else "off"),
        precision="tf32" if gpu else "float32",
        adapters=adapters,
        at_once=20 if gpu else None,  # of similar length: hardly any waits for the longest
        evaluate_every=given.every or given.rounds or case.rounds,
        **({"validation": 0.1} if way == ONE_SCALE else {}),
    )


def trained(
    tasks: list[Task], said: Callable[[int, Options], None] = lambda m, scores: None
) -> tuple[list[fb.Run | None], float]:
    """All tasks as one program, or on a CPU one after another, and the seconds of each; none of one that diverged.

    `said` hears every score.
    """
    began, owns = time.perf_counter(), [Memory() for _ in tasks]
    if tasks[0].device.type == "cpu":
        return [alone(task) for task in tasks], (time.perf_counter() - began) / len(tasks)
    last: list[Any] = [None] * len(tasks)
    for entries in rounds_together(tasks, [task.begin() for task in tasks], owns):
        last = [old if entry is None else entry for old, entry in zip(last, entries)]
        for m, entry in enumerate(entries):
            for word in () if entry is None else (*entry[1].get("notes", ()), entry[1].get("diverged")):
                print(word or "", end="\n" if word else "", flush=True)
            if entry is not None and "test" in entry[1]:
                said(m, {**scores_in(entry[1]["test"]), "rounds": entry[0].state.round})
    ends = zip(tasks, last, owns)
    runs = [None if "diverged" in end[1] else fb.Run(task, end[0], [], own) for task, end, own in ends]
    return runs, (time.perf_counter() - began) / len(tasks)


def alone(task: Task) -> fb.Run | None:
    try:
        return train(task)
    except Diverged as error:
        print(error, flush=True)
        return None


def scores_in(scores: Any) -> Options:
    return {name: float(scores[name]) for name in ("accuracy", "nll", "brier", "ece")}


def message(run: fb.Run) -> int:
    """Numbers that a client sends in a round."""
    return sum((2 if isinstance(q, fb.Gaussian) else 1) * q.mean.numel() for q in run.parts.values())


def strangers(case: Case, run: fb.Run) -> Options:
    """AUROC of entropy and mutual information against pictures of something else."""
    most = min(2000, len(run.task.clients.data.test_x))
    inside, rows = run.predict(run.task.clients.data.test_x[:most]), {}
    for name, x in case.strangers().items():
        p = run.predict(x[:most])
        rows[f"auroc {name}, entropy"] = float(auroc(inside.entropy, p.entropy))
        if float(p.mutual_information.max()) > 1e-9:
            rows[f"auroc {name}, mutual information"] = float(auroc(inside.mutual_information, p.mutual_information))
    return rows


def tune(figures: Figures, case: Case, given: argparse.Namespace) -> None:
    data = data_of(case, True, given.rows)
    for way in given.only or [way for way in ways(case) if way != ONE_SCALE]:
        changes = given.change or grid_of(way)[: given.most]
        for together in [[change] for change in changes] if given.device == "cpu" else [changes]:

            def said(m: int, scores: Options, way: str = way, together: list[Options] = together) -> None:
                words = ", ".join(f"{name} {value}" for name, value in together[m].items())
                figures.add(f"{way}, {words}", **scores, way=way, options=together[m])

            runs, taken = trained([task_of(case, way, data, 100, given, change) for change in together], said)
            for m, run in enumerate(runs):
                if run is not None:
                    said(m, {**scores_in(run.scores()), "rounds": run.task.rounds, "seconds": taken})


def test(figures: Figures, case: Case, given: argparse.Namespace) -> None:
    data = data_of(case, False, given.rows)
    for way in given.only or ways(case):
        for together in [[seed] for seed in given.seeds] if given.device == "cpu" else [given.seeds]:
            runs, taken = trained([task_of(case, way, data, seed, given, {}) for seed in together])
            for seed, run in zip(together, runs):
                if run is None:
                    continue
                numbers, rounds = message(run), run.task.rounds
                if way == ONE_SCALE:
                    run = one_scale(run, draws=10, widths=WIDTHS).run
                scores = {**scores_in(run.scores()), **strangers(case, run)}
                figures.add(f"{way}, seed {seed}", **scores, numbers=numbers, rounds=rounds, seconds=taken)


def best_in(path: Path) -> dict[str, Options]:
    """The options of each way with the lowest Brier score in a file of `tune`, of those trained longest."""
    rows = [row for row in json.loads(path.read_text())["rows"] if "way" in row and row["brier"] == row["brier"]]
    best = {row["way"]: row for row in sorted(rows, key=lambda row: (row["rounds"], -row["brier"]))}
    return {way: row["options"] for way, row in best.items()}


def jobs(case: Case, given: argparse.Namespace) -> None:
    """The arguments of single processes, one per line, separated by tabs."""
    for way in given.only or ways(case):
        if given.part == "test":
            print("\n".join(f"--only\t{way}\t--seeds\t{seed}" for seed in given.seeds))
        elif way != ONE_SCALE:
            print("\n".join(f"--only\t{way}\t--change\t{json.dumps(change)}" for change in grid_of(way)[: given.most]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("part", choices=["tune", "test", "join"])
    parser.add_argument("files", nargs="*", type=Path, help="of join")
    parser.add_argument("--list", action="store_true", help="print the single jobs")
    parser.add_argument("--change", nargs="*", type=json.loads, help="options that are tried, of tune")
    parser.add_argument("--chosen", type=Path, help="a file of tune whose best options are tested")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", help="captured on a GPU, off on a CPU")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--every", type=int, help="rounds between scores")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", type=int, help="at most so many, of training and of testing")
    parser.add_argument("--most", type=int, help="options tried for each way, of tune")
    parser.add_argument("--only", nargs="*", help="ways")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--commit")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.seeds, given.rows, given.most = 1, [0], 70, 1
    warnings.simplefilter("ignore")  # that sets are partial
    output = given.output or Path(f"docs/results/adapters-{given.case}-{given.part}.json")
    case = CASES[given.case]
    if given.chosen is not None:
        case = case._replace(chosen={**case.chosen, **best_in(given.chosen)})
    if given.list:
        return jobs(case, given)
    if given.part == "join":
        output.write_text(json.dumps(joined(given.files), indent=1) + "\n")
        return None
    figures = Figures(output, given.device, given.commit, keep=True)
    return {"tune": tune, "test": test}[given.part](figures, case, given)


if __name__ == "__main__":
    main()
