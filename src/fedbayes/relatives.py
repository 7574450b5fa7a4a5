"""FedPPD's relatives, each around a base method of point clients: SWAG at the end, posterior averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedbayes.clients.posterior_averaging import posterior_averaging
from fedbayes.clients.swag import LEAST, swag
from fedbayes.composition import Method, Setting
from fedbayes.federation import Program
from fedbayes.posterior import Gaussian, LowRank, Parts, Point
from fedbayes.server.rules import rule_named


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
