"""What the direct scores accept: each check returns its arguments in float64, or names the wrong one and the mend."""

import torch
from torch import Tensor

_SUM_SLACK = 1e-3  # Half-precision softmax rows miss one by about this much.


def class_probs(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] whose rows sum to one, and integer labels [N] in 0..C-1."""
    probs, labels = distribution("probs", probs), torch.as_tensor(labels).detach()
    if probs.ndim != 2:
        raise ValueError(f"probs must be [N, C], not {_shape(probs)}. Average the draws first.")
    rows, classes = probs.shape
    if labels.shape != (rows,):
        raise ValueError(
            f"labels must be [{rows}], one per row of probs, not {_shape(labels)}. Were one-hot rows passed?"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, not {labels.dtype}. Convert them with labels.long().")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        first = int(labels[outside][0])
        raise ValueError(
            f"labels must lie in 0..{classes - 1}: {int(outside.sum())} of {rows} do not (first: {first}). "
            "Does the network have fewer outputs than the data has classes?"
        )
    return probs, labels.long()


def distribution(name: str, probs: Tensor) -> Tensor:
    """Probabilities [..., C] of at least two classes whose last axis sums to one."""
    probs = real(name, probs)
    if probs.ndim < 2 or probs.shape[-1] < 2:
        raise ValueError(f"{name} must be [..., C] with at least two classes last, not {_shape(probs)}.")
    _in_unit_interval(name, probs)
    off = float((probs.sum(-1) - 1).abs().max())
    if off > _SUM_SLACK:
        raise ValueError(f"rows of {name} must sum to one: one misses it by {off:.3g}. Take a softmax.")
    return probs


def label_probs(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] of each label on its own, and targets [N, C] of zeros and ones."""
    probs, targets = real("probs", probs), real("targets", targets)
    if probs.ndim != 2:
        raise ValueError(f"probs must be [N, C], one probability per label, not {_shape(probs)}.")
    if targets.shape != probs.shape:
        raise ValueError(
            f"targets must be {_shape(probs)} like probs, not {_shape(targets)}. One-hot the labels first."
        )
    _in_unit_interval("probs", probs)
    if ((targets != 0) & (targets != 1)).any():
        raise ValueError("targets must be zeros and ones. Are these class numbers or soft labels?")
    return probs, targets


def normal(mean: Tensor, scale: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, scale and target of one shape, [N] or [N, D], with positive scale; returned as [N, D]."""
    mean, scale, target = real("mean", mean), real("scale", scale), real("target", target)
    if mean.ndim not in (1, 2):
        raise ValueError(f"mean must be [N] or [N, D], not {_shape(mean)}.")
    for name, value in (("scale", scale), ("target", target)):
        if value.shape != mean.shape:
            raise ValueError(f"{name} must be {_shape(mean)} like mean, not {_shape(value)}. Reshape or expand it.")
    positive("scale", scale)
    rows = len(mean)
    return mean.reshape(rows, -1), scale.reshape(rows, -1), target.reshape(rows, -1)


def positive(name: str, value: Tensor) -> None:
    """Refuse a value with an entry that is not above zero."""
    bad = int((value <= 0).sum())
    if bad:
        raise ValueError(f"{name} must be positive: {bad} of {value.numel()} are not. Was a log-scale passed?")


def ranked(name: str, values: Tensor) -> Tensor:
    """Scores [N] to rank: any real range, infinities too (they rank at the ends), but no NaN."""
    values = torch.as_tensor(values).detach()
    if values.ndim != 1:
        raise ValueError(f"{name} must be [N], one score per sample, not {_shape(values)}.")
    if not len(values):
        raise ValueError(f"{name} is empty: a ranking needs at least one score on either side.")
    if values.isnan().any():
        raise ValueError(f"{name} has {int(values.isnan().sum())} NaN of {len(values)}. Leave those samples out first.")
    return values.double()


def hits(correct: Tensor, like: Tensor) -> Tensor:
    """Zeros and ones (or booleans) [N] that say which predictions were right."""
    correct = torch.as_tensor(correct).detach()
    if correct.shape != like.shape:
        raise ValueError(f"correct must be {_shape(like)} like uncertainty, not {_shape(correct)}.")
    if ((correct != 0) & (correct != 1)).any():
        raise ValueError("correct must be booleans or zeros and ones. Pass predictions == labels.")
    return correct.double()


def real(name: str, value: Tensor) -> Tensor:
    """A finite, non-empty tensor, detached and in float64."""
    value = torch.as_tensor(value).detach()
    if not value.numel():
        raise ValueError(f"{name} is empty, shape {_shape(value)}: there is nothing to score.")
    value = value.double()
    bad = int((~value.isfinite()).sum())
    if bad:
        raise ValueError(f"{name} must be finite: {bad} of {value.numel()} are NaN or infinite. Did the model diverge?")
    return value


def share(name: str, value: float) -> float:
    """A number strictly between zero and one."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, not {value}. Write 0.9 for 90 %.")
    return value


def _in_unit_interval(name: str, value: Tensor) -> None:
    low, high = float(value.min()), float(value.max())
    if low < 0 or high > 1 + _SUM_SLACK:
        raise ValueError(f"{name} must lie in [0, 1], not [{low:.3g}, {high:.3g}]. Were logits passed?")


def _shape(value: Tensor) -> str:
    return str(list(value.shape))
