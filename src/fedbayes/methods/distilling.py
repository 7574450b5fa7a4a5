"""Servers that distil the cohort's networks on unlabelled inputs of their own: FedBE, and FedPPD's algorithm 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbayes.clients.soft import soft
from fedbayes.errors import InputError
from fedbayes.federation.distil import FITS, Place, ensemble
from fedbayes.federation.program import Program
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import rule_named
from fedbayes.federation.stages import distillation
from fedbayes.methods.groups import optimiser_named
from fedbayes.methods.method import Method, Setting
from fedbayes.methods.points import FedAvg, PointAveraging
from fedbayes.methods.students import FedPPD
from fedbayes.model.likelihood import Weights
from fedbayes.model.model import Model
from fedbayes.model.predictive import each_draw
from fedbayes.model.soft_targets import mixed, sharpened, soft_targets
from fedbayes.options import (
    at_least_one,
    below_one,
    not_negative,
    one_of,
    option,
    positive,
    record,
    whole,
    with_default,
)
from fedbayes.posterior.values import Draws, Parts


@record
class Distilling(Method):
    """A server that distils the cohort's networks on unlabelled inputs (FedBE; FedPPD, algorithm 3).

    Around each network's average a distribution is fitted to the uploads; the mean prediction of draws of it, the
    average and the uploads, to the power 1 / `sharpen`, is the target that the average learns.
    """

    fit: str = option("distribution that is fitted to the uploads", one_of(FITS), default="gaussian")
    ensemble_draws: int = option("draws of it", whole(0, "a whole number of draws"), default=10)
    spread: float = option("factor on its width; FedPPD's code has 0.1", positive, default=1.0)
    sharpen: float = option("temperature of the targets", positive, default=0.5)
    server_lr: float = option("step size at the server", positive, default=0.001, kind="scalar")
    server_student_lr: float = option("step size of the student at the server", positive, default=0.001, kind="scalar")
    server_momentum: float = option("of the server's SGD", below_one, default=0.9)
    server_weight_decay: float = option("factor of the weights in the server's gradient", not_negative, default=0.0)
    server_epochs: int = option("passes over the server's inputs", at_least_one, default=20)
    server_batch: int = option("inputs in a step of the server", at_least_one, default=64)
    swa_start: int = option(
        "steps before the server's iterates are averaged", whole(0, "a whole number of steps"), default=500
    )
    swa_every: int = option("steps between iterates that are averaged", at_least_one, default=25)

    def distilling(self, program: Program, models: Mapping[str, Model]) -> Program:
        """The program with such a server; `models` are the networks by the name of their learning rate."""
        plain = {name: replace(model, augment=None) for name, model in models.items()}
        client = soft(
            plain,
            optimiser=optimiser_named("sgd", self.server_momentum),
            epochs=self.server_epochs,
            batch=self.server_batch,
            start=self.swa_start,
            every=self.swa_every,
            decay=self.server_weight_decay,
        )

        def targets(parts: Parts, members: Parts, x: Tensor, place: Place) -> Tensor:
            return torch.stack([pseudo_labels(model, parts, members, x, self, place) for model in plain.values()], 1)

        return program._replace(stages=(*program.stages, distillation(program, client, targets)))


@record
class FedBE(PointAveraging, Distilling):
    """FedAvg with a server that distils an ensemble around the clients on unlabelled inputs (Chen & Chao, 2021)."""

    name: ClassVar[str] = "fedbe"
    fixed: ClassVar[Mapping[str, str]] = {"server": "the server distils"}
    rule: str | Rule = with_default(FedAvg, "rule", default="fedavg")

    def check(self) -> None:
        super().check()
        if rule_named(self.rule).robust:
            raise InputError(
                "rule: the server of fedbe learns from every client's network, liars' too, however it averages them; "
                "use fedavg with that rule, or leave it out"
            )

    def compose(self, setting: Setting) -> Program:
        program = self.averaged(setting, self.rule_of(self.rule))
        return self.distilling(program, {"server_lr": program.model})


@record
class FedPPDDistill(FedPPD, Distilling):
    """FedPPD with a server that distils teachers and students on unlabelled inputs of its own (algorithm 3)."""

    name: ClassVar[str] = "fedppd_distill"

    def compose(self, setting: Setting) -> Program:
        program, teacher = self.teacher_and_student(setting)
        return self.distilling(program, {"server_lr": teacher, "server_student_lr": program.model})


def pseudo_labels(model: Model, parts: Parts, members: Parts, x: Tensor, options: Distilling, place: Place) -> Tensor:
    """What the ensemble says of inputs [N, ...]: soft targets [N, S, C]."""

    def read(output: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        return (soft_targets(model.likelihood, output, weights),)

    drawn = _ensemble(model, parts, members, options, place)
    with torch.no_grad():
        pieces = [
            mixed(model.likelihood, each_draw(model, drawn, rows, read, (*place, "labels"))[0])
            for rows in x.split(1024 if x.device.type == "cpu" else 4096)
        ]
    return sharpened(model.likelihood, torch.cat(pieces), options.sharpen)


def _ensemble(model: Model, parts: Parts, members: Parts, options: Distilling, place: Place) -> dict[str, Tensor]:
    """Weights [M + 1 + K, P] of each part. Draws and the average have the pooled buffers, an upload has its own."""
    draws, drawn = options.ensemble_draws, {}
    uploads = {part: q.values for part in model.layouts if isinstance(q := members.get(part), Draws)}
    count = len(next(iter(uploads.values())))
    for part in model.layouts:
        mean = parts[part].mean
        if part in model.trainable:
            fitted: dict[str, Any] = {"fit": options.fit, "draws": draws, "spread": options.spread}
            drawn[part] = ensemble(mean, uploads[part], **fitted, place=(*place, part))
        else:
            drawn[part] = torch.cat([mean.expand(draws + 1, -1), uploads.get(part, mean.expand(count, -1))])
    return drawn
