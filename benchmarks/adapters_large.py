"""Large networks with adapters on a GPU: ten stacked clients over one body, BERT (110 M weights) and ViT (86 M).

`python benchmarks/adapters_large.py bert vit --device cuda` builds both with random weights, and needs transformers and
torchvision. Measured are peak memory against one client's full fine-tuning, speed against the loop engine with the
first round's compilation beside it, and whether both engines end alike. `--small` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Figures, our_round, wait
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory
from fedbayes.training.task import Task


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


NETWORKS = {"bert": bert, "vit": vit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="a folder: one file per network")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8, help="rows of a client's step")
    parser.add_argument("--steps", type=int, default=8, help="of a client in a round")
    parser.add_argument("--only", nargs="*", help="methods")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--commit")
    given = parser.parse_args()
    if given.small:
        given.device, given.batch, given.steps = "cpu", 2, 2
    for name in given.networks:
        large(Figures(given.output / f"adapters-{name}.json", given.device, given.commit), NETWORKS[name], given)


if __name__ == "__main__":
    main()
