"""Kernels of a traced graph, made by PyTorch's compiler and kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from fedbayes.engine.kept import keep_programs


def begin_helpers(device: str) -> None:
    """On a GPU let the processes that make kernels side by side begin: until they are there, this one makes each."""
    if device == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        keep_programs()
        AsyncCompile.wakeup()


def kernels(graph: GraphModule, shapes: list[tuple[Any, ...]], options: dict[str, Any]) -> Callable[..., Any]:
    """A graph's operations compiled for inputs of these shapes, strides, types, devices and offsets; kept on disk."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy

    keep_programs()
    # Inductor looks on its disk only where it could note what a program assumes of shapes; ours are numbers still.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        inputs: list[Any] = [_empty(*shape) for shape in shapes]
    with torch.no_grad(), _no_arguments(), tracing(TracingContext(mode)):
        return torch._inductor.compile(graph, inputs, options=options)


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: Any, offset: int) -> Tensor:
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    room = offset + sum((n - 1) * s for n, s in zip(shape, stride)) + 1
    return torch.empty(room, dtype=dtype, device=device).as_strided(shape, stride, offset)


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hides the command line: the compiler writes the word behind an --only, unquoted, into the code it makes."""
    words, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = words
