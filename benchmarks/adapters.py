"""Adapters measured: a pre-trained ResNet-20 from CIFAR-10 to SVHN at 20 sites; large networks, ten clients stacked.

`python benchmarks/adapters.py svhn --device cuda` needs SVHN, CIFAR-100, DTD and `weights` in the folder named by
FEDBAYES_DATA; `tune` scores options on a seventh of the training rows instead of the test rows. `bert` and `vit` build
networks of 110 and 86 million weights, drawn at random, and need transformers or torchvision; they measure peak memory
and speed on a GPU. `--small` tries each out on a CPU.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Figures, our_round, wait
from safetensors.torch import load_file
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data.fetch import here
from fedbayes.evaluate.one_scale import one_scale
from fedbayes.networks.papers import network_named
from fedbayes.scores.ranking import auroc
from fedbayes.training.rounds import Memory, Task, prepare, rounds, rounds_together, train

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the body's training
TRAINED, TESTED = 7000, 3000  # of the 10,000 digits
SITES, ROUNDS = 20, 30
WIDTHS = (0.003, 0.01, 0.03, 0.1, 0.3)  # of which one is fitted afterwards

# What is compared: a method with its options and adapters. `lr` was chosen by `tune`.
NORMS = ["head.*", "*norm*"]
LOW = {"pattern": ["conv", "blocks.*"], "rank": 16, "full": NORMS}
POINTS = {"epochs": 2, "batch": 32}
NORMALS = {"epochs": 2, "batch": 32, "test_draws": 20}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full fine-tuning": ("fedavg", {**POINTS, "lr": 0.05}, {}),
    "adapters, points": ("fedavg", {**POINTS, "lr": 0.1}, LOW),
    "adapters, posterior": ("fedvi", {**NORMALS, "lr": 0.2}, LOW),
    "adapters, posterior (feduab)": ("feduab", {**NORMALS, "lr": 0.1}, LOW),
    "both factors averaged": ("fedavg", {**POINTS, "lr": 0.05}, {**LOW, "rank": 8, "both": True}),
    "last layer, points": ("fedavg", {**POINTS, "lr": 0.1}, {"rank": 0}),
    "last layer, posterior": ("fedvi", {**NORMALS, "lr": 0.2}, {"rank": 0}),
}
ONE_SCALE = "adapters, one scale fitted afterwards"
WAYS[ONE_SCALE] = WAYS["adapters, points"]
# In the order in which they are tried: `--most 2` takes the first two of each.
GRID = {
    "full fine-tuning": [{"lr": v} for v in (0.02, 0.1, 0.05, 0.2)],
    "adapters, points": [{"lr": v} for v in (0.05, 0.2, 0.1, 0.4)],
    "adapters, posterior": [{"lr": lr, "prior_scale": s} for s in (0.3, 0.1, 1.0) for lr in (0.1, 0.3)],
    "adapters, posterior (feduab)": [{"lr": lr, "initial": s} for s in (0.03, 0.1) for lr in (0.1, 0.3)],
    "both factors averaged": [{"lr": v} for v in (0.02, 0.1, 0.05)],
    "last layer, points": [{"lr": v} for v in (0.05, 0.2)],
}


def resnet20() -> nn.Module:
    """The body: names of the file as the library's network has them."""
    network = network_named("resnet", (3, 32, 32), 10, depth=20)
    renamed = {}
    for name, weight in load_file(here("weights/resnet20-cifar10.safetensors")).items():
        name = re.sub(r"layer(\d)\.(\d)", lambda m: f"blocks.{3 * int(m[1]) - 3 + int(m[2])}", name)
        name = re.sub(r"\bbn(\d)", r"norm\1", re.sub(r"^bn1", "norm", re.sub(r"^conv1", "conv", name)))
        renamed[name.replace("linear", "head")] = weight
    network.load_state_dict(renamed)
    return network


