"""FedPPD: clients whose posterior predictive distribution is distilled into one network, a student."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from fedbayes.clients.langevin import COOLING, SCHEDULES, UPLOADS, langevin
from fedbayes.clients.samplers import SAMPLERS, Sampler
from fedbayes.clients.schedules import WITHIN
from fedbayes.errors import InputError
from fedbayes.federation.pooling import static_rules
from fedbayes.federation.program import Pooling, Prediction, Program
from fedbayes.federation.rules import rule_named
from fedbayes.federation.weighting import WEIGHTINGS, Weighting, weighting_named
from fedbayes.methods.composition import check_batch, model_of
from fedbayes.methods.groups import Descent, Schedule, optimiser_named
from fedbayes.methods.method import Setting
from fedbayes.model.call import arguments_of, tensor_in
from fedbayes.model.inputs import in_precision_of
from fedbayes.model.model import Model
from fedbayes.networks.papers import network_named
from fedbayes.options import (
    Check,
    at_least_one,
    below_one,
    flag,
    not_negative,
    one_of,
    option,
    positive,
    record,
    up_to_one,
    whole,
    with_default,
)
from fedbayes.posterior.values import Parts, Point

STUDENT = "student"
NETWORK = Check("a network, or the name of one", lambda v: isinstance(v, str | nn.Module))


@record
class FedPPD(Schedule):
    """FedPPD: Langevin draws of a teacher, distilled on each client into a student that predicts (Bhatt et al., 2024).

    `temperature` 1 is the posterior: theta -= lr / 2 grad U + N(0, T lr / n). As published: `temperature` 4 with
    `cooling` "1/n", `schedule` "epochs", `upload` "last", `lr_within` "steps".
    """

    name: ClassVar[str] = "fedppd"
    student: str | nn.Module | None = option(
        "a network, or the name of one; by default built as the teacher is", NETWORK, default=None
    )
    lr: float = with_default(Descent, "lr", default=0.05)
    student_lr: float = option("step size of the student", positive, default=0.05, kind="scalar")
    epochs: int = with_default(Descent, "epochs", default=5)
    batch: int = with_default(Descent, "batch", default=10)
    sampler: str = option("of the teacher's weights", one_of(SAMPLERS), default="sgld")
    temperature: float = option("of the teacher's posterior", not_negative, default=1.0, kind="scalar")
    cooling: str = option("what the temperature is multiplied by", one_of(COOLING), default="constant")
    burn_in: int = option(
        "epochs of a round before the student learns", whole(0, "a whole number of epochs"), default=0
    )
    thin: int = option("the student learns from every so many draws", at_least_one, default=1)
    schedule: str = option("when the student learns", one_of(SCHEDULES), default="interleaved")
    upload: str = option("which draw of the teacher is sent", one_of(UPLOADS), default="map")
    friction: float = option("of sghmc", up_to_one, default=0.1)
    memory: float = option("of psgld", below_one, default=0.99)
    momentum: float = option("of the student's SGD", below_one, default=0.0)
    weight_decay: float = option("precision of the prior, per row", not_negative, default=0.0001, kind="scalar")
    input_noise: float = option(
        "scale of the noise on inputs that the student sees", not_negative, default=0.001, kind="scalar"
    )
    teacher_dropout: bool = option("the teacher keeps its dropout while it teaches", flag, default=False)
    student_lr_within: str = option("how student_lr falls within a round", one_of(WITHIN), default="constant")
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="size", kind="server", importable=True
    )

    def falls_by_steps(self) -> bool:
        return super().falls_by_steps() or self.student_lr_within == "steps"

    def check(self) -> None:
        super().check()
        left = self.epochs - self.burn_in
        if left < self.thin or left % self.thin:
            raise InputError(
                f"epochs - burn_in = {left} must be a positive multiple of thin = {self.thin}, "
                "or the student never learns"
            )

    def compose(self, setting: Setting) -> Program:
        return self.teacher_and_student(setting)[0]

    def teacher_and_student(self, setting: Setting) -> tuple[Program, Model]:
        """FedPPD's program, whose model is the student, and the teacher."""
        teacher, student = model_of(setting, None), student_of(setting, self.student)
        for model in (teacher, student):
            check_batch(setting, model, self.batch)
        client = langevin(
            teacher,
            student,
            sampler=_sampler(self.sampler, self.friction, self.memory),
            optimiser=optimiser_named("sgd", self.momentum),
            epochs=self.epochs,
            batch=self.batch,
            burn_in=self.burn_in,
            thin=self.thin,
            schedule=self.schedule,
            upload=self.upload,
            cooling=self.cooling,
            within=self.lr_within,
            student_within=self.student_lr_within,
            dropout=self.teacher_dropout,
        )
        fixed = self.scalars()

        def scalars(number: int) -> Mapping[str, float]:
            decay = self.fallen(number, setting.rounds)
            return {**fixed, "lr": self.lr * decay, "student_lr": self.student_lr * decay}

        program = Program(
            student,
            client,
            points_of(teacher) | points_of(student),
            scalars,
            Pooling(averages_of(teacher) | averages_of(student), weighting_named(self.weighting)),
            prediction=Prediction(part=STUDENT),
            constants=teacher.frozen,
        )
        return program, teacher


def outputs_of(network: nn.Module, inputs: Any) -> int:
    """How many numbers a network gives for an input."""
    args, names = arguments_of(inputs)
    return int(tensor_in(copy.deepcopy(network).eval()(*args, **names)).shape[-1])


def student_of(setting: Setting, student: str | nn.Module | None) -> Model:
    """The student's network for the setting, its parts under a name of their own."""
    network, frozen = setting.network, setting.frozen
    if student is not None:
        with torch.no_grad():
            inputs = in_precision_of(network, setting.prepare(setting.x) if setting.prepare else setting.x)
            outputs = outputs_of(network, inputs)
        shape = tuple(setting.x.shape[1:])
        template = network_named(student, shape, outputs, seed=setting.seed) if isinstance(student, str) else student
        network, frozen = copy.deepcopy(template).to(setting.x.device, next(setting.network.parameters()).dtype), ()
        with torch.no_grad():
            own_outputs = outputs_of(network, inputs)
        if own_outputs != outputs:
            raise InputError(f"student: it gives {own_outputs} outputs for each input, the teacher {outputs}")
    return model_of(replace(setting, network=network, frozen=frozen), None, STUDENT)


def points_of(model: Model) -> Parts:
    """The network's own values as points."""
    return {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}


def averages_of(model: Model) -> dict[str, Any]:
    """Averages by weight of all that is trained, and the rules of what is not."""
    return {part: rule_named("fedavg") for part in model.trainable} | static_rules(model)


def _sampler(name: str, friction: float, memory: float) -> Sampler:
    return SAMPLERS[name](**{"sghmc": {"friction": friction}, "psgld": {"memory": memory}}.get(name, {}))
