"""Point clients that keep a linear term of their loss: FedDyn and FedLap (ADMM of points), and SCAFFOLD's control."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Phase, Upload
from fedbayes.clients.point import LINEAR
from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts, Point

PART = "model"
CONTROL = "control"  # the part that holds the server's control variate


class State(NamedTuple):
    """The inner client's state, and the vector that it came with."""

    inner: Any
    kept: Tensor


def with_dual(inner: Client, *, per_row: bool) -> Client:
    """Minimises  mean NLL + (v . w + rho / 2 |w - broadcast|^2) / rows,  then  v += gamma * rho * (w - broadcast).

    `per_row`: rho is in units of rows, as the precision of a posterior (FedLap; Swaroop et al., 2025); else rows = 1
    (FedDyn; Acar et al., 2021). The inner client is a point client that reads `proximal` and the linear term. Scalar
    options: `rho`, `gamma`.
    """

    def told(dual: Tensor, info: Info) -> Info:
        rows = info.n.to(dual.dtype) if per_row else 1.0
        options = {**info.options, "proximal": info.options["rho"] / rows}
        return info._replace(options=options, constants={**info.constants, LINEAR: {PART: dual / rows}})

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info)
        move = done.parts[PART].mean - info.broadcast[PART].mean
        dual = state.kept + info.options["gamma"] * info.options["rho"] * move
        residual = {"primal_residual": move.square().mean().sqrt()}
        return Upload(done.parts, {"dual": dual}, {**done.metrics, **residual})

    return _keeping(inner, "dual", told, finish)


def with_control(inner: Client) -> Client:
    """SCAFFOLD: steps along  gradient - c_k + c,  then  c_k += (broadcast - w) / (steps * lr) - c  (its option II).

    Karimireddy et al. (2020). c is the part `control`; the client sends c plus the change of c_k. Plain descent at a
    constant rate.
    """

    def told(own: Tensor, info: Info) -> Info:
        return info._replace(constants={**info.constants, LINEAR: {PART: info.broadcast[CONTROL].mean - own}})

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info)
        common = info.broadcast[CONTROL]
        walked = state.inner.steps.clamp(min=1) * info.options["lr"]
        change = (info.broadcast[PART].mean - done.parts[PART].mean) / walked - common.mean
        parts = {**done.parts, CONTROL: Point(common.mean + change, common.layout)}
        return Upload(parts, {"control": state.kept + change}, done.metrics)

    return _keeping(inner, "control", told, finish)


def _keeping(inner: Client, name: str, told: Any, finish: Any) -> Client:
    """The inner client with a vector of its own, zero at first, of which its steps are told."""

    def start(own: Own, info: Info) -> State:
        return State(inner.start({}, info), own[name])

    def stepping(phase: Phase) -> Phase:
        def step(state: State, b: Any, tape: Tape, info: Info) -> State:
            return state._replace(inner=phase.step(state.inner, b, tape, told(state.kept, info)))

        return phase._replace(step=step)

    def nothing(broadcast: Parts) -> Own:
        return {name: torch.zeros_like(broadcast[PART].mean)}

    return Client(start, tuple(map(stepping, inner.phases)), finish, nothing)
