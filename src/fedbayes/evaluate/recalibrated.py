"""Probabilities made honest by maps from sums that add: one for all sites, or one by site that leans on all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes import scores as of
from fedbayes.errors import InputError, unknown
from fedbayes.evaluate.calibration import Held, held_out
from fedbayes.scores.proper import FLOOR
from fedbayes.scores.recalibrate import EDGES
from fedbayes.training.private import check_public
from fedbayes.training.run import Run

HOW = ("temperature", "isotonic", "histogram")
LEANS = 50.0  # rows of all sites that stand beside a site's own


class Maps(NamedTuple):
    """A map for each site, and one for all; of temperature a number, else what a probability in each bin becomes."""

    how: str
    sites: list[Tensor]
    everywhere: Tensor

    def apply(self, probs: Tensor, site: int | None = None) -> Tensor:
        """Mended probabilities [N, C] of a site, or by the map of all."""
        own = self.everywhere if site is None else self.sites[site]
        if self.how == "temperature":
            return of.tempered(probs.double().clamp_min(FLOOR).log(), float(own))
        return of.recalibrated(probs, own, EDGES[self.how])


def fit(run: Run, how: str = "temperature", *, held: Held | None = None) -> Maps:
    """Maps by site and for all, from sums over held-out rows; a site of few rows leans on those of all."""
    check_public(run.task.privacy, "maps", mend="")
    held = held or held_out(run)
    if held.p.kind != "classes":
        raise InputError(f"recalibration: the run predicts {held.p.kind}; maps of probabilities are for classes")
    if how not in HOW:
        raise unknown("map", how, HOW)
    seen = torch.zeros(len(held.y), dtype=torch.bool)
    own, pooled = [], _sums(how, held, torch.zeros(0, dtype=torch.int64))
    for rows in held.sites:
        fresh = rows[~seen[rows]].unique()
        seen[fresh] = True
        own.append(_sums(how, held, rows))
        pooled = {name: value + pooled[name] for name, value in _sums(how, held, fresh).items()}
    if not float(pooled["count"].sum()) > 0:
        raise InputError("recalibration: no held-out row at any site; give the run a validation share, or a test set")
    return Maps(how, [_decode(how, of.leaning(sums, pooled, LEANS)) for sums in own], _decode(how, pooled))


def _sums(how: str, held: Held, rows: Tensor) -> dict[str, Tensor]:
    probs, y = held.p.probs.cpu()[rows], held.y[rows]
    if how == "temperature":
        return of.temperature_sums(probs.double().clamp_min(FLOOR).log(), y)
    return of.recalibration_sums(probs, y, EDGES[how])


def _decode(how: str, sums: dict[str, Tensor]) -> Tensor:
    if how == "temperature":
        return torch.tensor(of.temperature(sums), dtype=torch.float64)
    return of.recalibration(sums, "isotonic" if how == "isotonic" else "histogram")


def compared(run: Run, held: Held | None = None) -> dict[str, dict[str, float]]:
    """NLL and ECE of judging rows as they are, and after each map, pooled and by site."""
    held = held or held_out(run)
    sites = [rows for rows in held.judge_sites if len(rows)]
    if not sites:
        raise InputError("recalibration: no row is left to judge by; give the run a larger test set")
    numbers = [k for k, rows in enumerate(held.judge_sites) if len(rows)]
    plain = [held.judge.probs.cpu()[rows].double() for rows in sites]
    labels = [held.judge_y[rows] for rows in sites]
    table = {"as they are": _row(plain, labels)}
    for how in HOW:
        maps = fit(run, how, held=held)
        table[f"{how}, pooled"] = _row([maps.apply(p) for p in plain], labels)
        table[f"{how}, by site"] = _row([maps.apply(p, k) for p, k in zip(plain, numbers)], labels)
    return table


def _row(probs: list[Tensor], labels: list[Tensor]) -> dict[str, float]:
    each = [of.classification_scores(of.classification_sums(p, y)) for p, y in zip(probs, labels)]
    whole = of.classification_scores(of.classification_sums(torch.cat(probs), torch.cat(labels)))
    return {"nll": whole["nll"], "ece": whole["ece"], "site_ece": float(np.mean([row["ece"] for row in each]))}
