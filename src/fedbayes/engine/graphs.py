"""CUDA graphs: the steps of a phase, or any function of tensors, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Info
from fedbayes.engine.work import Table, Work


class Graph:
    """The steps of a phase captured once and replayed: inputs are copied into fixed buffers, noise is drawn inside."""

    UNROLL = 20  # steps of one replay at most; rows and noise of all of them are gathered and drawn at once
    NORMALS = 2**28  # of one replay at most, where a step has fewer: a GiB

    def __init__(self, several: Callable[..., Any], work: Work, state: Any, most: int) -> None:
        device = work.store.x.device
        self.state = tree_map(torch.clone, state)
        self.info = own_memory(work.info, work.together.info.constants)
        self.table = Table(*(None if t is None else t.to(device, copy=True) for t in work.table))  # type: ignore[arg-type]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

        def advance(times: int) -> None:
            now, at = self.state, self.at + torch.arange(times, device=device)
            rows = self.table.rows.index_select(0, at)
            flags = [None] * times if self.table.live is None else self.table.live.index_select(0, at).unbind(0)
            xs, ys, noise = work.store.x[rows], work.store.y[rows], work.noise(0, times)
            _copy(self.state, several(now, xs, ys, flags, noise, at, self.info))
            self.at += times

        self.steps = len(work.table.rows)
        unroll = max(1, min(most, self.NORMALS // max(1, work.noise(0, 1).numel())))
        self.many = self.steps // -(-self.steps // unroll)
        lengths = {self.many, 1} if self.steps % self.many else {self.many}

        def warm_up() -> None:
            # As each will be captured: a step that compiles anew within a capture spoils it.
            for times in lengths:
                self.at.zero_()
                advance(times)

        _aside(warm_up)
        self.graphs = {}
        for times in lengths:
            self.at.zero_()
            self.graphs[times] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[times]):
                advance(times)

    def __call__(self, work: Work, state: Any) -> Any:
        """The state after the table's steps; a fresh copy, for the buffers are used again."""
        _copy((self.state, self.info, self.table), (state, work.info, work.table))
        self.at.zero_()
        torch.cuda.manual_seed(work.seed)  # after the capture, so that a resumed run draws the same
        for _ in range(self.steps // self.many):
            self.graphs[self.many].replay()
        for _ in range(self.steps % self.many):
            self.graphs[1].replay()
        return _fresh(self.state)


def own_memory(info: Info, axes: Mapping[str, int | None] | None) -> Info:
    """In memory of its own, but for constants that all clients share: a frozen body may be large, and never changes."""
    shared = {name for name in info.constants if axes is None or axes[name] is None}
    own = {name: v if name in shared else tree_map(torch.clone, v) for name, v in info.constants.items()}
    return tree_map(torch.clone, info._replace(constants={}))._replace(constants=own)


class Captured:
    """A function of tensors on the device, captured once and replayed for others of the same shapes."""

    def __init__(self, f: Callable[[Any], Any], inputs: Any) -> None:
        self.f = f  # what it refers to must outlive the graph
        self.inputs = tree_map(torch.clone, inputs)
        _aside(lambda: f(self.inputs))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = f(self.inputs)

    def __call__(self, inputs: Any) -> Any:
        """f(inputs), a fresh copy."""
        _copy(self.inputs, inputs)
        self.graph.replay()
        return _fresh(self.outputs)


def _aside(f: Callable[[], object]) -> None:
    """Three runs on a stream beside the current one, which a capture must be preceded by."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(stream)


def _fresh(values: Any) -> Any:
    """Copies of all tensors."""
    new = tree_map(torch.empty_like, values)
    _copy(new, values)
    return new


def _copy(into: Any, values: Any) -> None:
    """Write values into the tensors of a tree, those of one type at once: each alone would cost a launch."""
    together: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in _pairs(into, values):
        if a is not None and a is not b:
            olds, news = together.setdefault((a.dtype, b.dtype, b.device), ([], []))
            olds.append(a)
            news.append(b)
    for olds, news in together.values():
        torch._foreach_copy_(olds, news, non_blocking=True)


def _pairs(into: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(into, dict):  # by name: a step may have put them in another order
        for name, old in into.items():
            yield from _pairs(old, values[name])
    elif isinstance(into, tuple):
        for old, new in zip(into, values, strict=True):
            yield from _pairs(old, new)
    else:
        yield from zip(tree_leaves(into), tree_leaves(values), strict=True)
