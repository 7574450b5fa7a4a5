"""Members of a sweep that differ in their seed alone, taken together: means over seeds with their errors. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbayes.runs.margins import Margin
from fedbayes.runs.records import RunFiles

SEED = re.compile(r"(?<![^,/])seed=-?\d+(,|$)")


class OverSeeds(NamedTuple):
    """One setting: its name, how many seeds it was run under, and the mean of each score with its noise."""

    name: str
    seeds: int
    figures: dict[str, tuple[float, Margin]]


def over_seeds(runs: Sequence[tuple[str, RunFiles]]) -> list[OverSeeds]:
    """The settings of runs by the names of a sweep's members (`lr=0.1,seed=0`); none where no seeds were swept."""
    groups: dict[str, list[RunFiles]] = {}
    for name, files in runs:
        if SEED.search(name):
            rest = SEED.sub("", name).rstrip(",/").replace("method=", "")
            groups.setdefault(rest or files.experiment.method, []).append(files)
    if all(len(members) < 2 for members in groups.values()):
        return []
    return [OverSeeds(name, len(members), _means(members)) for name, members in groups.items()]


def _means(members: Sequence[RunFiles]) -> dict[str, tuple[float, Margin]]:
    """Means over seeds: standard errors are s / sqrt(n), of differences in pairs where settings have the same seeds."""
    figures = {}
    for score in dict.fromkeys(score for files in members for score in files.scores):
        some = [files for files in members if score in files.scores]
        values = np.array([files.scores[score] for files in some])
        seeds = np.array([files.experiment.seed for files in some])
        rows = values / math.sqrt(len(values)) if len(values) > 1 else np.zeros(0)
        figures[score] = float(values.mean()), Margin(0.0, rows, seeds)
    return figures
