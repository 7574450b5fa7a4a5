"""Gradients of a loss by a dict of vectors, the same inside and outside of vmap and compile."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedbayes.model.model import Model
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
    return _by_leaves(loss, {name: v.detach() for name, v in vectors.items()}, rest)


def weight_gradients(
    loss: Callable[..., tuple[Tensor, Any]], model: Model, vectors: Vectors, *rest: Any
) -> tuple[Vectors, Any]:
    """The same for loss(weights, *rest) of the named tensors that the vectors of a model's parts are made of.

    Where nothing is traced or stacked these are the leaves: cuts that are differentiated cost a node each.
    """
    if _STILL.get() or not alone():
        return gradients(lambda vectors, *rest: loss(model.weights(vectors), *rest), vectors, *rest)
    cuts = [model.layouts[part].cut(vector.detach()) for part, vector in vectors.items()]
    slopes, other = _by_leaves(loss, model.as_read({name: t for cut in cuts for name, t in cut.items()}), rest)
    return {part: model.layouts[part].flat(slopes) for part in vectors}, other


def _by_leaves(loss: Callable[..., tuple[Tensor, Any]], leaves: Vectors, rest: tuple[Any, ...]) -> tuple[Vectors, Any]:
    """Gradients by tensors that nobody else has."""
    with torch.enable_grad():
        for leaf in leaves.values():
            leaf.requires_grad_()
        value, other = loss(leaves, *rest)
    slopes = _backward(value, tuple(leaves.values()))
    filled = [torch.zeros_like(v) if g is None else g for v, g in zip(leaves.values(), slopes)]
    return dict(zip(leaves, filled)), mapped(Tensor.detach, other)


def _backward(value: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`; on a CPU its engine itself, for the backward pass stays in this thread.

    What other threads would have to know makes every node dearer, a hundredth of a step with convolutions in all.
    """
    if value.is_cpu and value.requires_grad:
        engine, one = torch.autograd.Variable._execution_engine, torch.ones_like(value)
        return engine.run_backward((value,), (one,), False, False, leaves, True, accumulate_grad=False)
    return torch.autograd.grad(value, leaves, allow_unused=True)


def still(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step by gradients of zero, at the cost of its forward pass: it takes BatchNorm's statistics."""

    def forward(*arguments: Any) -> Any:
        before = _STILL.set(True)
        try:
            return step(*arguments)
        finally:
            _STILL.reset(before)

    return forward
