"""Personal methods: clients that keep weights, or a posterior, of their own."""

from __future__ import annotations

from typing import Any

from fedbayes.composition import Method, check_options
from fedbayes.errors import InputError
from fedbayes.group import HEAD
from fedbayes.methods.options import builds_on, call, refinable
from fedbayes.methods.points import fedavg
from fedbayes.methods.variational import fedvi
from fedbayes.personal import held_near_a_copy, keeping_home
from fedbayes.server.rules import Rule


@refinable
@builds_on(fedavg)
def fedper(*, home: tuple[str, ...] = (HEAD,), **options: Any) -> Method:
    """FedAvg whose clients keep some weights for themselves, by pattern: the last layer (Arivazhagan et al., 2019)."""
    base = call(fedavg, options)
    return keeping_home(base, "fedper", {"home": home, **base.options}, home=tuple(home))


@refinable
@builds_on(fedavg)
def lg_fedavg(*, shared: tuple[str, ...] = (HEAD,), **options: Any) -> Method:
    """FedAvg of some weights only, by pattern: the last layer; all others stay home (Liang et al., 2020)."""
    base = call(fedavg, options)
    return keeping_home(base, "lg_fedavg", {"shared": shared, **base.options}, shared=tuple(shared))


@refinable
@builds_on(fedvi)
def bpfed(*, home: tuple[str, ...] = (HEAD,), draws: int | None = None, **options: Any) -> Method:
    """BPFed: variational clients that keep some weights, by pattern; their prior is the client's own last posterior.

    Chen et al. (2023). What is shared has the broadcast as its prior, and is pooled by `rule`.
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    base = call(fedvi, options)
    return keeping_home(base, "bpfed", {"home": home, **base.options}, home=tuple(home))


@refinable
@builds_on(fedvi)
def pfedbayes(
    *,
    lr: float = 1e-3,
    optimiser: str = "adam",
    global_lr: float | None = None,
    kl: str = "1/n",
    kl_weight: float = 10.0,
    rule: str | Rule = "mean_rho",
    draws: int | None = None,
    **options: Any,
) -> Method:
    """pFedBayes: a personal posterior held near the client's copy of the global one, which follows it (Zhang, 2022).

    `kl_weight` is the paper's zeta against the summed log-likelihood (`kl` = "1/n"); `global_lr` is of the copy, `lr`
    where it is not given. The copies are pooled as means of (mean, rho).
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    if options.get("prior", "broadcast") != "broadcast":
        raise InputError("prior is fixed in pfedbayes: it is the client's copy of the global posterior")
    given = {"lr": lr, "optimiser": optimiser, "kl": kl, "kl_weight": kl_weight, "rule": rule}
    check_options({"global_lr": lr if global_lr is None else global_lr})
    base = call(fedvi, {**given, **options})
    return held_near_a_copy(base, optimiser=optimiser, lr=lr if global_lr is None else global_lr, kl=kl)
