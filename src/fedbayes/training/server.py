"""A server that distils: its unlabelled inputs, the targets that the cohort's networks give them, and its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.engine.loop import Store
from fedbayes.errors import InputError
from fedbayes.federation.program import SERVER, Contribution, FederationState, Order, Outcome, Program
from fedbayes.federation.round import broadcast_of, gathered


def server_engine(program: Program, engine: Any, clients: Clients, server_data: Any, seed: int) -> Any:
    """The engine that trains at the server on its unlabelled inputs, checked; its targets are filled in each round."""
    assert program.server.targets is not None
    assert program.server.client is not None
    x = unlabelled(clients, server_data, program.server.client.phases[0].batch).to(engine.store.x.device)
    one = Contribution(0, program.initial, torch.ones((), device=x.device))
    shape = program.server.targets(known_to(program, program.initial, [one, one]), x[:2], (seed, "shape")).shape[1:]
    targets = torch.zeros(len(x), *shape, dtype=program.initial[program.prediction.part].mean.dtype, device=x.device)
    alone = program._replace(
        client=program.server.client,
        pooling=program.pooling._replace(rules={}, channel=()),
        prediction=program.prediction._replace(members=True),
    )
    rows = torch.arange(len(x))
    return engine.beside(alone, seed, Store(x, targets, lambda k: rows, rows), often=True)


def unlabelled(clients: Clients, server_data: Any, least: int) -> Tensor:
    """The server's inputs [N, ...]: rows that no client has, given rows of the data, or inputs as they are."""
    data = clients.data
    given = clients.server if server_data is None else torch.as_tensor(getattr(server_data, "x", server_data))
    if not len(given):
        raise InputError(
            "server_data: this method distils at the server on unlabelled inputs, and there are none; keep rows there "
            "(partition_options: server = 1000), or pass fit(..., server_data=inputs)"
        )
    rows = given.dim() == 1 and given.dtype == torch.int64
    if rows and not (given.min() >= 0 and given.max() < len(data)):
        raise InputError(f"server_data: rows outside 0..{len(data) - 1} of {data.name}; give row numbers or inputs")
    x = data.x[given] if rows else given
    if tuple(x.shape[1:]) != data.shape:
        raise InputError(
            f"server_data: inputs of shape {list(x.shape[1:])}, but the clients' are {list(data.shape)}; "
            "the server needs inputs as the clients have"
        )
    if x.is_floating_point() and data.x.is_floating_point():
        x = x.to(data.x.dtype)
    if x.dtype != data.x.dtype:
        kinds = [str(t.dtype).removeprefix("torch.") for t in (x, data.x)]
        raise InputError(f"server_data: inputs are {kinds[0]}, the clients' {kinds[1]}; store them alike")
    if x.is_floating_point() and not torch.isfinite(x).all():
        raise InputError("server_data: some inputs are not finite; drop or fill them")
    if len(x) < least:
        raise InputError(
            f"server_data: {len(x)} unlabelled inputs don't fill one batch of {least}; give more, or lower server_batch"
        )
    return x


def known_to(program: Program, parts: Mapping[str, Any], uploads: list[Contribution]) -> dict[str, Any]:
    """What the server knows after a round: the pooled parts, and the cohort's uploads beside them."""
    return {**parts, **gathered(program, dict(parts), uploads)}


def at_server(
    program: Program, engine: Any, state: FederationState, options: Mapping[str, float], outcome: Outcome
) -> FederationState:
    """The state after the server has distilled the cohort's ensemble; as it was where nobody contributed.

    Training that ends in weights that are not finite is thrown away.
    """
    if not outcome.uploads:
        return state
    assert program.server.targets is not None
    known = known_to(program, state.broadcast, outcome.uploads)
    # In place: a captured graph reads this very tensor.
    engine.store.y.copy_(program.server.targets(known, engine.store.x, (engine.seed, state.round, SERVER)))
    order = Order(state.round, (SERVER,), (), broadcast_of(program, state), options)
    made = engine.train(order, lambda k: None)
    if not made.uploads:
        return state
    return state._replace(broadcast={**state.broadcast, **made.uploads[0].parts})
