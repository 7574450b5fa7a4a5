"""Posteriors of clients from the iterates of their training, over FedAvg: SWAG at the end, posterior averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from fedbayes.clients.posterior_averaging import posterior_averaging
from fedbayes.clients.swag import LEAST, swag
from fedbayes.errors import InputError
from fedbayes.federation.pooling import static_rules
from fedbayes.federation.program import Program
from fedbayes.federation.rules import RULES
from fedbayes.methods.groups import ServerStep
from fedbayes.methods.method import Setting
from fedbayes.methods.points import FedAvg, PointAveraging
from fedbayes.options import at_least_one, not_negative, one_of, option, positive, record, share, whole, with_default
from fedbayes.posterior.values import Gaussian, LowRank, Parts, Point

COVARIANCES = {"diagonal": "independent weights", "low_rank": "the diagonal and the last deviations, half each"}
POOLED = [name for name, rule in RULES.items() if Gaussian in rule.takes and not rule.needs_reference]


@record
class FedSWAG(ServerStep, PointAveraging):
    """FedAvg, and SWAG on every client in the last `swag_rounds` rounds (Maddox et al., 2019; Linsner et al., 2021).

    With `covariance` "low_rank" the server keeps all factors: the mean of the clients' covariances.
    """

    name: ClassVar[str] = "fedswag"
    fixed: ClassVar[Mapping[str, str]] = {"rule": "it is `pooled`"}
    ruled_by: ClassVar[str] = "pooled"
    covariance: str = option("of the clients' normals", one_of(COVARIANCES), default="diagonal")
    rank: int = option("deviations that are kept, where covariance = low_rank", whole(2), default=10)
    swag_rounds: int = option("last rounds in which clients collect iterates", at_least_one, default=1, kind="server")
    swag_every: int = option("steps between iterates that count", at_least_one, default=1, kind="scalar")
    swag_start: float = option("share of a round's steps before iterates count", share, default=0.5, kind="scalar")
    swag_lr: float | None = option(
        "step size while iterates are collected; lr where it is not given", positive, default=None, kind="server"
    )
    pooled: str = option("rule for the normals", one_of(POOLED), default="nwa", kind="server", importable=True)
    test_draws: int = option("draws in prediction", at_least_one, default=20, kind="server")

    def check(self) -> None:
        super().check()
        if self.covariance == "low_rank" and self.pooled == "mean_rho":
            raise InputError('pooled: a normal of low rank has no rho; use "nwa", or covariance = "diagonal"')

    def needs_last_rounds(self, rounds: int) -> str:
        if self.swag_rounds >= rounds:
            return ""
        last = f"the last {self.swag_rounds} of {rounds} rounds"
        return f"fedswag's posterior is made in {last}; set swag_rounds = {rounds}"

    def compose(self, setting: Setting) -> Program:
        """Clients that run SWAG in the last rounds; their normals are pooled, and predict."""
        program, rule = self.averaged(setting, RULES["fedavg"]), self.rule_of(self.pooled)
        rank = self.rank if self.covariance == "low_rank" else 0
        first = program.initial["model"]

        def scalars(number: int) -> Mapping[str, float]:
            last = number >= setting.rounds - self.swag_rounds
            rate = {"lr": self.swag_lr} if last and self.swag_lr is not None else {}
            return {**program.options(number), "collect": float(last), **rate}

        def points(broadcast: Parts, scalars: Mapping[str, float] | None = None) -> Parts:
            return {part: Point(q.mean, q.layout) for part, q in broadcast.items()}

        def uploaded(broadcast: Parts) -> Parts:
            q = broadcast["model"]
            assert isinstance(q, Gaussian)
            if not rank:
                return broadcast
            return {**broadcast, "model": LowRank(q.mean, q.scale, q.scale.expand(rank, -1), q.layout)}

        return program._replace(
            client=swag(program.client, rank=rank),
            # A Gaussian in every round: broadcasts have one shape and size.
            initial={
                **program.initial,
                "model": Gaussian(first.mean, torch.full_like(first.mean, LEAST), first.layout),
            },
            options=scalars,
            pooling=program.pooling._replace(
                rules={"model": rule} | static_rules(program.model, rule),
                reference=points,
                uploaded=uploaded,
            ),
            stages=self.server_stages,
            prediction=program.prediction._replace(members=rank > 0, made=setting.rounds - self.swag_rounds),
        )


@record
class FedPA(FedAvg):
    """FedPA: clients send Sigma^-1 (broadcast - mean) of their posterior samples (Al-Shedivat et al., 2021).

    A sample is the mean of consecutive iterates. The server's optimiser takes the averaged deltas for gradients.
    """

    name: ClassVar[str] = "fedpa"
    fixed: ClassVar[Mapping[str, str]] = {"client": "its samples are the method; give fedavg a client of your own"}
    samples: int = option("posterior samples of a client in a round", at_least_one, default=5)
    shrinkage: float = option(
        "of the samples' covariance to the identity, the paper's rho", not_negative, default=0.01, kind="scalar"
    )
    burn_share: float = option("share of a round's steps before the first sample", share, default=0.4, kind="scalar")
    plain_rounds: int = option(
        "first rounds that are FedAvg's", whole(0, "a whole number of rounds"), default=0, kind="server"
    )
    server: str | None = with_default(ServerStep, "server", default="sgd")
    server_lr: float = with_default(ServerStep, "server_lr", default=0.2)

    def compose(self, setting: Setting) -> Program:
        program = super().compose(setting)

        def scalars(number: int) -> Mapping[str, float]:
            return {**program.options(number), "average": float(number >= self.plain_rounds)}

        return program._replace(client=posterior_averaging(program.client, samples=self.samples), options=scalars)
