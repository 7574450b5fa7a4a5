"""Seconds from `fit` to the first finished round: cold, with nothing compiled before, and warm, in the next process.

Each start is a process of its own; the first has an empty folder of compiled programs, the second that of the first.
With `--compile soon` it goes on until the steps are compiled, and says how long that took.
`python benchmarks/start.py --device cuda --deadline 280` starts no network when the seconds are used up; `--only mlp
resnet18` names some. Networks come from torchvision and transformers where they are installed, else from plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SCRIPT, SOURCES = Path(__file__), Path(__file__).parents[1] / "src"


class Case(NamedTuple):
    """A network that is started: how its clients train, how many there are, and the shape of an input."""

    method: str
    clients: int
    shape: tuple[int, ...]
    network: Callable[[], tuple[nn.Module, str]]


def papers(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, str]:
    from fedbayes.networks.papers import network_named

    return network_named(name, shape, 10), f"fedbayes {name}"


def resnet18() -> tuple[nn.Module, str]:
    try:
        from torchvision.models import resnet18
    except ImportError:
        return papers("resnet18", (3, 32, 32))
    return resnet18(num_classes=10), "torchvision resnet18"


class Encoder(nn.Module):
    """Tokens, or patches of an image, through twelve equal blocks of attention."""

    def __init__(self, inputs: nn.Module, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.inputs, self.place = inputs, nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inputs(x) + self.place).mean(1))


class Patches(nn.Module):
    """An image [B, 3, 32, 32] as 64 vectors, one for each patch of 4 x 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


def vit() -> tuple[nn.Module, str]:
    try:
        from torchvision.models import VisionTransformer
    except ImportError:
        return Encoder(Patches(192), 64, 192, 3), "12 blocks of attention of width 192, patches"
    return VisionTransformer(32, 4, 12, 3, 192, 768, num_classes=10), "torchvision VisionTransformer, 12 blocks of 192"


class Logits(nn.Module):
    """A classifier of transformers, for the tensor it gives."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).logits


def bert() -> tuple[nn.Module, str]:
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:
        return Encoder(nn.Embedding(50_000, 256), 32, 256, 4), "12 blocks of attention of width 256, tokens"
    sizes = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 1024}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=50_000, num_labels=10, **sizes, **quiet)
    return Logits(BertForSequenceClassification(config)), "transformers BertForSequenceClassification, 12 blocks of 256"


CASES = {
    "mlp": Case("feduab", 10, (1, 28, 28), lambda: papers("mlp", (1, 28, 28))),
    "cnn": Case("feduab", 10, (3, 32, 32), lambda: papers("cnn", (3, 32, 32))),
    "resnet18": Case("fedavg", 4, (3, 32, 32), resnet18),
    "vit": Case("fedavg", 4, (3, 32, 32), vit),
    "bert": Case("fedavg", 4, (32,), bert),
}


def start(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one start, in this process."""
    began = time.perf_counter()
    from measure import federation, wait

    import fedbayes as fb
    from fedbayes.engine import compiled, repeats
    from fedbayes.training.prepare import prepare
    from fedbayes.training.rounds import rounds
    from fedbayes.training.run import Memory

    torch.manual_seed(0)
    network, name = case.network()
    data = federation(case.shape, [arguments.rows] * case.clients)
    if arguments.device == "cuda":
        torch.zeros(1, device="cuda")
    if arguments.least is not None:
        repeats.LEAST[arguments.device] = arguments.least
    figures: dict[str, Any] = {"network": name, "imports": time.perf_counter() - began}
    taken = {"trace": 0.0, "compile": 0.0}
    measured(compiled.Compiled, "_program", taken, "trace")
    measured(compiled, "made", taken, "compile")
    began, worked = time.perf_counter(), sum(os.times()[:4])
    with fb.profile() as shares:
        method = fb.methods.method_named(arguments.method or case.method, {"epochs": 1, "lr": 1e-3})
        task = prepare(
            network, data, method=method, device=arguments.device, compile=arguments.compile, evaluate_every=10**9,
            rounds=10**5, **({} if arguments.engine is None else {"engine": arguments.engine}),
        )  # fmt: skip
        trained, notes = rounds(task, task.begin(), Memory()), []
        _, record = next(trained)
        wait(arguments.device)
        figures["first"] = time.perf_counter() - began
        figures["processor"] = sum(os.times()[:4]) - worked  # seconds of all its threads and compilers
    notes += record.get("notes", [])
    figures["capture"] = shares.seconds["compile"] - sum(taken.values())
    until = began + arguments.limit
    while arguments.compile == "soon" and not notes and time.perf_counter() < until:
        _, record = next(trained)
        notes += record.get("notes", [])
    figures |= {"round": record["round"], "until it": time.perf_counter() - began, **taken}
    began = time.perf_counter()
    _, again = next(trained)
    wait(arguments.device)
    figures["next"] = time.perf_counter() - began
    # What its clients have learned, to the last bit: programs that were kept train as fresh ones do.
    figures["loss"] = repr(again["train"]["loss"])
    return figures | {"choice": task.choice, "notes": [*notes, *again.get("notes", [])]}


