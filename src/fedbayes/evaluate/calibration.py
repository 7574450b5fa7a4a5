"""Calibration of a run across its clients: a temperature, and conformal sets or intervals, from sums that add.

Each client scores held-out rows of its own and sends sums or a histogram; the server decodes the total once. Rows come
from the validation share where the run has one, else from half of the test set (a row calibrates for every client or
for none); the other half is left to judge by. The promise P(truth in set) >= coverage holds for rows exchangeable with
the pooled calibration rows. A site whose label mix differs has it only from `by_class`, which promises it for every
class, so for every mix of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes import scores as of
from fedbayes.errors import InputError, unknown
from fedbayes.model.predictive import Predictive
from fedbayes.noise import generator
from fedbayes.scores.proper import FLOOR
from fedbayes.training.private import check_public
from fedbayes.training.run import Run
from fedbayes.training.tested import check_whole, predict_with

SET_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "least_ambiguous": of.least_ambiguous_scores,
    "adaptive": of.adaptive_scores,
}


class Held(NamedTuple):
    """Held-out rows by site: predictions and targets (original units) to calibrate by, and others to judge by."""

    p: Predictive
    y: Tensor
    sites: list[Tensor]  # rows of p
    judge: Predictive
    judge_y: Tensor
    judge_sites: list[Tensor]  # rows of judge
    source: str

    @property
    def suffices(self) -> bool:
        """Whether some rows calibrate and some are left to judge by: of a single test row none may calibrate."""
        return all(any(len(rows) for rows in sites) for sites in (self.sites, self.judge_sites))


class Conformal(NamedTuple):
    """A threshold that keeps a coverage promise; one for each class where it was calibrated by class."""

    threshold: Tensor
    coverage: float
    score: str
    rows: int
    spread: Tensor  # of the training targets: the scale where a regression claims none

    def sets(self, p: Predictive) -> Tensor:
        """Membership [N, C]: the classes that can't be ruled out."""
        return (SET_SCORES[self.score](p.probs) <= self.threshold.to(p.mean.device)).cpu()

    def interval(self, p: Predictive) -> tuple[Tensor, Tensor]:
        """Lower and upper ends [N, D] in the target's units; several outputs are covered at once."""
        half = float(self.threshold) * scale_of(p, self.spread)
        return p.mean - half, p.mean + half


