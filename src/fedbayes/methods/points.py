"""Clients that train points: averaged, held near the broadcast, or a normal fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedbayes.composition import (
    Method,
    Setting,
    by_round,
    check_dropout,
    check_options,
    is_linear,
    model_of,
    point_client,
    server_optimiser,
)
from fedbayes.errors import InputError
from fedbayes.federation import Program, check_rules, static_rules
from fedbayes.methods.options import builds_on, call, refinable
from fedbayes.posterior import Gaussian, Parts, Point
from fedbayes.server.rules import Rule, rule_named
from fedbayes.server.weighting import weighting_named


@refinable
def fedavg(
    *,
    lr: float = 0.05,
    epochs: int = 5,
    batch: int = 10,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    clip: float = 0.0,
    adversarial: float = 0.0,
    rule: str | Rule = "fedavg",
    weighting: str = "size",
    server: str | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    norm_passes: int = 0,
    mc_dropout: bool = False,
    test_draws: int = 20,
) -> Method:
    """Point clients averaged by size (McMahan et al., 2017); `proximal` > 0 holds them near the broadcast.

    `mc_dropout` keeps dropout on in prediction. The learning rate is multiplied by `lr_decay` each round after
    `lr_silent` rounds; `lr_within` "falling" takes it linearly to 0 within each, "steps" multiplies it by
    `lr_drop` after each `lr_drop_every` epochs. `clip` > 0 is the largest norm of a
    gradient, `adversarial` > 0 the length of a step uphill in each input, trained on beside the input itself.
    `server`: "sgd" (momentum) or "adam" on the pooled mean. BatchNorm's statistics are averages of the clients', or,
    with `norm_passes` > 0, those of the pooled network, taken by so many more passes over the cohort's rows.
    """
    options = dict(locals())
    check_options(options)

    def build(setting: Setting) -> Program:
        check_dropout(setting, mc_dropout)
        model = model_of(setting, None)
        client = point_client(setting, model, options)
        initial: Parts = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        scalars = {
            "lr": lr,
            "weight_decay": weight_decay,
            "proximal": proximal,
            "clip": clip,
            "adversarial": adversarial,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        program = Program(
            model,
            client,
            initial,
            {part: rule_named(rule) for part in model.trainable} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            dropout=mc_dropout,
            test_draws=test_draws,
            server_optimiser=server_optimiser(server, server_lr, server_momentum),
            norm_passes=norm_passes,
        )
        check_rules(program)
        return program

    return Method("fedprox" if proximal else "fedavg", options, build)


@refinable
@builds_on(fedavg)
def fedprox(*, proximal: float = 0.01, **options: Any) -> Method:
    """FedAvg whose clients pay proximal / 2 * |w - broadcast|^2 (Li et al., 2020)."""
    if not proximal > 0:
        raise InputError(f"proximal must be positive for fedprox, not {proximal}; fedavg is the method with 0")
    return call(fedavg, {"proximal": proximal, **options})


def fedag(
    *,
    lr: float = 0.06,
    epochs: int = 40,
    batch: int = 1,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "falling",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    clip: float = 10.0,
    weighting: str = "equal",
    predict: str = "bootstrap",
    noise: str = "heldout",
    test_draws: int = 100,
) -> Method:
    """FedAG: point clients go on from the mean; the server fits a normal to their weights (Thorgeirsson, 2021).

    `predict`: "bootstrap" (the clients' networks as an ensemble), "monte_carlo" (`test_draws` from the normal), or
    "closed" (eq. 6, for a linear network). `noise` is the observation noise of a regression: "none" (eq. 5 alone),
    "own", "train", "heldout" or "calibrated", see `federation.NOISE`; "likelihood" is the likelihood's own.
    """
    options = dict(locals())
    check_options(options)

    def build(setting: Setting) -> Program:
        model = model_of(setting, None)
        if predict == "closed" and not is_linear(setting.network):
            raise InputError('predict = "closed" is the form of a linear network; use "bootstrap" or "monte_carlo"')
        start = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        # Before the first round nobody disagrees. A Gaussian all the same: every broadcast has one shape and size.
        spread: Parts = {
            part: Gaussian(q.mean, torch.full_like(q.mean, 1e-12), q.layout) if part in model.trainable else q
            for part, q in start.items()
        }

        def points(broadcast: Parts, scalars: Mapping[str, float] | None = None) -> Parts:
            return {part: Point(q.mean, q.layout) for part, q in broadcast.items()}

        scalars = {
            "lr": lr,
            "weight_decay": weight_decay,
            "clip": clip,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        return Program(
            model,
            point_client(setting, model, options),
            spread,
            {part: rule_named("fedag") for part in model.trainable} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            reference=points,
            uploaded=points,
            test_draws=test_draws,
            members=predict == "bootstrap",
            closed=predict == "closed",
            noise=noise if setting.likelihood.kind == "real" else "likelihood",
        )

    return Method("fedag", options, build)
