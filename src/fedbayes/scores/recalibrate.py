"""Probabilities made honest again from sums by bin: a histogram map, or a rising one; pooled over sites, or by site.

Every class is mended by itself against the others, and a row is divided by its sum (Zadrozny and Elkan, 2002).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedbayes.scores import inputs

Sums = dict[str, Tensor]
Map = Literal["histogram", "isotonic"]

HISTOGRAM_EDGES = torch.linspace(-8, 8, 33, dtype=torch.float64).sigmoid()
ISOTONIC_EDGES = torch.linspace(-16, 16, 1025, dtype=torch.float64).sigmoid()
"""Even in the log-odds; a rising map needs no few bins, for it pools them itself."""

EDGES: dict[str, Tensor] = {"histogram": HISTOGRAM_EDGES, "isotonic": ISOTONIC_EDGES}


def recalibration_sums(probs: Tensor, labels: Tensor, edges: Tensor) -> Sums:
    """By class and bin of its probability [C, B + 1]: rows, rows of that class, summed probability; they add."""
    classes = probs.shape[1]
    probs = probs.double()
    place = torch.searchsorted(edges.to(probs.device), probs) + torch.arange(classes) * (len(edges) + 1)
    hit = torch.zeros_like(probs).scatter_(1, labels.long()[:, None], 1.0)

    def summed(values: Tensor) -> Tensor:
        flat = torch.zeros(classes * (len(edges) + 1), dtype=torch.float64)
        return flat.index_add_(0, place.flatten(), values.flatten()).reshape(classes, -1)

    return {"count": summed(torch.ones_like(probs)), "hits": summed(hit), "mass": summed(probs)}


def leaning(own: Sums, pooled: Sums, rows: float = 50.0) -> Sums:
    """A site's sums with those of all sites beside them, scaled to so many rows: a site of few rows leans on them."""
    total = (
        float(pooled["count"].reshape(-1, pooled["count"].shape[-1])[0].sum())
        if pooled["count"].ndim
        else float(pooled["count"])
    )
    if not total > 0:
        raise ValueError("count is 0: recalibration needs at least one labelled row. Were all sites masked out?")
    return {name: value + pooled[name] * (rows / total) for name, value in own.items()}


def recalibration(sums: Sums, how: Map = "isotonic") -> Tensor:
    """What a probability in each bin becomes, [C, B + 1]: the share of hits.

    `histogram` smooths it by one row of the bin's own mean; bins without rows keep their middle. `isotonic` pools bins
    until shares rise (Ayer et al., 1955), half a row of all off 0 and 1; bins without rows take the next.
    """
    if how not in EDGES:
        raise ValueError(f'how must be "histogram" or "isotonic", not {how!r}.')
    count, hits, mass = (sums[name].double() for name in ("count", "hits", "mass"))
    edges = torch.cat([torch.zeros(1).double(), EDGES[how], torch.ones(1).double()])
    middle = ((edges[1:] + edges[:-1]) / 2).expand_as(count)
    mean = torch.where(count > 0, mass / count.clamp_min(1e-300), middle)
    if how == "histogram":
        return (hits + mean) / (count + 1)
    return torch.stack([_rising(*row) for row in zip(hits, count, middle)])


def recalibrated(probs: Tensor, values: Tensor, edges: Tensor) -> Tensor:
    """Probabilities [N, C] after the map; a row that would sum to 0 stays as it was."""
    probs = inputs.distribution("probs", probs)
    place = torch.searchsorted(edges.to(probs.device), probs)
    mended = values.to(probs.device).gather(1, place.mT).mT
    total = mended.sum(1, keepdim=True)
    return torch.where(total > 0, mended / total.clamp_min(1e-300), probs)


def _rising(hits: Tensor, count: Tensor, middle: Tensor) -> Tensor:
    """The rising shares of least weighted squared error, by pooling neighbours that fall; empty bins take the next."""
    filled = (count > 0).nonzero()[:, 0]
    if not len(filled):
        return middle.clone()
    blocks: list[list[float]] = []  # hits, rows, bins
    for h, n in zip(hits[filled].tolist(), count[filled].tolist()):
        blocks.append([h, n, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            h1, n1, b1 = blocks.pop()
            blocks[-1] = [blocks[-1][0] + h1, blocks[-1][1] + n1, blocks[-1][2] + b1]
    # Half a row of all, and not of the block: a first block of one row would lift all above it.
    least = 0.5 / (float(count[filled].sum()) + 1)
    shares = torch.tensor([h / n for h, n, b in blocks for _ in range(int(b))], dtype=torch.float64)
    place = torch.searchsorted(filled, torch.arange(len(count))).clamp_max(len(filled) - 1)
    return shares.clamp(least, 1 - least)[place]
