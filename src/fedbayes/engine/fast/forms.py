"""Which steps an engine has code of its own for, read off a phase: its step, and the network that it trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Phase
from fedbayes.clients.ivon import IvonStep
from fedbayes.clients.point import PointStep
from fedbayes.clients.variational import VariationalStep, chain_for
from fedbayes.model.chain import chain_of
from fedbayes.posterior.values import LOG_2PI


class Dense(NamedTuple):
    """Gradient descent on the mean NLL of linear maps with functions between them."""

    layers: tuple[tuple[int, int, bool], ...]  # inputs, outputs, whether it has a bias; in the order of the vector
    between: tuple[str, ...]  # "relu", "tanh" or "sigmoid", after each layer but the last
    inputs: Callable[[Tensor], Tensor]  # stored rows as the network sees them
    dtype: torch.dtype  # of the weights
    scale: float | None  # of the normal likelihood; None: classes
    momentum: float
    pull: tuple[str, ...]
    clip: bool
    falling: int  # epochs within which the learning rate falls to 0; 0: it does not
    private: bool = False  # whether rows' gradients are shortened and noise is added


class Newton(NamedTuple):
    """How a natural-gradient step goes."""

    curvature: str  # "average" or "price"
    implicit: bool
    remembers: bool


class Bayes(NamedTuple):
    """Descent on the expected NLL of normals over linear maps with functions between them, and their KL to a prior.

    By local reparameterisation: the noise is that of the layers' outputs. By gradients, or by natural ones (`newton`).
    Of `points` there is neither noise nor a KL: their one draw is their NLL. Points of a natural step are draws of the
    weights, made and moved elsewhere.
    """

    layers: tuple[tuple[int, int, bool], ...]  # as of Dense
    between: tuple[str, ...]
    inputs: Callable[[Tensor], Tensor]
    scale: float | None
    momentum: float
    draws: int
    kl: str
    prior: str
    epochs: int
    falling: bool
    newton: Newton | None = None
    points: bool = False

    @property
    def kind(self) -> str:
        """What the weights are, as the kernels have it."""
        return "points" if self.points else "scales" if self.newton is None else "precisions"

    @property
    def drawn(self) -> bool:
        """Whether the points are draws of the weights."""
        return self.points and self.newton is not None


class Rowwise(NamedTuple):
    """Plain gradient descent on one row's squared error, of a network with at most one hidden layer, of ReLU."""

    hidden: int  # units of the hidden layer; 0: a linear map
    inputs: Callable[[Tensor], Tensor]  # stored rows as the network sees them
    sharpness: float  # 1 / scale^2: the loss is sharpness / 2 * (target - output)^2 + constant
    constant: float
    clip: bool
    falling: bool  # whether the learning rate falls to 0 within the phase


def dense(phase: Phase) -> Dense | None:
    """The form of a point client's step on linear maps; None for any other."""
    step = phase.step
    if not isinstance(step, PointStep) or phase.batches != 1 or step.adversarial or step.optimiser.momentum is None:
        return None
    chain = chain_of(step.model)
    if chain is None:
        return None
    return Dense(
        chain.layers,
        chain.between,
        chain.inputs,
        step.model.dtype,
        chain.scale,
        step.optimiser.momentum,
        step.pull,
        step.clip,
        step.epochs if step.falling else 0,
        phase.private,
    )


def bayes(phase: Phase) -> Bayes | None:
    """The form of a variational client's step on linear maps; None for any other."""
    step = phase.step
    if not isinstance(step, VariationalStep | IvonStep) or phase.batches != 1 or phase.private:
        return None
    chain = chain_for(step.model, step.estimation)
    if chain is None or step.model.dtype != torch.float32:
        return None
    form = Bayes(*chain, 0.0, step.draws, step.kl, step.prior, step.epochs, step.falling)
    if isinstance(step, VariationalStep):
        return None if step.optimiser.momentum is None else form._replace(momentum=step.optimiser.momentum)
    if step.opposite or step.clips or step.curvature == "squared" or step.prior != "fixed":
        return None
    return form._replace(newton=Newton(step.curvature, step.implicit, step.remembers))


def points(phase: Phase) -> Bayes | None:
    """The form of a point client's step on linear maps down its NLL alone; None for any other."""
    form = dense(phase)
    if form is None or form.private or form.pull or form.clip or form.dtype != torch.float32:
        return None
    chain, falling = (form.layers, form.between, form.inputs, form.scale), form.falling
    return Bayes(*chain, form.momentum, 1, "", "", max(1, falling), falling > 0, points=True)


def drawn(phase: Phase) -> IvonStep | None:
    """An IVON step by one draw of the weights, which is all the noise that it reads; None for any other."""
    step = phase.step
    if not isinstance(step, IvonStep) or not step.alone or phase.batches != 1 or step.points:
        return None
    model, simple = step.model, not (step.opposite or step.clips or step.curvature == "squared")
    only = step.estimation.normals == model.layouts["model"].size
    return step if simple and only and model.dtype == torch.float32 else None


def drawn_chain(phase: Phase) -> Bayes | None:
    """The form of such a step on linear maps, whose gradient is that of points; None for any other."""
    step = drawn(phase)
    chain = None if step is None else chain_of(step.model)
    if step is None or chain is None:
        return None
    newton = Newton(step.curvature, step.implicit, step.remembers)
    return Bayes(*chain, 0.0, 1, step.kl, "", step.epochs, step.falling, newton, points=True)


def rowwise(phase: Phase) -> Rowwise | None:
    """The form of such a step on single rows, where the network is small and the error squared; None for any other."""
    form = dense(phase)
    if form is None or form.private or form.scale is None or (phase.batch, form.dtype) != (1, torch.float32):
        return None
    plain = not form.momentum and not form.pull and form.falling in (0, phase.epochs)
    small = form.between in ((), ("relu",)) and form.layers[-1][1] == 1 and all(bias for _, _, bias in form.layers)
    if not (plain and small):
        return None
    constant = math.log(form.scale) + 0.5 * LOG_2PI
    hidden = form.layers[0][1] if form.between else 0
    return Rowwise(hidden, form.inputs, form.scale**-2, constant, form.clip, form.falling > 0)
