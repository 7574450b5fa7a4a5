"""Modules with other tensors than their own: twins for another mode or thread, and calls with given weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized


def twin(module: nn.Module) -> nn.Module:
    """A copy that shares the tensors."""
    return copy.deepcopy(module, {id(t): t for t in [*module.parameters(), *module.buffers()]})


class _Twins(threading.local):
    """The twins that a thread has made."""

    def __init__(self) -> None:
        self.made: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


_TWINS = _Twins()


def of_this_thread(module: nn.Module) -> nn.Module:
    """The module, or beside the main thread a twin: a functional call puts weights into the module for its time."""
    if torch.compiler.is_compiling() or threading.current_thread() is threading.main_thread():
        return module
    if module not in _TWINS.made:
        _TWINS.made[module] = twin(module)
    return _TWINS.made[module]


Places = dict[str, list[tuple[dict[str, Any], str]]]  # where a module keeps the tensor of a name; several where tied
_PLACES: WeakKeyDictionary[nn.Module, Places | None] = WeakKeyDictionary()


def call(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """module(x) with other weights and buffers.

    It is PyTorch's functional_call without its search for the places of the names, a fifth of what a small step spends
    in Python.
    """
    module = of_this_thread(module)
    places = None if torch.compiler.is_compiling() else _places(module)
    if places is None:
        return functional_call(module, dict(tensors), (x,))
    before = []
    try:
        for name, tensor in tensors.items():
            for table, key in places[name]:
                before.append((table, key, table[key]))
                table[key] = tensor
        return module(x)
    finally:
        for table, key, own in reversed(before):
            table[key] = own


def _places(module: nn.Module) -> Places | None:
    """None for a module whose parts hold more of their weights than the plain tables, as recurrent layers do."""
    if module not in _PLACES:
        _PLACES[module] = _found(module)
    return _PLACES[module]


def _found(module: nn.Module) -> Places | None:
    if any(isinstance(m, nn.RNNBase | torch.jit.ScriptModule) or is_parametrized(m) for m in module.modules()):
        return None
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                holders.setdefault(id(tensor), []).append((table, key))
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: holders[id(tensor)] for name, tensor in named.items()}
