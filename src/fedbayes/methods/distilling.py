"""Servers that distil the cohort's networks on unlabelled inputs of their own: FedBE, and FedPPD's algorithm 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.soft import soft
from fedbayes.composition import Method, Setting, check_options, optimiser_named
from fedbayes.distillation import mixed, sharpened, soft_targets
from fedbayes.federation import MEMBERS, Program
from fedbayes.methods.options import builds_on, call, option_names, refuse
from fedbayes.methods.points import fedavg
from fedbayes.methods.students import fedppd, teacher_and_student
from fedbayes.model import Model, Weights
from fedbayes.posterior import Draws, Parts
from fedbayes.predict import each_draw
from fedbayes.server.distil import Place, ensemble


def distil_options(
    *,
    fit: str = "gaussian",
    ensemble_draws: int = 10,
    spread: float = 1.0,
    sharpen: float = 0.5,
    server_lr: float = 0.001,
    server_student_lr: float = 0.001,
    server_momentum: float = 0.9,
    server_weight_decay: float = 0.0,
    server_epochs: int = 20,
    server_batch: int = 64,
    swa_start: int = 500,
    swa_every: int = 25,
) -> dict[str, Any]:
    """The options of a server that distils: FedBE's and FedPPD's, but for `spread`, which FedPPD's code has at 0.1."""
    options = dict(locals())
    check_options(options)
    return options


@builds_on(distil_options, fedavg)
def fedbe(**options: Any) -> Method:
    """FedAvg with a server that distils an ensemble around the clients on unlabelled inputs (Chen & Chao, 2021)."""
    refuse("fedbe", options, "server", "the server distils")
    own = distil_options(**{k: options.pop(k) for k in option_names(distil_options) if k in options})
    base = call(fedavg, options)

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        return distilling(program, {"server_lr": program.model}, own)

    return Method("fedbe", {**base.options, **own}, build)


@builds_on(distil_options, fedppd)
def fedppd_distill(**options: Any) -> Method:
    """FedPPD with a server that distils teachers and students on unlabelled inputs of its own (algorithm 3)."""
    own = distil_options(**{k: options.pop(k) for k in option_names(distil_options) if k in options})
    base = fedppd(**options)

    def build(setting: Setting) -> Program:
        program, teacher = teacher_and_student(setting, base.options)
        return distilling(program, {"server_lr": teacher, "server_student_lr": program.model}, own)

    return Method("fedppd_distill", {**base.options, **own}, build)


def distilling(program: Program, models: Mapping[str, Model], options: Mapping[str, Any]) -> Program:
    """The program with a server that distils the cohort's networks on unlabelled inputs (FedBE; FedPPD, algorithm 3).

    Around each network's average a distribution is fitted to the uploads (`fit`, its width times `spread`); the mean
    prediction of `ensemble_draws` draws of it, the average and the uploads, to the power 1 / `sharpen`, is the target
    that the average learns in `server_epochs`, averaged over iterates from step `swa_start` on, every `swa_every`.
    `models` are the networks by the name of their learning rate.
    """
    plain = {name: replace(model, augment=None) for name, model in models.items()}
    client = soft(
        plain,
        optimiser=optimiser_named("sgd", options["server_momentum"]),
        epochs=options["server_epochs"],
        batch=options["server_batch"],
        start=options["swa_start"],
        every=options["swa_every"],
        decay=options["server_weight_decay"],
    )

    def targets(parts: Parts, x: Tensor, place: Place) -> Tensor:
        return torch.stack([pseudo_labels(model, parts, x, options, place) for model in plain.values()], 1)

    def scalars(number: int) -> Mapping[str, float]:
        return {**program.options(number), **{name: options[name] for name in models}}

    return program._replace(server_client=client, server_targets=targets, options=scalars)


def pseudo_labels(model: Model, parts: Parts, x: Tensor, options: Mapping[str, Any], place: Place) -> Tensor:
    """What the ensemble says of inputs [N, ...]: soft targets [N, S, C]."""

    def read(output: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        return (soft_targets(model.likelihood, output, weights),)

    drawn = _ensemble(model, parts, options, place)
    with torch.no_grad():
        pieces = [
            mixed(model.likelihood, each_draw(model, drawn, rows, read, (*place, "labels"))[0])
            for rows in x.split(1024 if x.device.type == "cpu" else 4096)
        ]
    return sharpened(model.likelihood, torch.cat(pieces), options["sharpen"])


def _ensemble(model: Model, parts: Parts, options: Mapping[str, Any], place: Place) -> dict[str, Tensor]:
    """Weights [M + 1 + K, P] of each part. Draws and the average have the pooled buffers, an upload has its own."""
    draws, drawn = options["ensemble_draws"], {}
    kept = {part: q.values for part in model.layouts if isinstance(q := parts.get(MEMBERS + part), Draws)}
    count = len(next(iter(kept.values())))
    for part in model.layouts:
        mean = parts[part].mean
        if part in model.trainable:
            fitted = {"fit": options["fit"], "draws": draws, "spread": options["spread"]}
            drawn[part] = ensemble(mean, kept[part], **fitted, place=(*place, part))
        else:
            drawn[part] = torch.cat([mean.expand(draws + 1, -1), kept.get(part, mean.expand(count, -1))])
    return drawn
