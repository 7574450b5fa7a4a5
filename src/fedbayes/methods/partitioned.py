"""Methods whose clients keep a factor of the posterior, a site: PVI, and Bayesian ADMM, of which PVI is one setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from fedbayes.clients.anchored import anchored, check_known
from fedbayes.clients.client import Client
from fedbayes.clients.partitioned import FIRST, own_model, partitioned
from fedbayes.errors import InputError
from fedbayes.federation.program import Personal, Program, Stage
from fedbayes.federation.sites import mixed_sites
from fedbayes.methods.groups import IVON, Descent, Newton, Schedule, optimiser_named
from fedbayes.methods.method import Setting
from fedbayes.methods.variational import BY_CURVATURE, Variational
from fedbayes.options import at_least_one, option, options_of, positive, record, up_to_one, with_default
from fedbayes.posterior.values import Gaussian

KEEPS_FACTORS = (
    "clients of {} keep a factor that holds what they sent; with a part of that left out, the prior times all factors "
    "would not be the server's posterior"
)


@record
class Partitioned(Variational):
    """Variational clients that keep a factor of the posterior each."""

    optimiser: str = with_default(Variational, "optimiser", default=IVON)
    train_draws: int = with_default(Variational, "train_draws", default=2)
    kl: str = with_default(Variational, "kl", default="1/n")
    # It is in the first broadcast, and factors follow from it: no run can go on with another.
    prior_scale: float = option("standard deviation of the prior", positive, default=0.5, kind="server")
    lr_within: str = with_default(Schedule, "lr_within", default="falling")
    lr: float = with_default(Descent, "lr", default=0.2)

    def check(self) -> None:
        super().check()
        if self.server is not None:
            raise InputError(f"server: in {self.name} the posterior is made of the clients' factors; leave it out")

    def idle(self, program: Program) -> dict[str, str]:
        return super().idle(program) | ({"initial": BY_CURVATURE} if self.begins_by_curvature else {})

    def inner(self, setting: Setting, program: Program) -> Client:
        """The client that finds a posterior from its prior."""
        return program.client

    def factored(self, setting: Setting, scalars: Mapping[str, float], stages: tuple[Stage, ...] = ()) -> Program:
        """The program: the prior is the first broadcast, changes are multiplied, stages follow."""
        program = self.pooled(setting, prior="broadcast", division=1.0, rule="dwc", weighting="size")
        first = program.initial["model"]
        assert isinstance(first, Gaussian)
        prior = Gaussian(torch.zeros_like(first.mean), torch.full_like(first.mean, self.prior_scale), first.layout)
        inner = self.inner(setting, program)
        by_curvature = self.optimiser == IVON
        begins = by_curvature and self.beta2 == 0
        client = partitioned(inner, tilts=by_curvature or bool(stages), begins=begins)
        told = {"cohort": float(setting.cohort), "prior_scale": self.prior_scale, **scalars}
        return program._replace(
            client=client,
            pooling=program.pooling._replace(as_sent=KEEPS_FACTORS.format(self.name), clips_itself=True),
            stages=(*stages, *program.stages),
            personal=Personal(own_model(client, inner)),
            initial={**program.initial, "model": prior},
            options=lambda number: {**program.options(number), **told},
            constants={**program.constants, FIRST: first},
        )


FIXED = dict.fromkeys(
    ("prior", "rule", "weighting", "division"), "the prior is the cavity, the rule adds natural parameters"
)


@record
class PVI(Partitioned):
    """Partitioned variational inference: clients keep a factor of the posterior, and send its change (Bui, 2018).

    The prior N(0, prior_scale^2) is the first broadcast; training starts from the network's own weights. With ivon each
    client holds its mean by its part of the posterior's precision: any `damping` below 1 settles for convex losses;
    with gradient steps it is about 1 / clients where they are alike.
    """

    name: ClassVar[str] = "pvi"
    fixed: ClassVar[Mapping[str, str]] = FIXED
    kl_weight: float = with_default(Variational, "kl_weight", default=1.0)
    damping: float = option("share of a client's change that is made", up_to_one, default=0.8, kind="scalar")

    def compose(self, setting: Setting) -> Program:
        return self.factored(setting, {"rho": 1.0, "alpha": 1.0, "carried": 0.0})


def ahead(rho: float, gamma: float, alpha: float, cohort: int) -> float:
    """By what share of its way in a round the server gets ahead of its clients' sites, where these follow slowly."""
    follows = rho * gamma * cohort
    return 1 - min(1.0, follows / (1 - alpha + alpha * follows))


