"""The client that makes a posterior of its classifier its own: by Laplace, or by a flow fitted to its data (pFedPF)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedbayes.clients.cached import Cache
from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.clients.laplace import CLASSIFIER, Finish, Laplace, inside, log_likelihood, means
from fedbayes.clients.optimisers import Optimiser, adam
from fedbayes.model import curvature
from fedbayes.model.classifier import Group
from fedbayes.model.curvature import Sums
from fedbayes.model.gradient import gradients
from fedbayes.noise import Tape, normals
from fedbayes.posterior.flow import Flowed, Radial
from fedbayes.posterior.spliced import Grafted
from fedbayes.posterior.values import FullGaussian, Gaussian, Parts, Point


class Flow(NamedTuple):
    """A chain of radial flows, and how it is fitted: passes over the cached rows, rows and draws in a step."""

    length: int = 10
    epochs: int = 20
    batch: int = 128
    draws: int = 4
    prior: str = "sent"


# What the client's likelihood is multiplied with where the base was sent: name -> what it is.
FLOW_PRIORS = {
    "sent": "the base: what the server sent, in which the client's rows count already",
    "own": "the prior of the client's Laplace posterior: the product is its own posterior, each row counted once",
}


class Looking(NamedTuple):
    """The inner client's state, its rows as the classifier sees them, and sums over them at the weights it has."""

    inner: Any
    cache: Cache
    sums: Sums
    slope: Tensor  # of the log-likelihood in the classifier's weights


class Flowing(NamedTuple):
    """The inner client's state, its rows, the base, mean and root precision of the prior, and the flow so far."""

    inner: Any
    cache: Cache
    base: Any
    prior: tuple[Tensor, Tensor]
    vectors: dict[str, Tensor]
    optimiser: Any
    loss: Tensor
    steps: Tensor


