"""Laplace's approximation: the generalised Gauss-Newton matrix of a group of weights, and the posterior it gives.

Daxberger et al. (2021). G = sum_n J_n^T L_n J_n with the Jacobian J_n of the outputs and the curvature L_n of the
negative log-likelihood in them. Sums over rows add, so that one pass over the data in batches is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from fedbayes.errors import InputError
from fedbayes.model.classifier import Group, Vectors
from fedbayes.model.likelihood import Likelihood, Weights
from fedbayes.posterior.full import FullGaussian, from_precision
from fedbayes.posterior.values import Gaussian

Sums = dict[str, Tensor]
STRUCTURES = {
    "diag": "the diagonal",
    "kron": "Kronecker factors: of features, and of outputs (of a linear classifier)",
    "full": "all of it",
}
PRECISIONS = (1e-2, 1e6)  # between which the evidence chooses a prior precision
HALVINGS = 60


def of_outputs(likelihood: Likelihood, output: Tensor, parameters: Weights) -> Tensor:
    """Curvature [B, C, C] of the negative log-likelihood in the outputs [B, C]."""
    mean, variance = likelihood.moments(output, parameters)
    if likelihood.kind == "classes":
        return torch.diag_embed(mean) - mean[..., :, None] * mean[..., None, :]
    return torch.diag_embed(variance if likelihood.kind == "labels" else variance.reciprocal())


def check_curvature(group: Group, structure: str) -> None:
    """Refuse what has no such curvature, before any training."""
    likelihood = group.model.likelihood
    fixed = likelihood.scale is not None or likelihood.parameters
    if likelihood.kind == "survival" or (likelihood.kind == "real" and (likelihood.width != 1 or not fixed)):
        raise InputError("laplace: this likelihood's curvature is not known; use classes, labels or a normal")
    if structure == "kron" and not group.linear:
        raise InputError("hessian: kron is for the network's last linear map; use diag or full for other weights")


def zeros(group: Group, structure: str, like: Tensor) -> Sums:
    """The sums before any row; matrices in float64: rounding in float32 can be larger than the prior's precision."""
    size, shape = group.layout.size, group.layout.shapes[0]
    if structure == "kron":
        outputs, inputs = shape
        shapes: dict[str, tuple[int, ...]] = {"inputs": (inputs, inputs), "outputs": (outputs, outputs), "rows": ()}
    else:
        shapes = {structure: (size,) if structure == "diag" else (size, size)}
    dtype = like.dtype if structure == "diag" else torch.float64
    return {name: like.new_zeros(s, dtype=dtype) for name, s in shapes.items()}


def terms(
    group: Group, structure: str, vector: Tensor, seen: Tensor, vectors: Vectors, mask: Tensor | None
) -> tuple[Sums, Tensor]:
    """A batch's terms of the sums, and its outputs [B, C]."""
    output = group.output(vector, seen, vectors)
    precise = output if structure == "diag" else output.double()
    curvature = of_outputs(group.model.likelihood, precise, group.model.weights(vectors))
    if mask is not None:
        # where, not a product: a padded row may be inf or nan.
        curvature = torch.where(mask[:, None, None], curvature, 0)
        seen = torch.where(mask.reshape([-1] + [1] * (seen.dim() - 1)), seen, 0)
    if group.linear and structure == "kron":
        features = seen.to(curvature.dtype)
        rows = features.new_full((), len(features)) if mask is None else mask.sum().to(features.dtype)
        return {"inputs": features.mT @ features, "outputs": curvature.sum(0), "rows": rows}, output
    if group.linear:
        return {structure: _of_linear(structure, seen.to(curvature.dtype), curvature, group.bias)}, output
    jacobian = jacrev(lambda v: group.output(v, seen, vectors))(vector).to(curvature.dtype)
    half = torch.einsum("bcd,bdp->bcp", curvature, jacobian)
    subscripts = "bcp,bcp->p" if structure == "diag" else "bcp,bcq->pq"
    return {structure: torch.einsum(subscripts, jacobian, half)}, output


