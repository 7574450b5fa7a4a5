"""How the steps of stacked clients are executed: eagerly, compiled, or compiled and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedbayes.clients.client import Batch, Info, Phase, only_if
from fedbayes.engine.loop import Store
from fedbayes.noise import Tape


class Table(NamedTuple):
    """Row numbers and live flags of a phase, [steps, clients, batches, B]; `full`: nothing is padding."""

    rows: Tensor
    live: Tensor
    full: bool


class Clients(NamedTuple):
    """How functions of one client are run for those of a chunk. One client alone runs without vmap."""

    size: int
    info: Info  # which fields of Info have the clients' axis

    def over(self, f: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
        """f over the clients: arguments with axis 0 are stacked, those with None the same for all."""
        if self.size > 1:
            return vmap(f, in_dims=axes, randomness="different")

        def alone(*arguments: Any) -> Any:
            own = [self._take(a, axis) for a, axis in zip(arguments, axes)]
            return tree_map(lambda t: t[None], f(*own))

        return alone

    def first(self, info: Info) -> Info:
        """The first client's info."""
        return self._take(info, self.info)

    def _take(self, argument: Any, axis: Any) -> Any:
        if isinstance(axis, Info):
            return Info(*(self._take(a, b) for a, b in zip(argument, axis)))
        return argument if axis is None else tree_map(lambda t: t[0], argument)


def stacked_step(phase: Phase, together: Clients, store: Store, full: bool) -> Callable[..., Any]:
    """One step of every client: gather its rows, run its own step."""

    def one(state: Any, xs: Tensor, ys: Tensor, live: Tensor, noise: Tensor, at: Tensor, info: Info) -> Any:
        masks = [None] * phase.batches if full else list(live.unbind(0))
        made = tuple(Batch(a, b, mask, at) for a, b, mask in zip(xs.unbind(0), ys.unbind(0), masks))
        new = phase.step(state, made[0] if phase.batches == 1 else made, Tape(noise), info)
        # A client whose steps are over waits for the others unchanged.
        return new if full else only_if(live.any(), new, state)

    over = together.over(one, (0, 0, 0, 0, 0, None, together.info))

    def step(state: Any, rows: Tensor, live: Tensor, noise: Tensor, at: Tensor, info: Info) -> Any:
        return over(state, store.x[rows], store.y[rows], live, noise, at, info)

    return step


class Steps:
    """Executes the steps of a phase in one of the modes "eager", "compiled", "graph"."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def run(
        self,
        phase: Phase,
        together: Clients,
        state: Any,
        table: Table,
        noise: Callable[[int], Tensor],
        info: Info,
        store: Store,
    ) -> Any:
        device = store.x.device
        rows, live = table.rows.to(device), table.live.to(device)
        step = self._step(phase, together, store, table.full)
        numbers = torch.arange(len(rows), device=device)
        for s in range(len(rows)):
            state = step(state, rows[s], live[s], noise(s), numbers[s], info)
        return state

    def _step(self, phase: Phase, together: Clients, store: Store, full: bool) -> Callable[..., Any]:
        if self.mode == "eager":
            return stacked_step(phase, together, store, full)
        key = (id(phase), together.size, together.info, full)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(
                stacked_step(phase, together, store, full), fullgraph=True, dynamic=False
            )
        return self._compiled[key]
