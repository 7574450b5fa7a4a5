"""A client that also sends Laplace's posterior of a group of its weights: the classifier, from cached features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.model import curvature
from fedbayes.model.classifier import Group
from fedbayes.model.curvature import Sums
from fedbayes.noise import Tape
from fedbayes.posterior.values import FullGaussian, Gaussian, Parts

CLASSIFIER = "classifier"  # the part that holds the group's own posterior, beside the network
Finish = Callable[[Any, Info], Upload]

# Where the prior of the group's weights comes from: name -> what it is.
PRIORS = {
    "evidence": "N(0, I / precision) with the precision of the highest evidence",
    "fixed": "N(0, I / prior_precision)",
    "broadcast": "the posterior that the server sent",
}


class Laplace(NamedTuple):
    """How a group's posterior is fitted: structure of the curvature, its prior, rows in a batch."""

    group: Group
    structure: str = "kron"
    prior: str = "evidence"
    batch: int = 500

    def fit(self, sums: Sums, mean: Tensor, info: Info) -> Gaussian | FullGaussian:
        """The posterior at `mean`."""
        return curvature.posterior(self.group, sums, mean, self.prior_of(sums, mean, info))

    def prior_of(self, sums: Sums, mean: Tensor, info: Info) -> Any:
        """The prior: a precision, or the broadcast posterior."""
        if self.prior == "broadcast":
            return info.broadcast[CLASSIFIER]
        if self.prior == "fixed":
            return info.options["prior_precision"]
        values = curvature.eigenvalues(self.group, sums)
        return curvature.fitted_precision(values, mean.double().square().sum())


class State(NamedTuple):
    """The inner client's state, and the curvature's sums so far."""

    inner: Any
    sums: Sums


def with_laplace(inner: Client, whole: Finish, laplace: Laplace) -> Client:
    """`inner`, then one pass over its rows at the weights it found: the group's posterior is uploaded beside them.

    `whole(state, info)` gives the inner client's whole network, also where some of it stays home. The posterior has
    the found weights as its mean, and the inverse of  Gauss-Newton matrix + prior precision  as its covariance.
    """
    group = laplace.group

    def start(own: Own, info: Info) -> State:
        begun = inner.start(own, info)
        like = whole(begun, info).parts[group.part].mean
        return State(begun, curvature.zeros(group, laplace.structure, like))

    def look(state: State, b: Batch, tape: Tape, info: Info) -> State:
        vectors = means(group, whole(state.inner, info).parts, info)
        seen = group.look(vectors, b.x)
        terms, _ = curvature.terms(group, laplace.structure, group.of(vectors), seen, vectors, b.mask)
        return state._replace(sums={name: t + terms[name] for name, t in state.sums.items()})

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info)
        mean = group.of(means(group, whole(state.inner, info).parts, info))
        q = laplace.fit(state.sums, mean, info)
        return done._replace(parts={**done.parts, CLASSIFIER: q})

    phases = (*(inside(phase) for phase in inner.phases), Phase(look, 1, laplace.batch))
    return Client(start, phases, finish, inner.first)


def inside(phase: Phase) -> Phase:
    """A phase of an inner client, as one of a client whose state holds the inner one's."""

    def step(state: Any, b: Any, tape: Tape, info: Info) -> Any:
        return state._replace(inner=phase.step(state.inner, b, tape, info))

    def begin(state: Any, info: Info) -> Any:
        assert phase.begin is not None
        return state._replace(inner=phase.begin(state.inner, info))

    return phase._replace(step=step, begin=begin if phase.begin else None)


def means(group: Group, parts: Parts, info: Info) -> dict[str, Any]:
    """The centres of a network's parts, and its frozen weights."""
    centres = {part: parts[part].mean for part in group.model.layouts}
    return {**centres, **group.model.frozen_in(info.constants)}


def log_likelihood(
    vector: Tensor, group: Group, seen: Tensor, y: Tensor, mask: Tensor | None, vectors: dict[str, Any]
) -> Tensor:
    """Summed over the live rows, of the classifier's weights [p]."""
    model = group.model
    rows = model.likelihood.log_prob(group.output(vector, seen, vectors), y, model.weights(vectors))
    return (rows if mask is None else torch.where(mask, rows, 0)).sum()


def standard(group: Group, structure: str, like: Tensor) -> Gaussian | FullGaussian:
    """N(the network's own weights, I) over the group: what is broadcast before anyone has fitted a posterior."""
    mean = group.of(group.model.initial()).to(like)
    if structure == "diag":
        return Gaussian(mean, torch.ones_like(mean), group.layout)
    return FullGaussian(mean, torch.eye(len(mean)).to(like), group.layout)
