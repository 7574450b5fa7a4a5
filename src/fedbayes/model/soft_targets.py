"""Soft targets: one network's predictions, and the loss of another network that learns to give them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.model.likelihood import Likelihood, Weights


def soft_targets(likelihood: Likelihood, output: Tensor, weights: Weights) -> Tensor:
    """The predictive distribution of outputs [..., B, C] as targets [..., B, S, C].

    Probabilities of classes or labels, or survival curves (S = 1), or mean and variance of real targets (S = 2).
    """
    mean, variance = likelihood.moments(output, weights)
    return mean[..., None, :] if likelihood.kind != "real" else torch.stack([mean, variance], -2)


def mixed(likelihood: Likelihood, targets: Tensor) -> Tensor:
    """Targets [M, B, S, C] of an ensemble's members as those of their equal mixture, [B, S, C]."""
    centre = targets.mean(0)
    if likelihood.kind != "real":
        return centre
    spread = targets[:, :, 0].var(0, correction=0)
    return torch.stack([centre[:, 0], centre[:, 1] + spread], -2)


def sharpened(likelihood: Likelihood, targets: Tensor, temperature: float) -> Tensor:
    """Class probabilities to the power 1 / temperature, normalised; other targets as they are."""
    if likelihood.kind != "classes" or temperature == 1:
        return targets
    return (targets.clamp(min=1e-30).log() / temperature).softmax(-1)


def cross_entropy(likelihood: Likelihood, output: Tensor, weights: Weights, targets: Tensor) -> Tensor:
    """E[-log p(y | output)] over y from the soft targets [B, S, C], one number for each row.

    Classes: -sum_c t_c log p_c; so too for the interval of an event. Labels: the same for each label. Real: that of one
    normal under another.
    """
    if likelihood.kind == "classes":
        return -(targets[:, 0] * output.log_softmax(-1)).sum(-1)
    if likelihood.kind == "labels":
        return F.binary_cross_entropy_with_logits(output, targets[:, 0], reduction="none").sum(-1)
    mean, variance = likelihood.moments(output, weights)
    if likelihood.kind == "survival":
        return -(_deaths(targets[:, 0]) * _deaths(mean).clamp(min=1e-12).log()).sum(-1)
    if likelihood.scale is None and likelihood.width == 1 and not likelihood.parameters:
        return 0.5 * (mean - targets[:, 0]).square().sum(-1)  # of a likelihood of the user's own no variance is known
    gap = (mean - targets[:, 0]).square() + targets[:, 1]
    return 0.5 * (gap / variance + variance.log()).sum(-1)


def _deaths(curve: Tensor) -> Tensor:
    """The chances of an event in each interval, and of none, from curves [B, J]."""
    one, none = torch.ones_like(curve[:, :1]), torch.zeros_like(curve[:, :1])
    return torch.cat([one, curve], -1) - torch.cat([curve, none], -1)


def mean_over_live(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of one number per row over the live rows of a batch."""
    if mask is None:
        return rows.mean()
    return torch.where(mask, rows, 0).sum() / mask.to(rows.dtype).sum().clamp(min=1)
