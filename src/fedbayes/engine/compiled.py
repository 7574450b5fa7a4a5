"""A step compiled: traced once by running it, then made into kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedbayes.engine.clock import COMPILE, share
from fedbayes.engine.kept import keep_programs
from fedbayes.model.recomputation import noted_blocks, peak, recompute


class Compiled:
    """A pure function of tensors within trees, compiled anew for each structure and shape of its arguments.

    Not torch.compile: that reads Python's bytecode, which for operations taken over within vmap costs ten times as
    long as it takes to run them once on tensors without content. What Inductor makes of it is kept on disk, by the
    graph, its constants, shapes, threads and versions: the next process takes it from there, equal in every bit.
    `kernels` False: the operations are run one by one as they were traced. `again`: activations of the network's marked
    blocks are computed again for the backward pass.
    """

    def __init__(self, step: Callable[..., Any], *, kernels: bool = True, again: bool = False) -> None:
        self.step = step
        self.kernels = kernels
        self.again = again
        self._programs: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """step(*arguments)."""
        leaves, structure = tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        # An expanded tensor at one call and a plain one at the next would be two programs.
        inputs = [leaves[place].contiguous() for place in places]
        key = (structure, tuple((t.shape, t.dtype) for t in inputs), torch.get_float32_matmul_precision())
        if key not in self._programs:
            with share(COMPILE):
                self._programs[key] = self._program(leaves, places, structure, inputs)
        run, out = self._programs[key]
        with torch.no_grad():
            return tree_unflatten(list(run(*inputs)), out)

    def held(self, *arguments: Any) -> int:
        """Bytes that a call would hold at most beside its arguments, run operation by operation; about."""
        leaves, structure = tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return peak(self._trace(leaves, places, structure, [leaves[place] for place in places])[0].graph)

    def _program(
        self, leaves: list[Any], places: list[int], structure: Any, inputs: list[Tensor]
    ) -> tuple[Callable[..., Any], Any]:
        """The compiled function of the tensors at these places of the leaves, and the structure of what it gives."""
        # Two inputs that are one tensor now, as at a round's start, may be two at the next call.
        apart = [torch.empty_like(t) for t in inputs]
        with torch.no_grad():
            graph, out = self._trace(leaves, places, structure, apart)
            return _compiled(graph, apart, as_traced=self.again) if self.kernels else graph, out

    def _trace(
        self, leaves: list[Any], places: list[int], structure: Any, inputs: list[Tensor]
    ) -> tuple[GraphModule, Any]:
        """The step as a graph of operations on these inputs, and the structure of what it gives."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            whole = list(leaves)
            for place, tensor in zip(places, tensors):
                whole[place] = tensor
            flat_outputs, out = tree_flatten(self.step(*tree_unflatten(whole, structure)))
            structures.append(out)
            return flat_outputs

        structures: list[Any] = []
        with torch.no_grad():
            return traced(flat, inputs, again=self.again), structures[-1]


def traced(flat: Callable[..., Any], inputs: list[Tensor], *, again: bool) -> GraphModule:
    """The operations of a function of tensors; `again`: with those of marked blocks computed again where they are read.

    Tensors of a network that are neither weights nor buffers are no inputs: they become constants.
    """
    if not again:
        return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    with noted_blocks() as blocks:  # functionalize: what is written in place could not be computed again
        module = make_fx(functionalize(flat), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    recompute(module.graph, blocks)
    module.recompile()
    return module


def _compiled(graph: GraphModule, inputs: list[Tensor], *, as_traced: bool) -> Callable[..., Any]:
    """Kernels of a graph's operations; `as_traced`: in their order, for they stand where memory is free for them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy

    keep_programs()
    # Inductor looks on its disk only where it could note what a program assumes of shapes; ours are numbers still.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    shapes: list[Any] = [mode.from_tensor(t, static_shapes=True) for t in inputs]
    options = {"cpp.threads": torch.get_num_threads(), **({"reorder_for_locality": False} if as_traced else {})}
    with _no_arguments(), tracing(TracingContext(mode)):
        return torch._inductor.compile(graph, shapes, options=options)


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hides the command line: the compiler writes the word behind an --only, unquoted, into the code it makes."""
    words, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = words
