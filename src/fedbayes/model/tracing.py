"""How an operation runs just now: for one client, or for several at once."""

from __future__ import annotations

import torch


def alone() -> bool:
    """Whether nothing is stacked."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None
