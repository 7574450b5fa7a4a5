"""The data of a server that trains: rows with labels, or inputs whose targets are filled in each round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.federation.program import Program, Store


def server_store(program: Program, clients: Clients, server_data: Any, seed: int, device: torch.device) -> Store | None:
    """What the program's stages train on at the server, checked; None where none of them trains there."""
    needs = next((stage.server for stage in program.stages if stage.server is not None), None)
    if needs is None:
        return None
    if needs.targets is None:
        rows = clients.server if server_data is None else torch.as_tensor(server_data)
        if not len(rows):
            raise InputError("server_data: this method trains at the server and needs rows there; there are none")
        return Store(clients.data.x[rows].to(device), clients.data.y[rows].to(device), _all(len(rows)))
    x = unlabelled(clients, server_data, needs.least).to(device)
    return Store(x, needs.targets(x, seed), _all(len(x)))


def _all(count: int) -> Any:
    rows = torch.arange(count)
    return lambda client: rows


def unlabelled(clients: Clients, server_data: Any, least: int) -> Tensor:
    """The server's inputs [N, ...]: rows that no client has, given rows of the data, or inputs as they are."""
    data = clients.data
    source = clients.server if server_data is None else torch.as_tensor(getattr(server_data, "x", server_data))
    if not len(source):
        raise InputError(
            "server_data: this method distils at the server on unlabelled inputs, and there are none; keep rows there "
            "(partition_options: server = 1000), or pass fit(..., server_data=inputs)"
        )
    rows = source.dim() == 1 and source.dtype == torch.int64
    if rows and not (source.min() >= 0 and source.max() < len(data)):
        raise InputError(f"server_data: rows outside 0..{len(data) - 1} of {data.name}; give row numbers or inputs")
    x = data.x[source] if rows else source
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
    if data.unusable(x):
        raise InputError("server_data: some inputs are not finite; drop or fill them")
    if len(x) < least:
        raise InputError(
            f"server_data: {len(x)} unlabelled inputs don't fill one batch of {least}; give more, or lower server_batch"
        )
    return x
