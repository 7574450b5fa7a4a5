"""Robust pooling: what a minority of clients can't move at will, whatever they send.

Each is a function of all posteriors (`rules.combining`), Gaussian or Point, and counts every client once: a client that
lies may claim any number of rows. The distance of two posteriors is that of Wasserstein for independent weights,
W2^2 = |m - m'|^2 + |s - s'|^2; for points it is the Euclidean one.

With K clients and P weights all hold the K uploads, 8 K P bytes of Gaussians in float32, and work in float64 on blocks
of weights, in less than 100 MB however many there are. The median and the trimmed mean sort, O(K log K P) operations;
the geometric median and multi-Krum need K^2 distances, which are a matrix product per block, O(K^2 P) operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedbayes.posterior.values import Gaussian, Point, Posterior

Combine = Callable[[Sequence[Posterior], Tensor, Posterior], Posterior]

OUTLIERS = 0.2  # share of clients that may lie, by default
MINORITY = "a share in [0, 0.5)"  # in words, what it may be
BLOCK = 2**19  # numbers of one kind in a block: 4 MB in float64, of which a rule needs about ten
LEAST = 1e-12  # a scale never rounds to zero
FAR = 1e100  # what is farther from the median can't be told apart: its powers would not be finite
ROUNDING = 1e-10  # of squared distances from the median: those that differ by less can't be told apart
ITERATIONS, TOLERANCE, SMOOTHING = 1000, 1e-13, 1e-6  # of the geometric median


def count_of(outliers: float, clients: int) -> int:
    """How many of so many clients are taken to lie: the share, rounded up, and always less than half.

    >>> tuple(count_of(0.2, clients) for clients in (1, 2, 3, 10, 11, 100))
    (0, 0, 1, 2, 3, 20)
    """
    return min(math.ceil(outliers * clients - 1e-9), (clients - 1) // 2)


def median(posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior) -> Posterior:
    """The median of each mean and of each log scale (Yin et al., 2018); of whole numbers the lower one."""
    if not posteriors[0].mean.is_floating_point():
        stacked = torch.stack([q.mean for q in posteriors])
        return Point(stacked.median(0).values.to(reference.mean.dtype), reference.layout)

    def middle(means: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return _middle(_ordered(means)), None if scales is None else _middle_scale(_ordered(scales))

    return _by_weight(middle, posteriors, reference)


def trimmed_mean(outliers: float = OUTLIERS) -> Combine:
    """The mean of each natural parameter without its `outliers` largest and smallest values (Yin et al., 2018).

    In units of the medians m_0 and s_0, l = s_0^2 / s^2 and l d = l (m - m_0) / s_0: their trimmed means are positive,
    and l d. The mean is held between the smallest and the largest that are not trimmed. Of points it is the trimmed
    mean itself; where nothing is trimmed, the log pool of equal weights.
    """

    def combine(posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior) -> Posterior:
        cut = count_of(outliers, len(posteriors))

        def trimmed(means: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
            inner = _within(_ordered(means), cut)
            if scales is None:
                return inner.mean(-1), None
            ordered = _ordered(scales)
            middle, unit = _middle(inner), _middle_scale(ordered)  # trimming leaves a median where it is
            precision = _precision(_within(ordered, cut), unit).mean(-1)
            shifts = ((means - middle[:, None]) / unit[:, None]).clamp(-FAR, FAR) * _precision(scales, unit)
            mean = middle + unit * (_within(_ordered(shifts), cut).mean(-1) / precision)
            return mean.clamp(inner[:, 0], inner[:, -1]), unit * precision.rsqrt()

        return _by_weight(trimmed, posteriors, reference)

    return combine


def geometric_median(posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior) -> Posterior:
    """The (mean, scale) with the smallest sum of distances to all, by smoothed Weiszfeld (Pillutla et al., 2022)."""
    return _mixture(_weiszfeld(_products(posteriors)), posteriors, reference)


def multi_krum(outliers: float = OUTLIERS) -> Combine:
    """The mean of (mean, scale) over those whose neighbours are nearest (Blanchard et al., 2017).

    With f `outliers` of K, a client's score is the mean squared distance to its K - f - 1 nearest; the K - f clients
    with the lowest are kept.
    """

    def combine(posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior) -> Posterior:
        count = len(posteriors)
        kept = count - count_of(outliers, count)
        nearest = _squares(_products(posteriors)).sort(1).values[:, 1:kept]
        best = nearest.sum(1).argsort(stable=True)[:kept]
        return _mixture(torch.zeros(count, dtype=torch.float64).index_fill(0, best, 1 / kept), posteriors, reference)

    return combine


def mixing(combine: Combine, outliers: float = OUTLIERS) -> Combine:
    """A rule over means of neighbours: each (mean, scale) is that of its K - f nearest, itself among them.

    Nearest-neighbour mixing (Allouah et al., 2023), for f `outliers` of K: clients whose rows differ are brought
    together before the rule looks for those who lie. Whole numbers are left as they are. It holds the uploads twice.
    """

    def over_neighbours(posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior) -> Posterior:
        count = len(posteriors)
        if not posteriors[0].mean.is_floating_point():
            return combine(posteriors, weights, reference)
        nearest = _squares(_products(posteriors)).argsort(dim=1, stable=True)[:, : count - count_of(outliers, count)]
        shares = torch.zeros(count, count, dtype=torch.float64).scatter_(1, nearest, 1 / nearest.shape[1])
        return combine(mixtures(shares, posteriors), weights, reference)

    return over_neighbours


def _ordered(values: Tensor) -> Tensor:
    """Sorted over the last axis, that of the clients."""
    return values.sort(-1).values


def _middle(ordered: Tensor) -> Tensor:
    """The median of what is sorted, halfway between the middle two where their number is even."""
    low, high = _middle_two(ordered)
    return low / 2 + high / 2


def _middle_scale(ordered: Tensor) -> Tensor:
    """The same of logarithms."""
    low, high = _middle_two(ordered)
    return low.sqrt() * high.sqrt()


def _middle_two(ordered: Tensor) -> tuple[Tensor, Tensor]:
    count = ordered.shape[-1]
    return ordered[..., (count - 1) // 2], ordered[..., count // 2]


def _within(ordered: Tensor, cut: int) -> Tensor:
    """What is sorted without so many at each end."""
    return ordered[..., cut : ordered.shape[-1] - cut]


def _precision(scales: Tensor, unit: Tensor) -> Tensor:
    """Precisions [B, K] in units of a scale for each weight."""
    return (unit[:, None] / scales).clamp(1 / FAR, FAR).square()


def _blocks(posteriors: Sequence[Posterior]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Means and scales [B, K] of so many weights at a time that they fit in a block."""
    means = [q.mean.reshape(-1) for q in posteriors]
    scales = None if isinstance(posteriors[0], Point) else [_scale(q).reshape(-1) for q in posteriors]
    room = BLOCK if means[0].device.type == "cpu" else 16 * BLOCK  # a GPU has more, and waits for each block
    width = max(1, room // len(posteriors))
    for start in range(0, max(1, means[0].numel()), width):
        part = slice(start, start + width)
        yield _columns(means, part), None if scales is None else _columns(scales, part)


def _columns(vectors: Sequence[Tensor], part: slice) -> Tensor:
    return torch.stack([v[part] for v in vectors]).T.contiguous().double()


def _scale(q: Posterior) -> Tensor:
    return q.scale if isinstance(q, Gaussian) else q.moments()[1].sqrt()


def _by_weight(
    combine: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    posteriors: Sequence[Posterior],
    reference: Posterior,
) -> Posterior:
    """What `combine` makes of each block, put together in the reference's type.

    Results have their place from the start: small ones kept between large blocks would scatter the memory.
    """
    first, dtype = posteriors[0], reference.mean.dtype
    mean = torch.empty(first.mean.numel(), dtype=dtype, device=first.mean.device)
    scale = None if isinstance(first, Point) else torch.empty_like(mean)
    start = 0
    for block in _blocks(posteriors):
        some, spread = combine(*block)
        end = start + len(some)
        mean[start:end] = some.to(dtype)
        if scale is not None and spread is not None:
            scale[start:end] = spread.to(dtype).clamp(min=LEAST)
        start = end
    mean = mean.reshape(first.mean.shape)
    if scale is None:
        return Point(mean, reference.layout)
    return Gaussian(mean, scale.reshape(first.mean.shape), reference.layout)


def _mixture(shares: Tensor, posteriors: Sequence[Posterior], reference: Posterior) -> Posterior:
    """Means of (mean, scale) by shares [K]."""
    shares = shares.to(posteriors[0].mean.device)

    def mixed(means: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return means @ shares, None if scales is None else scales @ shares

    return _by_weight(mixed, posteriors, reference)


def mixtures(shares: Tensor, posteriors: Sequence[Posterior]) -> list[Posterior]:
    """One mean of (mean, scale) for each row of shares [..., K], in the posteriors' own type."""
    first, shares = posteriors[0], shares.to(posteriors[0].mean.device)
    kinds = 1 if isinstance(first, Point) else 2
    room = torch.empty(kinds, len(shares), first.mean.numel(), dtype=first.mean.dtype, device=first.mean.device)
    start = 0
    for block in _blocks(posteriors):
        end = start + len(block[0])
        for kind, values in enumerate(block):
            if values is not None:
                room[kind, :, start:end] = (values @ shares.T).T.to(room)
        start = end
    means = [mean.reshape(first.mean.shape) for mean in room[0]]
    if kinds == 1:
        return [Point(mean, first.layout) for mean in means]
    scales = room[1].clamp(min=LEAST).reshape(len(shares), *first.mean.shape)
    return [Gaussian(mean, scale, first.layout) for mean, scale in zip(means, scales)]


def _products(posteriors: Sequence[Posterior]) -> Tensor:
    """Inner products [K, K] of all (mean, scale) about their median.

    Seen from there those who agree are near, and their distances exact, however far off others are.
    """
    total = torch.zeros(len(posteriors), len(posteriors), dtype=torch.float64, device=posteriors[0].mean.device)
    for block in _blocks(posteriors):
        for values in block:
            if values is not None:
                away = (values - _middle(_ordered(values))[:, None]).clamp(-FAR, FAR)
                total += away.T @ away
    return total.cpu()


def _squares(products: Tensor) -> Tensor:
    """Squared distances [K, K] of vectors with these inner products."""
    own = products.diagonal()
    return (own + own[:, None] - 2 * products).clamp(min=0).fill_diagonal_(0)


def distances(posteriors: Sequence[Posterior]) -> Tensor:
    """Distances [K, K] of all posteriors, zero where rounding hides them, as between copies far away."""
    products = _products(posteriors)
    squares, own = _squares(products), products.diagonal()
    return torch.where(squares > ROUNDING * (own + own[:, None]), squares, 0.0).sqrt()


def _weiszfeld(products: Tensor) -> Tensor:
    """The shares of vectors in their geometric median, begun at the origin.

    All in inner products: |x_k - z|^2 = G_kk - 2 (G a)_k + a G a for z = sum_k a_k x_k, so that an iteration costs K^2.
    Distances below a millionth of the median one from the origin count as that.
    """
    own = products.diagonal()
    squares, shares = own, torch.zeros_like(own)
    least = (SMOOTHING * own.sqrt().median()).clamp(min=1 / FAR)
    for _ in range(ITERATIONS):
        pull = squares.clamp(min=0).sqrt().clamp(min=least).reciprocal()
        before, shares = shares, pull / pull.sum()
        if float((shares - before).abs().max()) < TOLERANCE:
            break
        toward = products @ shares
        squares = own - 2 * toward + shares @ toward
    return shares
