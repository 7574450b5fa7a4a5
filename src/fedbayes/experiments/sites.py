"""A user's data function that gives one client at a time, so that no machine needs the rows of another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedbayes.data import Clients, Dataset, Standardise
from fedbayes.data.ragged import Ragged
from fedbayes.errors import InputError

Site = Callable[..., Dataset]


def asks_for_client(data: Any) -> bool:
    """Whether the user's object is a function `data(client, ...)`: client k's rows, or the server's for None."""
    if not callable(data) or inspect.isclass(data):
        return False
    return "client" in inspect.signature(data).parameters


def everybody(function: Site, options: Mapping[str, Any], clients: int) -> Clients:
    """All sites in one process, as if their rows had been gathered: for the engines that run here.

    The test set is the server's where it has one, else the clients' own rows, one after another.
    """
    public = _ask(function, options, None)
    sites = [_ask(function, options, k, public) for k in range(clients)]
    sizes = [len(site.x) for site in sites]
    tests = [] if len(public.test_x) else [len(site.test_x) for site in sites]
    known = sites if tests else [public]
    data = replace(
        public,
        x=torch.cat([*(site.x for site in sites), public.x]),
        y=torch.cat([*(site.y for site in sites), public.y]),
        test_x=torch.cat([site.test_x for site in known]),
        test_y=torch.cat([site.test_y for site in known]),
    )
    return Clients(data, _consecutive(sizes), _consecutive(tests or [0] * clients), _after(sum(sizes), len(public.x)))


def alone(function: Site, options: Mapping[str, Any], clients: int, client: int | None = None) -> Clients:
    """The federation as one machine knows it: the server's rows, or client k's and nobody else's."""
    data = _ask(function, options, client)
    one = [0] * clients
    if client is None:
        return Clients(data, _consecutive(one), _consecutive(one), _after(0, len(data.x)))
    if not 0 <= client < clients:
        raise InputError(f"client {client} was asked for, but the experiment has clients 0 to {clients - 1}")
    train, test = ([*one[:client], n, *one[client + 1 :]] for n in (len(data.x), len(data.test_x)))
    return Clients(data, _consecutive(train), _consecutive(test), torch.zeros(0, dtype=torch.int64))


def _ask(function: Site, options: Mapping[str, Any], client: int | None, like: Dataset | None = None) -> Dataset:
    data = function(client=client, **options)
    who = "the server (client=None)" if client is None else f"client {client}"
    if not isinstance(data, Dataset):
        raise InputError(f"data for {who} is a {type(data).__name__}; give a Dataset, such as from_arrays makes")
    if not len(data.x):
        raise InputError(f"data for {who} has no rows; {'one example' if client is None else 'one'} is the least")
    if data.target_scale is not None and data.coding is None:
        raise InputError(f"data for {who} has targets in units of its own; scale them by numbers that all sites share")
    if like is not None and isinstance(data.prepare, Standardise) and data.prepare != like.prepare:
        raise InputError(
            f"data for {who} is standardised by its own rows; give all sites the same numbers, "
            "prepare=fedbayes.data.Standardise(mean, std)"
        )
    if like is not None:
        if data.coding != like.coding:
            raise InputError(f"data for {who} is coded otherwise than the server's; give all the same coding")
        for name in ("kind", "classes", "shape", "prepare", "times"):
            if getattr(data, name) != getattr(like, name):
                raise InputError(
                    f"data for {who}: {name} is {getattr(data, name)!r}, the server's is {getattr(like, name)!r}"
                )
    return data


def _consecutive(sizes: Sequence[int]) -> Ragged:
    return Ragged.of_sizes(np.arange(sum(sizes)), np.array(sizes))


def _after(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)
