"""Personal methods: clients that keep weights, or a posterior, of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedbayes.clients.bilevel import bilevel, own_model
from fedbayes.clients.home import Split, keep_home, whole_model
from fedbayes.composition import Method, Setting, check_options, optimiser_named
from fedbayes.errors import InputError
from fedbayes.federation import Program
from fedbayes.group import HEAD, last_layer
from fedbayes.layout import matches
from fedbayes.methods.options import builds_on, call, refinable
from fedbayes.methods.points import fedavg
from fedbayes.methods.variational import fedvi
from fedbayes.posterior import Parts
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
    base = call(fedvi, {"prior": "broadcast", **options})
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
    given = {"lr": lr, "optimiser": optimiser, "kl": kl, "kl_weight": kl_weight, "rule": rule, "prior": "broadcast"}
    check_options({"global_lr": lr if global_lr is None else global_lr})
    base = call(fedvi, {**given, **options})
    return held_near_a_copy(base, optimiser=optimiser, lr=lr if global_lr is None else global_lr, kl=kl)


def keeping_home(
    base: Method,
    name: str,
    options: Mapping[str, Any],
    *,
    home: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
) -> Method:
    """`base` with the weights that match `home` never leaving a client; or, by `shared`, all but those that match.

    There is no global model then: only personal ones predict.
    """

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        layouts = program.model.layouts
        names = [n for layout in layouts.values() for n in layout.names]
        patterns = _named(setting.network, home or shared, names, "home" if home else "shared")
        if shared:
            patterns = tuple(n for n in names if not matches(n, patterns))
        split = Split.of(layouts, patterns)
        if program.main not in split.shared:
            raise InputError(f"home: nothing would be left to share; keep fewer weights than {', '.join(patterns[:4])}")
        if program.members or program.server_client or program.noise != "likelihood":
            raise InputError(f"{base.name} pools whole networks at the server; no weights of it can stay home")
        client = keep_home(program.client, split, program.initial)
        return program._replace(
            client=client,
            personal=whole_model(client, program.tuned.finish),
            initial=split.cut(program.initial)[0],
            rules={part: rule for part, rule in program.rules.items() if part in split.shared},
            reference=_shared_only(program, split),
            whole=False,
        )

    return Method(name, dict(options), build)


def held_near_a_copy(base: Method, *, optimiser: str, lr: float, kl: str) -> Method:
    """The variational method `base` with pFedBayes' clients: `lr` and `optimiser` are of the copy of the global."""

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        client = bilevel(program.client, optimiser=optimiser_named(optimiser, base.options["momentum"]), kl=kl)
        return program._replace(
            client=client,
            personal=own_model(client, program.client),
            options=lambda number: {
                **(scalars := program.options(number)),
                "global_lr": lr * scalars["lr"] / base.options["lr"],
            },
        )

    return Method("pfedbayes", {**base.options, "global_lr": lr}, build)


def _shared_only(program: Program, split: Split) -> Any:
    """The reference of a sum over what is shared, from a program that knows whole broadcasts."""
    whole = split.cut(program.initial)[1]

    def reference(broadcast: Parts, options: Any) -> Parts:
        return split.cut(program.reference(split.merge(broadcast, whole), options))[0]

    return reference


def _named(network: nn.Module, patterns: tuple[str, ...], names: list[str], what: str) -> tuple[str, ...]:
    """Patterns with `head` replaced by the last layer's, each checked to match a weight."""
    found = []
    for pattern in patterns:
        if pattern == HEAD:
            pattern = last_layer(network)
        if not any(matches(n, [pattern]) for n in names):
            raise InputError(f"{what}: no weight matches {pattern!r}; the network has {', '.join(names[:8])}, ...")
        found.append(pattern)
    return tuple(found)