@record
class BayesADMM(Partitioned):
    """Bayesian ADMM: PVI with a strength rho of the pull, and a server between mean and product (Moellenhoff, 2026).

    Client k finds q_k by  E_q[rows / temperature * loss] + rho * KL(q || q_g / t_k^(1 / rho)),  and its site becomes
    t_k * (q_k / q_g)^(rho * gamma). The server has  (1 - alpha) mean_k eta_k + alpha (eta_prior + sum of all sites)  in
    natural parameters. rho = alpha = temperature = 1 is `pvi` with damping gamma. By default rho is 1 / clients and
    gamma 1: clients pull as much as the posterior counts, and where all take part both parts of the server agree.
    """

    name: ClassVar[str] = "bayes_admm"
    fixed: ClassVar[Mapping[str, str]] = {
        **FIXED,
        "kl": "the KL is weighed by temperature * rho / rows",
        "kl_weight": "it is temperature * rho",
    }
    kl_weight: float = with_default(Variational, "kl_weight", default=1.0)
    rho: float | None = option(
        "strength of the pull to the server's posterior; None: 1 / clients", positive, default=None, kind="server"
    )
    # No run can go on with another: sites are kept about a share of the mean that it sets.
    gamma: float = option("share of a client's change that its site takes", up_to_one, default=1.0, kind="server")
    alpha: float | None = option(
        "share of the product of sites in the server's posterior; None: 1 / (1 + clients * rho)",
        up_to_one,
        default=None,
        kind="server",
    )
    temperature: float = option("of the posterior: rows count 1 / temperature", positive, default=1.0, kind="scalar")

    def compose(self, setting: Setting) -> Program:
        rho = 1 / setting.clients if self.rho is None else self.rho
        alpha = 1 / (1 + setting.clients * rho) if self.alpha is None else self.alpha
        carried = 0.0 if setting.stale else ahead(rho, self.gamma, alpha, setting.cohort)
        stages = (mixed_sites(rho=rho, damping=self.gamma, alpha=alpha, carried=carried, prior_scale=self.prior_scale),)
        scalars = {"rho": rho, "alpha": alpha, "carried": carried, "damping": self.gamma}
        return self.factored(setting, {**scalars, "kl_weight": self.temperature * rho}, stages)


@record
class FedLapCov(BayesADMM):
    """FedLap-Cov: Bayesian ADMM whose clients train a point, and are as sure as Laplace's approximation there.

    Swaroop et al. (2025). The curvature is the diagonal of the Gauss-Newton matrix, by projections on noise.
    """

    name: ClassVar[str] = "fedlap_cov"
    fixed: ClassVar[Mapping[str, str]] = {
        **BayesADMM.fixed,
        **dict.fromkeys((*options_of(Newton), "train_draws", "estimator"), "its clients train points"),
        **dict.fromkeys(("lr_drop", "lr_drop_every"), "its step size is constant, or falls in a line"),
    }
    lr: float = with_default(Descent, "lr", default=0.05)
    optimiser: str = with_default(Descent, "optimiser", default="sgd")
    prior_scale: float = with_default(Partitioned, "prior_scale", default=0.3)
    rho: float | None = with_default(BayesADMM, "rho", default=1.0)
    gamma: float = with_default(BayesADMM, "gamma", default=0.2)
    probe: int = option("rows in a projection of the curvature", at_least_one, default=8)

    def check(self) -> None:
        super().check()
        if self.lr_within not in ("constant", "falling"):
            raise InputError(f'lr_within: "{self.lr_within}" is not for fedlap_cov; use "constant" or "falling"')

    def idle(self, program: Program) -> dict[str, str]:
        return super().idle(program) | {"initial": "its clients train points; leave it out"}

    def inner(self, setting: Setting, program: Program) -> Client:
        check_known(setting.likelihood)
        return anchored(
            program.model,
            optimiser_named(self.optimiser, self.momentum),
            epochs=self.epochs,
            batch=self.batch,
            falling=self.lr_within == "falling",
            probe=self.probe,
        )
