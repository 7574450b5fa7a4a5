"""Observation noise of a regression: what a target's variance holds beyond the disagreement of the networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbayes.federation.program import BY_MEMBERS, FederationState, Program
from fedbayes.model.parts import is_static
from fedbayes.model.predictive import predictive
from fedbayes.posterior.values import Draws, Gaussian, Parts

SMALLEST = 1e-8  # a variance in standardised units; a target without any variance is predicted with this much
VARIANCES = torch.logspace(-4, 0.5, 136, dtype=torch.float64)  # tried, in units of the mean squared residual
FACTORS = {"calibrated": torch.logspace(-1, 1, 21, dtype=torch.float64)}


def with_noise(program: Program, state: FederationState, rows: Sequence[tuple[Tensor, Tensor]]) -> FederationState:
    """The state, and the noise that the program's predictor has on the rows (x, y) of those who trained it.

    Each client's rows are judged by the networks of the others ("heldout", "calibrated"; by its own where there are no
    others), by its own ("own") or by all ("train"). A client needs no rows but its own, and sends `nll_sums` of them.
    Beside it the noise of one network by itself, as a personal model is one: (y - mean)^2 + spread is the mean of the
    judges' squared residuals, each taken alone.
    """
    if program.prediction.noise not in BY_MEMBERS:
        return state
    y = torch.cat([y for _, y in rows])
    mean, spread = _judged(program, state, rows)
    noise = observation_noise(program.prediction.noise, mean, spread, y)
    if not program.prediction.members:
        each = program.prediction._replace(members=True, closed=False)
        mean, spread = _judged(program._replace(prediction=each), state, rows)
    alone = ((y.double() - mean).square() + spread).mean(0).clamp(min=SMALLEST)
    lone, like = torch.stack([alone, torch.ones_like(alone)]), state.broadcast[program.prediction.part].mean
    return state._replace(kept=state.kept._replace(noise=noise.flatten().to(like), lone_noise=lone.flatten().to(like)))


def _judged(program: Program, state: FederationState, rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What the judges of each client's rows predict: mean and disagreement, each [rows, D], in standardised units."""
    model = replace(program.model, units=None)
    predictions = []
    for k, (x, _) in enumerate(rows):
        others = [j for j in range(len(rows)) if j != k] or [k]
        panel = {"own": [k], "train": list(range(len(rows)))}.get(program.prediction.noise, others)
        q = _of_members(program, state, panel)
        predictions.append(predictive(model, q, x, draws=program.prediction.draws, closed=program.prediction.closed))
    return torch.cat([p.mean for p in predictions]).double(), torch.cat([p.epistemic for p in predictions]).double()


def _of_members(program: Program, state: FederationState, panel: list[int]) -> Parts:
    """What would predict if only these members had been there."""
    parts, members = state.broadcast, state.kept.members
    some = {part: Draws(q.values[panel], q.layout) for part, q in members.items() if isinstance(q, Draws)}
    if program.prediction.members or program.prediction.closed:
        return {**parts, **some}
    drawn = {part: q for part, q in some.items() if not is_static(part)}
    moments = {part: q.moments() for part, q in drawn.items()}
    return parts | {part: Gaussian(m, v.sqrt().clamp(min=1e-12), some[part].layout) for part, (m, v) in moments.items()}


def observation_noise(kind: str, mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    """Noise variance and factor on the disagreement, [2, D], from predictions [n, D] of targets [n, D].

    The variance v minimises the NLL of the rows under N(mean, factor * spread + v): a sum over rows for each v tried.
    The factor is 1 unless `kind` is "calibrated".
    """
    mean, spread, y = mean.double(), spread.double(), y.double()
    factors = FACTORS.get(kind, torch.ones(1, dtype=torch.float64)).to(y.device)
    columns = [_fit((y - mean).square()[:, d], spread[:, d], factors) for d in range(y.shape[1])]
    return torch.stack(columns, 1)


def _fit(squares: Tensor, spread: Tensor, factors: Tensor) -> Tensor:
    """The variance and factor with the least sum over rows of [r^2 / t + log t] / 2, t = factor * spread + variance."""
    variances = (VARIANCES.to(squares.device) * squares.mean()).clamp(min=SMALLEST)
    sums = torch.stack([nll_sums(squares, factor * spread, variances) for factor in factors])
    best = int(sums.argmin())
    return torch.stack([variances[best % len(variances)], factors[best // len(variances)]])


def nll_sums(squares: Tensor, spread: Tensor, variances: Tensor) -> Tensor:
    """Sum over rows of the NLL (without its constant) under each variance: what a client sends."""
    total = spread[:, None] + variances
    return 0.5 * (squares[:, None] / total + total.log()).sum(0)
