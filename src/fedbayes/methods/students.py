"""FedPPD: clients whose posterior predictive distribution is distilled into one network, a student."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedbayes.clients.langevin import langevin
from fedbayes.composition import Method, Setting, check_batch, check_options, model_of, optimiser_named
from fedbayes.errors import InputError
from fedbayes.federation import Program, static_rules
from fedbayes.model import Model, in_precision_of
from fedbayes.networks.papers import network_named
from fedbayes.posterior import Parts, Point
from fedbayes.samplers import SAMPLERS, Sampler
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
    student_lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    weighting: str = "size",
) -> Method:
    """FedPPD: Langevin draws of a teacher, distilled on each client into a student that predicts (Bhatt et al., 2024).

    `student` is a network, or the name of one; by default it is built as the teacher is. `temperature` 1 is the
    posterior: theta -= lr / 2 grad U + N(0, T lr / n). As published: `temperature` 4 with `cooling` "1/n", `schedule`
    "epochs", `upload` "last", `lr_within` "steps". `friction` is of sampler "sghmc", `memory` of "psgld", `momentum` of
    the student's SGD. `burn_in` are epochs of a round before the student learns, from every `thin`-th draw.
    """
    options = dict(locals())
    check_options(options)
    _check_epochs(epochs, burn_in, thin)

    return Method("fedppd", options, lambda setting: teacher_and_student(setting, options)[0])


def teacher_and_student(setting: Setting, options: Mapping[str, Any]) -> tuple[Program, Model]:
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
        student_within=options["student_lr_within"],
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
        constants=teacher.frozen,
    )
    return program, teacher


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
    return model_of(replace(setting, network=network, frozen=frozen), None, STUDENT)


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
