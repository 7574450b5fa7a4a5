"""A step compiled: traced once by running it, then made into kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedbayes.engine.beside import Beside, Waiting, plain
from fedbayes.engine.clock import COMPILE, share
from fedbayes.engine.compiler import begin_helpers, kernels
from fedbayes.engine.repeats import Part, cut
from fedbayes.engine.several import begun, made
from fedbayes.model.recomputation import noted_blocks, peak, recompute

SMALL = 2**23  # numbers of the largest tensor of a step whose launches are joined: up to there it was measured


class Program(NamedTuple):
    """A traced step: its parts, the function that it is by theirs, what it gives, and how they are compiled."""

    parts: list[Part]
    join: Callable[[Sequence[Callable[..., Any]]], Callable[..., Any]]
    out: Any
    options: dict[str, Any]


class Compiled:
    """A pure function of tensors within trees, compiled anew for each structure and shape of its arguments.

    Not torch.compile: that reads Python's bytecode, which for operations taken over within vmap costs ten times as
    long as it takes to run them once on tensors without content. What Inductor makes of it is kept on disk, by the
    graph, its constants, shapes, threads and versions: the next process takes it from there, equal in every bit.
    `kernels` False: the operations are run one by one as they were traced. `again`: activations of the network's marked
    blocks are computed again for the backward pass. `deep`: there will be enough to compile for several processes.
    """

    def __init__(
        self, step: Callable[..., Any], *, kernels: bool = True, again: bool = False, deep: bool = False
    ) -> None:
        self.step = step
        self.kernels = kernels
        self.again = again
        self.deep = deep
        self.beside: dict[Any, tuple[Program, Beside]] = {}  # what another process compiles
        self._programs: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """step(*arguments)."""
        leaves, structure, places, inputs, key = _taken_apart(arguments)
        if key not in self._programs:
            with share(COMPILE), begun(_device(inputs) if self.deep else "") as waiting:
                program = self._program(leaves, places, structure, inputs)
                self._programs[key] = self._ready(program, waiting)
        run, out = self._programs[key]
        with torch.no_grad():
            return tree_unflatten(list(run(*inputs)), out)

    def there(self, *arguments: Any, ask: bool) -> bool:
        """Whether a call need not wait for the compiler; `ask`: if not, a process beside this one begins to compile."""
        leaves, structure, places, inputs, key = _taken_apart(arguments)
        if ask and key not in self._programs and key not in self.beside:
            with share(COMPILE):
                program = self._program(leaves, places, structure, inputs)
                self.beside[key] = program, Beside(program.parts, program.options)
        return key in self._programs

    def take(self) -> None:
        """Take what the processes beside have compiled."""
        with share(COMPILE):
            for key, (program, beside) in self.beside.items():
                if beside.fault is not None:
                    raise RuntimeError(beside.fault)
                ready = [kernels(*part, program.options) for part in program.parts]  # from disk
                self._programs[key] = program.join(ready), program.out
                beside.mark()
        self.beside = {}

    def end(self) -> None:
        """Stop the processes beside this one."""
        for _, beside in self.beside.values():
            beside.end()
        self.beside = {}

    def held(self, *arguments: Any) -> int:
        """Bytes that a call would hold at most beside its arguments, run operation by operation; about."""
        leaves, structure = tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return peak(self._trace(leaves, places, structure, [leaves[place] for place in places])[0].graph)

    def _program(self, leaves: list[Any], places: list[int], structure: Any, inputs: list[Tensor]) -> Program:
        """The traced function of the tensors at these places of the leaves."""
        device = _device(inputs)
        if self.kernels:
            begin_helpers(device)
        # Two inputs that are one tensor now, as at a round's start, may be two at the next call.
        apart = [torch.empty_like(t) for t in inputs]
        graph, out = self._trace(leaves, places, structure, apart)
        shapes = [(t.shape, t.stride(), t.dtype, t.device, 0) for t in apart]
        # As traced: in the order of operations, for those that are computed again stand where memory is free for them.
        as_traced = {"reorder_for_locality": False} if self.again else {}
        options = {"cpp.threads": torch.get_num_threads(), **as_traced, **launches(graph, device)}
        pieces = cut(graph, apart) if self.kernels and not self.again else None
        if pieces is None:
            return Program([Part(plain(graph), shapes)], itemgetter(0), out, options)
        return Program([Part(plain(one), given) for one, given in pieces.parts], pieces.run, out, options)

    def _ready(self, program: Program, waiting: list[Waiting]) -> tuple[Callable[..., Any], Any]:
        if self.kernels:
            return program.join(made(program.parts, program.options, waiting)), program.out
        return program.join([part.graph for part in program.parts]), program.out

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


def launches(graph: GraphModule, device: str) -> dict[str, Any]:
    """Options of the compiler: on a GPU small operations that do not wait for one another are one launch.

    Where tensors are larger than `SMALL`, as of wide networks on many images, what they cost is no launches.
    """
    sizes = [v.numel() for node in graph.graph.nodes if isinstance(v := node.meta.get("val"), Tensor)]
    return {"combo_kernels": True} if device == "cuda" and max(sizes, default=0) <= SMALL else {}


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


def _device(inputs: list[Tensor]) -> str:
    return next((t.device.type for t in inputs), "cpu")


def _taken_apart(arguments: tuple[Any, ...]) -> tuple[list[Any], Any, list[int], list[Tensor], Any]:
    """Leaves and structure of arguments, the places of tensors among them, these, and what a program is known by."""
    leaves, structure = tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # An expanded tensor at one call and a plain one at the next would be two programs.
    inputs = [leaves[place].contiguous() for place in places]
    key = (structure, tuple((t.shape, t.dtype) for t in inputs), torch.get_float32_matmul_precision())
    return leaves, structure, places, inputs, key
