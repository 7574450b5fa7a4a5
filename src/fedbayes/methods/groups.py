"""Groups of options that several methods share, each written once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fedbayes.clients.ivon import CURVATURES
from fedbayes.clients.optimisers import OPTIMISERS, Optimiser
from fedbayes.clients.schedules import WITHIN
from fedbayes.errors import InputError
from fedbayes.federation.buckets import bucketed, spoilt_share
from fedbayes.federation.program import Program, Stage
from fedbayes.federation.robust import MINORITY, OUTLIERS
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import rule_named
from fedbayes.federation.stages import server_step, statistics_again
from fedbayes.methods.method import Method, Setting
from fedbayes.options import (
    at_least_one,
    below_one,
    flag,
    not_negative,
    number,
    one_of,
    option,
    options_of,
    positive,
    record,
    share,
    up_to_one,
    whole,
)

Options = Callable[[int], Mapping[str, float]]
# The factor on step sizes after a share of a run's rounds.
ACROSS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
IVON = "ivon"  # among the optimisers of variational clients


@record
class Descent(Method):
    """How clients descend."""

    lr: float = option("step size", positive, default=0.05, kind="scalar")
    epochs: int = option("passes over a client's rows per round", at_least_one, default=5)
    batch: int = option("rows in a step", at_least_one, default=10)
    optimiser: str = option("of the clients", one_of(OPTIMISERS), default="sgd")
    momentum: float = option("of sgd", below_one, default=0.0)


@record
class Schedule(Method):
    """How the step size falls."""

    lr_decay: float = option("factor on lr per round", up_to_one, default=1.0, kind="server")
    lr_silent: int = option(
        "rounds before lr_decay begins", whole(0, "a whole number of rounds"), default=0, kind="server"
    )
    lr_across: str = option("how lr falls over a run's rounds", one_of(ACROSS), default="constant", kind="server")
    lr_within: str = option("how lr falls within a round", one_of(WITHIN), default="constant")
    lr_drop: float = option('factor on lr per drop, where lr_within is "steps"', up_to_one, default=0.85, kind="scalar")
    lr_drop_every: int = option("epochs between drops", whole(1, "a whole number of epochs"), default=1, kind="scalar")

    def check(self) -> None:
        super().check()
        if self.falls_by_steps():
            return
        for name in ("lr_drop", "lr_drop_every"):
            if getattr(self, name) != options_of(self)[name].default:
                raise InputError(f'{name}: no step size falls by steps; set lr_within = "steps", or leave it out')

    def falls_by_steps(self) -> bool:
        """Whether a step size may fall by `lr_drop`: a client of the user's own may read it."""
        return self.lr_within == "steps" or getattr(self, "client", None) is not None

    def by_round(self, setting: Setting) -> Options:
        """The numbers that clients read, with the step size of each round."""
        scalars = self.scalars()
        return lambda number: {**scalars, "lr": scalars["lr"] * self.fallen(number, setting.rounds)}

    def fallen(self, number: int, rounds: int) -> float:
        """What multiplies step sizes in a round."""
        return self.lr_decay ** max(0, number - self.lr_silent) * ACROSS[self.lr_across](
            min(1.0, number / max(1, rounds))
        )


PRIOR_STEPS = {
    "implicit": "to where it balances the step of the data: stable however narrow it is",
    "explicit": "by its slope, as in the paper",
}


@record
class Newton(Method):
    """How clients learn means and scales by the curvature of their loss (IVON), where that is their optimiser."""

    beta1: float = option("ivon: what a gradient's running mean keeps in a step", below_one, default=0.9, kind="scalar")
    beta2: float = option(
        "ivon: what the curvature's running mean keeps in a step; 0: it is by curvature_memory",
        below_one,
        default=0.0,
        kind="switch",
    )
    curvature: str = option("ivon: how the curvature is estimated", one_of(CURVATURES), default="average")
    curvature_memory: float = option(
        "ivon: rounds over which the curvature is averaged", positive, default=10.0, kind="scalar"
    )
    least_curvature: float = option(
        "ivon: steps are lr * gradient / curvature, but where that is less than this; 0: everywhere",
        not_negative,
        default=1.0,
        kind="scalar",
    )
    prior_step: str = option("ivon: how the prior is followed", one_of(PRIOR_STEPS), default="implicit")
    opposite: bool | None = option(
        "ivon: draws of a step come in pairs of opposite noise; None: where train_draws is even", flag, default=None
    )
    clip_step: float = option(
        "ivon: largest step of a weight, before lr; 0: none", not_negative, default=0.0, kind="switch"
    )