def digits(tuning: bool, given: argparse.Namespace) -> fb.data.Dataset:
    """The digits that are trained and tested on; for tuning a seventh of the training rows is the test set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a part
        svhn = fb.data.load("svhn")
    x, y, rows = svhn.test_x, svhn.test_y, given.rows
    cut, end = (rows - rows // 7, rows) if tuning else (rows, rows + given.tested)
    seen = fb.data.Prepare(MEAN, DEVIATION)
    return fb.data.from_arrays(x[:cut], y[:cut], x[cut:end], y[cut:end], prepare=seen, name="svhn")


def task_of(way: str, data: fb.data.Dataset, seed: int, given: argparse.Namespace, **changes: Any) -> Task:
    method, options, adapters = WAYS[way]
    more = {"validation": 0.1} if way == ONE_SCALE else {}
    made = fb.methods.method_named(method, {**options, **changes})
    return prepare(
        resnet20(),
        data.split(fb.partition.dirichlet(0.3), clients=SITES, seed=seed),
        method=made,
        rounds=given.rounds,
        seed=seed,
        device=given.device,
        engine="stacked" if given.device == "cuda" else "auto",
        compile="off",
        precision="tf32" if given.device == "cuda" else "float32",
        adapters=adapters,
        evaluate_every=given.rounds,
        **more,
    )


def trained(tasks: list[Task]) -> tuple[list[fb.Run], float]:
    """All tasks as one program, or on a CPU one after another, and the seconds."""
    if tasks[0].device.type == "cpu":
        began = time.perf_counter()
        return [train(task) for task in tasks], time.perf_counter() - began
    began, owns = time.perf_counter(), [Memory() for _ in tasks]
    last: list[Any] = [None] * len(tasks)
    journals: list[list[Any]] = [[] for _ in tasks]
    for entries in rounds_together(tasks, [task.begin() for task in tasks], owns):
        for place, entry in enumerate(entries):
            if entry is not None:
                last[place] = entry[0]
                journals[place].append(entry[1])
    runs = [fb.Run(task, end, journal, own) for task, end, journal, own in zip(tasks, last, journals, owns)]
    return runs, time.perf_counter() - began


def message(run: fb.Run) -> int:
    """Numbers that a client sends in a round."""
    fields = ("mean", "scale")
    return sum(
        getattr(q, field).numel() for q in run.parts.values() for field in fields if field in q.__dataclass_fields__
    )


def figures_of(run: fb.Run) -> dict[str, float]:
    scores = run.scores()
    return {name: float(scores[name]) for name in ("accuracy", "nll", "brier", "ece")}


def strangers(run: fb.Run) -> dict[str, float]:
    """AUROC of entropy and mutual information against pictures that are no digits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {"cifar100": fb.data.load("cifar100").test_x, "dtd": fb.data.load("dtd").test_x}
    most = min(2000, len(run.task.clients.data.test_x))
    inside = run.predict(run.task.clients.data.test_x[:most])
    rows = {}
    for name, x in others.items():
        p = run.predict(x[:most])
        rows[f"auroc {name}, entropy"] = float(auroc(inside.entropy, p.entropy))
        if float(p.mutual_information.max()) > 1e-9:
            rows[f"auroc {name}, mutual information"] = float(auroc(inside.mutual_information, p.mutual_information))
    return rows


def tune(figures: Figures, given: argparse.Namespace) -> None:
    data = digits(True, given)
    for way in given.only or GRID:
        changes = GRID[way][: given.most]
        for together in [[change] for change in changes] if given.device == "cpu" else [changes]:
            runs, taken = trained([task_of(way, data, 100, given, **change) for change in together])
            for change, run in zip(together, runs):
                figures.add(f"{way}, {change}", **figures_of(run), seconds=taken / len(runs))


def svhn(figures: Figures, given: argparse.Namespace) -> None:
    data = digits(False, given)
    for way in given.only or WAYS:
        seeds = [[seed] for seed in range(given.seeds)] if given.device == "cpu" else [list(range(given.seeds))]
        for together in seeds:
            runs, taken = trained([task_of(way, data, seed, given) for seed in together])
            for seed, run in zip(together, runs):
                if way == ONE_SCALE:
                    run = one_scale(run, draws=10, widths=WIDTHS).run
                scores = {**figures_of(run), **strangers(run)}
                figures.add(f"{way}, seed {seed}", **scores, numbers=message(run), seconds=taken / len(runs))