def held_out(run: Run, *, draws: int | None = None, seed: int = 0, p: Predictive | None = None) -> Held:
    """Predict the held-out rows; `seed` says which half of the test set calibrates where there is no validation.

    `p` spares predicting the test set anew.
    """
    check_whole(run)
    data, clients = run.task.clients.data, run.task.clients
    if not len(data.test_x):
        raise InputError(f"{data.name} has no test rows: calibration needs rows to judge by")
    p = predict_with(run.task, run.parts, data.test_x, draws=draws) if p is None else p
    y = _targets(run, data.test_y)
    homes = [clients.test_rows(k) for k in range(len(clients))]
    if len(run.task.validation):
        rows = run.task.validation
        mine = predict_with(run.task, run.parts, data.x[rows], draws=draws)
        assert run.task.validation_sizes is not None
        sites = list(torch.arange(len(rows)).split(run.task.validation_sizes.tolist()))
        return Held(mine, _targets(run, data.y[rows]), sites, p, y, homes, "validation rows")
    order = torch.randperm(len(y), generator=generator(seed, "calibrate"))
    calibrates = torch.zeros(len(y), dtype=torch.bool)
    calibrates[order[: len(y) // 2]] = True
    calibrating, judging = ([rows[calibrates[rows] == flag] for rows in homes] for flag in (True, False))
    return Held(p, y, calibrating, p, y, judging, "half of the test set")


def temperature(run: Run, *, held: Held | None = None) -> float:
    """The temperature of least NLL over all clients' held-out rows; apply it by `tempered` (Guo et al., 2017)."""
    check_public(run.task.privacy, "sums", mend="")
    held = held or held_out(run)
    if held.p.kind != "classes":
        raise InputError(f"temperature: the run predicts {held.p.kind}; temperature scaling is for classes")
    sums: dict[str, Tensor] = {}
    for rows in distinct(held.sites):
        own = of.temperature_sums(_log(held.p.probs[rows]), held.y[rows].to(held.p.mean.device))
        sums = {name: sums.get(name, 0) + value for name, value in own.items()}
    if not sums:
        raise InputError("temperature: no held-out row at any site; give the run a validation share, or a test set")
    return of.temperature(sums)


def tempered(p: Predictive, temperature: float) -> Tensor:
    """Probabilities proportional to p^(1 / temperature); for one draw softmax(logits / temperature)."""
    return of.tempered(_log(p.probs), temperature)


def conformal(
    run: Run,
    coverage: float = 0.9,
    *,
    score: str = "least_ambiguous",
    by_class: bool = False,
    sites: Iterable[int | str] | None = None,
    held: Held | None = None,
) -> Conformal:
    """A conformal threshold from the added histograms of all sites, or of some, by number or name (or one alone).

    Classes get sets by `score`, real targets intervals by |y - mean| / scale. Too few rows give an infinite threshold.
    """
    check_public(run.task.privacy, mend="")
    held = held or held_out(run)
    p, kind = held.p, held.p.kind
    if kind in ("labels", "survival"):
        raise InputError(f"conformal: the run predicts {kind}; sets are for one class, intervals for reals")
    if kind == "classes" and score not in SET_SCORES:
        raise unknown("conformal score", score, SET_SCORES)
    if kind == "real" and by_class:
        raise InputError("conformal: by_class needs classes; the run predicts real targets")
    chosen = held.sites if sites is None else [held.sites[_site(run, k)] for k in sites]
    spread = target_spread(run)
    edges = of.PROBABILITY_EDGES if kind == "classes" else of.RESIDUAL_EDGES
    groups = p.mean.shape[-1] if by_class else 1
    counts = torch.zeros(groups, len(edges) + 1, dtype=torch.float64)
    for rows in distinct(chosen):
        y = held.y[rows]
        strange = _strangeness(rows_of(p, rows), y, score, spread)
        for c in range(groups):
            counts[c] += of.histogram(strange, edges, y == c if by_class else None)
    total = int(counts.sum())
    if not total:
        raise InputError("conformal: no held-out row at these sites; give the run a validation share, or a test set")
    # A class that no site holds out can't be ruled out.
    limits = [of.conformal_threshold(n, edges, coverage) if n.sum() else torch.inf for n in counts]
    threshold = torch.tensor(limits if by_class else limits[0], dtype=torch.float64)
    return Conformal(threshold, coverage, score if kind == "classes" else "residual", total, spread)


def _site(run: Run, site: int | str) -> int:
    names, count = run.task.clients.names, len(run.task.clients)
    if isinstance(site, str) and site in names:
        return names.index(site)
    if isinstance(site, str) or not 0 <= site < count:
        raise InputError(f"conformal: there is no site {site!r}; there are {', '.join(names) or f'0 to {count - 1}'}")
    return site


def covered(rule: Conformal, p: Predictive, y: Tensor) -> Tensor:
    """Which truths [N] lie in their set, or in their interval."""
    if p.kind == "classes":
        return rule.sets(p).gather(1, y[:, None])[:, 0]
    low, high = (end.cpu() for end in rule.interval(p))
    return ((low <= y) & (y <= high)).all(-1)


def distinct(sites: Iterable[Tensor]) -> Iterable[Tensor]:
    """Rows by site, each row at the first site that holds it: one row is one piece of evidence."""
    held = [rows for rows in sites if len(rows)]
    seen = torch.zeros(1 + max((int(rows.max()) for rows in held), default=0), dtype=torch.bool)
    for rows in held:
        fresh = rows[~seen[rows]].unique()
        seen[fresh] = True
        if len(fresh):
            yield fresh


def rows_of(p: Predictive, rows: Tensor) -> Predictive:
    """Some rows of a prediction."""
    return p.at(rows)


def scale_of(p: Predictive, spread: Tensor) -> Tensor:
    """The claimed standard deviation, or the training targets' where none is claimed."""
    total = p.total
    return torch.where(total > 0, total.sqrt(), spread.to(total))


def target_spread(run: Run) -> Tensor:
    """Standard deviation [D] of real training targets in their own units; 1 where they are constant, or classes.

    Of a private run the unit in which its targets were standardised, which its model tells anyway; else 1.
    """
    data = run.task.clients.data
    if data.kind != "real":
        return torch.ones(1)
    if run.task.privacy is not None:
        return (
            data.y.new_ones(data.y.shape[1:]).double() if data.target_scale is None else data.target_scale.std.double()
        )
    spread = _targets(run, data.y).double().std(0, correction=0)
    return torch.where(spread > 0, spread, 1.0)


def _strangeness(p: Predictive, y: Tensor, score: str, spread: Tensor) -> Tensor:
    """The score [N] of each true target; higher is stranger."""
    if p.kind == "classes":
        return of.label_scores(SET_SCORES[score](p.probs).cpu(), y)
    return of.normalised_residual(p.mean.cpu(), scale_of(p, spread).cpu(), y)


def _targets(run: Run, y: Tensor) -> Tensor:
    units = run.task.clients.data.target_scale
    return y if units is None else units.undo(y)


def _log(probs: Tensor) -> Tensor:
    return probs.double().clamp_min(FLOOR).log()
