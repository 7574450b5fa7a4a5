"""Twins of a module: copies that share its tensors, for another mode or another thread."""

from __future__ import annotations

import copy
import threading
from weakref import WeakKeyDictionary

import torch
from torch import nn


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
