"""Two-dimensional convolutions by the way that is fastest where they run; any other as PyTorch does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 4  # input channels that channels-last kernels of a CPU are slow for
_STACKED = False  # whether clients side by side are traced: their convolutions are products of matrices


@contextmanager
def stacked(yes: bool = True) -> Iterator[None]:
    """While it is open, compiled convolutions on a GPU are those of several clients at once."""
    global _STACKED
    before, _STACKED = _STACKED, yes
    try:
        yield
    finally:
        _STACKED = before


def alone() -> bool:
    """Whether nothing is stacked or traced."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d."""
    if _STACKED and input.is_cuda and torch.compiler.is_compiling():
        return by_products(input, weight, bias, *args, **kwargs)
    if (
        alone()
        and weight.shape[1] <= FEW
        and input.dim() == 4
        and input.is_contiguous(memory_format=torch.channels_last)
    ):
        out = F.conv2d(input.contiguous(), weight, bias, *args, **kwargs)
        return out.contiguous(memory_format=torch.channels_last)
    return F.conv2d(input, weight, bias, *args, **kwargs)


def by_products(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """The same as one product of matrices: the patches [B, C k l, positions] that a filter meets, side by side.

    Under vmap a convolution becomes one of many groups, which GPUs are slow at; a compiler makes the patches in a
    single pass.
    """
    if groups > 1 or isinstance(padding, str) or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (down, right), (top, left), (tall, wide) = (_pair(n) for n in (stride, padding, dilation))
    x = F.pad(input, (left, left, top, top))
    rows, columns = weight.shape[-2:]
    height = (x.shape[-2] - tall * (rows - 1) - 1) // down + 1
    width = (x.shape[-1] - wide * (columns - 1) - 1) // right + 1
    met = [
        x[
            ...,
            i * tall : i * tall + down * (height - 1) + 1 : down,
            j * wide : j * wide + right * (width - 1) + 1 : right,
        ]
        for i in range(rows)
        for j in range(columns)
    ]
    patches = torch.stack(met, 2).flatten(1, 2).flatten(2)
    out = torch.matmul(weight.flatten(1), patches).unflatten(-1, (height, width))
    return out if bias is None else out + bias[:, None, None]


def _pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else tuple(n) * (2 // len(tuple(n)))
