"""How an operation runs just now: for one client, or for several at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_compiles, _stack = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack


def alone() -> bool:
    """Whether nothing is stacked."""
    return _stack() is None and not _compiles()


def takes_own_functions() -> bool:
    """Whether a function with a gradient of its own can be called: what is made functional to be traced has no rule."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return all(level.key() != torch._C._functorch.TransformType.Functionalize for level in levels)


def asks_whether_traced(module: nn.Module) -> bool:
    """Whether layers look at the values of a mask to leave it out, but where they are being traced: transformers'."""
    return any(type(layer).__module__.partition(".")[0] == "transformers" for layer in module.modules())


_LOCK, _WITHIN, _OWN = threading.Lock(), [0], torch.jit.is_tracing


@contextmanager
def said_to_be_traced() -> Iterator[None]:
    """While it is open, networks of stacked clients that ask whether they are traced are told so.

    Values of stacked clients can't be read any more than those of a trace: the branch that needs none must be taken.
    """
    with _LOCK:
        _WITHIN[0] += 1
        torch.jit.is_tracing = _is_traced
    try:
        yield
    finally:
        with _LOCK:
            _WITHIN[0] -= 1
            if not _WITHIN[0]:
                torch.jit.is_tracing = _OWN


def _is_traced() -> bool:
    return not alone() or bool(_OWN())
