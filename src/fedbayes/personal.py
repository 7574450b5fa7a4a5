"""Personal methods, made of others: what stays home, whose prior, and what a client does to make a model its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedbayes.clients.bilevel import bilevel, own_model
from fedbayes.clients.client import Client
from fedbayes.clients.home import Split, keep_home, whole_model
from fedbayes.composition import Method, Setting, optimiser_named
from fedbayes.errors import InputError
from fedbayes.federation import Program
from fedbayes.group import HEAD, last_layer
from fedbayes.layout import matches
from fedbayes.posterior import Parts


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
            personal=whole_model(client, personal_of(program).finish),
            initial=split.cut(program.initial)[0],
            rules={part: rule for part, rule in program.rules.items() if part in split.shared},
            reference=_shared_only(program, split),
            whole=False,
        )

    return Method(name, dict(options), build)


def personal_of(program: Program) -> Client:
    """The client that makes a personal model: the program's own word, or its training client."""
    return program.personal or program.client


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
