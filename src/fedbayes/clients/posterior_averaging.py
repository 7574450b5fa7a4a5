"""The client of federated posterior averaging (FedPA): a step by the covariance of its own posterior samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Phase, Upload
from fedbayes.noise import Tape
from fedbayes.posterior.values import Point


class State(NamedTuple):
    """The inner client's state, sums of iterates by window [l, P] and how many each holds [l]."""

    inner: Any
    sums: Tensor
    counts: Tensor


def posterior_averaging(inner: Client, *, samples: int, part: str = "model") -> Client:
    """Al-Shedivat et al. (2021) around a client of one phase, whose upload becomes  broadcast - delta.

    After a share `burn_share` of the round's steps the rest is cut into `samples` windows; the mean of each window's
    iterates is one sample (iterate-averaged stochastic gradients). Steps that don't fill a window are left out, and
    with fewer steps than windows there are fewer samples. In rounds with `average` = 0 the last iterate is sent, as
    in FedAvg. Scalar options: those of the inner client, `burn_share`, `shrinkage`, `average`.
    """
    (phase,) = inner.phases

    def start(own: Own, info: Info) -> State:
        begun = inner.start(own, info)
        vector = begun.vectors[part]
        return State(begun, vector.new_zeros(samples, *vector.shape), vector.new_zeros(samples))

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        after = phase.step(state.inner, b, tape, info)
        total = phase.epochs * info.batches[0]
        burn = (info.options["burn_share"] * total).floor()
        length = ((total - burn) / samples).floor().clamp(min=1)
        window = ((b.step - burn) / length).floor()
        here = (torch.arange(samples, device=window.device) == window).to(state.sums.dtype)
        return State(after, state.sums + here[:, None] * after.vectors[part], state.counts + here)

    def finish(state: State, info: Info) -> Upload:
        upload, old = inner.finish(state.inner, info), info.broadcast[part].mean
        drawn = state.sums / state.counts.clamp(min=1)[:, None]
        move = delta(old, drawn, (state.counts > 0).to(old.dtype), info.options["shrinkage"])
        last = upload.parts[part]
        sent = torch.where(info.options["average"] > 0, old - move, last.mean)
        return upload._replace(parts={**upload.parts, part: Point(sent, last.layout)})

    return Client(start, (Phase(step, phase.epochs, phase.batch),), finish, inner.first)


def delta(start: Tensor, samples: Tensor, live: Tensor, shrinkage: Tensor) -> Tensor:
    """Sigma^-1 (start - mean) from samples [l, P] in O(l^2 P), without a P x P matrix.

    Sigma = rho_l I + (1 - rho_l) S, S the samples' covariance (l - 1), rho_l = 1 / (1 + (l - 1) rho), rho the
    `shrinkage`; so Sigma / rho_l = I + rho * sum_t (t - 1) / t u_t u_t^T with u_t = theta_t - mean_(t-1), and each
    term is one Sherman-Morrison update. `live` [l] marks the first samples that count.
    """
    terms: list[tuple[Tensor, Tensor]] = []  # v_t = Sigma_(t-1)^-1 u_t, and gamma_t / (1 + gamma_t u_t^T v_t)
    mean = samples[0]
    for t in range(2, len(samples) + 1):
        u = samples[t - 1] - mean
        v = _solve(terms, u)
        gamma = live[t - 1] * shrinkage * (t - 1) / t
        terms.append((v, gamma / (1 + gamma * (u @ v))))
        mean = mean + live[t - 1] * u / t
    return (1 + (live.sum() - 1) * shrinkage) * _solve(terms, start - mean)


def _solve(terms: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """(I + sum of rank-one terms)^-1 x."""
    return x - sum((strength * (v @ x) * v for v, strength in terms), torch.zeros_like(x))
