"""The IVON client: a Gaussian by natural-gradient steps, whose scales follow the curvature of the expected loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload, falling_rate
from fedbayes.clients.private_rows import private_gradients
from fedbayes.clients.variational import KL_WEIGHTS, TILT, Expectation, prior_of
from fedbayes.model.chain import Chain
from fedbayes.model.estimators import ESTIMATORS, Plan
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, Parts, Point

BEGINNING = 4  # rounds that the first curvature counts as: means are to learn before scales widen
SINGLE = 500  # steps that it counts as at most where it is of one draw: the more the rows, the more of it is noise
STEADY = 2  # rounds that the average goes over at least: noise must not take a precision away
LEAST_SAID = 0.05  # of a gradient over its scale: what one draw's first step says of a curvature at least
SAMPLE = 1024  # weights whose mean curvature is that of all, about: a pass over all of them in every step would cost
FARTHEST = 1.0  # how far a precision may go in a step, in terms of itself: it ends between .5 and 2.5 of what it was

# How the relative move x of a precision is made: its factor.
CURVATURES: dict[str, str] = {
    "price": "by Price's theorem, with IVON's term of second order, which keeps precisions positive",
    "average": "by Price's theorem, plainly averaged: without that term's bias where few rows make a step",
    "squared": "N times squared gradients, with that term",
}
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "price": lambda x: 1 + x + 0.5 * x.square(),
    "average": lambda x: 1 + x.clamp(min=-0.5 * FARTHEST),
    "squared": lambda x: 1 + x + 0.5 * x.square(),
}


@dataclass(frozen=True, eq=False)
class IvonStep:
    """A step down  N * mean NLL under q + KL(q || prior)  in the geometry of q = N(mean, 1 / precision).

    Shen et al. (2024), with N = 1 / (weight of the KL), curvature h and delta of the paper in precision = N (h + delta)
    and the prior's 1 / s_0^2 = N delta:
      h_hat    = (d NLL / d scale) / scale              (Price's theorem; or N times squared gradients)
      precision *= 1 + x + x^2 / 2,  x = (1 - beta2) (N h_hat + 1 / s_0^2 - precision) / precision
      mean     -= lr (gbar + (mean - m_0) / (N s_0^2)) / max(precision / N, least_curvature)
    with gbar the gradient's debiased running mean. |x| is at most 1. Any estimator of the expected loss serves; by
    weight sampling it is the paper's. A step is at most `clip_step` for each weight, before lr.
    With beta2 = 0 the curvature is averaged over `curvature_memory` rounds, at first over all so far, and `initial` is
    not read. A curvature of which nothing is known yet counts as `least_curvature`, in steps and in scales, or as what
    the first step saw if that is more; this counts as `BEGINNING` rounds of the average. So scales begin narrow and
    widen as means learn: where weights are more than rows, scales that the data allow an untrained network drown its
    gradients in noise, and it never leaves the prior.
    Without pairs of draws the first step saw mostly noise, whose size grows with the root of the rows, while its part
    of an average over rounds does not fall with them: it counts as no more than `SINGLE` steps then.
    `implicit`: the prior is followed to where it balances the gradient's step, however narrow it is,
      mean     -= lr (gbar + p (mean - m_0)) / (c + lr p)
    with p = 1 / (N s_0^2) and c = max(what the data have of precision / N, least_curvature).
    `opposite`: draws come in pairs of opposite noise, by which gradients at the mean drop out of the curvature: what
    is left of its error does not grow with the number of rows. Where one draw is made, a running mean of gradients is
    taken off instead.
    `private`: a row's gradients in mean and scale are shortened together, and what follows is made of their noisy sums.
    Scalar options: `lr`, `kl_weight`, `prior_scale`, `beta1`, `beta2`, `curvature_memory`, `least_curvature`,
    `clip_step`.
    """

    model: Model
    estimation: Plan
    epochs: int
    draws: int = 1
    kl: str = "1/n"
    prior: str = "broadcast"
    curvature: str = "price"
    falling: bool = False
    remembers: bool = False  # whether beta2 is given
    clips: bool = False
    implicit: bool = False
    opposite: bool = False
    private: bool = False  # noise is added to the gradients of mean and scale; the estimate is that of one row
    chain: Chain | None = None

    def __call__(self, state: Learner, b: Batch, tape: Tape, info: Info) -> Learner:
        options, weight = info.options, KL_WEIGHTS[self.kl](b, info)
        mean = state.vectors["mean"]
        pull, held, least = self._held(mean, info)
        begins, precision = self.begins(state, info), state.vectors["precision"]
        if begins is not None:
            precision = torch.where(begins, least + options["least_curvature"] / weight, precision)
        scale, z = precision.rsqrt(), tape(mean) if self.alone else None
        # One draw of the weights has one gradient: that in the scales is z times it.
        vectors = {"mean": mean, "scale": scale} if z is None else {"mean": mean + scale * z}
        vectors |= {part: state.vectors[part] for part in self.points}
        frozen = self.model.frozen_in(info.constants)
        if self.private:
            static, nll = state.static, state.loss.new_zeros(())
            rows = self.expectation.rows(static, frozen, b.step, torch.ones_like(mean))
            g = private_gradients(rows, vectors, b, tape, info, self.expectation.normals)
        else:
            g, (static, nll) = gradients(self.expectation.nll, vectors, state.static, b, tape, frozen)
        if self.curvature == "squared":
            seen = g["mean"].square() / weight
        else:
            seen = (g["scale"] if z is None else z * self._told(g["mean"], state, info)) / scale
        after = self._followed(precision, least + seen / weight, self.share(b, info))
        if begins is not None:
            said = self._first(seen, g["mean"] / scale) / weight
            after = torch.where(begins, torch.maximum(after, least + said), after)
        count, beta = state.optimiser["count"] + 1, options["beta1"]
        first = {n: beta * v + (1 - beta) * g[n] for n, v in state.optimiser["first"].items()}
        whole = -torch.expm1(count * beta.log())  # 1 - beta1^count
        rate = falling_rate(b, info, self.epochs) if self.falling else options["lr"]
        stiff = weight * held.clamp(min=0) if self.implicit else 0.0
        known = weight * (after - least) if self.implicit else weight * after
        curvature = torch.maximum(known, options["least_curvature"]) + rate * stiff
        move = (first["mean"] / whole + weight * pull) / curvature
        if self.clips:
            move = torch.minimum(torch.maximum(move, -options["clip_step"]), options["clip_step"])
        moved = {"mean": mean - rate * move, "precision": after}
        moved |= {part: state.vectors[part] - rate * first[part] / whole for part in self.points}
        return Learner(moved, static, {"first": first, "count": count}, state.loss + nll, state.steps + 1)

    @property
    def points(self) -> list[str]:
        """The trainable parts without a distribution."""
        return self.expectation.points

    @property
    def expectation(self) -> Expectation:
        """The expected loss that it descends."""
        return Expectation(self.model, self.estimation, self.draws, self.opposite, self.chain)

    def prior_of(self, info: Info) -> Gaussian:
        """What the posterior is held near, before any tilt."""
        return prior_of(self.prior, info)

    @property
    def alone(self) -> bool:
        """Whether a step has one draw of the weights, and no noise of privacy."""
        return self.draws == 1 and self.estimation.estimate is ESTIMATORS["weight"] and not self.private

    def _told(self, slope: Tensor, state: Learner, info: Info) -> Tensor:
        """What one draw did to the gradient: a running mean is taken off, by which the curvature keeps its mean."""
        if self.remembers:
            return slope
        count, beta = state.optimiser["count"].clamp(min=1), info.options["beta1"]
        return slope - state.optimiser["first"]["mean"] / -torch.expm1(count * beta.log())  # 0 before the first step

    def _first(self, seen: Tensor, slope: Tensor) -> Tensor:
        """What the first step says of the curvature: pairs of draws its value, one draw hardly more than its size. Of a
        weight whose noise is small one draw of the weights says nothing, so that a sample of all speaks for it; by
        draws of outputs it is a part of its slope (in units of its scale) at least."""
        if self.opposite or self.private:
            return seen
        if not self.alone:
            return torch.maximum(seen.abs(), LEAST_SAID * slope.abs())
        return torch.maximum(seen, seen[:: max(1, len(seen) // SAMPLE)].abs().mean())

    def _followed(self, precision: Tensor, seen: Tensor, share: Tensor) -> Tensor:
        """The precision after a step that saw another."""
        x = share * (seen / precision - 1)
        return precision * FACTORS[self.curvature](x.clamp(-FARTHEST, FARTHEST))

    def begins(self, state: Learner, info: Info) -> Tensor | None:
        """Where nothing is known of a curvature yet: at the first step of a run, or of a client without a factor. None:
        nowhere, for `initial` is read."""
        if self.remembers:
            return None
        fresh = info.constants[TILT].precision == 0 if TILT in info.constants else info.round == 0
        return fresh & (state.steps == 0)

    def _held(self, mean: Tensor, info: Info) -> tuple[Tensor, Tensor, Tensor]:
        """The slope of the negative log prior at a mean, its curvature there, and the precision that scales are held
        by; where the prior is tilted the last may be negative."""
        q = self.prior_of(info)
        precision = q.scale.square().reciprocal()
        if TILT not in info.constants:
            return precision * (mean - q.mean), precision, precision
        tilt = info.constants[TILT]
        held = precision - tilt.held
        return held * (mean - q.mean) + tilt.pull, held, precision - tilt.precision + tilt.others

    def share(self, b: Batch, info: Info) -> Tensor:
        """The share of a step's curvature in the average: 1 - beta2."""
        if self.remembers:
            return 1 - info.options["beta2"]
        steps = self.epochs * info.batches[0]
        beginning = BEGINNING * steps if self.opposite else (BEGINNING * steps).clamp(max=SINGLE)
        so_far = torch.maximum(beginning + info.round * steps + b.step, STEADY * steps)
        so_far = torch.minimum(so_far, 2 * info.options["curvature_memory"] * steps)
        return 2 / (so_far.to(info.options["lr"].dtype) + 2)


def ivon(step: IvonStep, batch: int) -> Client:
    """The client that goes from the broadcast posterior by these steps."""
    model, points = step.model, step.points

    def start(own: Own, info: Info) -> Learner:
        q = info.broadcast["model"]
        assert isinstance(q, Gaussian)
        trained = {"mean": q.mean, **{part: info.broadcast[part].mean for part in points}}
        static = {part: info.broadcast[part].mean for part in model.static}
        zero = q.mean.new_zeros(())
        first = {name: torch.zeros_like(v) for name, v in trained.items()}
        vectors = {**trained, "precision": q.scale.square().reciprocal()}
        return Learner(vectors, static, {"first": first, "count": zero}, zero, zero)

    def finish(state: Learner, info: Info) -> Upload:
        v = state.vectors
        q = Gaussian(v["mean"], v["precision"].rsqrt(), model.layouts["model"])
        parts: Parts = {"model": q}
        parts |= {part: Point(v[part], model.layouts[part]) for part in points}
        parts |= {part: Point(s, model.layouts[part]) for part, s in state.static.items()}
        least = step._held(v["mean"], info)[2]
        metrics = {
            "loss": state.loss / state.steps.clamp(min=1),
            "kl": q.kl(step.prior_of(info)),
            "negative_curvature": (v["precision"] < least).to(q.mean.dtype).mean(),
        }
        return Upload(parts, {}, metrics)

    return Client(start, (Phase(step, step.epochs, batch, private=step.private),), finish)
