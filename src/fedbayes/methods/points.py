"""Clients that train points: averaged, held near the broadcast, or a normal fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from fedbayes.clients.client import Client
from fedbayes.clients.point import LINEAR, PointStep, point
from fedbayes.errors import InputError
from fedbayes.federation.pooling import check_rules, static_rules
from fedbayes.federation.program import NOISE, Pooling, Prediction, Program
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import RULES, rule_named
from fedbayes.federation.weighting import WEIGHTINGS, Weighting, weighting_named
from fedbayes.methods.composition import check_batch, check_dropout, in_schedule, is_linear, model_of, row_normals
from fedbayes.methods.groups import Descent, Robustness, Schedule, ServerStep, Statistics, optimiser_named
from fedbayes.methods.method import Setting
from fedbayes.methods.own_client import OwnClient
from fedbayes.methods.refined import Refining
from fedbayes.model.chain import chain_of
from fedbayes.model.model import Model
from fedbayes.options import at_least_one, flag, not_negative, one_of, option, positive, record, with_default
from fedbayes.posterior.values import Gaussian, Parts, Point

PREDICTORS = {
    "bootstrap": "the clients' networks as an ensemble",
    "monte_carlo": "draws from the normal",
    "closed": "in closed form, for a linear network of real targets",
}


@record
class PointTraining(Schedule, Descent):
    """How clients train points."""

    weight_decay: float = option("factor of the weights in the gradient", not_negative, default=0.0, kind="switch")
    clip: float = option("largest norm of a gradient; 0: none", not_negative, default=0.0, kind="switch")

    def point_client(
        self,
        setting: Setting,
        model: Model,
        proximal: float = 0.0,
        adversarial: float = 0.0,
        linear: bool = False,
    ) -> Client:
        """The point client that the options ask for; with a linear term in its loss where another client tells one."""
        check_batch(setting, model, self.batch)
        pulls = {"weight_decay": self.weight_decay, "proximal": proximal, LINEAR: linear}
        step = PointStep(
            model,
            optimiser_named(self.optimiser, self.momentum),
            self.epochs,
            pull=tuple(name for name, strength in pulls.items() if strength),
            clip=self.clip > 0,
            falling=self.lr_within == "falling",
            adversarial=adversarial > 0,
            private=row_normals(setting, model) if setting.private_rows and not adversarial else None,
            chain=chain_of(model) if setting.private_rows else None,
        )
        return in_schedule(point(step, self.batch), self.lr_within)


@record
class PointAveraging(Refining, Statistics, PointTraining, Robustness):
    """Point clients that are averaged, whatever the server does then."""

    proximal: float = option(
        "clients pay proximal / 2 * |w - broadcast|^2 (Li et al., 2020)", not_negative, default=0.0, kind="switch"
    )
    adversarial: float = option(
        "length of a step uphill in each input, trained on beside the input itself",
        not_negative,
        default=0.0,
        kind="switch",
    )
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="size", kind="server", importable=True
    )
    mc_dropout: bool = option("dropout stays on in prediction", flag, default=False)
    test_draws: int = option("draws in prediction, with mc_dropout", at_least_one, default=20, kind="server")

    def averaged(self, setting: Setting, rule: Rule) -> Program:
        """The program of point clients under a rule."""
        check_dropout(setting, self.mc_dropout)
        model = model_of(setting, None)
        program = Program(
            model,
            self.point_client(setting, model, self.proximal, self.adversarial),
            {part: Point(v, model.layouts[part]) for part, v in model.initial().items()},
            self.by_round(setting),
            Pooling(
                dict.fromkeys(model.trainable, rule) | static_rules(model, rule),
                weighting_named(self.weighting),
            ),
            prediction=Prediction(draws=self.test_draws, dropout=self.mc_dropout),
        )
        check_rules(program)
        return program


@record
class FedAvg(OwnClient, ServerStep, PointAveraging):
    """Point clients averaged by size (McMahan et al., 2017); `proximal` > 0 holds them near the broadcast."""

    name: ClassVar[str] = "fedavg"
    rule: str | Rule = option("how points are pooled", one_of(RULES), default="fedavg", kind="server", importable=True)

    def compose(self, setting: Setting) -> Program:
        program = self.averaged(setting, self.rule_of(self.rule))._replace(stages=self.server_stages)
        return self.with_client(program, setting)


@record
class FedProx(FedAvg):
    """FedAvg whose clients pay proximal / 2 * |w - broadcast|^2 (Li et al., 2020)."""

    name: ClassVar[str] = "fedprox"
    fixed: ClassVar[Mapping[str, str]] = {"client": "its pull is the method; give fedavg a client of your own"}
    proximal: float = option("strength of the pull to the broadcast", positive, default=0.01, kind="scalar")


@record
class FedAG(OwnClient, PointTraining):
    """FedAG: point clients go on from the mean; the server fits a normal to their weights (Thorgeirsson, 2021)."""

    name: ClassVar[str] = "fedag"
    lr: float = with_default(Descent, "lr", default=0.06)
    epochs: int = with_default(Descent, "epochs", default=40)
    batch: int = with_default(Descent, "batch", default=1)
    lr_within: str = with_default(Schedule, "lr_within", default="falling")
    clip: float = with_default(PointTraining, "clip", default=10.0)
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="equal", kind="server", importable=True
    )
    predict: str = option(
        "by the clients' networks, draws of the normal, or closed form", one_of(PREDICTORS), default="bootstrap"
    )
    noise: str = option("where the observation noise of a regression comes from", one_of(NOISE), default="heldout")
    test_draws: int = option(
        'draws in prediction, where predict = "monte_carlo"', at_least_one, default=100, kind="server"
    )

    def compose(self, setting: Setting) -> Program:
        model = model_of(setting, None)
        if self.predict == "closed" and not is_linear(setting.network):
            raise InputError('predict = "closed" is the form of a linear network; use "bootstrap" or "monte_carlo"')
        if self.predict == "closed" and (setting.likelihood.kind, setting.likelihood.width) != ("real", 1):
            raise InputError(
                'predict = "closed" is for real targets, one output each; use "bootstrap" or "monte_carlo"'
            )
        start = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        # Before the first round there is no spread. A Gaussian all the same: every broadcast has one shape and size.
        spread: Parts = {
            part: Gaussian(q.mean, torch.full_like(q.mean, 1e-12), q.layout) if part in model.trainable else q
            for part, q in start.items()
        }

        def points(broadcast: Parts, scalars: Mapping[str, float] | None = None) -> Parts:
            return {part: Point(q.mean, q.layout) for part, q in broadcast.items()}

        program = Program(
            model,
            self.point_client(setting, model),
            spread,
            self.by_round(setting),
            Pooling(
                {part: rule_named("fedag") for part in model.trainable} | static_rules(model),
                weighting_named(self.weighting),
                reference=points,
                uploaded=points,
            ),
            prediction=Prediction(
                draws=self.test_draws,
                members=self.predict == "bootstrap",
                closed=self.predict == "closed",
                noise=self.noise if setting.likelihood.kind == "real" else "likelihood",
            ),
        )
        return self.with_client(program, setting)
