"""Runs an unmodified module with some of its operations done our way: dropout, BatchNorm, sampled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedbayes.noise import Tape

Handler = Callable[..., Any]


class Takeover(TorchFunctionMode):
    """While active, calls of the functions in `handlers` go to the handler, with the call's own arguments."""

    def __init__(self, handlers: Mapping[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self.handlers.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(*args, **(kwargs or {}))


def training_handlers(tape: Tape, mask: Tensor | None) -> dict[Any, Handler]:
    """Dropout that reads the tape, and BatchNorm that does not see padded rows (mask [B], None: all rows live)."""
    handlers: dict[Any, Handler] = {f: _dropout(tape, axes) for f, axes in DROPOUTS.items()}
    if mask is not None:
        handlers[F.batch_norm] = _masked_batch_norm(mask)
    return handlers


# How many leading axes have a mask of their own: all (elementwise), or batch and channel.
DROPOUTS: dict[Any, int | None] = {F.dropout: None, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2}


def _dropout(tape: Tape, axes: int | None) -> Handler:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        shape = [n if axes is None or i < axes else 1 for i, n in enumerate(input.shape)]
        keep = tape.uniform(input, shape) >= p
        return input * keep / (1 - p) if p < 1 else torch.zeros_like(input)

    return dropout


def _masked_batch_norm(mask: Tensor) -> Handler:
    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        # A network may fold other axes into the rows, row by row: then each row's flag stands for its share.
        live = mask.to(input.dtype).repeat_interleave(input.shape[0] // mask.shape[0])
        axes = [i for i in range(input.dim()) if i != 1]
        column = [1, -1] + [1] * (input.dim() - 2)
        rows = live.reshape([-1] + [1] * (input.dim() - 1))
        count = live.sum() * (input[:1, :1].numel())
        count = count.clamp(min=1)
        mean = (input * rows).sum(axes) / count
        centred = input - mean.reshape(column)
        variance = (centred.square() * rows).sum(axes) / count
        if running_mean is not None and running_var is not None:
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            # A batch without a live row leaves the statistics as they are.
            rate = momentum * (live.sum() > 0).to(input.dtype)
            running_mean.copy_(running_mean + rate * (mean.detach() - running_mean))
            running_var.copy_(running_var + rate * (unbiased - running_var))
        out = centred * (variance + eps).rsqrt().reshape(column)
        if weight is not None:
            out = out * weight.reshape(column)
        return out if bias is None else out + bias.reshape(column)

    return batch_norm