def measured(home: Any, name: str, taken: dict[str, float], key: str) -> None:
    """Add the seconds of each call of a function to `taken`."""
    f = getattr(home, name)

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return f(*args)
        finally:
            taken[key] += time.perf_counter() - began

    setattr(home, name, timed)


def in_process(name: str, arguments: argparse.Namespace, cache: str, limit: float) -> dict[str, Any]:
    """The figures of one start in a process of its own, whose compiled programs are in a folder."""
    words = [sys.executable, str(SCRIPT), "--start", name, "--device", arguments.device, "--compile", arguments.compile]
    words += ["--rows", str(arguments.rows), "--limit", str(min(arguments.limit, limit - 10))]
    for key in ("method", "engine", "least"):
        words += [f"--{key}", str(getattr(arguments, key))] if getattr(arguments, key) is not None else []
    path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    env = {**given, "FEDBAYES_CACHE": cache, "PYTHONPATH": path}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not started after {limit:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="docs/results/bench-start.json, or bench-start-gpu.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", help="on, graph, captured, soon or off; by default graph on a GPU, else on")
    parser.add_argument("--engine", help="stacked or loop; by default what the library chooses")
    parser.add_argument("--method", help="of all networks")
    parser.add_argument("--rows", type=int, default=200, help="of each client")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--deadline", type=float, default=3600)
    parser.add_argument("--limit", type=float, default=300, help="seconds that `soon` is waited for")
    parser.add_argument("--least", type=float, help="share of a step that must repeat itself to be cut; 2: never")
    parser.add_argument("--cache", help="a folder of compiled programs to begin with; by default an empty one")
    parser.add_argument("--commit")
    parser.add_argument("--start", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.compile = arguments.compile or ("graph" if arguments.device == "cuda" else "on")
    if arguments.start:
        print(json.dumps(start(CASES[arguments.start], arguments)))
        return
    from measure import Figures

    began = time.perf_counter()
    kind = "-gpu" if arguments.device == "cuda" else ""
    output = arguments.output or Path(f"docs/results/bench-start{kind}.json")
    figures = Figures(output, arguments.device, arguments.commit, keep=True)
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as empty:
            cache = arguments.cache or empty
            os.makedirs(cache, mode=0o700, exist_ok=True)
            states = ("warm",) if os.listdir(cache) else ("cold", "warm")
            for state in states if arguments.compile != "off" else ("eager",):
                left = arguments.deadline - (time.perf_counter() - began)
                if left < 10:
                    print("the deadline has passed; the other networks were not started", flush=True)
                    return
                row = in_process(name, arguments, cache, left)
                method = arguments.method or CASES[name].method
                how = ", ".join(
                    [
                        state,
                        *[arguments.compile] * (arguments.compile in ("soon", "captured")),
                        *([] if arguments.least is None else [f"cut from {arguments.least:g}"]),
                    ]
                )
                figures.add(f"{name} by {method}, {how}", **row)


if __name__ == "__main__":
    main()
