"""How far a client moved, in units of what it started from: q_0 = N(m_0, s_0^2), d = (m - m_0) / s_0, l = s_0^2 / s^2.

A point has unit scale and claims no precision: d = m - m_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.federation.program import Program
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Gaussian, Parts, Posterior

BLOCK = 2**16  # weights whose squares are added at once
CAP, CLIP, ROWS = "cap_precision", "clip_change", "cap_rows"  # names of bounds among a round's options


def started(program: Program, broadcast: Parts, options: Mapping[str, Any]) -> Parts:
    """What clients started from: the broadcast, as a point where terms are in units of points."""
    reference = program.pooling.reference(broadcast, options)
    return {p: q if type(q) is type(reference.get(p, q)) else reference[p] for p, q in broadcast.items()}


def trained_parts(program: Program) -> list[str]:
    """The shared parts that are bounded: all but statistics such as BatchNorm's."""
    return [part for part in program.pooling.rules if not is_static(part)]


def bound_of(part: str) -> str:
    """The name among a round's options of the bound on a part's change."""
    return f"{CLIP}.{part}"


class Change(NamedTuple):
    """How far a posterior is from where it started."""

    size: Tensor  # the root of the mean square of (d, log l), of points of d; in float64
    log_scale: Tensor | None  # of normals: log(s / s_0) = -log(l) / 2 of each weight


def change_of(q: Posterior, start: Posterior) -> Change:
    """The change of q in units of where it started, in q's own precision: it costs a few passes over the weights."""
    d = q.mean - start.mean
    if not (isinstance(q, Gaussian) and isinstance(start, Gaussian)):
        return Change(_square(d).sqrt(), None)
    log_scale = (q.scale / start.scale).log()
    return Change(((_square(d / start.scale) + 4 * _square(log_scale)) / 2).sqrt(), log_scale)


def _square(t: Tensor) -> Tensor:
    """The mean square, in float64 over blocks: a norm of millions in float32 is off by a thousandth."""
    pieces = [torch.linalg.vector_norm(piece, dim=-1).double().square() for piece in t.split(BLOCK, -1)]
    return torch.stack(pieces).sum(0) / t.shape[-1]
