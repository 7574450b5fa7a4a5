"""Optimisers as pure functions on a dict of vectors: the same numbers for one client or for many stacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Vectors = dict[str, Tensor]


class Optimiser(NamedTuple):
    """`init(vectors) -> state`; `update(state, vectors, gradients, lr) -> (state, vectors)`, in the order they had."""

    init: Callable[[Vectors], Any]
    update: Callable[[Any, Vectors, Vectors, Tensor], tuple[Any, Vectors]]
    momentum: float | None = None  # of gradient descent; None: it is something else


def sgd(momentum: float = 0.0) -> Optimiser:
    """Gradient descent with heavy-ball momentum, v = momentum * v + g, as in torch.optim.SGD."""

    def init(vectors: Vectors) -> Vectors:
        return {n: torch.zeros_like(v) for n, v in vectors.items()} if momentum else {}

    def update(state: Vectors, vectors: Vectors, gradients: Vectors, lr: Tensor) -> tuple[Vectors, Vectors]:
        if momentum:
            gradients = state = {n: momentum * v + gradients[n] for n, v in state.items()}
        return state, {n: torch.addcmul(v, gradients[n], lr, value=-1) for n, v in vectors.items()}

    return Optimiser(init, update, momentum)


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimiser:
    """Adam (Kingma & Ba, 2015), as in torch.optim.Adam."""

    def init(vectors: Vectors) -> Any:
        zeros = {n: torch.zeros_like(v) for n, v in vectors.items()}
        count = next(iter(vectors.values())).new_zeros(())
        return {"first": zeros, "second": dict(zeros), "count": count}

    def update(state: Any, vectors: Vectors, gradients: Vectors, lr: Tensor) -> tuple[Any, Vectors]:
        count = state["count"] + 1
        first = {n: beta1 * v + (1 - beta1) * gradients[n] for n, v in state["first"].items()}
        second = {n: beta2 * v + (1 - beta2) * gradients[n].square() for n, v in state["second"].items()}
        # 1 - beta^count by expm1: in float32 the plain difference loses four digits at the first steps.
        rate = lr / -torch.expm1(count * math.log(beta1))
        root = (-torch.expm1(count * math.log(beta2))).sqrt()
        stepped = {n: v - rate * first[n] / (second[n].sqrt() / root + eps) for n, v in vectors.items()}
        return {"first": first, "second": second, "count": count}, stepped

    return Optimiser(init, update)


OPTIMISERS: dict[str, Callable[..., Optimiser]] = {"sgd": sgd, "adam": adam}
