"""Sets, intervals and lower bounds that hold at every site, from histograms that add. `fb.conformal`.

| way | its promise P(truth is held) >= coverage holds for | what a site sends |
|---|---|---|
| pooled | rows as they come over all sites together | a histogram of scores |
| by_class | every class, so every site whatever its mix of classes | a histogram by class |
| label_shift | every site, where a class looks alike at all sites; the site's mix from its labels | the same |
| unlabelled | the same, the mix by EM from predictions of rows without labels | the same |
| blended | every site, its own rows counted beside a few of all sites by class | the same |
| own | every site, by its own rows alone | nothing |
| quantiles | rows as they come over all sites together | one number |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes import scores as of
from fedbayes.errors import InputError, unknown
from fedbayes.evaluate.binomial import exact_band, exact_interval
from fedbayes.evaluate.calibration import Held, held_out, target_spread, temperature, tempered
from fedbayes.evaluate.noised import CALIBRATION, cautious, check_noised, coarse, noised, noised_hits, source_of
from fedbayes.model.predictive import Predictive
from fedbayes.runs.calibrated import Calibrated, class_scores, posterior_of, quantiles_of, scale_of
from fedbayes.scores.survival import uncensored
from fedbayes.training.private import check_public
from fedbayes.training.run import Run

BY_KIND: dict[str, tuple[str, ...]] = {
    "classes": ("least_ambiguous", "adaptive", "regularised"),
    "real": ("normalised", "quantile"),
    "survival": ("observed", "weighted"),
}
QUANTILES = "quantiles"
WAYS = ("label_shift", "unlabelled", "by_class", "blended", "own", QUANTILES, "pooled")
WITHOUT_CLASSES = ("blended", "own", QUANTILES, "pooled")
BLENDED = 30.0  # rows of all sites, by class, that stand beside a site's own


class Gathered(NamedTuple):
    """What all sites have sent: their added histograms [C, B + 1], and what each has of its own [K, C, B + 1]."""

    counts: Tensor
    own: list[Tensor]
    edges: Tensor


def default_way(kind: str, noisy: bool = False) -> str:
    """The way that holds at sites that differ in more than their label mix; under noise, which hides a site's rows, in
    their mix alone."""
    return "pooled" if kind != "classes" else "label_shift" if noisy else "blended"


def fit(
    run: Run,
    coverage: float = 0.9,
    *,
    way: str | None = None,
    score: str | None = None,
    confidence: float | None = None,
    held: Held | None = None,
    penalty: float = 0.01,
    free: int = 2,
    epsilon: float | None = None,
    private_seed: int | None = None,
) -> Calibrated:
    """Thresholds for every site of a run, and how often they hold on rows that did not calibrate.

    By default `blended` for classes (`label_shift` under `epsilon`) and `pooled` for other targets; scores are
    `least_ambiguous` for classes, `normalised` for real targets, `observed` for survival. With `confidence` the
    coverage is kept with that confidence over the calibration rows, and not only on average over them. With `epsilon`
    every site adds noise to its histogram before it leaves it, and to how often promises hold there; sizes are not
    told. `private_seed` is for tests, and NOT PRIVATE.
    """
    if epsilon is None:
        check_public(run.task.privacy)
    for name, share in {"coverage": coverage, "confidence": confidence}.items():
        if share is not None and not 0 < share < 1:
            raise InputError(f"{name} must be above 0 and below 1, not {share}")
    held = held or held_out(run)
    kind = held.p.kind
    if kind not in BY_KIND:
        raise InputError(f"conformal: the run predicts {kind}; sets are for one class, intervals for reals")
    score, way = score or BY_KIND[kind][0], way or default_way(kind, noisy=epsilon is not None)
    if score not in BY_KIND[kind]:
        raise unknown(f"conformal score for {kind}", score, BY_KIND[kind])
    if way not in WAYS:
        raise unknown("way to calibrate", way, WAYS)
    if kind != "classes" and way not in WITHOUT_CLASSES:
        raise InputError(f"way {way!r} needs classes; {kind} targets take {', '.join(WITHOUT_CLASSES)}")
    if epsilon is not None:
        check_noised(way, score, epsilon)
    spread = target_spread(run)
    gathered = gather(held, score, spread, coverage, penalty, free, coarsely=epsilon is not None)
    random = source_of(private_seed)
    if epsilon is None:
        mix = mixes(run, held, gathered, way)
    else:
        run.spend(CALIBRATION, epsilon)
        gathered, mix = noised_sums(gathered, epsilon, random)
    thresholds, everywhere = THRESHOLDS[way](gathered, mix, coverage, confidence)
    sites = tuple(run.task.clients.name(k) for k in range(len(run.task.clients)))
    total = int(gathered.counts.sum().round())
    made = Calibrated(
        *(kind, score, way, coverage, sites, thresholds, everywhere, total),
        *(gathered.counts, gathered.edges, mix, spread.double()),
        penalty=penalty,
        free=free,
        confidence=confidence,
        source=held.source if epsilon is None else f"{held.source}; noised, epsilon {epsilon:g} for every row",
        **posterior_of(run),
    )
    made = _judged(made, held)
    if epsilon is not None:
        pairs = zip(made.judged["hits"].tolist(), made.judged["rows"].tolist())
        hits = np.array([noised_hits(h, n, epsilon, random) for h, n in pairs])
        made.judged.update(hits=hits, size=np.full(len(hits), np.nan))
    return made


def noised_sums(gathered: Gathered, epsilon: float, random: np.random.Generator) -> tuple[Gathered, Tensor]:
    """What sites send under noise, added and decoded; and their label mixes by their noised totals alone."""
    sent = [noised(counts, epsilon, random) for counts in gathered.own]
    counts = cautious(torch.stack(sent).sum(0), len(sent), epsilon)
    mix = torch.stack([of.mix_of_labels(one[:, -1].clamp_min(0), counts.sum(1)) for one in sent])
    return Gathered(counts, [], gathered.edges), mix


def gather(
    held: Held, score: str, spread: Tensor, coverage: float, penalty: float, free: int, coarsely: bool = False
) -> Gathered:
    """Every site's histogram; a row that two sites hold is counted once in the sum."""
    classes = held.p.mean.shape[-1] if held.p.kind == "classes" else 1
    edges = edges_of(score, classes, penalty, free)
    edges = coarse(edges) if coarsely else edges
    seen = torch.zeros(len(held.y), dtype=torch.bool)
    counts, own = torch.zeros(classes, len(edges) + 1, dtype=torch.float64), []
    for rows in held.sites:
        fresh = rows[~seen[rows]].unique()
        seen[fresh] = True

        def histograms(rows: Tensor) -> Tensor:
            return site_histograms(held.p.at(rows).cpu(), held.y[rows], score, edges, spread, coverage, penalty, free)

        own.append(histograms(rows))
        counts += own[-1] if len(fresh) == len(rows) else histograms(fresh)
    if not float(counts.sum()) > 0:
        raise InputError("conformal: no held-out row at any site; give the run a validation share, or a test set")
    return Gathered(counts, own, edges)


