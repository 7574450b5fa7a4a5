"""Bayesian linear regression: the conjugate posterior of a linear model, and its precisions by the evidence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.errors import InputError


class Linear(NamedTuple):
    """N(mean, covariance) over the weights of a linear model whose last weight is the bias, and the noise precision."""

    mean: Tensor  # [F + 1]
    covariance: Tensor  # [F + 1, F + 1]
    noise_precision: float
    prior_precision: float

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [N] of the targets of inputs [N, F]: phi^T mean, phi^T covariance phi + 1 / beta."""
        phi = _with_bias(x)
        return phi @ self.mean, (phi @ self.covariance * phi).sum(1) + 1 / self.noise_precision


def bayesian_linear(
    x: Tensor,
    y: Tensor,
    *,
    prior_precision: float = 1.0,
    noise_precision: float | None = None,
    evidence: bool = False,
    rounds: int = 1000,
) -> Linear:
    """The posterior under w ~ N(0, 1 / alpha) and y ~ N(w^T phi, 1 / beta), for inputs [N, F] and targets [N].

    covariance^-1 = alpha I + beta phi^T phi, mean = beta covariance phi^T y (Bishop, 2006, eqs. 3.53, 3.54). beta is
    1 / the residual variance of that mean unless given. `evidence`: alpha and beta by MacKay's fixed point,
    gamma = sum_i beta l_i / (alpha + beta l_i), alpha = gamma / |mean|^2, 1 / beta = |y - phi mean|^2 / (N - gamma).
    """
    phi, y = _with_bias(x), y.double().reshape(-1)
    if len(phi) != len(y) or not len(y):
        raise InputError(f"x has {len(phi)} rows and y {len(y)}: a linear regression needs one target for each input")
    alpha = float(prior_precision)
    # A target without variance would ask for infinite precision.
    floor = 1e-12 + 1e-12 * float(y.square().mean())
    beta = noise_precision or 1 / max(float(y.var(correction=0)), floor)
    values, vectors = torch.linalg.eigh(phi.T @ phi)
    values = values.clamp(min=0)
    turned = vectors.T @ (phi.T @ y)
    for _ in range(rounds if evidence or noise_precision is None else 0):
        mean = vectors @ (beta * turned / (alpha + beta * values))
        squares = max(float((y - phi @ mean).square().sum()), floor * len(y))
        new_alpha, new_beta = alpha, len(y) / squares
        if evidence:
            gamma = float((beta * values / (alpha + beta * values)).sum())
            new_alpha = gamma / max(float(mean.square().sum()), floor)
            new_beta = max(len(y) - gamma, floor) / squares
        done = abs(new_beta - beta) <= 1e-10 * beta and abs(new_alpha - alpha) <= 1e-10 * alpha
        alpha, beta = new_alpha, beta if noise_precision is not None and not evidence else new_beta
        if done:
            break
    spread = (alpha + beta * values).reciprocal()
    return Linear(vectors @ (beta * spread * turned), vectors * spread @ vectors.T, beta, alpha)


def _with_bias(x: Tensor) -> Tensor:
    x = x.double().reshape(len(x), -1)
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)
