"""Large networks with adapters on a GPU: ten stacked clients over one body, BERT (110 M weights) and ViT (86 M).

`python benchmarks/adapters_large.py vit --case graph --method fedvi --recompute` measures one case in a process of its
own, so that nothing else is in its memory, and writes it to a file of its own. Several may run side by side: what is
timed waits for its turn. `... vit --join` makes them one file, with memory in terms of one client's full fine-tuning
and speed in terms of the loop engine. Both networks have random weights, and need transformers and torchvision.
`--small` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Figures, joined, wait
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task


def bert(small: bool) -> tuple[nn.Module, Callable[[int], Any], dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = (
        {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if small else {}
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

    sizes = (32, 16, 3, 2, 32, 64) if small else (224, 16, 12, 12, 768, 3072)
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


def plain(figures: Figures, build: Any, given: argparse.Namespace) -> None:
    """One client's full fine-tuning as everybody writes it: peak memory and seconds of a step."""
    for name, make in {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}.items():
        forget(given.device)
        torch.manual_seed(0)
        network, rows, _ = build(given.small)
        network = network.to(given.device).train()
        x, y = rows(given.batch), torch.randint(4, (given.batch,), device=given.device)
        x = {k: v.to(given.device) for k, v in x.items()} if isinstance(x, dict) else x.to(given.device)
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
        used, count = memory(given.device), sum(p.numel() for p in network.parameters())
        figures.add(f"one client, all weights, {name}", weights=count, step=min(times), gib=used)
        del network, steps, output, loss


def task_of(build: Any, given: argparse.Namespace, engine: str, recompute: bool) -> Task:
    """Ten clients of random rows; posteriors by drawn weights, for a normal per output and token would be gigabytes."""
    torch.manual_seed(0)
    network, rows, adapters = build(given.small)
    pairs = [(rows(given.batch * given.steps), torch.arange(given.batch * given.steps) % 4) for _ in range(10)]
    options: dict[str, Any] = {"epochs": 1, "batch": given.batch, "lr": 0.01}
    if given.method != "fedavg":
        options |= {"train_draws": 1, "test_draws": 1, "estimator": "weight"}
    return prepare(
        network,
        fb.data.from_clients(pairs, classes=4),
        method=fb.methods.method_named(given.method, options),
        rounds=4,
        device=given.device,
        engine=engine,
        compile=given.case if given.case in ("captured", "graph") and given.device == "cuda" else "off",
        precision="float32" if given.case == "alike" else given.precision,
        adapters=adapters,
        recompute=recompute,
        evaluate_every=10**9,
        **({"at_once": 10} if engine == "stacked" else {}),
    )


def alike(figures: Figures, build: Any, given: argparse.Namespace) -> None:
    """Whether a stacked round ends as the loop's does, without and with recomputation."""
    ends = {}
    for what, engine, recompute in (("loop", "loop", False), ("", "stacked", False), (", recomputed", "stacked", True)):
        forget(given.device)
        ends[what], begin = trained_one_round(task_of(build, given, engine, recompute))
        if engine == "stacked":
            off = float((ends["loop"] - ends[what]).norm() / (ends["loop"] - begin).norm())
            figures.add(f"{given.method}: a stacked round against the loop's, float32{what}", difference=off)


def measured(figures: Figures, build: Any, given: argparse.Namespace) -> None:
    """Peak memory of training, seconds of a round and of the first."""
    torch.set_float32_matmul_precision("high")
    task = task_of(build, given, "loop" if given.case == "loop" else "stacked", given.recompute)
    forget(given.device)
    steps, taken, notes = rounds(task, task.begin(), Memory()), [], []
    turn = given.output / "turn"
    with turn.open("w") as file:
        for number in range(3):
            if number == 1:
                fcntl.flock(file, fcntl.LOCK_EX)
            start = time.perf_counter()
            _, record = next(steps)
            wait(given.device)
            taken.append(time.perf_counter() - start)
            notes += record.get("notes", [])
    sizes = {"trained": sum(layout.size for layout in task.program.model.trainable.values())}
    more = {"notes": notes} if notes else {}
    figures.add(name_of(given), seconds=min(taken[1:]), first=taken[0], gib=memory(given.device), **sizes, **more)


def name_of(given: argparse.Namespace) -> str:
    how = {"loop": "loop", "eager": "stacked, off"}.get(given.case, f"stacked, {given.case}")
    return f"{given.method}, {given.precision}, {how}{', recomputed' * given.recompute}"


def join(name: str, given: argparse.Namespace) -> None:
    """One file of the cases' files: memory in terms of plain fine-tuning, speed in terms of the loop."""
    whole = joined(given.output.glob(f"part-{name}-*.json"))
    rows = {row["what"]: row for row in whole["rows"]}
    for what, row in rows.items():
        for optimiser in ("AdamW", "SGD"):
            base = rows.get(f"one client, all weights, {optimiser}")
            if "first" in row and base:
                row[f"against_{optimiser.lower()}"] = float(f"{row['gib'] / base['gib']:.4g}")
        loop = rows.get(", ".join(what.split(", ")[:2]) + ", loop")
        if "stacked" in what and "seconds" in row and loop:
            row["times_the_loop"] = float(f"{loop['seconds'] / row['seconds']:.4g}")
    (given.output / f"adapters-{name}.json").write_text(json.dumps(whole, indent=1) + "\n")


def trained_one_round(task: Task) -> tuple[Tensor, Tensor]:
    """The posterior's mean after a round, and before."""
    begin = task.begin()
    progress, _ = next(rounds(task, begin, Memory()))
    return progress.state.broadcast["model"].mean.cpu(), begin.state.broadcast["model"].mean.cpu()


NETWORKS = {"bert": bert, "vit": vit}
CASES = {"plain": plain, "alike": alike, "loop": measured, "eager": measured, "captured": measured, "graph": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=list(NETWORKS))
    parser.add_argument("--case", choices=list(CASES), default="plain")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--join", action="store_true", help="make one file of those of all cases")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8, help="rows of a client's step")
    parser.add_argument("--steps", type=int, default=8, help="of a client in a round")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--commit")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.small:
        given.device, given.batch, given.steps = "cpu", 2, 2
    if given.join:
        join(given.network, given)
        return
    words = "-".join([given.network, given.case, given.method, given.precision, *["again"] * given.recompute])
    figures = Figures(given.output / f"part-{words}.json", given.device, given.commit)
    CASES[given.case](figures, NETWORKS[given.network], given)


if __name__ == "__main__":
    main()
