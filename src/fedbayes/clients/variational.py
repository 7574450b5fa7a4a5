"""The variational client: Bayes by Backprop from, and held near, the broadcast posterior (FedUAB) or a fixed prior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload, falling_rate
from fedbayes.clients.ghost import of_normals
from fedbayes.clients.optimisers import Optimiser
from fedbayes.clients.private_rows import RowsOf, by_row, private_gradients
from fedbayes.errors import InputError
from fedbayes.model.chain import Chain, chain_of
from fedbayes.model.estimators import ESTIMATORS, Plan, forward
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.layout import matches
from fedbayes.posterior.values import Gaussian, Parts, Point, softplus_and_slope, softplus_inverse

Vectors = dict[str, Tensor]


KlWeight = Callable[[Batch, Info], Tensor]

# The weight of the KL against the mean NLL of a batch, FedUAB eq. 10. B is the number of batches in an epoch.
KL_WEIGHTS: dict[str, KlWeight] = {
    "constant": lambda b, info: info.options["kl_weight"],
    "1/B": lambda b, info: info.options["kl_weight"] / info.batches[0],
    "1/n": lambda b, info: info.options["kl_weight"] / info.n,
    # As if every client of the federation were like this one.
    "1/all": lambda b, info: info.options["kl_weight"] / (info.n * info.options["clients"]),
    # Blundell et al. (2015): 2^(B-b) / (2^B - 1) for b = 1..B, computed without large powers.
    "blundell": lambda b, info: (
        info.options["kl_weight"]
        * 0.5 ** (b.step % info.batches[0] + 1.0)
        / (1 - 0.5 ** info.batches[0].to(torch.float64))
    ).float(),
}
TILT = "tilt"  # among what a client is told: a factor that the prior is divided by
LEAST, LARGEST = 1e-37, 1e37  # between which a first scale is a number of float32, and its square no zero


class Tilt(NamedTuple):
    """What is added to the negative log prior about its mean m:  pull . (theta - m) - precision / 2 . (theta - m)^2.

    What is left of the prior's precision may be negative: the likelihood has the rest. It has it for each weight alone,
    not along axes in which correlated weights are hardly known; so means lose `held`, and not `precision`. Where a mean
    stays at m the two come to the same.
    """

    pull: Tensor
    precision: Tensor
    held: Tensor
    others: Tensor  # precision of what scales are held by, beyond the prior


class Expectation(NamedTuple):
    """The mean NLL of a batch under q = N(mean, scale^2) over part `model`, other parts being points, by some draws.

    Of vectors without a scale it is that at the mean.
    """

    model: Model
    estimation: Plan
    draws: int = 1
    opposite: bool = False  # the second half of the draws has the noise of the first, with the other sign
    chain: Chain | None = None  # of private steps, where `chain_for` gives one: they need no gradient for each row

    @property
    def points(self) -> list[str]:
        """The trainable parts without a distribution."""
        return [part for part in self.model.trainable if part != "model"]

    def nll(self, vectors: Vectors, static: Vectors, b: Batch, tape: Tape, frozen: Mapping[str, Any]) -> Any:
        """The loss, and beside it the buffers after the pass and the loss once more, for `gradients`."""
        if self.draws == 1:
            nll, static = self._draw(vectors, static, b, tape, frozen)
            return nll, (static, nll.detach())
        noise = tape(vectors["mean"], (self.draws // (1 + self.opposite), self.estimation.normals))
        noise = torch.cat([noise, -noise]) if self.opposite else noise
        if self.estimation.stacks:
            copies = {part: v.expand(self.draws, *v.shape) for part, v in static.items()}
            each = vmap(lambda s, z: self._draw(vectors, s, b, Tape(z), frozen), randomness="different")
            nlls, statics = each(copies, noise)
        else:
            rows = [self._draw(vectors, static, b, Tape(z), frozen) for z in noise]
            nlls, statics = tree_map(lambda *leaves: torch.stack(leaves), *rows)
        static = {p: v[0] if p == "counters" else v.mean(0) for p, v in statics.items()}
        return nlls.mean(), (static, nlls.detach().mean())

    @property
    def normals(self) -> int:
        """How many normals a batch reads."""
        return self.draws // (1 + self.opposite) * self.estimation.normals

    def rows(self, static: Vectors, frozen: Mapping[str, Any], step: Tensor, unit: Tensor) -> RowsOf:
        """How the gradients of rows are found, in the scales by this unit."""
        if self.chain is not None:
            return of_normals(self.chain, unit)
        return by_row(self.nll, lambda row, z: (static, row, z, frozen), step, {"scale": unit})

    def _draw(self, vectors: Vectors, static: Vectors, b: Batch, tape: Tape, frozen: Mapping[str, Any]) -> Any:
        model = self.model
        others = model.weights({**{p: vectors[p] for p in self.points}, **static, **frozen})
        mean, scale = vectors["mean"], vectors.get("scale")
        output, weights, static = forward(model, "model", mean, scale, others, b.x, tape, b.mask, self.estimation)
        return model.nll(output, b.y, b.mask, weights), static


def chain_for(model: Model, estimation: Plan) -> Chain | None:
    """The chain whose outputs' normals are drawn; None where the network, or the estimator, is another."""
    local = estimation.estimate is ESTIMATORS["local"]
    return chain_of(model) if local and estimation.taken == frozenset(model.layouts["model"].names) else None


def prior_of(prior: str, info: Info) -> Gaussian:
    """What a posterior is held near: the broadcast, or N(0, prior_scale^2)."""
    q = info.broadcast["model"]
    assert isinstance(q, Gaussian)
    if prior == "broadcast":
        return q
    return Gaussian(torch.zeros_like(q.mean), info.options["prior_scale"].expand_as(q.mean))


