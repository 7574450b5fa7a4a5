"""A long traced step in parts: what it does again and again, as the blocks of a deep network do, is compiled once.

A trace is a list of operations. Where a stretch of it follows itself several times, on values of the same shapes, the
list is cut into that stretch and what stands between. On a GPU long stretches are cut again, where least goes from one
piece to the next: the compiler's work grows faster than a stretch, and several processes can share it. Costs what the
compiler would have fused across the cuts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

# Of a step's computing operations that need not be compiled, for it to be cut. On a GPU more is fused, and is lost.
LEAST = {"cpu": 0.4, "cuda": 0.4}
SHORTEST = 8  # operations of a stretch
LONGEST = {"cuda": 400}  # operations that are compiled as one; where cuts cost no launches, there is no limit
NEAR = 30  # operations on: what is read no later would have been fused
ALIGNMENT = 16  # bytes

Shapes = list[tuple[Any, ...]]
Function = Callable[..., Any]


class Part(NamedTuple):
    """A stretch of a graph as a function of the values it takes from before.

    Of these, `shapes` has size, strides, type, device, and where in their memory they begin: 1 for at no good place.
    """

    graph: GraphModule
    shapes: Shapes


class Call(NamedTuple):
    """Where a part is called: on which values, what is made, and what nobody reads any more afterwards."""

    part: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    over: tuple[str, ...]


class Cut(NamedTuple):
    """A graph as calls of its parts."""

    parts: list[Part]
    calls: list[Call]
    inputs: list[str]
    constants: dict[str, Tensor]
    outputs: Any

    def run(self, functions: Sequence[Function]) -> Function:
        """The graph as a function, by those of its parts."""

        def whole(*inputs: Tensor) -> list[Any]:
            values = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
            for part, takes, gives, over in self.calls:
                given = [_laid(values[name], stride) for name, (_, stride, *_) in zip(takes, self.parts[part].shapes)]
                values.update(zip(gives, functions[part](*given), strict=True))
                for name in over:
                    del values[name]
            return [values[out.name] if isinstance(out, Node) else out for out in self.outputs]

        return whole


def _laid(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The value with its numbers where they were in the trace: compilers may put them elsewhere, and rely on it."""
    if value.stride() == stride or 0 in stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def cut(module: GraphModule, inputs: Sequence[Tensor]) -> Cut | None:
    """The graph of these inputs in parts, some called several times; None where it had better stay whole."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "")
    if device not in LEAST:
        return None
    if _in_place(module):  # a part would not know which of its inputs share memory
        module = make_fx(functionalize(module), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    if _in_place(module):
        return None
    *nodes, last = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr")]
    views, nodes = _views_first(nodes)
    longest = LONGEST.get(device, len(nodes) + len(views))
    is_long = len(nodes) > longest
    if not is_long:
        views, nodes = [], views + nodes
    work = [_computes(node) for node in nodes]
    spans = [span for span in sorted(_spans(_tokens(nodes), work, 0, len(nodes))) if _are_alike(nodes, *span)]
    if sum((times - 1) * sum(work[at : at + length]) for at, length, times in spans) < LEAST[device] * sum(work):
        spans = []
    if not spans and not is_long:
        return None
    groups: list[list[list[Node]]] = [[views]]  # the stretches of one are compiled as one
    done = 0
    for at, length, times in [*spans, (len(nodes), 0, 0)]:
        groups.append([nodes[done:at]])
        groups.append([nodes[at + k * length : at + (k + 1) * length] for k in range(times)])
        done = at + length * times
    pieces = [piece for group in groups for piece in _pieces(group, longest)]
    return _joined(module, [*views, *nodes], pieces, last)


def _pieces(group: list[list[Node]], longest: int) -> Iterator[list[list[Node]]]:
    """Stretches that do the same, cut at the same places into pieces of about that length at most."""
    if not group or not group[0]:
        return
    length = len(group[0])
    count = -(-length // longest)
    crossing = _crossing(group[0]) if count > 1 else []
    edges = [0]
    for number in range(1, count):
        ideal, room = number * length // count, length // (4 * count)
        edges.append(min(range(ideal - room, ideal + room + 1), key=lambda place: crossing[place]))
    for begin, end in zip(edges, [*edges[1:], length]):
        yield [stretch[begin:end] for stretch in group]


def _crossing(stretch: list[Node]) -> list[float]:
    """For each place: the bytes of what is made before it and read behind it, by operations near by."""
    place = {node: number for number, node in enumerate(stretch)}
    crossing = [0.0] * len(stretch)
    for number, node in enumerate(stretch):
        last = max((place.get(user, len(stretch)) for user in node.users), default=number)
        value = node.meta.get("val")
        size = value.numel() * value.element_size() if isinstance(value, Tensor) else float("inf")
        if last <= number + NEAR or not isinstance(value, Tensor):
            for between in range(number + 1, min(last + 1, len(stretch))):
                crossing[between] += size
    return crossing


def _are_alike(nodes: list[Node], at: int, length: int, times: int) -> bool:
    """Whether stretches of the same operations on values of the same shapes read these from the same places."""
    stretches = [nodes[at + k * length : at + (k + 1) * length] for k in range(times)]
    return len({_form(stretch, _taken(stretch)) for stretch in stretches}) == 1


def _joined(module: GraphModule, nodes: list[Node], groups: list[list[list[Node]]], last: Node) -> Cut | None:
    """The cut by groups of stretches of these nodes, each group one part."""
    order = {node: number for number, node in enumerate(nodes)}
    parts: list[Part] = []
    found: list[tuple[int, Call]] = []
    for group in groups:
        takes = [_taken(stretch) for stretch in group]
        if not all(isinstance(node.meta.get("val"), Tensor) for node in takes[0]):
            return None
        gives = [place for place in range(len(group[0])) if any(_read_later(one, place) for one in group)]
        parts.append(_part(group[0], takes[0], gives, [all(map(_aligned, values)) for values in zip(*takes)]))
        for stretch, taken in zip(group, takes):
            names = tuple(stretch[place].name for place in gives)
            call = Call(len(parts) - 1, tuple(node.name for node in taken), names, ())
            found.append((order[stretch[0]], call))
    calls = [call for _, call in sorted(found, key=itemgetter(0))]
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    constants = {node.name: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}
    kept = {*inputs, *constants, *(node.name for node in last.all_input_nodes)}
    for number in reversed(range(len(calls))):
        call = calls[number]
        calls[number] = call._replace(over=tuple(dict.fromkeys({*call.takes, *call.gives} - kept)))
        kept |= {*call.takes, *call.gives}
    return Cut(parts, calls, inputs, constants, last.args[0])


def _views_first(nodes: list[Node]) -> tuple[list[Node], list[Node]]:
    """Views of inputs, of the place in a vector that is a block's own, say; and all other operations."""
    first: set[Node] = set()
    for node in nodes:
        of_inputs = all(one in first or one.op in ("placeholder", "get_attr") for one in node.all_input_nodes)
        if node.op == "call_function" and of_inputs and not _computes(node):
            first.add(node)
    return [n for n in nodes if n in first], [n for n in nodes if n not in first]


