"""The client of partitioned variational inference: a variational client whose prior leaves its own factor out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Upload
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, Parts, map_tensors, softplus_inverse

LEAST = 1e-3  # of the prior's precision: what a cavity has at least, where factors of others are negative
FALL = 0.9  # of the broadcast's precision: what all clients of a round together may take off it


class State(NamedTuple):
    """The variational client's state, the cavity that it is held near, and the factor it came with."""

    inner: Any
    cavity: Gaussian
    factor: dict[str, Tensor]


FIRST = "first"  # among the constants: where training starts in round 0


def partitioned(inner: Client) -> Client:
    """Bui et al. (2018): from the cavity q / t_k as prior find q_k, send the damped change, keep the new factor.

    upload = q_k^damping * q^(1 - damping),  t_k <- t_k * upload / q,  in natural parameters; the server multiplies q by
    all changes (the rule `dwc` with q as its reference). The constant `first` is where training starts in round 0, for
    a network can't leave a prior that is centred on 0. A weight whose precision would fall by more than its client's
    share of `FALL` is damped further: so the server never meets a precision that it must floor, and the prior times
    all factors is its posterior after every round. Factors are float64: a cavity may be a millionth of the posterior's
    precision.
    Scalar options: `damping`, `prior_scale`, `cohort`.
    """

    def start(own: Own, info: Info) -> State:
        factor = {name: own[name].double() for name in ("precision", "shift")}
        begun = inner.start(own, info)
        first, fresh = info.constants[FIRST], info.round == 0
        vectors = {
            **begun.vectors,
            "mean": torch.where(fresh, first.mean, begun.vectors["mean"]),
            "rho": torch.where(fresh, softplus_inverse(first.scale), begun.vectors["rho"]),
        }
        cavity = without(_gaussian(info.broadcast), factor, LEAST * info.options["prior_scale"].double() ** -2)
        return State(begun._replace(vectors=vectors), cavity, factor)

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        seen = info._replace(broadcast={**info.broadcast, "model": state.cavity})
        return state._replace(inner=phase.step(state.inner, b, tape, seen))

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info._replace(broadcast={**info.broadcast, "model": state.cavity}))
        q, options = _gaussian(info.broadcast), info.options
        upload = towards(q, _gaussian(done.parts), options["damping"].double(), FALL / options["cohort"].double())
        # The factor takes the change as it is sent, rounded: it is what the server adds.
        before, after = _naturals(q), _naturals(upload)
        own = {name: state.factor[name] + after[name] - before[name] for name in state.factor}
        return Upload({**done.parts, "model": upload}, own, done.metrics)

    def nothing(broadcast: Parts) -> Own:
        zero = torch.zeros_like(broadcast["model"].mean, dtype=torch.float64)
        return {"precision": zero, "shift": zero.clone()}

    (phase,) = inner.phases
    return Client(start, (phase._replace(step=step),), finish, nothing)


def without(q: Gaussian, factor: dict[str, Tensor], least: Tensor) -> Gaussian:
    """The cavity q / factor. It holds the prior: where it has less precision than `least`, negative factors of others
    have left nothing to be known but where q is."""
    whole = _naturals(q)
    precision, shift = (whole[name] - factor[name] for name in ("precision", "shift"))
    known = precision > least
    precision = torch.where(known, precision, least)
    mean = torch.where(known, shift / precision, q.mean.double())
    return Gaussian(mean.to(q.mean.dtype), precision.rsqrt().to(q.mean.dtype), q.layout)


def towards(q: Gaussian, fitted: Gaussian, damping: Tensor, fall: Tensor) -> Gaussian:
    """q * (fitted / q)^c with c = damping, or less where more than `fall` of q's precision would go."""
    old, new = (value.scale.double().square().reciprocal() for value in (q, fitted))
    loss = (damping * (old - new)).clamp(min=0)
    part = damping * torch.where(loss > fall * old, fall * old / loss, 1.0)
    precision = old + part * (new - old)
    # From q's own mean: the difference of two large products would lose small moves.
    mean = q.mean.double() + part * new * (fitted.mean.double() - q.mean.double()) / precision
    return Gaussian(mean.to(q.mean.dtype), precision.rsqrt().to(q.mean.dtype), q.layout)


def own_model(client: Client, inner: Client) -> Client:
    """A partitioned client whose upload is the posterior it found, undamped."""

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info._replace(broadcast={**info.broadcast, "model": state.cavity}))
        return Upload(done.parts, {}, done.metrics)

    return client._replace(finish=finish)


def _naturals(q: Gaussian) -> dict[str, Tensor]:
    shift, precision = map_tensors(q, Tensor.double).naturals()
    return {"precision": precision, "shift": shift}


def _gaussian(parts: Parts) -> Gaussian:
    q = parts["model"]
    assert isinstance(q, Gaussian)
    return q
