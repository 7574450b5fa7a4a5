"""Laplace's approximation of the pooled posterior with a full covariance, by Newton steps that are sums of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Upload
from fedbayes.clients.newton import STANDS_FOR, newton, option_of, prior_precision
from fedbayes.errors import InputError
from fedbayes.federation.products import with_likelihood, with_precision
from fedbayes.federation.program import Context, Personal, Pooling, Prediction, Program, Stage
from fedbayes.federation.rules import RULES
from fedbayes.federation.weighting import weighting_named
from fedbayes.methods.composition import model_of
from fedbayes.methods.method import Method, Setting
from fedbayes.model.classifier import group_of
from fedbayes.model.curvature import PRECISIONS, check_curvature
from fedbayes.model.likelihood import Likelihood
from fedbayes.options import at_least_one, one_of, option, positive, record, up_to_one
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import FullGaussian, Gaussian, Parts, map_tensors

MOST = 3000  # weights: a matrix of so many squared is 72 MB
SETTLED = 2  # rounds before the evidence is asked: at first weights the likelihood's curvature says little
UPDATES, CLOSE = 10, 1e-3  # of prior precisions in a round, at most, and where they end
PRIORS = {
    "evidence": "N(0, s^2) for each named tensor, with the s of the highest evidence",
    "fixed": "N(0, prior_scale^2)",
}


@record
class Laplace(Method):
    """Laplace's approximation of the posterior of all clients' rows: full covariance, no learning rate.

    A round is a Newton step: clients send gradient and Gauss-Newton matrix of their rows at the broadcast mean, as a
    normal times the prior, and the server multiplies them. For logistic regression a few rounds end at the pooled
    maximum and its Laplace approximation. The prior's precision of each named tensor follows the evidence (MacKay,
    1992). A message has the square of the number of weights. In a cohort that is not all, or of which some are gone,
    rows count for as many as the federation has; such rounds end at no fixed posterior.
    """

    name: ClassVar[str] = "laplace"
    batch: int = option("rows in a step of the pass over a client's rows", at_least_one, default=32)
    step: float = option("share of a Newton step that is made", up_to_one, default=1.0, kind="server")
    prior: str = option("of the weights", one_of(PRIORS), default="evidence")
    prior_scale: float = option("standard deviation of the prior, or its first one", positive, default=1.0)
    test_draws: int = option("draws in prediction", at_least_one, default=200, kind="server")

    def compose(self, setting: Setting) -> Program:
        model = model_of(setting, None)
        check_setting(setting, list(model.layouts), sum(layout.size for layout in model.layouts.values()))
        group = group_of(model, model.module, ("*",), setting.x)
        check_curvature(group, "full")
        layout = model.layouts["model"]
        mean = model.initial()["model"]
        first = FullGaussian(mean, torch.eye(layout.size).to(mean) * self.prior_scale, layout)
        client = newton(group, self.batch)
        told = {option_of(name): self.prior_scale**-2 for name in layout.names}
        told[STANDS_FOR] = setting.clients / setting.cohort

        def reference(broadcast: Parts, options: Mapping[str, Any]) -> Parts:
            m = broadcast["model"].mean.double()
            scale = prior_precision(layout, options, m).rsqrt()
            return {**broadcast, "model": Gaussian(torch.zeros_like(m), scale, layout)}

        pooling = Pooling(
            {"model": RULES["full_product"]}, weighting_named("equal"), reference, uploaded=in_double, as_sent=EXACT
        )
        return Program(
            model,
            client,
            {"model": first},
            lambda number: told,
            pooling,
            (newton_step(layout, self.step, self.prior == "evidence", self.prior_scale**-2, setting.cohort),),
            Prediction(draws=self.test_draws),
            Personal(alone(client)),
        )


EXACT = "the product of laplace's uploads is the posterior of all rows; with a part left out it would be no one's"


def check_setting(setting: Setting, parts: list[str], size: int) -> None:
    """Refuse what this has no form for, before any training."""
    if parts != ["model"] or own_parameters(setting.likelihood):
        raise InputError(
            "laplace: this network or its likelihood has weights that are no part of one normal (BatchNorm, a learned "
            "noise or baseline); use pvi, or for a regression likelihood = 'normal' with a fixed noise"
        )
    if size > MOST:
        raise InputError(f"laplace holds a matrix of {size} x {size} weights, at most {MOST}; use pvi or fedlap_cov")


def own_parameters(likelihood: Likelihood) -> bool:
    """Whether the likelihood has parameters that are trained."""
    return bool(likelihood.parameters)


def in_double(broadcast: Parts) -> Parts:
    """Parts as they are uploaded: in float64, whatever the network is in."""
    return map_tensors(broadcast, lambda t: t.double())


def alone(client: Client) -> Client:
    """The client whose upload is its own model, of its own rows, in the network's precision."""

    def finish(state: Any, info: Info) -> Upload:
        once = {**info.options, STANDS_FOR: torch.ones_like(info.options[STANDS_FOR])}
        done = client.finish(state, info._replace(options=once))
        like = info.broadcast["model"].mean
        return done._replace(parts=map_tensors(done.parts, lambda t: t.to(like.dtype)))

    return client._replace(finish=finish)


def newton_step(layout: Layout, share: float, by_evidence: bool, first: float, cohort: int) -> Stage:
    """The prior of the highest evidence, then a share of the step; in the network's precision from there on.

    Clients that came count for the whole cohort. Its state is the prior's precision of each tensor, of which the next
    round's clients are told.
    """

    def init(parts: Parts) -> dict[str, Tensor]:
        return {name: torch.tensor(first, dtype=torch.float64) for name in layout.names}

    def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
        q, old = parts["model"], context.order.broadcast["model"].mean
        assert isinstance(q, FullGaussian)
        if context.outcome.counted != cohort:
            prior = prior_precision(layout, context.order.options, q.mean)
            q = with_likelihood(q, prior, cohort / context.outcome.counted)
        if by_evidence and context.order.round >= SETTLED:
            q, state = fitted(q, layout, state)
        mean = torch.lerp(old.double(), q.mean, share)
        sent = FullGaussian(mean.to(old), q.tril.to(old), layout)
        return {**parts, "model": sent}, state, {option_of(n): float(v) for n, v in state.items()}

    def told(state: Any) -> dict[str, float]:
        return {option_of(name): float(value) for name, value in state.items()}

    return Stage("newton", init, apply, told=told)


def fitted(q: FullGaussian, layout: Layout, state: Mapping[str, Tensor]) -> tuple[FullGaussian, dict[str, Tensor]]:
    """q under the prior of the highest evidence, by MacKay's updates:  precision = (p - precision tr S) / |m|^2.

    The likelihood is the quadratic that q stands for; p, S and m are number, covariance and mean of a tensor's weights.
    """
    low, high = PRECISIONS
    precisions = dict(state)
    for _ in range(UPDATES):
        mean, variance = (layout.split(t) for t in q.moments())
        before = precisions
        precisions = {}
        for name, old in before.items():
            determined = variance[name].numel() - old * variance[name].sum()
            ratio = determined.clamp(min=0) / mean[name].square().sum().clamp(min=1e-300)
            precisions[name] = ratio.clamp(low, high).cpu()
        vectors = [
            prior_precision(layout, {option_of(n): v for n, v in p.items()}, q.mean) for p in (before, precisions)
        ]
        q = with_precision(q, *vectors)
        if all(abs(float(precisions[n] / before[n]) - 1) < CLOSE for n in precisions):
            break
    return q, precisions
