"""FedPPD: clients whose posterior predictive distribution is distilled into one network, a student."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.clients.langevin import langevin
from fedbayes.clients.soft import soft
from fedbayes.composition import Method, Setting, check_batch, check_options, model_of, optimiser_named
from fedbayes.distillation import mixed, sharpened, soft_targets
from fedbayes.errors import InputError
from fedbayes.federation import MEMBERS, Program, static_rules
from fedbayes.model import Model, Weights, in_precision_of
from fedbayes.networks.papers import network_named
from fedbayes.posterior import Draws, Parts, Point
from fedbayes.predict import each_draw
from fedbayes.samplers import SAMPLERS, Sampler
from fedbayes.server.distil import Place, ensemble
from fedbayes.server.rules import rule_named
from fedbayes.server.weighting import weighting_named

STUDENT = "student"


def fedppd(
    *,
    student: str | nn.Module | None = None,
    lr: float = 0.05,
    student_lr: float = 0.05,
    epochs: int = 5,
    batch: int = 10,
    sampler: str = "sgld",
    temperature: float = 1.0,
    cooling: str = "constant",
    burn_in: int = 0,
    thin: int = 1,
    schedule: str = "interleaved",
    upload: str = "map",
    friction: float = 0.1,
    memory: float = 0.99,
    momentum: float = 0.0,
    weight_decay: float = 1e-4,
    input_noise: float = 0.001,
    teacher_dropout: bool = False,
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    weighting: str = "size",
) -> Method:
    """FedPPD: Langevin draws of a teacher, distilled on each client into a student that predicts (Bhatt et al., 2024).

    `student` is a network, or the name of one; by default it is built as the teacher is. `temperature` 1 is the
    posterior: theta -= lr / 2 grad U + N(0, T lr / n). As published: `temperature` 4 with `cooling` "1/n", `schedule`
    "epochs", `upload` "last", `teacher_dropout`. `friction` is of sampler "sghmc", `memory` of "psgld", `momentum` of
    the student's SGD. `burn_in` are epochs of a round before the student learns, from every `thin`-th draw.
    """
    options = dict(locals())
    check_options(options)
    _check_epochs(epochs, burn_in, thin)

    return Method("fedppd", options, lambda setting: _teacher_and_student(setting, options)[0])


def fedppd_distill(**options: Any) -> Method:
    """FedPPD with a server that distils teachers and students on unlabelled inputs of its own (algorithm 3)."""
    own = distil_options(**{k: options.pop(k) for k in list(options) if k in (distil_options.__kwdefaults__ or {})})
    base = fedppd(**options)

    def build(setting: Setting) -> Program:
        program, teacher = _teacher_and_student(setting, base.options)
        return distilling(program, {"server_lr": teacher, "server_student_lr": program.model}, own)

    return Method("fedppd_distill", {**base.options, **own}, build)


def _teacher_and_student(setting: Setting, options: Mapping[str, Any]) -> tuple[Program, Model]:
    """FedPPD's program, whose model is the student, and the teacher."""
    teacher, student = model_of(setting, None), student_of(setting, options["student"])
    for model in (teacher, student):
        check_batch(setting, model, options["batch"])
    names = ("epochs", "batch", "burn_in", "thin", "schedule", "upload", "cooling")
    client = langevin(
        teacher,
        student,
        sampler=_sampler(options["sampler"], options["friction"], options["memory"]),
        optimiser=optimiser_named("sgd", options["momentum"]),
        **{name: options[name] for name in names},
        within=options["lr_within"],
        dropout=options["teacher_dropout"],
    )

    def scalars(number: int) -> Mapping[str, float]:
        fixed = ("temperature", "weight_decay", "input_noise", "lr_drop", "lr_drop_every")
        decay = options["lr_decay"] ** max(0, number - options["lr_silent"])
        rates = {name: options[name] * decay for name in ("lr", "student_lr")}
        return {name: options[name] for name in fixed} | rates

    program = Program(
        student,
        client,
        points_of(teacher) | points_of(student),
        averages_of(teacher) | averages_of(student),
        weighting_named(options["weighting"]),
        scalars,
        main=STUDENT,
    )
    return program, teacher


def distil_options(
    *,
    fit: str = "gaussian",
    ensemble_draws: int = 10,
    spread: float = 1.0,
    sharpen: float = 0.5,
    server_lr: float = 0.001,
    server_student_lr: float = 0.001,
    server_momentum: float = 0.9,
    server_epochs: int = 20,
    server_batch: int = 64,
    swa_start: int = 500,
    swa_every: int = 25,
) -> dict[str, Any]:
    """The options of a server that distils: FedBE's and FedPPD's, but for `spread`, which FedPPD's code has at 0.1."""
    options = dict(locals())
    check_options(options)
    return options


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


def student_of(setting: Setting, student: str | nn.Module | None) -> Model:
    """The student's network for the setting, its parts under a name of their own."""
    network, frozen = setting.network, setting.frozen
    if student is not None:
        with torch.no_grad():
            given = in_precision_of(network, setting.prepare(setting.x) if setting.prepare else setting.x)
            outputs = copy.deepcopy(network).eval()(given).shape[-1]
        shape = tuple(setting.x.shape[1:])
        made = network_named(student, shape, outputs, seed=setting.seed) if isinstance(student, str) else student
        network, frozen = copy.deepcopy(made).to(setting.x.device, next(setting.network.parameters()).dtype), ()
        with torch.no_grad():
            said = copy.deepcopy(network).eval()(given).shape[-1]
        if said != outputs:
            raise InputError(f"student: it gives {said} outputs for each input, the teacher {outputs}")
    return Model.of(
        network,
        setting.likelihood,
        frozen=frozen,
        prepare=setting.prepare,
        units=setting.units,
        bfloat16=setting.bfloat16,
        augment=setting.augment,
        name=STUDENT,
    )


def points_of(model: Model) -> Parts:
    """The network's own values as points."""
    return {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}


def averages_of(model: Model) -> dict[str, Any]:
    """Averages by weight of all that is trained, and the rules of what is not."""
    return {part: rule_named("fedavg") for part in model.trainable} | static_rules(model)


def _sampler(name: str, friction: float, memory: float) -> Sampler:
    return SAMPLERS[name](**{"sghmc": {"friction": friction}, "psgld": {"memory": memory}}.get(name, {}))


def _check_epochs(epochs: int, burn_in: int, thin: int) -> None:
    left = epochs - burn_in
    if left < thin or left % thin:
        raise InputError(
            f"epochs - burn_in = {left} must be a positive multiple of thin = {thin}, or the student never learns"
        )
