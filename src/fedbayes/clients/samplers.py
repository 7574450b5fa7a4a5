"""Samplers of a posterior by noisy gradients, as pure functions on a dict of vectors.

All are in units of a learning rate: with U the mean negative log-density of one example, n examples and temperature T,
their distribution is exp(-n U / T) for small steps. `heat` is T / n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Vectors = dict[str, Tensor]


class Sampler(NamedTuple):
    """`init(vectors) -> state`; `update(state, vectors, gradients, normals, lr, heat) -> (state, vectors)`."""

    init: Callable[[Vectors], Any]
    update: Callable[[Any, Vectors, Vectors, Vectors, Tensor, Tensor], tuple[Any, Vectors]]


def sgld() -> Sampler:
    """Stochastic gradient Langevin dynamics (Welling & Teh, 2011): theta -= lr / 2 * grad U + N(0, heat * lr)."""

    def update(
        state: Any, vectors: Vectors, gradients: Vectors, normals: Vectors, lr: Tensor, heat: Tensor
    ) -> tuple[Any, Vectors]:
        noise = (heat * lr).sqrt()
        return state, {n: v - 0.5 * lr * gradients[n] + noise * normals[n] for n, v in vectors.items()}

    return Sampler(lambda vectors: {}, update)


def psgld(memory: float = 0.99, least: float = 1e-5) -> Sampler:
    """Preconditioned SGLD (Li et al., 2016): steps and noise are scaled by G = 1 / (least + sqrt(V)).

    V is the running mean of squared gradients. The term of G's own slope is left out, as in the paper: it vanishes
    with `memory` -> 1.
    """

    def init(vectors: Vectors) -> Any:
        zeros = {n: torch.zeros_like(v) for n, v in vectors.items()}
        return {"square": zeros, "weight": next(iter(vectors.values())).new_zeros(())}

    def update(
        state: Any, vectors: Vectors, gradients: Vectors, normals: Vectors, lr: Tensor, heat: Tensor
    ) -> tuple[Any, Vectors]:
        # The weight of what has been seen: without it the first steps of every round would be far too long.
        weight = memory * state["weight"] + 1 - memory
        square = {n: memory * state["square"][n] + (1 - memory) * g.square() for n, g in gradients.items()}
        moved = {}
        for n, v in vectors.items():
            scale = (least + (square[n] / weight).sqrt()).reciprocal()
            moved[n] = v - 0.5 * lr * scale * gradients[n] + (heat * lr * scale).sqrt() * normals[n]
        return {"square": square, "weight": weight}, moved

    return Sampler(init, update)


def sghmc(friction: float = 0.1) -> Sampler:
    """Stochastic gradient Hamiltonian Monte Carlo (Chen et al., 2014), with momentum 1 - friction.

    v = (1 - friction) v - lr / 2 * grad U + N(0, friction * heat * lr), theta += v. With friction 1 it is SGLD.
    A chain begins with v drawn from N(0, heat * lr / (2 - friction)): from rest it would be too narrow for about
    1 / friction steps.
    """

    def init(vectors: Vectors) -> Any:
        resting = {n: torch.zeros_like(v) for n, v in vectors.items()}
        return {"speed": resting, "begun": next(iter(vectors.values())).new_zeros(())}

    def update(
        state: Any, vectors: Vectors, gradients: Vectors, normals: Vectors, lr: Tensor, heat: Tensor
    ) -> tuple[Any, Vectors]:
        # Before the first step v is a draw of its distribution, which friction and noise of a step leave as it is: the
        # sum of both is one normal with that distribution's variance.
        fresh = heat * lr / (2 - friction)
        noise = torch.where(state["begun"] > 0, friction * heat * lr, fresh).sqrt()
        before = state["speed"]
        speed = {n: (1 - friction) * before[n] - 0.5 * lr * gradients[n] + noise * normals[n] for n in vectors}
        return {"speed": speed, "begun": torch.ones_like(state["begun"])}, {n: v + speed[n] for n, v in vectors.items()}

    return Sampler(init, update)


SAMPLERS: dict[str, Callable[..., Sampler]] = {"sgld": sgld, "psgld": psgld, "sghmc": sghmc}
