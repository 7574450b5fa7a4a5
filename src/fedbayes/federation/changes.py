"""How far a client moved, in units of what it started from: q_0 = N(m_0, s_0^2), d = (m - m_0) / s_0, l = s_0^2 / s^2.

A point has unit scale and claims no precision: d = m - m_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedbayes.federation.program import Program
from fedbayes.model.model import is_static
from fedbayes.posterior.values import Gaussian, Parts, Posterior

CAP, CLIP, ROWS = "cap_precision", "clip_change", "cap_rows"  # names of bounds among a round's options


def started(program: Program, broadcast: Parts, options: Mapping[str, Any]) -> Parts:
    """What clients started from: the broadcast, as a point where terms are in units of points."""
    reference = program.pooling.reference(broadcast, options)
    return {part: q if type(q) is type(reference[part]) else reference[part] for part, q in broadcast.items()}


def trained_parts(program: Program) -> list[str]:
    """The shared parts that are bounded: all but statistics such as BatchNorm's."""
    return [part for part in program.pooling.rules if not is_static(part)]


def bound_of(part: str) -> str:
    """The name among a round's options of the bound on a part's change."""
    return f"{CLIP}.{part}"


class Change(NamedTuple):
    """How far a posterior is from where it started: of the mean d, and of normals the log precision, in float64."""

    shift: Tensor
    log_precision: Tensor | None

    @property
    def size(self) -> Tensor:
        """The root of the mean square of all entries."""
        pieces = [self.shift] if self.log_precision is None else [self.shift, self.log_precision]
        return (sum(t.square().mean(-1) for t in pieces) / len(pieces)).sqrt()  # type: ignore[union-attr]


def change_of(q: Posterior, start: Posterior) -> Change:
    """The change of q in units of where it started."""
    d = q.mean.double() - start.mean.double()
    if not (isinstance(q, Gaussian) and isinstance(start, Gaussian)):
        return Change(d, None)
    scale = start.scale.double()
    return Change(d / scale, 2 * (scale / q.scale.double()).log())