def edges_of(score: str, classes: int, penalty: float, free: int) -> Tensor:
    """The edges of a score's histogram."""
    if score == "regularised":
        return of.regularised_edges(classes, penalty, free)
    return {"normalised": of.RESIDUAL_EDGES, "quantile": of.SIGNED_EDGES}.get(score, of.PROBABILITY_EDGES)


def site_histograms(
    p: Predictive, y: Tensor, score: str, edges: Tensor, spread: Tensor, coverage: float, penalty: float, free: int
) -> Tensor:
    """What a site sends: counts [C, B + 1] of its rows' scores, by class where targets are classes."""
    if p.kind == "classes":
        if not len(y):
            return torch.zeros(p.mean.shape[-1], len(edges) + 1, dtype=torch.float64)
        values = of.label_scores(class_scores(score, p.probs, penalty, free), y)
        return of.class_histograms(values, y, p.mean.shape[-1], edges)
    if not len(y):
        return torch.zeros(1, len(edges) + 1, dtype=torch.float64)
    if p.kind == "survival":
        times = torch.tensor(p.times)
        values = of.survival_residual(p.survival, times, y[:, 0])
        if score == "observed":
            return of.histogram(values, edges)[None]
        left = uncensored(y.double(), y[:, 0].double(), before=True)
        last = of.survival_residual(p.survival, times, y[:, 0].max().expand(len(y)))
        return of.survival_histogram(values, y[:, 1].double() / left, edges, last)[None]
    if score == "quantile":
        low, high = quantiles_of(p, coverage)
        return of.histogram(of.quantile_residual(low, high, spread, y), edges)[None]
    return of.histogram(of.normalised_residual(p.mean, scale_of(p, spread), y), edges)[None]


def mixes(run: Run, held: Held, gathered: Gathered, way: str) -> Tensor:
    """The label mix [K, C] of each site: from its labels, or by EM from predictions alone; ones without classes."""
    sums = gathered.counts.sum(1)
    if held.p.kind != "classes":
        return torch.ones(len(held.sites), 1, dtype=torch.float64)
    if way != "unlabelled":
        labels = torch.stack([n.sum(1) for n in gathered.own])
        if run.task.privacy is None:  # of whose training rows nothing is told without noise
            labels += run.task.clients.label_counts()
        return torch.stack([of.mix_of_labels(n, sums) for n in labels])
    probs = tempered(held.p, temperature(run, held=held)).cpu()
    rows = torch.cat(held.sites).unique()
    source = probs[rows].mean(0)  # what EM must take the predictions for, for it to find the mix of these rows again
    return torch.stack([of.mix_by_em(probs[rows], source) if len(rows) else source for rows in held.sites])


