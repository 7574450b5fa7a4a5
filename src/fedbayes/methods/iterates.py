"""Posteriors of clients from the iterates of their training, over FedAvg: SWAG at the end, posterior averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedbayes.clients.posterior_averaging import posterior_averaging
from fedbayes.clients.swag import LEAST, swag
from fedbayes.composition import Method, Setting, check_options
from fedbayes.federation import Program
from fedbayes.methods.options import builds_on, call, refuse
from fedbayes.methods.points import fedavg
from fedbayes.posterior import Gaussian, LowRank, Parts, Point
from fedbayes.server.rules import rule_named


@builds_on(fedavg)
def fedswag(
    *,
    covariance: str = "diagonal",
    rank: int = 10,
    swag_rounds: int = 1,
    swag_every: int = 1,
    swag_start: float = 0.5,
    swag_lr: float | None = None,
    pooled: str = "nwa",
    test_draws: int = 20,
    **options: Any,
) -> Method:
    """FedAvg, and SWAG on every client in the last `swag_rounds` rounds (Maddox et al., 2019; Linsner et al., 2021).

    `covariance` "low_rank": the diagonal and the last `rank` deviations, half each; the server keeps all factors.
    Iterates count every `swag_every` steps after the share `swag_start` of a round's, at rate `swag_lr` (`lr` where it
    is not given). `pooled` is the rule for the normals; that of low rank has the mean of the clients' covariances.
    """
    own = {k: v for k, v in locals().items() if k != "options"}
    check_options(own)
    refuse("fedswag", options, "rule", "it is `pooled`")
    return collecting(call(fedavg, options), own)


@builds_on(fedavg)
def fedpa(
    *,
    samples: int = 5,
    shrinkage: float = 0.01,
    burn_share: float = 0.4,
    plain_rounds: int = 0,
    server: str = "sgd",
    server_lr: float = 0.2,
    **options: Any,
) -> Method:
    """FedPA: clients send Sigma^-1 (broadcast - mean) of their posterior samples (Al-Shedivat et al., 2021).

    `samples` means of consecutive iterates after a share `burn_share` of a round's steps; `shrinkage` is the paper's
    rho. The server's optimiser takes the averaged deltas for gradients. The first `plain_rounds` are FedAvg's.
    """
    own = {"samples": samples, "shrinkage": shrinkage, "burn_share": burn_share, "plain_rounds": plain_rounds}
    check_options(own)
    return averaging(call(fedavg, {"server": server, "server_lr": server_lr, **options}), own)


def collecting(base: Method, options: Mapping[str, Any]) -> Method:
    """The base method, whose clients run SWAG in the last rounds; their normals are pooled, and predict."""
    rank = options["rank"] if options["covariance"] == "low_rank" else 0

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        first = program.initial["model"]

        def scalars(number: int) -> Mapping[str, float]:
            last = number >= setting.rounds - options["swag_rounds"]
            own = {name: options[name] for name in ("swag_every", "swag_start")}
            rate = {"lr": options["swag_lr"]} if last and options["swag_lr"] is not None else {}
            return {**program.options(number), **own, "collect": float(last), **rate}

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
            rules={**program.rules, "model": rule_named(options["pooled"])},
            options=scalars,
            reference=points,
            uploaded=uploaded,
            members=rank > 0,
            test_draws=options["test_draws"],
        )

    return Method("fedswag", {**base.options, **options}, build)


def averaging(base: Method, options: Mapping[str, Any]) -> Method:
    """The base method, whose clients step by the covariance of samples of their own posterior."""

    def build(setting: Setting) -> Program:
        program = base.build(setting)

        def scalars(number: int) -> Mapping[str, float]:
            own = {name: options[name] for name in ("burn_share", "shrinkage")}
            return {**program.options(number), **own, "average": float(number >= options["plain_rounds"])}

        return program._replace(client=posterior_averaging(program.client, samples=options["samples"]), options=scalars)

    return Method("fedpa", {**base.options, **options}, build)
