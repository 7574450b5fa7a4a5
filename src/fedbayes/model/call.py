"""Modules with other tensors than their own: copies for another mode or thread, and calls with given weights."""

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


def shared_copy(module: nn.Module) -> nn.Module:
    """A copy that shares the tensors."""
    return copy.deepcopy(module, {id(t): t for t in [*module.parameters(), *module.buffers()]})


class _ThreadCopies(threading.local):
    """The copies of this thread, by module."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


_COPIES = _ThreadCopies()


def of_this_thread(module: nn.Module) -> nn.Module:
    """The module itself in the main thread, else a copy: a call with other weights holds them in the module."""
    if torch.compiler.is_compiling() or threading.current_thread() is threading.main_thread():
        return module
    if module not in _COPIES.of:
        _COPIES.of[module] = shared_copy(module)
    return _COPIES.of[module]


Places = dict[str, list[tuple[dict[str, Any], str]]]  # where a module keeps the tensor of a name; several where tied
_PLACES: WeakKeyDictionary[nn.Module, Places | None] = WeakKeyDictionary()


def call(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """module(x) with other weights and buffers.

    It is PyTorch's functional_call without looking up where each name lies, a fifth of what a small step spends
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
