"""How the league judges a run: all test rows, and the site where a score is worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedbayes.errors import NotFinite
from fedbayes.model.predictive import Predictive
from fedbayes.runs.evaluation import predictions
from fedbayes.scores import SUMS, auroc, risk_of, survival_calibration
from fedbayes.training.run import Run

WORST_NLL, SURE = 99.0, 0.9
BY_SITES = ("fedavg_pf", "pfedbayes")  # whose models are personal, though there is a global one too


def judged(run: Run) -> dict[str, float]:
    """The scores of a trained run on test rows: of all, and at the site where they are worst."""
    diverged = float(bool(run.journal) and "diverged" in run.journal[-1])
    if run.task.method in BY_SITES:
        prediction = run.task.program.prediction._replace(whole=False)
        run = replace(run, task=replace(run.task, program=run.task.program._replace(prediction=prediction)))
    try:
        p, rows, homes = predictions(run)
        assert p is not None  # every federation has test rows
        owner = run.task.clients.data.test_owner
        if len(homes) == 1 and owner is not None:  # all rows in one place; they still came from somewhere
            homes = [(owner == k).nonzero().flatten() for k in owner.unique()]
        return {**scores_of(p.cpu(), run.task.clients.data.test_y[rows], homes), "diverged": diverged}
    except (NotFinite, RuntimeError):
        return {"nll": WORST_NLL, "diverged": 1.0}


def scores_of(p: Predictive, y: torch.Tensor, homes: Sequence[torch.Tensor]) -> dict[str, float]:
    """NLL, ECE, AUROC and the coverage of sets at the worst site; of survival concordance, Brier and calibration."""
    decode = SUMS[p.kind][1]
    scores = decode(p.sums(y))
    sites = [rows for rows in homes if len(rows)]
    each = [decode(p.at(rows).sums(y[rows]))["nll"] for rows in sites]
    names = [name for name in ("nll", "ece", "accuracy", "concordance", "brier") if name in scores]
    table = {name: scores[name] for name in names} | {"worst_nll": min(max(each), WORST_NLL)}
    table["nll"] = min(table["nll"], WORST_NLL)
    if p.kind == "survival":
        middle = len(p.times) // 2
        error = survival_calibration(p.survival[:, middle], y, p.times[middle], min(5, len(y))).error
        return table | {"calibration": error, "risk_spread": float(risk_of(p.survival).std())}
    covered = in_sets(p.probs, y).double()
    table["worst_coverage"] = min(float(covered[rows].mean()) for rows in sites)
    if p.probs.shape[1] == 2 and 0 < int(y.sum()) < len(y):
        table["auroc"] = auroc(p.probs[y == 0, 1], p.probs[y == 1, 1])
    return table


def in_sets(probs: torch.Tensor, y: torch.Tensor, level: float = SURE) -> torch.Tensor:
    """Whether the likeliest classes that together have at least `level` hold the true one."""
    mine = probs.gather(1, y[:, None])
    likelier = torch.where(probs > mine, probs, 0).sum(1)
    return likelier < level
