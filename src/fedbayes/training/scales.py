"""How far the scales of a posterior have moved since the first round, and whether they still do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedbayes.clients.partitioned import FIRST
from fedbayes.federation.program import Program
from fedbayes.posterior.values import Gaussian, Parts

NOTHING = 1e-11  # a first scale below it stands for none
LONG = 20  # rounds after which something can be said
HARDLY, STILL = 0.1, 0.02  # of their size: moved since the first round, and in the last one


def moves(program: Program, before: Parts, after: Parts) -> dict[str, float]:
    """The median scale, and the medians of |log ratio| to the first and to the round before; empty without scales."""
    part = program.prediction.part
    old, q, first = (
        q if isinstance(q, Gaussian) else None
        for q in (before.get(part), after.get(part), program.constants.get(FIRST, program.initial.get(part)))
    )
    if q is None or old is None or first is None or float(first.scale.median()) < NOTHING:
        return {}
    return {
        "median": float(q.scale.median()),
        "moved": _gap(q.scale, first.scale),
        "moving": _gap(q.scale, old.scale),
    }


def note(figures: Mapping[str, float], number: int, rounds: int, optimiser: Any) -> str:
    """What is to be said of scales after the last of many rounds; empty where they are settled."""
    if not figures or number < max(rounds, LONG):
        return ""
    if figures["moved"] < HARDLY and optimiser != "ivon":
        return (
            f"scales have moved by {figures['moved']:.1%} since the first round: how wide the posterior is was set by "
            'initial; fedvi learns it, and optimiser = "ivon"'
        )
    if figures["moving"] > STILL:
        return f"scales still moved by {figures['moving']:.1%} in the last round: train for more"
    return ""


def _gap(scale: Tensor, other: Tensor) -> float:
    return float((scale.double() / other.double()).log().abs().median())
