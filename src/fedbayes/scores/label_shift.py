"""Conformal thresholds that hold at a site of its own label mix, from histograms of scores by class that add.

Where sites differ in how often a class comes, and not in how a class looks, site k covers the truth with probability
sum_c p_k(c) F_c(t) at threshold t; F_c is known from the rows of all sites, p_k to the site alone (Podkopaev and
Ramdas, 2021; Plassier et al., 2023). Nothing travels for it but the histograms by class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbayes.scores import inputs

STEPS = 2000  # of EM at most
SLACK = 1e-9  # a share this little short of the level reaches it


def class_histograms(values: Tensor, labels: Tensor, classes: int, edges: Tensor) -> Tensor:
    """Counts [C, B + 1] of scores [N] by class and bin, as `histogram` counts them; they add over sites."""
    index = torch.searchsorted(edges.to(values.device), values.double()) + labels.long() * (len(edges) + 1)
    counts = torch.zeros(classes * (len(edges) + 1), dtype=torch.float64, device=values.device)
    return counts.scatter_add(0, index, torch.ones_like(index, dtype=torch.float64)).reshape(classes, -1)


def mix_of_labels(counts: Tensor, everywhere: Tensor) -> Tensor:
    """A site's label mix [C] from its own counts [C], with one row of the mix of all sites beside them."""
    counts, everywhere = counts.double(), inputs.real("everywhere", everywhere)
    return (counts + everywhere / everywhere.sum()) / (counts.sum() + 1)


def mix_by_em(probs: Tensor, source: Tensor) -> Tensor:
    """A site's label mix [C] from unlabelled predictions [N, C], made under the mix `source` (Saerens et al., 2002).

    p(c) <- (sum_i q_i(c) + source(c)) / (N + 1) with q_i(c) proportional to probs_i(c) p(c) / source(c). The likelihood
    has one summit, and one row of the source mix keeps it unique. It is as good as the probabilities are calibrated.
    """
    source = inputs.real("source", source)
    source = source / source.sum()
    known = source > 0
    ratio = torch.where(known, inputs.distribution("probs", probs) / torch.where(known, source, 1.0), 0.0)
    mix = source
    for _ in range(STEPS):
        total = (ratio @ mix).clamp_min(1e-300)
        new = (mix * (ratio.mT @ (1 / total)) + source) / (len(probs) + 1)
        done = float((new - mix).abs().max()) < 1e-8
        mix = new
        if done:
            break
    return mix / mix.sum()


def mix_by_confusion(predicted: Tensor, confusion: Tensor) -> Tensor:
    """A site's label mix [C] from how often it predicts each class [C], by EM over pooled confusions [true, predicted].

    It asks of predictions only that a class is mistaken at this site as it is elsewhere, not that they are calibrated.
    """
    seen = confusion.double().sum(1)
    source = seen / seen.sum()
    chance = (confusion.double() + 1e-3) / (confusion.double() + 1e-3).sum(1, keepdim=True)
    ratio = (chance * source[:, None]).mT  # [predicted, true], as if a prediction told the class by Bayes' rule
    ratio = ratio / ratio.sum(1, keepdim=True)
    rows = torch.repeat_interleave(ratio, predicted.long(), dim=0)
    return mix_by_em(rows, source) if len(rows) else source


def effective_rows(counts: Tensor, mix: Tensor) -> float:
    """How many rows of one mix would tell as much as these rows by class: 1 / sum_c p(c)^2 / n_c (Kish, 1965)."""
    rows, mix = counts.double().sum(1), mix.double()
    if bool(((rows == 0) & (mix > SLACK)).any()):
        return 0.0
    return float(1 / (mix.square() / rows.clamp_min(1)).sum())