def refine(
    inner: Client, whole: Finish, laplace: Laplace, *, target: Tensor, rows: int, flow: Flow | None = None
) -> Client:
    """`inner`, then the posterior of its classifier; the upload is the whole model with that grafted in.

    The base is, of these, what there is: the posterior that the server sent (`classifier`); the classifier's share of
    a Gaussian over the network; Laplace's at the client's weights. A chain of radial flows then takes it towards
    likelihood * prior  by reverse KL (eqs. 9, 10), the prior being the base itself, or Laplace's own in the last case
    and where `flow.prior` is "own".
    Without `flow` the base predicts, a Gaussian after one Newton step. `target` [1, ...] is shaped as a target, `rows`
    is the most that a client has. Scalar option: `flow_lr`, which falls by a cosine.
    """
    group = laplace.group
    # Drawn here and not by a client: stacked clients would each draw others, by their places in the cohort.
    directions = first_directions(flow.length if flow else 0, group.layout.size)

    def start(own: Own, info: Info) -> Looking:
        begun = inner.start(own, info)
        like = whole(begun, info).parts[group.part].mean
        cache = Cache.empty(group, target, rows if flow else 0, laplace.batch)
        return Looking(begun, cache, curvature.zeros(group, laplace.structure, like), like.new_zeros(group.layout.size))

    def look(state: Looking, b: Batch, tape: Tape, info: Info) -> Looking:
        vectors = means(group, whole(state.inner, info).parts, info)
        vector, seen = group.of(vectors), group.look(vectors, b.x)
        terms, _ = curvature.terms(group, laplace.structure, vector, seen, vectors, b.mask)
        sums = {name: t + terms[name] for name, t in state.sums.items()}
        slope = state.slope + grad(log_likelihood)(vector, group, seen, b.y, b.mask, vectors)
        cache = state.cache.add(seen, b) if flow else state.cache
        return Looking(state.inner, cache, sums, slope)

    def base_of(state: Looking, info: Info) -> tuple[Any, Any]:
        """The base, and the prior that the client's likelihood is multiplied with."""
        parts = whole(state.inner, info).parts
        q = parts[group.part]
        mean = group.of(means(group, parts, info))
        sent = info.broadcast.get(CLASSIFIER)
        if sent is not None and (flow is None or flow.prior == "sent" or laplace.prior == "broadcast"):
            return sent, sent
        if isinstance(q, Gaussian):
            share = Gaussian(mean, group.of({group.part: q.scale}), group.layout)
            return share, share
        precision = laplace.prior_of(state.sums, mean, info).to(mean.dtype)
        prior = Gaussian(torch.zeros_like(mean), precision.rsqrt().expand_as(mean), group.layout)
        return laplace.fit(state.sums, mean, info) if sent is None else sent, prior

    def begin(state: Looking, info: Info) -> Flowing:
        assert flow is not None
        base, prior = base_of(state, info)
        vectors = first_flow(base.mean, directions)
        zero = base.mean.new_zeros(())
        return Flowing(
            state.inner,
            state.cache,
            base,
            (prior.mean, root_precision(prior)),
            vectors,
            OPTIMISER.init(vectors),
            zero,
            zero,
        )

    def loss(vectors: dict[str, Tensor], state: Flowing, seen: Tensor, y: Tensor, noise: Tensor, info: Info) -> Any:
        others = means(group, whole(state.inner, info).parts, info)
        draws, log_det = Radial(**vectors).forward(state.base.at(noise))
        fit = vmap(lambda w: log_likelihood(w, group, seen, y, None, others))(draws) / len(y)
        mean, root = state.prior
        away = draws - mean
        white = away * root if root.dim() == 1 else away @ root.mT
        prior = -0.5 * white.square().sum(-1)
        # Up to constants, and for each row: Adam then does not depend on how many there are.
        value = -(fit + (log_det + prior) / info.n).mean()
        return value, value.detach()

    def step(state: Flowing, b: Batch, tape: Tape, info: Info) -> Flowing:
        assert flow is not None
        seen, y = state.cache.draw(flow.batch, tape, info)
        noise = tape(state.base.mean, (flow.draws, group.layout.size))
        slopes, value = gradients(loss, state.vectors, state, seen, y, noise, info)
        done = b.step / (flow.epochs * info.batches[-1])
        rate = info.options["flow_lr"] * 0.5 * (1 + torch.cos(math.pi * done))
        moved, vectors = OPTIMISER.update(state.optimiser, state.vectors, slopes, rate)
        return state._replace(vectors=vectors, optimiser=moved, loss=state.loss + value, steps=state.steps + 1)

    def finish(state: Any, info: Info) -> Upload:
        parts = whole(state.inner, info).parts
        if isinstance(state, Flowing):
            graft = Flowed(state.base, Radial(**state.vectors), group.layout)
            return Upload(grafted(group, parts, graft), {}, {"loss": state.loss / state.steps.clamp(min=1)})
        base, prior = base_of(state, info)
        if CLASSIFIER not in info.broadcast and isinstance(parts[group.part], Gaussian):
            base = newton(curvature.posterior(group, state.sums, base.mean, prior), state.slope)
        return Upload(grafted(group, parts, base), {}, {})

    last = (Phase(step, flow.epochs, flow.batch, begin=begin),) if flow else ()
    phases = (*(inside(phase) for phase in inner.phases), Phase(look, 1, laplace.batch), *last)
    return Client(start, phases, finish, inner.first)


OPTIMISER: Optimiser = adam()


def first_directions(length: int, size: int) -> Tensor:
    """Where the centres of a chain lie at first, [length, size], about a unit away; the same for every client."""
    return normals(length * size, "flow").reshape(length, size) / math.sqrt(size)


def first_flow(centre: Tensor, directions: Tensor) -> dict[str, Tensor]:
    """A chain that leaves everything where it is, with centres in these directions from the base's."""
    zero = centre.new_zeros(len(directions))
    return {"centre": centre + directions.to(centre), "alpha": zero, "beta": zero.clone()}


def root_precision(q: Gaussian | FullGaussian) -> Tensor:
    """R with R^T R = precision: its diagonal [p], or a triangle [p, p]."""
    if isinstance(q, Gaussian):
        return q.scale.reciprocal()
    one = torch.eye(q.mean.shape[-1], dtype=q.mean.dtype, device=q.mean.device)
    return torch.linalg.solve_triangular(q.tril, one, upper=False)


def newton(q: Gaussian | FullGaussian, slope: Tensor) -> Gaussian | FullGaussian:
    """q moved by its covariance times the slope of the log-likelihood at its mean, which is also the prior's."""
    if isinstance(q, Gaussian):
        return Gaussian(q.mean + q.scale.square() * slope, q.scale, q.layout)
    return FullGaussian(q.mean + q.tril @ (q.tril.mT @ slope), q.tril, q.layout)


def grafted(group: Group, parts: Parts, graft: Any) -> Parts:
    """Whole parts in which the group's weights have a posterior of their own."""
    stock = parts[group.part]
    assert isinstance(stock, Point | Gaussian)
    return {**parts, group.part: Grafted(stock, graft, group.places, stock.layout)}
