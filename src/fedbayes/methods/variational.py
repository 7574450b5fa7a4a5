"""Variational clients: Gaussians over all weights, under any rule, prior and estimator; FedUAB and PVI among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedbayes.clients.partitioned import FIRST, own_model, partitioned
from fedbayes.clients.variational import initial_scale, variational
from fedbayes.composition import (
    Method,
    Setting,
    batch_like,
    by_round,
    check_batch,
    check_options,
    check_points,
    in_schedule,
    model_of,
    optimiser_named,
    server_optimiser,
)
from fedbayes.errors import InputError
from fedbayes.federation import Program, check_rules, static_rules
from fedbayes.methods.options import builds_on, call, refinable
from fedbayes.model import points_by_default
from fedbayes.networks.estimators import plan
from fedbayes.posterior import Gaussian, Parts, Point
from fedbayes.server.rules import Rule, rule_named
from fedbayes.server.weighting import weighting_named


@refinable
def fedvi(
    *,
    lr: float = 0.05,
    epochs: int = 5,
    batch: int = 10,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    train_draws: int = 1,
    test_draws: int = 20,
    estimator: str = "local",
    kl: str = "constant",
    kl_weight: float = 1e-4,
    prior: str | None = None,
    prior_scale: float = 1.0,
    initial: float | Mapping[str, float] = 0.1,
    division: float = 1.0,
    points: tuple[str, ...] = (),
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    rule: str | Rule = "log_pool",
    weighting: str = "size",
    server: str | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    norm_passes: int = 0,
) -> Method:
    """Variational clients under any rule, weighting, prior and estimator.

    `initial` is the first layer's scale, its square divided by `division` at each next layer; or a table of scales by
    pattern of name. `kl` says what multiplies
    `kl_weight`: "constant" (1), "1/B", "1/n" or "blundell". `prior` is "broadcast" or "fixed" (N(0, prior_scale^2));
    by default "broadcast", but "fixed" under rules that narrow (ws, wc, conflation): their broadcast is a prior that is
    harder with every round, until a step of size `lr` on its KL diverges.
    `points` are patterns of weights that are not given a distribution, beside BatchNorm's and the likelihood's own.
    `norm_passes` as in `fedavg`: a rule that moves the mean further than any client went, as dwc does, needs them.
    """
    options = dict(locals())
    check_options(options)
    held_near = prior or ("fixed" if rule_named(rule).narrows else "broadcast")
    options["prior"] = held_near

    def build(setting: Setting) -> Program:
        model = model_of(setting, [*points_by_default(setting.network, setting.likelihood), *points])
        check_points(setting, model, points)
        check_batch(setting, model, batch)
        made = plan(model, "model", batch_like(setting.x, batch), estimator)
        learner = variational(
            model,
            made,
            optimiser=optimiser_named(optimiser, momentum),
            epochs=epochs,
            batch=batch,
            train_draws=train_draws,
            kl=kl,
            prior=held_near,
            falling=lr_within == "falling",
        )
        client = in_schedule(learner, lr_within)
        first: Parts = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        mean = first["model"].mean
        first["model"] = Gaussian(mean, initial_scale(model, initial, division).to(mean), model.layouts["model"])

        def reference(broadcast: Parts, scalars: Mapping[str, float]) -> Parts:
            if held_near == "broadcast":
                return broadcast
            q = broadcast["model"].mean
            fixed = Gaussian(torch.zeros_like(q), torch.as_tensor(scalars["prior_scale"]).to(q).expand_as(q), q_layout)
            return {**broadcast, "model": fixed}

        q_layout = model.layouts["model"]
        scalars = {
            "lr": lr,
            "kl_weight": kl_weight,
            "prior_scale": prior_scale,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        shared = {part: rule_named("fedavg") for part in model.trainable if part != "model"}
        program = Program(
            model,
            client,
            first,
            {"model": rule_named(rule), **shared} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            reference=reference,
            test_draws=test_draws,
            server_optimiser=server_optimiser(server, server_lr, server_momentum),
            norm_passes=norm_passes,
        )
        check_rules(program)
        return program

    return Method("fedvi", options, build)


@refinable
@builds_on(fedvi)
def feduab(*, draws: int | None = None, division: float = 2.0, **options: Any) -> Method:
    """FedUAB: the broadcast posterior is start and prior, the log-linear pool (eq. 8) by size, H = `division` = 2.

    `draws` is the paper's Z: it sets `train_draws` and `test_draws` unless they are given.
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    method = call(fedvi, {"division": division, "prior": "broadcast", **options})
    return Method("feduab", method.options, method.build)


@refinable
@builds_on(fedvi)
def pvi(*, damping: float = 0.5, prior_scale: float = 1.0, initial: float = 0.1, **options: Any) -> Method:
    """Partitioned variational inference: clients keep a factor of the posterior, and send its change (Bui, 2018).

    The prior N(0, prior_scale^2) is the first broadcast; training starts from the network's own weights with scale
    `initial`. `damping` in (0, 1] is the share of the change that is made: about 1 / clients where they are alike.
    """
    options = {"kl": "1/n", "kl_weight": 1.0, "lr_within": "falling", **options}
    fixed = [name for name in ("prior", "rule", "weighting", "division") if name in options]
    if fixed:
        raise InputError(f"{fixed[0]} is fixed in pvi: the prior is the cavity, the rule adds natural parameters")
    if options.get("server") is not None:
        raise InputError("server: in pvi the posterior is the product of the clients' factors; leave it out")
    base = call(fedvi, {"rule": "dwc", "prior_scale": prior_scale, "initial": initial, **options})
    check_options({"damping": damping})

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        first = program.initial["model"]
        assert isinstance(first, Gaussian)
        prior = Gaussian(torch.zeros_like(first.mean), torch.full_like(first.mean, prior_scale), first.layout)
        client = partitioned(program.client)
        return program._replace(
            client=client,
            personal=own_model(client, program.client),
            initial={**program.initial, "model": prior},
            options=lambda number: {**program.options(number), "damping": damping, "cohort": float(setting.cohort)},
            constants={**program.constants, FIRST: first},
        )

    return Method("pvi", {"damping": damping, **base.options}, build)
