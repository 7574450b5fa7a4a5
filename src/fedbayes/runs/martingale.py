"""A test that may be looked at after every row: bets against the claim that new rows come as the reference rows did.

A new row's rank among all rows so far, ties broken by chance, is uniform and independent of the ranks before it, while
rows are exchangeable (Vovk et al., 2005). So a fortune that is bet on these ranks at fair odds reaches c with
probability 1 / c at most, over all time (Ville, 1939). The rows of the stream join the reference: ranks against a fixed
reference are not independent, and a long quiet stream would find the reference's own error.

Arrays carry any axes first, so that many streams run as one. Counts are whole numbers and rows are bet on one by one:
a stream that is cut in other places gives the same fortune to the bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

EDGES = np.sinh(np.linspace(-32, 32, 8193)) * 1e-9
"""Even in the logarithm on both sides of 0, from 1e-9 to 4e4, 0.8 % wide: for scores of any unit."""

BETAS = ((0.3, 1.0), (0.5, 1.0), (0.75, 1.0), (1.0, 0.3), (1.0, 0.5), (1.0, 0.75), (0.5, 0.5), (0.75, 0.75), (2.0, 2.0))
"""Bets on ranks, as densities on [0, 1]: scores that rise, that fall, that spread, that close up."""

MEANING = ("rose", "rose", "rose", "fell", "fell", "fell", "spread", "spread", "closed up")

PATIENCE = 100.0  # rows; bets that begin later cost more, as the logarithm of the time
RATES = (0.05, 0.01)  # of forgetting, of bets on how often each class comes
TINY = 2.0**-53


class Ranks(NamedTuple):
    """Counts [..., G, B + 1] of all rows so far, by group and bin."""

    counts: np.ndarray


def ranks_of(reference: np.ndarray, groups: int = 1, group: np.ndarray | None = None, bins: int = 8194) -> Ranks:
    """The counts of reference rows [..., n] given as bins, by group."""
    group = np.zeros_like(reference) if group is None else group
    lead = reference.shape[:-1]
    flat = np.zeros((math.prod(lead), groups * bins))
    cells = (group * bins + reference).reshape(len(flat), -1)
    for row, cell in zip(flat, cells):
        row += np.bincount(cell, minlength=groups * bins)
    return Ranks(flat.reshape(*lead, groups, bins))


def bins_of(scores: np.ndarray) -> np.ndarray:
    """The bins of scores between EDGES; what is no number is the strangest."""
    return np.searchsorted(EDGES, np.asarray(scores, np.float64))


def p_values(
    ranks: Ranks, bins: np.ndarray, uniforms: np.ndarray, group: np.ndarray | None = None
) -> tuple[Ranks, np.ndarray]:
    """Of rows [..., m], one after another: the share of its group so far that is stranger, ties by chance; in (0, 1].

    p = (#{s_i > s} + u #{s_i = s}) / (n + 1), the row itself among its ties. Each row joins the counts.
    """
    counts = ranks.counts.copy()
    group = np.zeros_like(bins) if group is None else group
    above = np.flip(np.cumsum(np.flip(counts, -1), -1), -1)  # at or above each bin
    flat = above.reshape(*above.shape[:-2], -1)
    width = counts.shape[-1]
    cell = group * width + bins
    at = np.take_along_axis(flat, cell, -1)
    ties = np.take_along_axis(counts.reshape(flat.shape), cell, -1)
    total = np.take_along_axis(flat, group * width, -1)
    # Rows of this piece that came before, of the same group.
    before = np.tril(np.ones((bins.shape[-1],) * 2, dtype=bool), -1)
    same = (group[..., :, None] == group[..., None, :]) & before
    stranger = (same & (bins[..., None, :] > bins[..., :, None])).sum(-1)
    equal = (same & (bins[..., None, :] == bins[..., :, None])).sum(-1)
    p = (at - ties + stranger + uniforms * (ties + equal + 1)) / (total + same.sum(-1) + 1)
    pieces = counts.reshape(-1, flat.shape[-1])
    for row, cells in zip(pieces, cell.reshape(len(pieces), -1)):
        row += np.bincount(cells, minlength=flat.shape[-1])
    return Ranks(pieces.reshape(counts.shape)), np.clip(p, TINY, 1.0)


class Fortune(NamedTuple):
    """Bets under way: rows bet on, and the logarithm of what each bet [..., J] holds, with what it began later with."""

    rows: int
    logs: np.ndarray

    @property
    def log(self) -> np.ndarray:
        """The logarithm of the whole fortune [...]: what the bets hold, and what has not been laid yet."""
        return np.logaddexp(np.logaddexp.reduce(self.logs, -1), _waiting(self.rows))


def begin(bets: int = len(BETAS), lead: tuple[int, ...] = ()) -> Fortune:
    """A fortune of 1, of which nothing is laid."""
    return Fortune(0, np.full((*lead, bets), -np.inf))


def _waiting(rows: int) -> float:
    """The logarithm of the part that has not been laid after so many rows: log a / log(a + n), a slow decline."""
    return math.log(math.log(PATIENCE) / math.log(PATIENCE + rows))


def bet(fortune: Fortune, log_odds: np.ndarray) -> Fortune:
    """One row: a little more is laid, evenly on all bets, and each is paid by its density [..., J] at the row's rank.

    W_j <- (W_j + (a_n - a_(n+1)) / J) f_j(p), a mixture over the time at which a change begins.
    """
    n = fortune.rows
    laid = math.log((math.exp(_waiting(n)) - math.exp(_waiting(n + 1))) / fortune.logs.shape[-1])
    return Fortune(n + 1, np.logaddexp(fortune.logs, laid) + log_odds)


def beta_odds(p: np.ndarray) -> np.ndarray:
    """The logarithms of all of BETAS at ranks [...]: [..., J]."""
    low, high = np.log(p)[..., None], np.log(np.clip(1 - p, TINY, 1.0))[..., None]
    return (_A - 1) * low + (_B - 1) * high - _NORM


_A, _B = np.array(BETAS).T
_NORM = np.array([math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) for a, b in BETAS])


class Mix(NamedTuple):
    """How often each class came lately, by rate of forgetting: [..., len(RATES), C]."""

    lately: np.ndarray


def begin_mix(classes: int, lead: tuple[int, ...] = ()) -> Mix:
    return Mix(np.zeros((*lead, len(RATES), classes)))


def mix_odds(mix: Mix, counts: np.ndarray, p: np.ndarray, label: np.ndarray) -> tuple[Mix, np.ndarray]:
    """The logarithms [..., len(RATES)] of bets that classes go on to come as they came lately, and the memory after.

    The unit interval is cut as the classes came before this row (counts [..., C]); a cell pays by how much more often
    its class came lately. Ranks of class numbers fall into the cell of their class, but for rounding.
    """
    classes = counts.shape[-1]
    usual = (counts + 1 / classes) / (counts.sum(-1, keepdims=True) + 1)
    ends = np.cumsum(np.flip(usual, -1), -1)  # strange is a high number, so that the last class has the lowest ranks
    cell = classes - 1 - np.minimum((ends < p[..., None]).sum(-1), classes - 1)
    prior = 10.0
    seen = mix.lately.sum(-1, keepdims=True)
    share = (mix.lately + prior * usual[..., None, :]) / (seen + prior)
    ratio = np.log(share) - np.log(usual[..., None, :])
    odds = np.take_along_axis(ratio, np.broadcast_to(cell[..., None, None], (*ratio.shape[:-1], 1)), -1)[..., 0]
    keep = (1 - np.array(RATES))[:, None]
    here = (np.arange(classes) == label[..., None]).astype(np.float64)
    return Mix(mix.lately * keep + here[..., None, :]), odds