@dataclass(frozen=True, eq=False)
class VariationalStep:
    """A step down  mean_z[mean NLL of the batch under theta_z] + weight * KL(q || prior),  z = 1..draws.

    Blundell et al. (2015); FedUAB eqs. 9, 10. q = N(mean, softplus(rho)^2) over part `model`; other parts are points.
    The prior is the broadcast, or N(0, prior_scale^2). `falling`: lr goes linearly to 0 within a round of so many
    epochs. Scalar options: `lr`, `kl_weight`, `prior_scale`.
    """

    model: Model
    estimation: Plan
    optimiser: Optimiser
    epochs: int
    draws: int = 1
    kl: str = "constant"
    prior: str = "broadcast"
    falling: bool = False
    private: bool = False  # noise is added to the gradients of mean and rho; the estimate is that of one row
    chain: Chain | None = None

    def __call__(self, state: Learner, b: Batch, tape: Tape, info: Info) -> Learner:
        mean, rho = state.vectors["mean"], state.vectors["rho"]
        scale, slope = softplus_and_slope(rho)
        vectors = {"mean": mean, "scale": scale, **{part: state.vectors[part] for part in self.points}}
        frozen = self.model.frozen_in(info.constants)
        if self.private:
            static, nll = state.static, state.loss.new_zeros(())
            rows = self.expectation.rows(static, frozen, b.step, slope)
            g = private_gradients(rows, vectors, b, tape, info, self.expectation.normals)
        else:
            g, (static, nll) = gradients(self.expectation.nll, vectors, state.static, b, tape, frozen)
        # The KL's gradient by hand: d/dmean = (m - m0) / s0^2, d/dscale = s / s0^2 - 1 / s. No logarithm is needed.
        q, weight = self.prior_of(info), KL_WEIGHTS[self.kl](b, info)
        stiffness = weight / q.scale.square()
        slopes = {part: g[part] for part in self.points}
        slopes["mean"] = torch.addcmul(g["mean"], stiffness, mean - q.mean)
        pull = (stiffness * scale).sub_(weight / scale)
        slopes["rho"] = g["scale"] + pull * slope if self.private else pull.add_(g["scale"]).mul_(slope)
        if TILT in info.constants:
            tilt = info.constants[TILT]
            slopes["mean"] = slopes["mean"] + weight * (tilt.pull - tilt.held * (mean - q.mean))
            slopes["rho"] = slopes["rho"] - weight * scale * tilt.precision * slope
        rate = falling_rate(b, info, self.epochs) if self.falling else info.options["lr"]
        moved, after = self.optimiser.update(state.optimiser, state.vectors, slopes, rate)
        return Learner(after, static, moved, state.loss + nll, state.steps + 1)

    @property
    def points(self) -> list[str]:
        """The trainable parts without a distribution."""
        return self.expectation.points

    @property
    def expectation(self) -> Expectation:
        """The expected loss that it descends."""
        return Expectation(self.model, self.estimation, self.draws, chain=self.chain)

    def prior_of(self, info: Info) -> Gaussian:
        """What the posterior is held near."""
        return prior_of(self.prior, info)


def variational(step: VariationalStep, batch: int) -> Client:
    """The client that goes from the broadcast posterior by these steps."""
    model, points = step.model, step.points

    def start(own: Own, info: Info) -> Learner:
        q = info.broadcast["model"]
        assert isinstance(q, Gaussian)
        vectors = {"mean": q.mean, "rho": softplus_inverse(q.scale)}
        vectors |= {part: info.broadcast[part].mean for part in points}
        static = {part: info.broadcast[part].mean for part in model.static}
        zero = q.mean.new_zeros(())
        return Learner(vectors, static, step.optimiser.init(vectors), zero, zero)

    def finish(state: Learner, info: Info) -> Upload:
        v = state.vectors
        q = Gaussian(v["mean"], softplus_and_slope(v["rho"])[0], model.layouts["model"])
        parts: Parts = {"model": q}
        parts |= {part: Point(v[part], model.layouts[part]) for part in points}
        parts |= {part: Point(s, model.layouts[part]) for part, s in state.static.items()}
        return Upload(parts, {}, {"loss": state.loss / state.steps.clamp(min=1), "kl": q.kl(step.prior_of(info))})

    return Client(start, (Phase(step, step.epochs, batch, private=step.private),), finish)


def initial_scale(model: Model, first: float | Mapping[str, float], division: float, least: float = 0.0) -> Tensor:
    """Scales [P] of the first broadcast: variance first^2 in the first layer, divided by `division` (H) per layer.

    Or by pattern of name, {"head.*": 0.05, "*": 0.1}: the first that matches. Division goes no further than `least`.
    """
    layout = model.layouts["model"]
    if isinstance(first, Mapping):
        scales = [next((s for p, s in first.items() if matches(name, [p])), None) for name in layout.names]
        if None in scales:
            raise InputError(f"initial: no pattern matches {layout.names[scales.index(None)]!r}; add one, such as '*'")
        return torch.cat([torch.full((n,), float(s)) for s, n in zip(scales, layout.sizes) if s is not None])
    depth = {name: level for level, names in enumerate(layout.layers()) for name in names}
    pieces = []
    for name, n in zip(layout.names, layout.sizes):
        scale = first * division ** (-depth[name] / 2)
        if not LEAST < scale < LARGEST:
            raise InputError(f"division: {division} gives {name} the first scale {scale:g}; bring it nearer to 1")
        pieces.append(torch.full((n,), max(scale, min(first, least))))
    return torch.cat(pieces)
