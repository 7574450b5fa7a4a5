"""Variational clients: Gaussians over all weights, under any rule, prior and estimator; FedUAB and PVI among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fedbayes.clients.client import Client
from fedbayes.clients.ivon import IvonStep, ivon
from fedbayes.clients.optimisers import OPTIMISERS
from fedbayes.clients.schedules import WITHIN
from fedbayes.clients.variational import KL_WEIGHTS, VariationalStep, chain_for, initial_scale, variational
from fedbayes.errors import InputError
from fedbayes.federation.bounds import compares
from fedbayes.federation.pooling import check_rules, static_rules
from fedbayes.federation.program import Pooling, Prediction, Program
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import RULES, rule_named
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
from fedbayes.model.model import Model
from fedbayes.model.parts import points_by_default
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

BY_CURVATURE = "ivon finds the first scales by the curvature; leave it out, or set beta2 = 0.999, by which it is read"
UNCOMPARED = ("equal", "size", "discrepancy", "discrepancy_max")  # weightings that don't look at the broadcast
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

    def _least_scale(self, prior: str) -> float:
        """Of a prior that descent follows: a step on the KL takes lr * kl_weight / scale^2 of the way, here a tenth."""
        follows = prior == "broadcast" and self.optimiser == "sgd" and self.kl == "constant"
        return (10 * self.lr * self.kl_weight) ** 0.5 if follows else 0.0

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
        scale = initial_scale(model, self.initial, division, self._least_scale(prior))
        first["model"] = Gaussian(mean, scale.to(mean), layout)

        def reference(broadcast: Parts, scalars: Mapping[str, float]) -> Parts:
            if prior == "broadcast":
                return broadcast
            q = broadcast["model"].mean
            scale = torch.as_tensor(scalars["prior_scale"], dtype=torch.float64).to(q)  # the clients' unit to the bit
            fixed = Gaussian(torch.zeros_like(q), scale.expand_as(q), layout)
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
        if self.optimiser == IVON and self.momentum and getattr(self, "client", None) is None:
            raise InputError('momentum: it is of sgd, ivon has beta1; set that, or optimiser = "sgd", or leave it out')
        if self.optimiser == IVON and self.opposite and self.train_draws % 2:
            raise InputError(f"train_draws: opposite draws come in pairs, not {self.train_draws}; make it even")

    @property
    def begins_by_curvature(self) -> bool:
        """Whether clients find their first scales themselves."""
        return self.optimiser == IVON and self.beta2 == 0 and getattr(self, "client", None) is None

    def _client(self, setting: Setting, model: Model, prior: str) -> Client:
        private = setting.private_rows
        if private:
            row_normals(setting, model)
        if private and self.optimiser == IVON and self.curvature == "squared":
            raise InputError('private: curvature = "squared" would take the noise for curvature; use "price"')
        estimation = plan(model, "model", batch_like(setting.x, 1 if private else self.batch), self.estimator)
        shared: dict[str, Any] = {
            **{"epochs": self.epochs, "draws": self.train_draws, "kl": self.kl, "prior": prior},
            **{"falling": self.lr_within == "falling", "private": private},
            "chain": chain_for(model, estimation) if private and self.train_draws == 1 else None,
        }
        if self.optimiser == IVON:
            how: dict[str, Any] = {
                "curvature": self.curvature,
                "remembers": self.beta2 > 0,
                "clips": self.clip_step > 0,
                "implicit": self.prior_step == "implicit",
                "opposite": self.train_draws % 2 == 0 if self.opposite is None else self.opposite,
            }
            return ivon(IvonStep(model, estimation, **how, **shared), self.batch)
        descent = optimiser_named(self.optimiser, self.momentum)
        return variational(VariationalStep(model, estimation, descent, **shared), self.batch)

    def _scalars(self, setting: Setting) -> Options:
        own = self.by_round(setting)
        return own if self.kl != "1/all" else lambda number: {**own(number), "clients": float(setting.clients)}


@record
class FedVI(OwnClient, Variational, Robustness):
    """Variational clients under any rule, weighting, prior and estimator; scales are learned.

    By default clients go by natural gradients (ivon, with draws in pairs) from the broadcast, hold a fixed prior, and
    take their rows for as many as the federation has, if all clients were alike: the log-linear pool of equals is then
    the posterior of all rows wherever losses are quadratic. Under rules that multiply posteriors a row counts once.
    """

    name: ClassVar[str] = "fedvi"
    work: ClassVar[tuple[str, ...]] = (*OwnClient.work, "train_draws", "estimator", "kl")
    lr: float = with_default(Descent, "lr", default=0.2)
    lr_within: str = option(
        "how lr falls within a round; None: falling with ivon, else constant", one_of(WITHIN), default=None
    )
    optimiser: str = with_default(Variational, "optimiser", default=IVON)
    train_draws: int = with_default(Variational, "train_draws", default=2)
    kl: str = option(
        "what multiplies kl_weight; None: 1/all, and 1/n under rules that narrow", one_of(KL_WEIGHTS), default=None
    )
    kl_weight: float = with_default(Variational, "kl_weight", default=1.0)
    prior_scale: float = with_default(Variational, "prior_scale", default=0.5)
    prior: str = option("of the clients", one_of(PRIORS), default="fixed")
    division: float = option("of the squared first scale at each next layer", positive, default=1.0, kind="server")
    rule: str | Rule = option(
        "how Gaussians are pooled", one_of(RULES), default="log_pool", kind="server", importable=True
    )
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="equal", kind="server", importable=True
    )

    def check(self) -> None:
        if self.lr_within is None:
            falls = self.optimiser == IVON and self.client is None
            object.__setattr__(self, "lr_within", "falling" if falls else "constant")
        if self.kl is None:
            rule = rule_named(self.rule)
            object.__setattr__(self, "kl", "1/n" if rule.narrows or rule.needs_reference else "1/all")
        super().check()

    def idle(self, program: Program) -> dict[str, str]:
        compared = self.prior == "broadcast" or self.weighting not in UNCOMPARED or compares(program)
        first = {} if compared or not self.begins_by_curvature else dict.fromkeys(("initial", "division"), BY_CURVATURE)
        return super().idle(program) | first

    def compose(self, setting: Setting) -> Program:
        program = self.pooled(
            setting,
            prior=self.prior,
            division=self.division,
            rule=self.rule_of(self.rule),
            weighting=self.weighting,
        )
        return self.with_client(program, setting)


@record
class ByBackprop(FedVI, PaperDraws):
    """Variational clients as published first: gradient steps on mean and rho, the broadcast as their prior."""

    lr: float = with_default(Descent, "lr", default=0.05)
    lr_within: str = with_default(FedVI, "lr_within", default="constant")
    optimiser: str = with_default(Variational, "optimiser", default="sgd")
    kl: str = with_default(FedVI, "kl", default="constant")
    kl_weight: float = with_default(Variational, "kl_weight", default=0.0001)
    prior_scale: float = with_default(Variational, "prior_scale", default=1.0)
    prior: str = with_default(FedVI, "prior", default="broadcast")
    weighting: str | Weighting = with_default(FedVI, "weighting", default="size")
    train_draws: int = with_default(Variational, "train_draws", default=None)
    test_draws: int = with_default(Variational, "test_draws", default=None)

    def check(self) -> None:
        self.resolve(train=1, test=20)
        super().check()


@record
class FedUAB(ByBackprop):
    """FedUAB: the broadcast posterior is start and prior, the log-linear pool (eq. 8) by size, H = `division` = 2.

    Beyond the paper, in networks deeper than its own: division goes no further than (10 lr kl_weight)^1/2, .007 by
    default. With scales of a fifth of that, steps on the KL overshoot and training diverges.
    `draws` is the paper's Z. As published: `initial` sets most of what its scales are; `fedvi` learns them.
    """

    name: ClassVar[str] = "feduab"
    division: float = with_default(FedVI, "division", default=2.0)


@record
class FedIVON(FedVI):
    """Variational clients by IVON (Shen et al., 2024) under any rule: scales are learned at one gradient per step.

    As `fedvi`, by a single draw, whose noise takes more rounds to average out. It is of the layers' outputs; one
    of the weights (`estimator = "weight"`, as published) tells curvatures with far more noise.
    """

    name: ClassVar[str] = "fedivon"
    fixed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("optimiser", "momentum"), "ivon is the method; its momentum is beta1"),
        "client": "its steps are the method; give fedvi a client of your own",
    }
    train_draws: int = with_default(Variational, "train_draws", default=1)
    curvature_memory: float = with_default(Newton, "curvature_memory", default=40.0)
