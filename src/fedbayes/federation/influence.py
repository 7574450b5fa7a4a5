"""What one client does to a round, in a few numbers: how far it moved, what it claims, whether a bound held it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbayes.federation.changes import change_of, trained_parts
from fedbayes.federation.program import Figures, Passed, Program, Terms
from fedbayes.posterior.values import Parts


def is_shown(program: Program) -> bool:
    """Whether clients move a posterior by this program: else they only make personal models, or statistics."""
    return program.prediction.part in program.pooling.rules


def figures_of(program: Program, passed: Passed, start: Parts, terms: Terms) -> Tensor:
    """The figures of an upload [4], or none [0] where nothing is pooled; `terms` are what was made of it."""
    device = start[program.prediction.part].mean.device
    if not is_shown(program):
        return torch.zeros(0, dtype=torch.float64, device=device)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sizes = [
        passed.sizes[part] if part in passed.sizes else change_of(passed.parts[part], start[part]).size
        for part in trained_parts(program)
    ]
    capped = torch.stack([*passed.capped.values()]).mean() if passed.capped else zero
    clipped = torch.stack([*passed.clipped.values()]).any().double() if passed.clipped else zero
    return torch.stack([torch.stack(sizes).amax(), _claim(program, terms, zero + 1), capped, clipped])


def _claim(program: Program, terms: Terms, one: Tensor) -> Tensor:
    part = program.prediction.part
    statistics = terms.get(part, {})
    if part in program.pooling.over:  # a bucket counts once, whatever one of its clients claims
        return one
    if program.pooling.rules[part].weighs_precision and "precision" in statistics:
        precision = statistics["precision"].double()
        return (precision.diagonal() if precision.dim() == 2 else precision).mean(-1)
    if not program.pooling.rules[part].weighted:
        return one
    return statistics["weight"].double() if "weight" in statistics else one


def by_client(clients: Sequence[int], rows: Sequence[Sequence[float]]) -> dict[int, Figures]:
    """Rows of figures by client; nothing where they are empty."""
    return {k: Figures(*row) for k, row in zip(clients, rows) if row}


def shares(figures: Mapping[int, Figures], weights: Mapping[int, float]) -> dict[int, tuple[float, ...]]:
    """For each client its change, its share of all claims, and whether it was capped and clipped.

    `weights` are those that the server has given where it holds the uploads; others have claimed with theirs.
    """
    claims = {k: row.claim * weights.get(k, 1.0) for k, row in figures.items()}
    total = math.fsum(claims.values())
    parts = {k: claim / total if total > 0 else 0.0 for k, claim in claims.items()}
    return {k: (row.change, parts[k], row.capped, row.clipped) for k, row in figures.items()}