def _of_linear(structure: str, features: Tensor, curvature: Tensor, bias: bool) -> Tensor:
    """The terms of a linear map without Jacobians: sum_n L_n x (f_n f_n^T), f_n the features and 1 for the bias."""
    outputs, inputs = curvature.shape[-1], features.shape[-1]
    if structure == "diag":
        each = torch.diagonal(curvature, dim1=-2, dim2=-1)
        weight = (each.mT @ features.square()).flatten()
        return torch.cat([weight, each.sum(0)]) if bias else weight
    if bias:
        features = torch.cat([features, features.new_ones(len(features), 1)], -1)
    size = features.shape[-1]
    pairs = (features[:, :, None] * features[:, None, :]).flatten(1)
    whole = (curvature.flatten(1).mT @ pairs).reshape(outputs, outputs, size, size)
    whole = whole.transpose(1, 2).reshape(outputs * size, outputs * size)
    # From each row of the weight with its bias to all weights, then all biases.
    numbers = torch.arange(outputs * size, device=whole.device).reshape(outputs, size)
    order = torch.cat([numbers[:, :inputs].flatten(), numbers[:, inputs:].flatten()])
    return whole.index_select(0, order).index_select(1, order)


def matrix(group: Group, sums: Sums) -> Tensor:
    """The Gauss-Newton matrix that the sums stand for, in float64: its diagonal [p], or all of it [p, p].

    Kronecker: the weight's block is  mean(L) x sum(f f^T); the bias has the exact one, and none in common.
    """
    sums = {name: t.double() for name, t in sums.items()}
    if "rows" not in sums:
        (only,) = sums.values()
        return only
    mean = sums["outputs"] / sums["rows"].clamp(min=1)
    weight = torch.kron(mean, sums["inputs"])
    return _blocks(weight, sums["outputs"]) if group.bias else weight


def eigenvalues(group: Group, sums: Sums) -> Tensor:
    """Eigenvalues [p] of the Gauss-Newton matrix; those below zero are rounding."""
    # A client that diverged must reach the check of its upload; the solver would raise an error instead.
    sums = {name: torch.nan_to_num(t.double(), posinf=0, neginf=0) for name, t in sums.items()}
    if "rows" not in sums:
        whole = matrix(group, sums)
        return (whole if "diag" in sums else torch.linalg.eigvalsh(whole)).clamp(min=0)
    outputs, inputs = torch.linalg.eigvalsh(sums["outputs"]), torch.linalg.eigvalsh(sums["inputs"])
    weight = (outputs[:, None] * inputs / sums["rows"].clamp(min=1)).flatten()
    return (torch.cat([weight, outputs]) if group.bias else weight).clamp(min=0)


def _blocks(first: Tensor, second: Tensor) -> Tensor:
    top = torch.cat([first, first.new_zeros(len(first), len(second))], 1)
    return torch.cat([top, torch.cat([first.new_zeros(len(second), len(first)), second], 1)])


def log_evidence(log_likelihood: Tensor, values: Tensor, precision: Tensor, distance: Tensor) -> Tensor:
    """Laplace's log marginal likelihood under a prior N(m0, I / precision); distance = |w - m0|^2 at the mode w.

    log p(D | w) - precision / 2 distance + p / 2 log precision - 1/2 sum_i log(value_i + precision)
    """
    determinants = torch.log1p(values / precision).sum(-1)
    return log_likelihood - 0.5 * (precision * distance + determinants)


def fitted_precision(values: Tensor, distance: Tensor) -> Tensor:
    """The prior precision of the highest evidence, between `PRECISIONS`; values are G's eigenvalues [p].

    Its derivative in log precision, sum_i v_i / (v_i + precision) - precision distance, only falls: by bisection.
    Data without information (no curvature) give the least precision, weights at the prior's mean the largest.
    """
    low, high = (values.new_full((), bound).log() for bound in PRECISIONS)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        precision = middle.exp()
        rising = (values / (values + precision)).sum(-1) > precision * distance
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    return (0.5 * (low + high)).exp()


def posterior(group: Group, sums: Sums, mean: Tensor, prior: Any) -> Gaussian | FullGaussian:
    """The normal at `mean` with precision  G + that of the prior: a number, a Gaussian or a FullGaussian."""
    whole = matrix(group, sums)
    if isinstance(prior, FullGaussian):
        if whole.dim() == 1:
            whole = whole.diag()
        whole = whole + torch.cholesky_inverse(prior.tril.double())
    else:
        added = prior.naturals()[1].double() if isinstance(prior, Gaussian) else prior.double().expand_as(mean)
        whole = whole + (added if whole.dim() == 1 else added.diag())
    if whole.dim() == 1:
        return Gaussian(mean, whole.rsqrt().to(mean.dtype), group.layout)
    return FullGaussian(mean, from_precision(whole).to(mean.dtype), group.layout)
