"""Ranks of methods over several problems, Friedman's test, and the difference that is needed to tell two apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05


class Ranks(NamedTuple):
    """Mean ranks by method, the best first; 1 is the best place."""

    mean: dict[str, float]
    blocks: int
    p_value: float  # of Friedman's test that all are alike; nan where there are too few
    critical: float  # Nemenyi: mean ranks that differ by less can't be told apart


def ranks_of(blocks: Sequence[Mapping[str, float]], *, higher: bool = False) -> Ranks:
    """Ranks of the methods that are in all blocks; ties share their places (Demsar, 2006)."""
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    names = [name for name in blocks[0] if all(name in block for block in blocks)]
    if len(names) < 2:
        raise ValueError("ranks need at least two methods that are in all blocks")
    table = np.array([[block[name] for name in names] for block in blocks])
    ranks = np.array([rankdata(-row if higher else row) for row in table])
    count, number = len(names), len(blocks)
    p_value = float(friedmanchisquare(*table.T).pvalue) if count > 2 and number > 1 else float("nan")
    spread = float(studentized_range.ppf(1 - LEVEL, count, np.inf)) / 2**0.5
    critical = spread * (count * (count + 1) / (6 * number)) ** 0.5
    mean = dict(sorted(zip(names, ranks.mean(0).tolist()), key=lambda pair: pair[1]))
    return Ranks(mean, number, p_value, critical)
