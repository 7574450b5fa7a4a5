"""What a run promises, as files that need no fedbayes: thresholds by site, and a Python file that applies them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedbayes.files import write_atomically
from fedbayes.posterior.values import Point
from fedbayes.runs import calibrated
from fedbayes.training.run import Run

TABLE, CODE = "sets.json", "sets.py"

PLAIN = '''"""Promises of a prediction, written by `fedbayes export`; needs torch, nothing else.

    from model import load
    from sets import promise

    promise(load()(x), site="A")  # classes: membership [N, C]; reals: lower and upper ends; survival: times outlived
"""

import json
import math
from pathlib import Path

import torch

HERE = json.loads((Path(__file__).parent / "sets.json").read_text(encoding="utf-8"))


def promise(prediction, site=None):
    """What is held as often as promised, at a site by its name; without one over all sites together."""
    rows = HERE["everywhere"] if site is None else HERE["thresholds"][site]
    limit = torch.tensor([math.inf if t is None else t for t in rows], dtype=torch.float64)
    if HERE["kind"] == "classes":
        return scores(prediction["probs"].double()) <= limit
    if HERE["kind"] == "survival":
        return outlived(prediction["survival"].double(), float(limit))
    mean, variance = prediction["mean"].double(), (prediction["aleatoric"] + prediction["epistemic"]).double()
    spread = torch.tensor(HERE["spread"], dtype=torch.float64)
    if HERE["score"] == "quantile":
        level = torch.tensor((1 + HERE["coverage"]) / 2, dtype=torch.float64)
        half = (variance.sqrt() * torch.special.ndtri(level) + limit * spread).clamp_min(0)
    else:
        half = limit * torch.where(variance > 0, variance.sqrt(), spread)
    return mean - half, mean + half


def scores(probs):
    """How strange each class would be, [N, C]."""
    if HERE["score"] == "least_ambiguous":
        return 1 - probs
    ordered, order = probs.sort(stable=True, dim=1, descending=True)
    mass = torch.zeros_like(ordered).scatter(1, order, ordered.cumsum(1))
    if HERE["score"] == "adaptive":
        return mass
    ranks = mass.argsort(stable=True, dim=1).argsort(dim=1) + 1
    return mass + HERE["penalty"] * (ranks - HERE["free"]).clamp_min(0)


def outlived(curves, limit):
    """The times [N] at which curves fall to the limit."""
    if limit >= 1:
        return torch.zeros(len(curves), dtype=torch.float64)
    grid = torch.tensor([0.0, *HERE["times"]], dtype=torch.float64)
    curves = torch.cat([torch.ones_like(curves[:, :1]), curves], 1)
    place = (curves > limit).long().cumprod(1).sum(1)
    inside = place.clamp(1, len(grid) - 1)
    before, after = (curves.gather(1, p[:, None])[:, 0] for p in (inside - 1, inside))
    share = ((before - limit) / (before - after).clamp_min(1e-300)).clamp(0, 1)
    return torch.where(place >= len(grid), grid[-1], grid[inside - 1] + share * (grid[inside] - grid[inside - 1]))
'''


def promises_in(home: str | Path, run: Run) -> calibrated.Calibrated | None:
    """The promises of a run's folder, None where it is not calibrated; refused where they are of another posterior."""
    return calibrated.read(home, run) if (Path(home) / calibrated.FILE).is_file() else None


def told_by(run: Run, what: str, draws: int | None) -> bool:
    """Whether an export predicts as the run does, whose promises then hold for it."""
    prediction = run.task.program.prediction
    if all(isinstance(run.parts[part], Point) for part in run.task.program.model.layouts) and not prediction.dropout:
        return True
    return what == "ensemble" and draws in (None, prediction.draws)


def write_sets(made: calibrated.Calibrated, folder: str | Path) -> list[Path]:
    """Write promises beside an exported network."""
    folder = Path(folder)
    card = json.loads((folder / "model.json").read_text(encoding="utf-8")) if (folder / "model.json").is_file() else {}
    table = {
        **{name: getattr(made, name) for name in ("kind", "score", "way", "coverage", "confidence", "penalty", "free")},
        "spread": made.spread.tolist(),
        "times": card.get("times", []),
        "everywhere": _row(made.everywhere.numpy()),
        "thresholds": {site: _row(own) for site, own in zip(made.sites, made.thresholds.numpy())},
    }
    write_atomically(folder / TABLE, json.dumps(table, indent=1, ensure_ascii=False))
    write_atomically(folder / CODE, PLAIN)
    return [folder / TABLE, folder / CODE]


def _row(values: np.ndarray) -> list[float | None]:
    """Thresholds as JSON has them: null stands for no limit."""
    return [float(v) if np.isfinite(v) else None for v in values]
