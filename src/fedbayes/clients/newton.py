"""A client that trains nothing: it says how its likelihood bends at the broadcast, as a normal times the prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.clients.laplace import log_likelihood
from fedbayes.model import curvature
from fedbayes.model.classifier import Group
from fedbayes.model.curvature import Sums
from fedbayes.noise import Tape
from fedbayes.posterior.full import FullGaussian, from_precision
from fedbayes.posterior.layout import Layout

PRECISION = "prior_precision"  # among a round's options, with the name of a tensor: of its weights' prior

STANDS_FOR = "stands_for"  # among a round's options


class State(NamedTuple):
    """Sums over the rows so far: curvature, slope and value of the log-likelihood."""

    sums: Sums
    slope: Tensor
    value: Tensor


def option_of(tensor: str) -> str:
    """The name among a round's options of the prior precision of a named tensor's weights."""
    return f"{PRECISION}.{tensor}"


def prior_precision(layout: Layout, options: Mapping[str, Any], like: Tensor) -> Tensor:
    """The prior's precision of each weight [P], in float64."""
    sizes = zip(layout.names, layout.sizes)
    rows = [torch.as_tensor(options[option_of(name)]).to(like).double().expand(size) for name, size in sizes]
    return torch.cat(rows)


def newton(group: Group, batch: int) -> Client:
    """One pass over the rows at the broadcast mean m: Gauss-Newton matrix G and slope g of the log-likelihood.

    The upload is the normal with precision  G + prior  and  precision * mean = G m + g: the client's quadratic
    likelihood times the prior N(0, 1 / prior_precision). The product of all over K - 1 priors is one Newton step of
    the posterior of all rows. In float64: an inverse in float32 would lose the larger precisions. Both sums are
    multiplied by the option `stands_for`: the clients of the federation that one of the cohort stands for.
    """
    layout = group.layout

    def start(own: Own, info: Info) -> State:
        like = info.broadcast[group.part].mean
        zero = like.new_zeros((), dtype=torch.float64)
        return State(curvature.zeros(group, "full", like), zero.expand(layout.size).clone(), zero)

    def look(state: State, b: Batch, tape: Tape, info: Info) -> State:
        vectors = {group.part: info.broadcast[group.part].mean, **group.model.frozen_in(info.constants)}
        vector, seen = group.of(vectors), group.look(vectors, b.x)
        terms, _ = curvature.terms(group, "full", vector, seen, vectors, b.mask)
        slope = grad(log_likelihood)(vector, group, seen, b.y, b.mask, vectors)
        value = log_likelihood(vector, group, seen, b.y, b.mask, vectors)
        sums = {name: t + terms[name] for name, t in state.sums.items()}
        return State(sums, state.slope + slope.double(), state.value + value.double())

    def finish(state: State, info: Info) -> Upload:
        m = info.broadcast[group.part].mean.double()
        times = info.options[STANDS_FOR].to(m)
        curved = times * curvature.matrix(group, state.sums)
        tril = from_precision(curved + prior_precision(layout, info.options, m).diag())
        mean = tril @ (tril.mT @ (curved @ m + times * state.slope))
        loss = -state.value / info.n.clamp(min=1)
        return Upload({group.part: FullGaussian(mean, tril, layout)}, {}, {"loss": loss.to(torch.float32)})

    return Client(start, (Phase(look, 1, batch),), finish)
