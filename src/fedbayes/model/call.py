"""Modules with other tensors than their own: copies for another mode or thread, and calls with given weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves


def shared_copy(module: nn.Module) -> nn.Module:
    """A copy that shares the tensors."""
    return copy.deepcopy(module, {id(t): t for t in [*module.parameters(), *module.buffers()]})


def apart_from_graphs(module: nn.Module) -> nn.Module:
    """A copy, in which activations that the module keeps on itself are no part of the graph that made them."""
    kept = [leaf for layer in module.modules() for leaf in tree_leaves(vars(layer)) if isinstance(leaf, Tensor)]
    return copy.deepcopy(module, {id(t): t.detach() for t in kept if not t.is_leaf})


class _ThreadCopies(threading.local):
    """The copies of this thread, by module."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


_COPIES = _ThreadCopies()


def of_this_thread(module: nn.Module) -> nn.Module:
    """A copy for this thread: a call with other weights holds them in the module, and may leave activations in it.

    The module itself is never called, so that it can be copied: PyTorch can't copy what a graph was made of.
    """
    if torch.compiler.is_compiling():
        return module
    copied = _COPIES.of.get(module)
    if copied is None:
        copied = _COPIES.of[module] = shared_copy(module)
    return copied


Places = dict[str, list[tuple[dict[str, Any], str]]]  # where a module keeps the tensor of a name; several where tied
_PLACES: WeakKeyDictionary[nn.Module, Places | None] = WeakKeyDictionary()


def call(module: nn.Module, tensors: Mapping[str, Tensor], x: Any, moving: Iterable[str] = ()) -> Any:
    """module(x) with other weights and buffers; of several inputs module(**x), or module(*x) where they have no names.

    `moving` names tensors that are written where the module assigns others in their place, as buffers it averages.
    It is PyTorch's functional_call without looking up where each name lies, a fifth of what a small step spends
    in Python.
    """
    module = of_this_thread(module)
    places = None if torch.compiler.is_compiling() else _places(module)
    if places is None:
        given = dict(tensors)
        output = functional_call(module, given, *arguments_of(x))
        for name in moving:
            _move(tensors[name], given[name])
        return output
    before = []
    try:
        for name, tensor in tensors.items():
            for table, key in places[name]:
                before.append((table, key, table[key]))
                table[key] = tensor
        args, names = arguments_of(x)
        output = module(*args, **names)
        for name in moving:
            for table, key in places[name]:
                _move(tensors[name], table.get(key))
        return output
    finally:
        for table, key, own in reversed(before):
            table[key] = own


def _move(tensor: Tensor, assigned: Any) -> None:
    """What was assigned, in place; of another size it is a mask or the like for this batch alone."""
    if assigned is not tensor and isinstance(assigned, Tensor) and assigned.shape == tensor.shape:
        tensor.copy_(assigned.detach())


NEEDED = "make_inputs_require_grads"  # the hook by which transformers starts recomputation at the embeddings


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write weights and buffers into a module; those that its state dict leaves out are written too."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in own.keys() & weights.keys():  # the likelihood's weights are not the module's
        own[name].data = weights[name].detach().to(own[name], copy=True)


def plain_gradients(module: nn.Module) -> bool:
    """Switch off, in place, the recomputation that transformers' modules do, and say whether it was on.

    It would be by other weights: a call with given weights holds them while it lasts. Ours is `recomputation.py`.
    """
    on = False
    for layer in module.modules():
        if getattr(layer, "gradient_checkpointing", False) is True:
            on, layer.gradient_checkpointing = True, False  # type: ignore[assignment]
        for key in [key for key, hook in layer._forward_hooks.items() if getattr(hook, "__name__", "") == NEEDED]:
            del layer._forward_hooks[key]
    return on


def arguments_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module is called with one input or several."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


LOGITS = "logits"


def tensor_in(output: Any) -> Any:
    """The tensor that a network means by what it gives: `logits` of a record or a dict, else the first of a tuple.

    What has no such tensor is given back as it is.
    """
    if isinstance(output, Tensor):
        return output
    named = output.get(LOGITS) if isinstance(output, Mapping) else getattr(output, LOGITS, None)
    if isinstance(named, Tensor):
        return named
    if is_dataclass(output):
        output = tuple(getattr(output, f.name) for f in fields(output))
    elif isinstance(output, Mapping) and len(output) == 1:
        output = tuple(output.values())
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    return output


def _places(module: nn.Module) -> Places | None:
    """None for a module that keeps its weights in other places too, as recurrent layers do."""
    if module not in _PLACES:
        _PLACES[module] = _search(module)
    return _PLACES[module]


def _search(module: nn.Module) -> Places | None:
    if any(isinstance(m, nn.RNNBase | torch.jit.ScriptModule) or is_parametrized(m) for m in module.modules()):
        return None
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                holders.setdefault(id(tensor), []).append((table, key))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: holders[id(tensor)] for name, tensor in tensors.items()}
