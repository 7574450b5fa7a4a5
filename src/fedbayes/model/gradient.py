"""Gradients of a loss by a dict of vectors, the same inside and outside of vmap and compile."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedbayes.model.tracing import alone
from fedbayes.model.trees import mapped

Vectors = dict[str, Tensor]
_STILL = ContextVar("still", default=False)


def gradients(loss: Callable[..., tuple[Tensor, Any]], vectors: Vectors, *rest: Any) -> tuple[Vectors, Any]:
    """d loss / d vectors and what else it gives, for loss(vectors, *rest) -> (value, else).

    Plain autograd where nothing is traced or stacked: it does with a fraction of func.grad's overhead.
    """
    if _STILL.get():
        with torch.no_grad():
            return {name: torch.zeros_like(v) for name, v in vectors.items()}, loss(vectors, *rest)[1]
    if not alone():
        return grad(loss, has_aux=True)(vectors, *rest)
    with torch.enable_grad():
        leaves = {name: v.detach().requires_grad_() for name, v in vectors.items()}
        value, other = loss(leaves, *rest)
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    filled = [torch.zeros_like(v) if g is None else g for v, g in zip(leaves.values(), slopes)]
    return dict(zip(leaves, filled)), mapped(Tensor.detach, other)


def still(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step by gradients of zero, at the cost of its forward pass: it takes BatchNorm's statistics."""

    def forward(*arguments: Any) -> Any:
        before = _STILL.set(True)
        try:
            return step(*arguments)
        finally:
            _STILL.reset(before)

    return forward