def shifted_thresholds(
    counts: Tensor, edges: Tensor, mix: Tensor, coverage: float = 0.9, confidence: float | None = None
) -> Tensor:
    """Thresholds [C] of a site with label mix [C], one for each candidate class, from summed counts [C, B + 1].

    The smallest edge t with sum_c p(c) F_c(t) >= coverage (1 + p(y) / n_y): the new row stands among the others with
    its own weight (Tibshirani et al., 2019). With the mix of the rows themselves that is the pooled threshold. With
    `confidence` the site is covered so often with that confidence over the calibration rows, not only on average
    (Vovk, 2012, for as many rows as these are worth). A class that no site has shown is covered by no threshold.
    """
    inputs.share("coverage", coverage)
    counts, mix = counts.double(), mix.double()
    if counts.ndim != 2 or counts.shape != (len(mix), len(edges) + 1):
        raise ValueError(f"counts must be [{len(mix)}, {len(edges) + 1}] by class and bin, not {list(counts.shape)}.")
    if not float(counts.sum()) > 0:
        raise ValueError("counts are all 0: conformal prediction needs calibration rows. Were all sites masked out?")
    if abs(float(mix.sum()) - 1) > 1e-6 or bool((mix < 0).any()):
        raise ValueError(f"mix must be shares that sum to one, not {mix.tolist()[:6]}. Divide counts by their sum.")
    rows = counts.sum(1)
    covered = (mix[:, None] * counts.cumsum(1) / rows.clamp_min(1)[:, None]).sum(0)[:-1]
    weight = torch.where(rows > 0, mix / rows.clamp_min(1), torch.where(mix > 0, torch.inf, 0.0))
    need = coverage * (1 + weight)
    if confidence is not None:
        sure = confident_share(effective_rows(counts, mix), coverage, confidence)
        need = need.clamp_min(sure)
    place = torch.searchsorted(covered, need - SLACK)
    return torch.cat([edges.double(), edges.new_full((1,), torch.inf).double()])[place]


def confident_share(rows: float, coverage: float, confidence: float) -> float:
    """The share r / n of calibration rows below a threshold that covers so often with so much confidence; inf: none.

    The coverage of the r-th of n scores is Beta(r, n + 1 - r), whatever their distribution (Vovk, 2012).
    """
    from scipy.special import betainc

    inputs.share("confidence", confidence)
    if rows < 1 or coverage**rows > 1 - confidence:
        return float("inf")
    low, high = coverage * rows, rows
    for _ in range(60):
        middle = (low + high) / 2
        fails = betainc(middle, rows + 1 - middle, coverage) > 1 - confidence
        low, high = (middle, high) if fails else (low, middle)
    return high / rows


def quantile_of_quantiles(quantiles: Tensor, sizes: Tensor, coverage: float = 0.9) -> float:
    """One number from each site: the smallest of the sites' thresholds that covers as promised (Humbert et al., 2023).

    Site k of n_k rows sends its ceil((n_k + 1) coverage)-th score, infinite where it has fewer. Of rows that are
    exchangeable over sites, the j-th smallest of these covers E = integral of P(fewer than j of Beta_k are below u) du.
    """
    from scipy.special import betainc

    inputs.share("coverage", coverage)
    sizes = sizes.double()
    if quantiles.shape != sizes.shape or not len(sizes):
        raise ValueError(f"quantiles must be one for each of {len(sizes)} sites, not {list(quantiles.shape)}.")
    ranks = torch.ceil((sizes + 1) * coverage - SLACK)
    points = torch.linspace(0, 1, 513, dtype=torch.float64)
    points = (points[1:] + points[:-1]) / 2
    short = ranks > sizes
    below = torch.from_numpy(
        betainc(ranks[:, None].numpy(), (sizes - ranks + 1).clamp_min(1)[:, None].numpy(), points[None].numpy())
    )
    below = torch.where(short[:, None], 0.0, below)
    held = torch.zeros(len(sizes) + 1, len(points), dtype=torch.float64)  # P(so many of the sites so far are below u)
    held[0] = 1
    for k, chance in enumerate(below):
        held[1 : k + 2] = held[1 : k + 2] * (1 - chance) + held[: k + 1] * chance
        held[0] *= 1 - chance
    expected = held.cumsum(0)[:-1].mean(1)  # of the j-th smallest, j = 1 .. K
    place = int((expected < coverage - SLACK).sum())
    ordered = torch.where(short, torch.inf, quantiles.double()).sort().values
    return float(ordered[place]) if place < len(ordered) else float("inf")
