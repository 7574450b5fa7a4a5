"""How the steps of stacked clients are executed: eagerly, compiled, or compiled and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

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


MODES = ("graph", "compiled", "eager")  # from the fastest down; each falls back on the next


class Steps:
    """Executes the steps of a phase in a mode; where one fails, the next takes over for good and a note says why."""

    def __init__(self, mode: str = "eager") -> None:
        self.mode = mode
        self.notes: list[str] = []
        self._made: dict[Any, Any] = {}

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
        """The state after all steps of the table. `noise(step)` gives the normals of a step."""
        while True:
            try:
                if self.mode == "graph":
                    return self._replay(phase, together, state, table, noise, info, store)
                return self._run(phase, together, state, table, noise, info, store)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self.mode == "eager":
                    raise
                lower = MODES[MODES.index(self.mode) + 1]
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                self.notes.append(f"steps run {lower} instead of {self.mode}: {first[:160]}")
                self.mode = lower
                self._made.clear()

    def _run(
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
        for s, (r, on, at) in enumerate(zip(rows.unbind(0), live.unbind(0), numbers.unbind(0))):
            state = step(state, r, on, noise(s), at, info)
        return state

    def _step(self, phase: Phase, together: Clients, store: Store, full: bool) -> Callable[..., Any]:
        if self.mode == "eager":
            return stacked_step(phase, together, store, full)
        key = (id(phase.step), together, full)
        if key not in self._made:
            step = stacked_step(phase, together, store, full)
            self._made[key] = torch.compile(step, fullgraph=True, dynamic=False)
        return self._made[key]

    def _replay(
        self,
        phase: Phase,
        together: Clients,
        state: Any,
        table: Table,
        noise: Callable[[int], Tensor],
        info: Info,
        store: Store,
    ) -> Any:
        key = ("graph", id(phase.step), together, table.full, len(table.rows))
        if key not in self._made:
            step = self._step(phase, together, store, table.full)
            self._made[key] = Graph(step, state, table, noise, info, store.x.device)
        return self._made[key](state, table, info)


class Graph:
    """The steps of a phase captured once and replayed: inputs are copied into fixed buffers, noise is drawn inside."""

    UNROLL = 10

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        table: Table,
        noise: Callable[[int], Tensor],
        info: Info,
        device: torch.device,
    ) -> None:
        self.state = tree_map(torch.clone, state)
        self.info = tree_map(torch.clone, info)
        self.rows, self.live = table.rows.to(device), table.live.to(device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

        def advance(times: int) -> None:
            now = self.state
            for _ in range(times):
                rows, live = self.rows.index_select(0, self.at)[0], self.live.index_select(0, self.at)[0]
                now = step(now, rows, live, noise(0), self.at[0], self.info)
                self.at += 1
            _copy(self.state, now)

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.at.zero_()
                advance(1)
        torch.cuda.current_stream().wait_stream(aside)
        self.graphs = {}
        for times in {1, min(self.UNROLL, len(table.rows))}:
            self.at.zero_()
            self.graphs[times] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[times]):
                advance(times)

    def __call__(self, state: Any, table: Table, info: Info) -> Any:
        """The state after the table's steps; a fresh copy, for the buffers are used again."""
        _copy(self.state, state)
        _copy(self.info, info)
        self.rows.copy_(table.rows, non_blocking=True)
        self.live.copy_(table.live, non_blocking=True)
        self.at.zero_()
        many = max(self.graphs)
        for _ in range(len(table.rows) // many):
            self.graphs[many].replay()
        for _ in range(len(table.rows) % many):
            self.graphs[1].replay()
        return tree_map(torch.clone, self.state)


def _copy(into: Any, values: Any) -> None:
    for a, b in zip(tree_leaves(into), tree_leaves(values)):
        a.copy_(b)