@record
class ServerStep(Method):
    """An optimiser of the server's own, whose gradient is the pooled mean's move (Reddi et al., 2021)."""

    server: str | None = option(
        "its name; None: the pool is taken as it is", one_of(OPTIMISERS), default=None, kind="server"
    )
    server_lr: float = option("step size of the server", positive, default=1.0, kind="server")
    server_momentum: float = option("of sgd at the server", below_one, default=0.9, kind="server")

    def check(self) -> None:
        super().check()
        for name in ("server_lr", "server_momentum"):
            if self.server is None and getattr(self, name) != options_of(self)[name].default:
                raise InputError(f'{name}: the server takes no step of its own; leave it out, or set server = "sgd"')

    @property
    def server_stages(self) -> tuple[Stage, ...]:
        """The server's step, where it takes one."""
        if self.server is None:
            return ()
        return (server_step(optimiser_named(self.server, self.server_momentum), self.server_lr),)


@record
class Robustness(Method):
    """What robust rules take clients for, and what they see of them."""

    ruled_by: ClassVar[str] = "rule"  # the option that names the rule; its default is that within a bucket

    outliers: float = option(
        "share of clients that may lie: so many are trimmed at each end by trimmed_mean, left out by multi_krum",
        number(MINORITY, lambda v: 0 <= v < 0.5),
        default=OUTLIERS,
        kind="server",
    )

    buckets: int | None = option(
        "sums to which a round's clients are dealt in front of a robust rule, which sees one posterior for each; by "
        "default it sees the clients' own",
        whole(2),
        default=None,
        kind="server",
    )

    mixing: bool = option(
        "a robust rule sees, for each posterior, the mean of its nearest: all but the share that may lie",
        flag,
        default=False,
        kind="server",
    )

    twins: float = option(
        "posteriors that are nearer to each other than this share of the usual distance count as one for a robust "
        "rule, before mixing; 0: each counts",
        share,
        default=0.0,
        kind="server",
    )

    def idle(self, program: Program) -> dict[str, str]:
        rules = (*program.pooling.rules.values(), *program.pooling.over.values())
        if any(rule.robust for rule in rules):
            return super().idle(program)
        why = f'no robust rule takes anybody for a liar; leave it out, or set {self.ruled_by} = "trimmed_mean"'
        return super().idle(program) | {"outliers": why}

    def wrapped(self, program: Program, setting: Setting) -> Program:
        program = super().wrapped(program, setting)
        if self.buckets is None:
            return program
        if self.twins:
            raise InputError("twins: they are found among uploads, and a bucket is a sum of several; leave one out")
        default: Any = options_of(self)[self.ruled_by].default
        spoilt = spoilt_share(self.buckets, setting.cohort, self.outliers)
        over = rule_named(getattr(self, self.ruled_by), spoilt, self.mixing)
        return bucketed(program, self.buckets, rule_named(default), over)

    def rule_of(self, rule: str | Rule) -> Rule:
        """A rule by name, for that share."""
        return rule_named(rule, self.outliers, self.mixing, self.twins)


@record
class Statistics(Method):
    """How BatchNorm's statistics are pooled."""

    norm_passes: int = option(
        "passes over the cohort's rows that take BatchNorm's statistics of the pooled network; 0: they are averaged",
        whole(0, "a whole number of passes"),
        default=0,
    )

    def last_stages(self, program: Program) -> tuple[Stage, ...]:
        before = super().last_stages(program)
        return (*before, statistics_again(program, self.norm_passes)) if self.norm_passes else before


@record
class PaperDraws(Method):
    """The papers' Z: one number for draws in training and in prediction."""

    draws: int | None = option("sets train_draws and test_draws where they are not given", at_least_one, default=None)

    @property
    def options(self) -> dict[str, Any]:
        """All options but `draws`, which the two that it sets stand for."""
        return {name: v for name, v in super().options.items() if name != "draws"}

    def resolve(self, train: int, test: int) -> None:
        """Fill in the draws that were not given."""
        for name, default in (("train_draws", train), ("test_draws", test)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default if self.draws is None else self.draws)


def optimiser_named(name: str, momentum: float) -> Optimiser:
    return OPTIMISERS[name](momentum) if name == "sgd" else OPTIMISERS[name]()