def bert(small: bool) -> tuple[nn.Module, Callable[[int], Any], dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if small else {}
    )
    # Without dropout, so that engines can be compared; masks of it would be as large as the activations.
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    network = BertForSequenceClassification(BertConfig(num_labels=4, **sizes, **quiet))
    length = 8 if small else 128

    def rows(count: int) -> dict[str, Tensor]:
        ids = torch.randint(1000, 30000, (count, length))
        live = torch.arange(length) < torch.randint(length // 2, length + 1, (count, 1))
        return {"input_ids": ids * live, "attention_mask": live.long()}

    return network, rows, {"pattern": ["bert.encoder.*"], "rank": 8, "full": ["classifier.*", "bert.pooler.*"]}


def vit(small: bool) -> tuple[nn.Module, Callable[[int], Any], dict[str, Any]]:
    from torchvision.models import VisionTransformer

    sizes = (32, 16, 1, 2, 32, 64) if small else (224, 16, 12, 12, 768, 3072)
    network = VisionTransformer(*sizes, num_classes=4)
    side = sizes[0]
    return (
        network,
        lambda count: torch.randn(count, 3, side, side),
        {"pattern": ["encoder.layers.*"], "rank": 8, "full": ["heads.*"]},
    )


def memory(device: str) -> float:
    """GiB of the device in use at most since it was asked for."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")


def forget(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def plain(figures: Figures, build: Any, given: argparse.Namespace, optimiser: str) -> float:
    """One client's full fine-tuning as everybody writes it: peak memory and seconds of a step."""
    forget(given.device)
    torch.manual_seed(0)
    network, rows, _ = build(given.small)
    network = network.to(given.device).train()
    x, y = rows(given.batch), torch.randint(4, (given.batch,), device=given.device)
    x = {k: v.to(given.device) for k, v in x.items()} if isinstance(x, dict) else x.to(given.device)
    make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[optimiser]
    steps, times = make(network.parameters(), lr=1e-5), []
    for _ in range(5):
        start = time.perf_counter()
        output = network(**x) if isinstance(x, dict) else network(x)
        loss = nn.functional.cross_entropy(output.logits if hasattr(output, "logits") else output, y)
        loss.backward()
        steps.step()
        steps.zero_grad()
        wait(given.device)
        times.append(time.perf_counter() - start)
    used = memory(given.device)
    count = sum(p.numel() for p in network.parameters())
    figures.add(f"one client, all weights, {optimiser}", weights=count, step=min(times), gib=used)
    return used


def large(figures: Figures, build: Any, given: argparse.Namespace) -> None:
    """Ten stacked clients over one body: memory and speed against the loop, and whether both end alike."""
    torch.set_float32_matmul_precision("high")
    adam = plain(figures, build, given, "AdamW")
    sgd = plain(figures, build, given, "SGD")
    torch.manual_seed(0)
    network, rows, adapters = build(given.small)
    pairs = [(rows(given.batch * given.steps), torch.arange(given.batch * given.steps) % 4) for _ in range(10)]
    clients = fb.data.from_clients(pairs, classes=4)
    body = sum(p.numel() for p in network.parameters())

    def task(engine: str, method: str, precision: str, mode: str = "off", half: bool = False) -> Task:
        made = {"epochs": 1, "batch": given.batch, "lr": 0.01}
        if method == "fedvi":
            made |= {"train_draws": 1, "test_draws": 1}
        return prepare(
            network.to(torch.bfloat16) if half else network.float(),
            clients,
            method=fb.methods.method_named(method, made),
            rounds=4,
            device=given.device,
            engine=engine,
            compile=mode,
            precision=precision,
            adapters=adapters,
            evaluate_every=10**9,
            **({"at_once": 10} if engine == "stacked" else {}),
        )

    def measured(what: str, times: int = 2, **how: Any) -> float:
        forget(given.device)
        one = task(**how)
        best, first, notes = our_round(one, given.device, times=times)
        used, sent = memory(given.device), sum(layout.size for layout in one.program.model.trainable.values())
        more = {"notes": notes} if notes else {}
        figures.add(
            what, seconds=best, first=first, gib=used, against_adamw=used / adam, against_sgd=used / sgd,
            trained=sent, of=body, **more,
        )  # fmt: skip
        return best

    ends = {}
    for engine in ("loop", "stacked"):
        forget(given.device)
        one = task(engine, "fedavg", "float32")
        ends[engine], begin = trained_one_round(one)
    moved = (ends["loop"] - begin).norm()
    figures.add(
        "a stacked round against the loop's, float32", difference=float((ends["loop"] - ends["stacked"]).norm() / moved)
    )
    graph = "graph" if given.device == "cuda" else "off"
    for method in given.only or ("fedavg", "fedvi"):
        for precision in ("tf32", "bf16"):
            loop = measured(f"{method}, {precision}, loop", 1, engine="loop", method=method, precision=precision)
            for mode in ("off", graph):
                how = {"engine": "stacked", "method": method, "precision": precision, "mode": mode}
                best = measured(f"{method}, {precision}, stacked, {mode}", **how)
                figures.add(f"{method}, {precision}, stacked, {mode}: times the loop's speed", ratio=loop / best)
    how = {"engine": "stacked", "method": "fedvi", "precision": "tf32", "half": True}
    measured("fedvi, body in bfloat16, stacked, off", **how)


def trained_one_round(task: Task) -> tuple[Tensor, Tensor]:
    """The posterior's mean after a round, and before."""
    begin = task.begin()
    progress, _ = next(rounds(task, begin, Memory()))
    return progress.state.broadcast["model"].mean.cpu(), begin.state.broadcast["model"].mean.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tune", "svhn", "bert", "vit"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=TRAINED)
    parser.add_argument("--tested", type=int, default=TESTED)
    parser.add_argument("--batch", type=int, default=8, help="rows of a client's step, of bert and vit")
    parser.add_argument("--steps", type=int, default=8, help="of a client in a round, of bert and vit")
    parser.add_argument("--most", type=int, help="options tried for each way, of tune")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--commit")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.seeds, given.rows, given.tested, given.batch, given.steps = 1, 1, 70, 20, 2, 2
    output = given.output or Path(f"docs/results/adapters-{given.part}.json")
    figures = Figures(output, given.device, given.commit, keep=True)
    if given.part in ("tune", "svhn"):
        {"tune": tune, "svhn": svhn}[given.part](figures, given)
    else:
        large(figures, {"bert": bert, "vit": vit}[given.part], given)


if __name__ == "__main__":
    main()
