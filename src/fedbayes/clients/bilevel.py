"""The client of pFedBayes: a personal posterior held near a copy of the global one, which follows it in turn."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Upload
from fedbayes.clients.optimisers import Optimiser
from fedbayes.clients.schedules import WITHIN
from fedbayes.clients.variational import KL_WEIGHTS
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, Parts, softplus_and_slope, softplus_inverse


class State(NamedTuple):
    """The variational client's state (the personal q), and the copy v of the global posterior with its optimiser's."""

    inner: Any
    copy: dict[str, Tensor]  # mean and rho
    optimiser: Any


def bilevel(inner: Client, *, optimiser: Optimiser, kl: str, within: str = "constant") -> Client:
    """Zhang et al. (2022): q takes a step on  mean NLL + weight * KL(q || v),  then v one on  weight * KL(q || v).

    v starts as the broadcast and is what the client uploads; q is its own, and starts from the broadcast where the
    client has none yet. `inner` is the variational client, whose prior is v. Scalar options: `global_lr`, which follows
    the schedule `within` a round as the inner client's rate does, and those of the inner client.
    """
    weight_of = KL_WEIGHTS[kl]
    (phase,) = inner.phases

    def start(own: Own, info: Info) -> State:
        q = info.broadcast["model"]
        assert isinstance(q, Gaussian)
        copy = {"mean": q.mean, "rho": softplus_inverse(q.scale)}
        return State(inner.start({}, _with(info, own["model"])), copy, optimiser.init(copy))

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        scale, slope = softplus_and_slope(state.copy["rho"])
        v = Gaussian(state.copy["mean"], scale)
        moved = phase.step(state.inner, b, tape, _with(info, v))
        mean, own = moved.vectors["mean"], softplus_and_slope(moved.vectors["rho"])[0]
        # d KL(q || v) / d mean_v = (m_v - m_q) / s_v^2,  d / d scale_v = 1 / s_v - (s_q^2 + (m_q - m_v)^2) / s_v^3.
        away, precision = v.mean - mean, scale.square().reciprocal()
        weight = weight_of(b, info)
        slopes = {
            "mean": weight * precision * away,
            "rho": weight * (1 - precision * (own.square() + away.square())) / scale * slope,
        }
        rate = info.options["global_lr"] * WITHIN[within](b.step / info.batches[0], phase.epochs, info)
        after, copy = optimiser.update(state.optimiser, state.copy, slopes, rate)
        return State(moved, copy, after)

    def finish(state: State, info: Info) -> Upload:
        v = _copy(state, info)
        done = inner.finish(state.inner, _with(info, v))
        return Upload({**done.parts, "model": v}, {"model": done.parts["model"]}, done.metrics)

    return Client(start, (phase._replace(step=step),), finish, lambda broadcast: {"model": broadcast["model"]})


def own_model(client: Client, inner: Client) -> Client:
    """A bi-level client whose upload is its personal posterior."""

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, _with(info, _copy(state, info)))
        return Upload(done.parts, {}, done.metrics)

    return client._replace(finish=finish)


def _copy(state: State, info: Info) -> Gaussian:
    layout = info.broadcast["model"].layout
    return Gaussian(state.copy["mean"], softplus_and_slope(state.copy["rho"])[0], layout)


def _with(info: Info, q: Any) -> Info:
    parts: Parts = {**info.broadcast, "model": q}
    return info._replace(broadcast=parts)