Thresholds = Callable[[Gathered, Tensor, float, float | None], tuple[Tensor, Tensor]]


def _pooled_threshold(counts: Tensor, edges: Tensor, coverage: float, confidence: float | None) -> Tensor:
    """One number for all classes, as each of them: [C]."""
    if not float(counts.sum()) > 0:
        return torch.full((len(counts),), torch.inf, dtype=torch.float64)
    whole = counts.sum(0, keepdim=True)
    return of.shifted_thresholds(whole, edges, torch.ones(1), coverage, confidence).expand(len(counts))


def _pooled(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    one = _pooled_threshold(g.counts, g.edges, coverage, confidence)
    return one.expand(len(mix), -1).clone(), one.clone()


def _own(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    each = [_pooled_threshold(n, g.edges, coverage, confidence) for n in g.own]
    return torch.stack(each), _pooled_threshold(g.counts, g.edges, coverage, confidence).clone()


def _by_class(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    each = torch.cat([_pooled_threshold(n[None], g.edges, coverage, confidence) for n in g.counts])
    return each.expand(len(mix), -1).clone(), each


def _shifted(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    each = [of.shifted_thresholds(g.counts, g.edges, p, coverage, confidence) for p in mix]
    return torch.stack(each), _pooled_threshold(g.counts, g.edges, coverage, confidence).clone()


def _blended(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    share = g.counts * (BLENDED / g.counts.sum(1, keepdim=True).clamp_min(BLENDED))
    each = [of.shifted_thresholds(n + share, g.edges, p, coverage, confidence) for n, p in zip(g.own, mix)]
    return torch.stack(each), _pooled_threshold(g.counts, g.edges, coverage, confidence).clone()


def _quantiles(g: Gathered, mix: Tensor, coverage: float, confidence: float | None) -> tuple[Tensor, Tensor]:
    if confidence is not None:
        raise InputError("confidence: one number from each site says nothing of it; take another way")
    some = [n.sum(0) for n in g.own if float(n.sum()) > 0]
    each = torch.tensor([of.conformal_threshold(n, g.edges, coverage) for n in some], dtype=torch.float64)
    one = of.quantile_of_quantiles(each, torch.tensor([float(n.sum()) for n in some]).round(), coverage)
    everywhere = torch.full((len(g.counts),), one, dtype=torch.float64)
    return everywhere.expand(len(mix), -1).clone(), everywhere


THRESHOLDS: dict[str, Thresholds] = {
    "pooled": _pooled,
    "by_class": _by_class,
    "label_shift": _shifted,
    "unlabelled": _shifted,
    "blended": _blended,
    "own": _own,
    QUANTILES: _quantiles,
}


def _judged(made: Calibrated, held: Held) -> Calibrated:
    """With how many of each site's judging rows are held, and how much is promised there."""
    rows, hits, size = [], [], []
    for k, own in enumerate(held.judge_sites):
        p, y = held.judge.at(own), held.judge_y[own]
        rows.append(len(own))
        hits.append(int(made.covered(p, y, k).sum()) if len(own) else 0)
        size.append(float(made.sizes(p, k).mean()) if len(own) else np.nan)
    made.judged.update(rows=np.array(rows), hits=np.array(hits), size=np.array(size, dtype=np.float64))
    return made


class SiteCoverage(NamedTuple):
    """How often a site's rows are held: of so many rows, with the exact interval of that share, and the mean size."""

    site: str
    rows: int
    coverage: float
    low: float
    high: float
    size: float
    inside: bool  # whether the promise is among what chance allows for so few rows


def by_site(made: Calibrated, confidence: float = 0.95) -> list[SiteCoverage]:
    """Coverage and size by site with exact binomial intervals (Clopper and Pearson, 1934); none without rows."""
    rows, hits, size = (made.judged[name] for name in ("rows", "hits", "size"))
    low, high = exact_interval(hits, rows, confidence)
    least, most = exact_band(made.coverage, rows, confidence)
    return [
        SiteCoverage(
            made.sites[k],
            int(rows[k]),
            float(hits[k] / rows[k]),
            float(low[k]),
            float(high[k]),
            float(size[k]),
            bool(least[k] <= hits[k] / rows[k] <= most[k]),
        )
        for k in range(len(made.sites))
        if rows[k]
    ]
