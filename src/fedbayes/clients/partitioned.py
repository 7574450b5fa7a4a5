"""The client of partitioned variational inference: a variational client whose prior leaves its own factor out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Upload
from fedbayes.noise import Tape
from fedbayes.posterior import Gaussian, Parts, softplus_inverse

LEAST = 1e-3  # of the broadcast's precision: what a cavity has at least, where factors of others are negative


class State(NamedTuple):
    """The variational client's state, the cavity that it is held near, and the factor it came with."""

    inner: Any
    cavity: Gaussian
    factor: dict[str, Tensor]


def partitioned(inner: Client, *, first: Gaussian) -> Client:
    """Bui et al. (2018): from the cavity q / t_k as prior find q_k, send the damped change, keep the new factor.

    upload = q_k^damping * q^(1 - damping),  t_k <- t_k * upload / q,  in natural parameters; the server multiplies q by
    all changes (the rule `dwc` with q as its reference). `first` is where training starts in round 0, for a network
    can't leave a prior that is centred on 0. Scalar option: `damping`.
    """

    def start(own: Own, info: Info) -> State:
        q = _gaussian(info.broadcast)
        precision = q.scale.square().reciprocal()
        left = torch.maximum(precision - own["precision"], LEAST * precision)
        cavity = Gaussian((precision * q.mean - own["shift"]) / left, left.rsqrt(), q.layout)
        begun = inner.start(own, info)
        fresh = info.round == 0
        vectors = {
            **begun.vectors,
            "mean": torch.where(fresh, first.mean, begun.vectors["mean"]),
            "rho": torch.where(fresh, softplus_inverse(first.scale), begun.vectors["rho"]),
        }
        return State(begun._replace(vectors=vectors), cavity, {"precision": own["precision"], "shift": own["shift"]})

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        seen = info._replace(broadcast={**info.broadcast, "model": state.cavity})
        return state._replace(inner=phase.step(state.inner, b, tape, seen))

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info._replace(broadcast={**info.broadcast, "model": state.cavity}))
        q, found, damping = _gaussian(info.broadcast), _gaussian(done.parts), info.options["damping"]
        old, new = q.scale.square().reciprocal(), found.scale.square().reciprocal()
        change = {"precision": damping * (new - old), "shift": damping * (new * found.mean - old * q.mean)}
        precision = old + change["precision"]
        upload = Gaussian((old * q.mean + change["shift"]) / precision, precision.rsqrt(), q.layout)
        own = {name: state.factor[name] + change[name] for name in change}
        return Upload({**done.parts, "model": upload}, own, done.metrics)

    def nothing(broadcast: Parts) -> Own:
        zero = torch.zeros_like(broadcast["model"].mean)
        return {"precision": zero, "shift": zero.clone()}

    (phase,) = inner.phases
    return Client(start, (phase._replace(step=step),), finish, nothing)


def own_model(client: Client, inner: Client) -> Client:
    """A partitioned client whose upload is the posterior it found, undamped."""

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info._replace(broadcast={**info.broadcast, "model": state.cavity}))
        return Upload(done.parts, {}, done.metrics)

    return client._replace(finish=finish)


def _gaussian(parts: Parts) -> Gaussian:
    q = parts["model"]
    assert isinstance(q, Gaussian)
    return q
