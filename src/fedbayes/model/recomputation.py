"""Activations of a network's repeated blocks, computed a second time for the backward pass instead of held for it.

A step is traced into one graph of operations, forward and backward (`engine/compiled.py`). Operations that a block adds
to it are noted; what the backward pass reads of them is then computed again, from what went into the block. So between
the two passes only what goes from block to block is held (Chen et al., 2016), whatever estimator, noise and transform
the step is made of: noise is an input of the graph, and reads the same both times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fedbayes.errors import InputError
from fedbayes.posterior.layout import matches

BLOCK = "is_block"  # of a module whose activations can be computed again
ASKED = "recomputes"  # of a network whose are


def mark_blocks(network: nn.Module, patterns: bool | Sequence[str]) -> None:
    """Mark, in place, the modules that the patterns name, else the repeated blocks; False: they are not computed again.

    They are marked all the same: so that it can be said what would be gained.
    """
    network.__dict__[ASKED] = patterns is not False
    if isinstance(patterns, bool):
        blocks = repeated(network)
        if patterns and not blocks:
            raise InputError(
                "recompute: the network has no list of blocks of one class; name modules that run one after another, "
                'such as recompute=["layer1", "layer2"]'
            )
    else:
        named = {name: layer for name, layer in network.named_modules() if name}
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in named):
                raise InputError(f"recompute: no module matches {pattern!r}; there are {', '.join([*named][:8])}, ...")
        blocks = [layer for name, layer in named.items() if matches(name, patterns)]
    for block in blocks:
        block.__dict__[BLOCK] = True


def repeated(network: nn.Module) -> list[nn.Module]:
    """Modules of one class that stand in one list, have layers of their own, and are in no other such module."""
    lists = []
    for layer in network.modules():
        if isinstance(layer, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in layer if any(True for _ in child.children()))
            lists += [[child for child in layer if type(child) is kind] for kind, many in kinds.items() if many > 1]
    blocks = [block for blocks in lists for block in blocks]
    inner = {id(layer) for block in blocks for layer in block.modules() if layer is not block}
    return [block for block in blocks if id(block) not in inner]


def recomputes(network: nn.Module) -> bool:
    """Whether activations of the network's blocks are computed again."""
    return bool(network.__dict__.get(ASKED))


@contextmanager
def noted_blocks() -> Iterator[list[list[Node]]]:
    """The operations that each marked block adds to a graph that is being traced, in the order of their calls."""
    blocks: list[list[Node]] = []
    inside: list[tuple[nn.Module, int]] = []  # the block that is running, and how many nodes there were before

    def graph() -> Graph | None:
        mode = get_proxy_mode()
        return None if mode is None else mode.tracer.graph

    def enter(layer: nn.Module, args: Any) -> None:
        if BLOCK in layer.__dict__ and not inside and (traced := graph()) is not None:
            inside.append((layer, len(traced.nodes)))

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        if inside and inside[-1][0] is layer and (traced := graph()) is not None:
            blocks.append([*traced.nodes][inside.pop()[1] :])

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield blocks
    finally:
        for hook in hooks:
            hook.remove()


def recompute(graph: Graph, blocks: Sequence[Sequence[Node]]) -> None:
    """Let later operations read copies of a block's, in place; those that the next blocks read are held.

    Copies stand where they are first read. The last block's operations have none: its backward pass follows at once.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    left = [own for block in blocks if (own := {node for node in block if node in place})]
    forward = set().union(*left)
    for own, following in pairwise(left):
        end = max(place[node] for node in following)
        later = {user for node in own for user in node.users if user not in forward and place[user] > end}
        held = {n for n in own if not _repeatable(n) or not own.union(later).issuperset(n.users)}
        _read_copies(graph, sorted(later, key=place.__getitem__), own - held, place)
    graph.eliminate_dead_code()


def _read_copies(graph: Graph, users: Sequence[Node], again: set[Node], place: dict[Node, int]) -> None:
    """Let these users, in order, read copies of the nodes that are computed again."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        return copies.get(node, node)

    for user in users:
        for node in _needed(user, again, copies, place):
            with graph.inserting_before(user):
                copies[node] = graph.node_copy(node, copy)
        user.args, user.kwargs = map_arg(user.args, copy), map_arg(user.kwargs, copy)


def _needed(user: Node, again: set[Node], copies: dict[Node, Node], place: dict[Node, int]) -> list[Node]:
    """What must be computed again for a user and was not yet, in order."""
    needed: set[Node] = set()
    open_nodes = [user]
    while open_nodes:
        fresh = {n for n in open_nodes.pop().all_input_nodes if n in again and n not in copies and n not in needed}
        needed |= fresh
        open_nodes += fresh
    return sorted(needed, key=place.__getitem__)


def _repeatable(node: Node) -> bool:
    """Whether a second call gives the same: no draw of PyTorch's own, and nothing that is written in place."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def peak(graph: Graph) -> int:
    """Bytes that the operations of a graph hold at most beside its inputs, each result until it was read last.

    Results that share memory are counted once.
    """
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    size: dict[Node, int] = {}
    given = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    for i, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            last[owner[source]] = i
        stores = _stores(node)
        same = [s for s in node.all_input_nodes if stores and stores <= _stores(s)] if node not in given else []
        owner[node] = owner[same[0]] if same else node
        if owner[node] is node:
            size[node] = 0 if node in given else sum(s for _, s in _stores(node))
            last[node] = i
    ends: dict[int, int] = {}
    held = most = 0
    for i, node in enumerate(graph.nodes):
        if owner[node] is node:
            held += size[node]
            ends[last[node]] = ends.get(last[node], 0) + size[node]
        most = max(most, held)
        held -= ends.pop(i, 0)
    return most


def _stores(node: Node) -> set[tuple[int, int]]:
    """The memory of a node's value, each piece by what names it and its bytes."""
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return {(v.untyped_storage()._cdata, v.untyped_storage().nbytes()) for v in values}
