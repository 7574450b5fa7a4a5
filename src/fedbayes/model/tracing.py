"""How an operation is met just now: done at once, for several clients at once, or written down for a compiler."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def alone() -> bool:
    """Whether nothing is stacked."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def traced() -> bool:
    """Whether operations are written down for a compiler, instead of being done."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None
