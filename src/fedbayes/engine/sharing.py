"""One data store for several federations: folds of a set, each with its own rows, trained as one program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from fedbayes.federation.program import Program, Store


class HasStore(Protocol):
    """An engine, for its data."""

    store: Store


def share_store(engines: Sequence[HasStore], programs: Sequence[Program]) -> None:
    """Let the engines read one store, their rows one after another in it; those that share one already keep it.

    Which rows a step reads does not depend on it: they are shuffled by their place, not by their number.
    """
    if any(program.model.prepare != programs[0].model.prepare for program in programs):
        raise ValueError("these federations prepare their inputs in different ways: give them data.as_seen()")
    stores = {(id(e.store.x), id(e.store.y)): e.store for e in engines}
    if len(stores) == 1:
        return
    x = torch.cat([store.x for store in stores.values()])
    y = torch.cat([store.y for store in stores.values()])
    starts = dict(zip(stores, accumulate((len(store.x) for store in stores.values()), initial=0)))
    for engine in engines:
        own, start = engine.store.rows, starts[id(engine.store.x), id(engine.store.y)]
        engine.store = Store(x, y, lambda k, own=own, start=start: start + own(k), engine.store.server)  # type: ignore[misc]
