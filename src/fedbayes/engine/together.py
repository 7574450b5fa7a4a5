"""How functions of one client are run for those of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.func import vmap

from fedbayes.clients.client import Info
from fedbayes.model.trees import mapped


class NotStackable(Exception):
    """What one client does alone, vmap can't do for several."""


class Clients(NamedTuple):
    """How functions of one client are run for those of a chunk. One client alone runs without vmap."""

    size: int
    info: Info  # which fields of Info, and which of its constants, have the clients' axis

    def over(self, f: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
        """f over the clients: arguments with axis 0 are stacked, those with None the same for all.

        What fails is tried with the first client alone: where that fails too its error is raised as it is. What then
        fails again together is vmap's fault, and a `NotStackable` says so; what failed only once is raised as it was.
        """
        stacked = vmap(f, in_dims=axes, randomness="different")

        def alone(*arguments: Any) -> Any:
            own = [take(a, axis, 0) for a, axis in zip(arguments, axes)]
            return mapped(lambda t: t[None], f(*own))

        def together(*arguments: Any) -> Any:
            try:
                return stacked(*arguments)
            except (torch.OutOfMemoryError, NotStackable):
                raise
            except Exception as error:
                reason = error
            try:
                alone(*arguments)
            except Exception as error:
                raise error from None
            try:
                stacked(*arguments)
            except Exception:
                raise NotStackable(first_words(reason)) from reason
            raise reason

        return together if self.size > 1 else alone

    def first(self, info: Info) -> Info:
        """The first client's info."""
        return take(info, self.info, 0)


def take(argument: Any, axis: Any, at: Any) -> Any:
    """The places `at` of what has the clients' axis; what they share as it is."""
    if isinstance(axis, Info):
        return Info(*(take(a, b, at) for a, b in zip(argument, axis)))
    if isinstance(axis, dict):
        return {name: take(a, axis[name], at) for name, a in argument.items()}
    return argument if axis is None else mapped(lambda t: t[at], argument)


def apart(argument: Any, axis: Any) -> Any:
    """None in place of what clients share: vmap would unpack it anew at every step."""
    if isinstance(axis, Info):
        return Info(*(apart(a, b) for a, b in zip(argument, axis)))
    if isinstance(axis, dict):
        return {name: apart(a, axis[name]) for name, a in argument.items()}
    return None if axis is None else argument


def joined(own: Any, argument: Any, axis: Any) -> Any:
    """One client's `own`, which `apart` gave, with what it shares."""
    if isinstance(axis, Info):
        return Info(*(joined(o, a, b) for o, a, b in zip(own, argument, axis)))
    if isinstance(axis, dict):
        return {name: joined(o, argument[name], axis[name]) for name, o in own.items()}
    return argument if axis is None else own


def first_words(error: BaseException) -> str:
    """The first line of what went wrong first: the end of a capture fails for no reason of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
