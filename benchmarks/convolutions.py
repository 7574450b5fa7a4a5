"""Microseconds of stacked clients' convolutions on a CUDA device: kernels of our own, and PyTorch's of many groups.

`python benchmarks/convolutions.py`. Each product alone (outputs, gradients of inputs and of filters), as a graph of
ten, layer by layer of FedUAB's CNN, pFedPF's residual networks and Acar's CNN.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Figures
from torch import Tensor

from fedbayes.model import stacked_convolution as ours


class Layer(NamedTuple):
    """A convolution of several clients' images; `local`: with a second one, of their squares by variances."""

    clients: int
    images: int
    channels: int
    size: int
    outs: int
    filter: int
    padding: int
    dtype: torch.dtype
    local: bool = False


TF32, BF16 = torch.float32, torch.bfloat16
LAYERS = {
    **{
        f"FedUAB's CNN, {clients} clients, {name}, {layer}": Layer(clients, 10, *shape, 0, dtype, True)
        for clients, dtype, name in ((10, BF16, "bf16"), (30, TF32, "tf32"))
        for layer, shape in {"first": (3, 32, 32, 3), "second": (32, 15, 32, 3), "third": (32, 6, 32, 3)}.items()
    },
    **{
        f"{name}, 20 clients, bf16": Layer(20, 128, c, size, c, 3, 1, BF16)
        for name, c, size in (
            ("16 channels", 16, 32),
            ("32 channels", 32, 16),
            ("64 channels", 64, 8),
            ("32 channels, twice as wide", 32, 32),
            ("64 channels, twice as wide", 64, 16),
            ("128 channels, twice as wide", 128, 8),
        )
    },
    "Acar's CNN, 10 clients, tf32, second": Layer(10, 64, 64, 14, 64, 5, 0, TF32),
}


def microseconds(f: Callable[[], object], times: int = 10) -> float:
    """The lowest of several replays of a graph of `times` calls, for one of them."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            f()
    taken = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / times)
    return min(taken)


def by_kernels(layer: Layer) -> dict[str, float]:
    g, n, c, h, o, r, pad = layer[:7]
    copies = (2,) if layer.local else ()
    x, w = _normal(layer, g, n, h, h, c), _normal(layer, g, *copies, o, r, r, c)
    how = (1, 1, pad, pad)
    size = h + 2 * pad - r + 1
    d, noise = _normal(layer, g, n, size, size, o), _normal(layer, g, n, o, size, size).float()
    bias = torch.rand(g, 2, o, device="cuda") if layer.local else None
    slopes = d.clone() if layer.local else None
    return {
        "outputs": microseconds(lambda: ours._forward(x, w, bias, None, noise if layer.local else None, *how)),
        "inputs": microseconds(lambda: ours._to_input(d, x, w, None, slopes, *how)),
        "filters": microseconds(lambda: ours._to_weight(d, x, None, slopes, r, r, *how)),
    }


def by_groups(layer: Layer) -> dict[str, float]:
    """One of many groups: of a pair, both one after the other."""
    g, n, c, h, o, r, pad = layer[:7]
    twice = 2 if layer.local else 1
    x, w = _normal(layer, n, g * c, h, h), _normal(layer, g * o, c, r, r)
    d = torch.empty_like(F.conv2d(x, w, None, 1, pad, 1, g))

    def back(*mask: bool) -> Callable[[], object]:
        how = ([1, 1], [pad, pad], [1, 1], False, [0, 0], g)
        return lambda: torch.ops.aten.convolution_backward(d, x, w, None, *how, [*mask, False])

    return {
        "outputs": twice * microseconds(lambda: F.conv2d(x, w, None, 1, pad, 1, g)),
        "inputs": twice * microseconds(back(True, False)),
        "filters": twice * microseconds(back(False, True)),
    }


def _normal(layer: Layer, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").abs().to(layer.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-convolutions.json"))
    parser.add_argument("--only", default="", help="layers whose names hold this")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is seen; these kernels are for one")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    figures = Figures(arguments.output, "cuda", arguments.commit, keep=bool(arguments.only))
    for name, layer in LAYERS.items():
        if arguments.only in name:
            own, groups = by_kernels(layer), by_groups(layer)
            figures.add(name, **own, **{f"{k} by groups": v for k, v in groups.items()})


if __name__ == "__main__":
    main()
