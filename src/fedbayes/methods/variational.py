"""Variational clients: Gaussians over all weights, under any rule, prior and estimator; FedUAB and PVI among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fedbayes.clients.client import Client
from fedbayes.clients.ivon import IvonStep, ivon
from fedbayes.clients.optimisers import OPTIMISERS
from fedbayes.clients.variational import KL_WEIGHTS, VariationalStep, initial_scale, variational
from fedbayes.errors import InputError
from fedbayes.federation.program import Pooling, Prediction, Program
from fedbayes.federation.round import check_rules, static_rules
from fedbayes.federation.rules import RULES, Rule, rule_named
from fedbayes.federation.weighting import WEIGHTINGS, Weighting, weighting_named
from fedbayes.methods.composition import batch_like, check_batch, check_points, in_schedule, model_of, row_normals
from fedbayes.methods.groups import (
    IVON,
    Descent,
    Newton,
    Options,
    PaperDraws,
    Robustness,
    Schedule,
    ServerStep,
    Statistics,
    optimiser_named,
)
from fedbayes.methods.method import Setting
from fedbayes.methods.own_client import OwnClient
from fedbayes.methods.refined import Refining
from fedbayes.model.estimators import ESTIMATORS, plan
from fedbayes.model.model import Model, points_by_default
from fedbayes.options import (
    at_least_one,
    each,
    not_negative,
    one_of,
    option,
    patterns,
    positive,
    record,
    with_default,
)
from fedbayes.posterior.values import Gaussian, Parts, Point

PRIORS = {"broadcast": "what the server sent", "fixed": "N(0, prior_scale^2)"}


@record
class Variational(Refining, Statistics, ServerStep, Newton, Schedule, Descent):
    """How clients find a Gaussian over their weights."""

    optimiser: str = option(
        "of the clients; ivon: natural-gradient steps, scales by curvature", one_of((*OPTIMISERS, IVON)), default="sgd"
    )
    train_draws: int = option("draws in a training step", at_least_one, default=1)
    test_draws: int = option("draws in prediction", at_least_one, default=20, kind="server")
    estimator: str = option("how the expected loss is estimated", one_of(ESTIMATORS), default="local")
    kl: str = option("what multiplies kl_weight", one_of(KL_WEIGHTS), default="constant")
    kl_weight: float = option(
        "of the KL to the prior, against the mean loss of a row", not_negative, default=0.0001, kind="scalar"
    )
    prior_scale: float = option("standard deviation of a fixed prior", positive, default=1.0, kind="scalar")
    initial: float | Mapping[str, float] = option(
        "first scale of the first layer, or a table of first scales by pattern of name",
        each(positive),
        default=0.1,
        kind="server",
    )
    points: tuple[str, ...] = option(
        "patterns of weights without a distribution, beside BatchNorm's and the likelihood's own", patterns, default=()
    )

    def pooled(
        self, setting: Setting, *, prior: str, division: float, rule: str | Rule, weighting: str | Weighting
    ) -> Program:
        """The program of variational clients under a rule and a prior."""
        model = model_of(setting, [*points_by_default(setting.network, setting.likelihood), *self.points])
        check_points(setting, model, self.points)
        check_batch(setting, model, self.batch)
        client = self._client(setting, model, prior)
        layout = model.layouts["model"]
        first: Parts = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        mean = first["model"].mean
        first["model"] = Gaussian(mean, initial_scale(model, self.initial, division).to(mean), layout)

        def reference(broadcast: Parts, scalars: Mapping[str, float]) -> Parts:
            if prior == "broadcast":
                return broadcast
            q = broadcast["model"].mean
            fixed = Gaussian(torch.zeros_like(q), torch.as_tensor(scalars["prior_scale"]).to(q).expand_as(q), layout)
            return {**broadcast, "model": fixed}

        rule = rule_named(rule)
        points = rule if rule.robust else RULES["fedavg"]
        shared = {part: points for part in model.trainable if part != "model"}
        program = Program(
            model,
            in_schedule(client, self.lr_within),
            first,
            self._scalars(setting),
            Pooling({"model": rule, **shared} | static_rules(model, rule), weighting_named(weighting), reference),
            self.server_stages,
            Prediction(draws=self.test_draws),
        )
        check_rules(program)
        return program

    def check(self) -> None:
        super().check()
        if self.optimiser == IVON and self.kl == "blundell":
            raise InputError('kl: "blundell" changes from step to step, ivon has one weight of the KL in a round')
        if self.optimiser == IVON and self.kl_weight == 0:
            raise InputError("kl_weight: ivon needs a positive weight of the KL, by which it knows its rows")

    def _client(self, setting: Setting, model: Model, prior: str) -> Client:
        private = setting.private_rows and self.optimiser != IVON
        if private:
            row_normals(setting, model)
        estimation = plan(model, "model", batch_like(setting.x, 1 if private else self.batch), self.estimator)
        shared: dict[str, Any] = {
            **{"epochs": self.epochs, "draws": self.train_draws, "kl": self.kl, "prior": prior},
            "falling": self.lr_within == "falling",
        }
        if self.optimiser == IVON:
            how: dict[str, Any] = {
                "curvature": self.curvature,
                "remembers": self.beta2 > 0,
                "clips": self.clip_step > 0,
            }
            return ivon(IvonStep(model, estimation, **how, **shared), self.batch)
        descent = optimiser_named(self.optimiser, self.momentum)
        return variational(VariationalStep(model, estimation, descent, private=private, **shared), self.batch)

    def _scalars(self, setting: Setting) -> Options:
        own = self.by_round(setting)
        return own if self.kl != "1/all" else lambda number: {**own(number), "clients": float(setting.clients)}


@record
class FedVI(OwnClient, Variational, Robustness):
    """Variational clients under any rule, weighting, prior and estimator.

    Rules that narrow (ws, wc, conflation) have a fixed prior by default: their broadcast would be a prior that is
    harder with every round, until a step of size `lr` on its KL diverges.
    """

    name: ClassVar[str] = "fedvi"
    work: ClassVar[tuple[str, ...]] = (*OwnClient.work, "train_draws", "estimator", "kl")
    prior: str | None = option(
        "of the clients; None: the broadcast, but fixed under rules that narrow", one_of(PRIORS), default=None
    )
    division: float = option("of the squared first scale at each next layer", positive, default=1.0, kind="server")
    rule: str | Rule = option(
        "how Gaussians are pooled", one_of(RULES), default="log_pool", kind="server", importable=True
    )
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="size", kind="server", importable=True
    )

    def check(self) -> None:
        super().check()
        if self.prior is None:
            object.__setattr__(self, "prior", "fixed" if rule_named(self.rule).narrows else "broadcast")

    def compose(self, setting: Setting) -> Program:
        assert self.prior is not None
        program = self.pooled(
            setting,
            prior=self.prior,
            division=self.division,
            rule=self.rule_of(self.rule),
            weighting=self.weighting,
        )
        return self.with_client(program, setting)


@record
class FedUAB(FedVI, PaperDraws):
    """FedUAB: the broadcast posterior is start and prior, the log-linear pool (eq. 8) by size, H = `division` = 2.

    `draws` is the paper's Z.
    """

    name: ClassVar[str] = "feduab"
    prior: str | None = with_default(FedVI, "prior", default="broadcast")
    division: float = with_default(FedVI, "division", default=2.0)
    train_draws: int = with_default(Variational, "train_draws", default=None)
    test_draws: int = with_default(Variational, "test_draws", default=None)

    def check(self) -> None:
        self.resolve(train=1, test=20)
        super().check()


@record
class FedIVON(FedVI):
    """Variational clients by IVON (Shen et al., 2024) under any rule: scales are learned at about FedAvg's cost.

    By default clients hold a fixed prior and take their rows for as many as the federation has, if all clients were
    alike; the log-linear pool of equals is then the posterior of all rows wherever losses are quadratic.
    """

    name: ClassVar[str] = "fedivon"
    fixed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("optimiser", "momentum"), "ivon is the method; its momentum is beta1"),
        "client": "its steps are the method; give fedvi a client of your own",
    }
    optimiser: str = with_default(Variational, "optimiser", default=IVON)
    estimator: str = with_default(Variational, "estimator", default="weight")
    kl: str = with_default(Variational, "kl", default="1/all")
    kl_weight: float = with_default(Variational, "kl_weight", default=1.0)
    prior_scale: float = with_default(Variational, "prior_scale", default=0.3)
    prior: str | None = with_default(FedVI, "prior", default="fixed")
    weighting: str | Weighting = with_default(FedVI, "weighting", default="equal")
