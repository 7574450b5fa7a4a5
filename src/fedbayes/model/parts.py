"""Into which parts the weights and buffers of a network fall: trained, beside them, or standing still."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fedbayes.model.likelihood import Likelihood, Weights
from fedbayes.posterior.layout import matches

FROZEN = "frozen"
STATIC = ("buffers", "counters")  # parts that training does not differentiate, in any network


def is_static(part: str) -> bool:
    """Whether a part, of whichever network, is one that training does not differentiate."""
    return part.rpartition(".")[2] in STATIC


def points_by_default(module: nn.Module, likelihood: Likelihood) -> list[str]:
    """Weights that are points unless asked otherwise: BatchNorm's scale and shift, and the likelihood's own."""
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        for name, _ in layer.named_parameters(recurse=False)
    ]
    return names + [f"likelihood.{name}" for name in likelihood.parameters]


def parameters_of(module: nn.Module, likelihood: Likelihood) -> dict[str, Tensor]:
    """All weights by name, the likelihood's own among them."""
    own = {n: p.detach() for n, p in module.named_parameters()}
    clash = next((n for n in own if n.startswith("likelihood.")), None)
    if clash:
        raise ValueError(f"the network has a weight {clash!r}, a name that likelihoods use; rename that attribute")
    device = next(iter(own.values())).device if own else None
    return own | {f"likelihood.{n}": p.detach().to(device) for n, p in likelihood.parameters.items()}


def travels(buffer: Tensor) -> bool:
    """Whether a buffer can be averaged and sent; a mask of -inf or complex rotations are the module's own constants."""
    return not buffer.is_complex() and bool(buffer.isfinite().all())


def refuse_strays(patterns: Iterable[str], weights: Weights, what: str) -> None:
    """Refuse a pattern that no weight's name matches."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in weights):
            raise ValueError(
                f"{what}: no weight matches {pattern!r}; the network has {', '.join(list(weights)[:8])}, ..."
            )
