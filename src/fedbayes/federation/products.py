"""The product of normals with full covariances over references, as a sum: statistics and what they decode to."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbayes.federation.moves import unit_scale
from fedbayes.posterior.full import FullGaussian, from_precision
from fedbayes.posterior.values import Posterior

FLOOR = 0.01  # of the reference's precision: the least that is left in any direction


def full_naturals(q: Posterior, weight: Tensor, reference: Posterior) -> dict[str, Tensor]:
    """Precision [P, P] and precision times mean, about the reference's mean and in units of its scales, in float64."""
    assert isinstance(q, FullGaussian)
    unit = unit_scale(reference)
    d = (q.mean.double() - reference.mean.double()) / unit
    tril = q.tril.double() / unit[:, None]
    # Two triangles are solved: an inverse by cholesky_inverse loses digits where scales differ much.
    half = torch.linalg.solve_triangular(tril, torch.eye(len(d), dtype=d.dtype, device=d.device), upper=False)
    precision = half.mT @ half
    one = torch.ones_like(weight.double())
    return {"precision": precision, "shift": precision @ d, "weight": one, "count": one}


def full_product(total: dict[str, Tensor], reference: Posterior) -> FullGaussian:
    """The normal with precision  sum - (count - 1) * reference's  and the shift that goes with it.

    In directions in which less than `FLOOR` of the reference's precision would be left, it has that and the reference's
    mean: so that it is a distribution whatever was sent.
    """
    unit, dtype = unit_scale(reference), reference.mean.dtype
    root = reference.tril.double() / unit[:, None] if isinstance(reference, FullGaussian) else torch.eye(len(unit))
    root = root.to(unit)
    known = root.mT @ total["precision"] @ root  # in units in which the reference is standard normal
    values, vectors = torch.linalg.eigh(0.5 * (known + known.mT))
    values = values - (total["count"] - 1)
    low = values < FLOOR
    values = torch.where(low, FLOOR, values)
    along = vectors.mT @ (root.mT @ total["shift"])
    mean = root @ (vectors @ torch.where(low, 0.0, along / values))
    back = unit[:, None] * root @ vectors  # covariance = back values^-1 back^T
    half = torch.linalg.qr((back * values.rsqrt()).mT).R.mT  # its triangle, without forming the product
    tril = half * torch.where(torch.diagonal(half) < 0, -1.0, 1.0)
    return FullGaussian((reference.mean.double() + unit * mean).to(dtype), tril.to(dtype), reference.layout)


def with_precision(q: FullGaussian, before: Tensor, after: Tensor) -> FullGaussian:
    """q with another prior N(0, 1 / precision): `before` and `after` are its precisions [P]; in q's own dtype."""
    shift, precision = _naturals(q)
    return _normal(shift, precision + (after - before).diag(), q)


def with_likelihood(q: FullGaussian, prior: Tensor, times: float) -> FullGaussian:
    """q with its likelihood to the power `times`; `prior` are the precisions [P] of its prior N(0, 1 / precision)."""
    shift, precision = _naturals(q)
    return _normal(times * shift, times * precision + (1 - times) * prior.diag(), q)


def _naturals(q: FullGaussian) -> tuple[Tensor, Tensor]:
    shift, precision = FullGaussian(q.mean.double(), q.tril.double()).naturals()
    return shift.double(), precision.double()


def _normal(shift: Tensor, precision: Tensor, like: FullGaussian) -> FullGaussian:
    tril = from_precision(precision)
    return FullGaussian((tril @ (tril.mT @ shift)).to(like.mean), tril.to(like.mean), like.layout)