def computes(part: Part) -> bool:
    """Whether a part does more than to take views."""
    return any(_computes(node) for node in part.graph.graph.nodes if node.op == "call_function")


def _computes(node: Node) -> bool:
    view = isinstance(node.target, OpOverload) and node.target.is_view
    return node.target is not operator.getitem and not view


def _in_place(module: GraphModule) -> bool:
    """Whether an operation changes the memory of another's value."""
    targets = (node.target for node in module.graph.nodes)
    return any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets)


def _tokens(nodes: list[Node]) -> list[int]:
    """A number for each operation, equal for those that do the same to values of the same shapes."""
    numbers: dict[Any, int] = {}

    def like(value: Any) -> Any:
        return str(_like(value.meta.get("val"))) if isinstance(value, Node) else value

    kinds = (f"{node.target} {map_aggregate((node.args, dict(node.kwargs)), like)}" for node in nodes)
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return [_like(v) for v in value] if isinstance(value, list | tuple) else value


def _spans(tokens: list[int], work: list[bool], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Stretches that follow themselves: where the first begins, its length, how many there are.

    The one that saves most first, then what is left before and behind it. Time O(length squared), in C.
    """
    most, best = 0, None
    here, counts = torch.tensor(tokens[begin:end]), torch.tensor([0, *work[begin:end]]).cumsum(0)
    for length in range(SHORTEST, len(here) // 2 + 1):
        edges = torch.nn.functional.pad((here[:-length] == here[length:]).int(), (1, 1)).diff()
        for at, stop in zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()):
            times = (stop - at) // length + 1
            saved = int(counts[at + length * times] - counts[at + length])
            if times > 1 and saved > most:
                most, best = saved, (begin + at, length, times)
    if best is None or most < SHORTEST:
        return
    yield best
    yield from _spans(tokens, work, begin, best[0])
    yield from _spans(tokens, work, best[0] + best[1] * best[2], end)


def _taken(stretch: list[Node]) -> list[Node]:
    """What a stretch reads of what was there before, in the order in which it does."""
    own = set(stretch)
    return list(dict.fromkeys(node for one in stretch for node in one.all_input_nodes if node not in own))


def _form(stretch: list[Node], taken: list[Node]) -> str:
    """What a stretch does, in words that are the same for its like."""
    names = {node: f"<{place}>" for place, node in enumerate([*taken, *stretch])}
    calls = [f"{n.target} {map_arg((n.args, dict(n.kwargs)), lambda a: names[a])}" for n in stretch]
    return f"{[_like(node.meta.get('val')) for node in taken]} {calls}"


def _read_later(stretch: list[Node], place: int) -> bool:
    own = set(stretch)
    return any(user not in own for user in stretch[place].users)


def _aligned(node: Node) -> bool:
    """Whether a value begins where a GPU reads four numbers at once: a vector's slice, as weights are, may not."""
    value = node.meta["val"]
    return value.storage_offset() * value.element_size() % ALIGNMENT == 0


def _part(stretch: list[Node], taken: list[Node], gives: list[int], aligned: list[bool]) -> Part:
    graph, new = Graph(), {}
    for number, node in enumerate(taken):
        new[node] = graph.placeholder(f"value_{number}")
    for node in stretch:
        new[node] = graph.node_copy(node, lambda a: new[a])
        new[node].meta = {}
    graph.output([new[stretch[place]] for place in gives])
    # A value that lies elsewhere than the compiler was told would be copied, with all that lies between its rows.
    shapes = [(*_like(node.meta["val"]), int(not lies_well)) for node, lies_well in zip(taken, aligned)]
    return Part(GraphModule({}, graph), shapes)
