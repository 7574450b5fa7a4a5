"""Two-dimensional convolutions by the way that is fastest where they run; any other as PyTorch does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.model import stacked_convolution
from fedbayes.model.tracing import alone

FEW = 4  # input channels that PyTorch's own channels-last kernels of a CPU are slow for; oneDNN's are not
PATCHES = 2**22  # numbers in the patches of a batch that are worth their memory
_COMPILED = _STACKED = False  # whether steps are compiled, and whether they are those of clients side by side


@contextmanager
def compiled(yes: bool = True, *, stacked: bool = True) -> Iterator[None]:
    """While it is open, convolutions are those of compiled steps, of several clients or of one."""
    global _COMPILED, _STACKED
    before, (_COMPILED, _STACKED) = (_COMPILED, _STACKED), (yes, yes and stacked)
    try:
        yield
    finally:
        _COMPILED, _STACKED = before


def replaced(x: Tensor) -> dict[Any, Any]:
    """The functions of PyTorch's that networks on this input's device do our way."""
    return {F.conv2d: conv2d} if x.is_cuda or not torch.backends.mkldnn.enabled else {}


def own_kernels() -> bool:
    """Whether two-dimensional convolutions on a GPU are kernels of our own just now."""
    return _STACKED and stacked_convolution.available()


def side_by_side(x: Tensor) -> bool:
    """Whether this is of clients side by side on a GPU, within compiled steps."""
    return _STACKED and x.is_cuda


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d.

    Of clients side by side on a GPU it is kernels of our own (`stacked_convolution.py`), in float32 without TF32 one
    convolution of many groups. On a CPU without oneDNN the first in
    training is a product of patches, but where it is compiled, as that makes it slower.
    """
    if side_by_side(input):
        return _stacked(input, weight, bias, *args, **kwargs)
    few = weight.shape[1] <= FEW and input.dim() == 4 and input.device.type == "cpu"
    slow = few and not torch.backends.mkldnn.enabled
    if slow and alone() and input.is_contiguous(memory_format=torch.channels_last):
        if weight.requires_grad and not input.requires_grad and not _COMPILED:
            return _product(input, weight, bias, *args, **kwargs)
        out = F.conv2d(input.contiguous(), weight, bias, *args, **kwargs)
        return out.contiguous(memory_format=torch.channels_last)
    return F.conv2d(input, weight, bias, *args, **kwargs)


def _product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """The first convolution of a network in training, as one product of all its patches: the output has channels last
    as it is, and the gradient of the weights is one product more."""
    (down, right), (rows, columns), fits = _pair(stride), weight.shape[-2:], not isinstance(padding, str)
    top, left = _pair(padding) if fits else (0, 0)
    count, channels, height, width = (*input.shape[:2], input.shape[2] + 2 * top, input.shape[3] + 2 * left)
    high, wide = (height - rows) // down + 1, (width - columns) // right + 1
    small = 0 < weight[0].numel() * count * high * wide <= PATCHES
    if not (fits and small) or groups > 1 or _pair(dilation) != (1, 1):
        out = F.conv2d(input.contiguous(), weight, bias, stride, padding, dilation, groups)
        return out.contiguous(memory_format=torch.channels_last)
    x = F.pad(input.contiguous(), (left, left, top, top))
    image, channel, row, column = x.stride()
    strides = (channel, row, column, image, row * down, column * right)
    patches = x.as_strided((channels, rows, columns, count, high, wide), strides).reshape(weight[0].numel(), -1)
    filters = weight.flatten(1).T.contiguous()  # so that its gradient is a product of rows that lie side by side
    out = patches.T @ filters if bias is None else torch.addmm(bias, patches.T, filters)
    return out.view(count, high, wide, -1).permute(0, 3, 1, 2)


def _stacked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """That of one of many clients within compiled steps."""
    usual = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str) and input.dim() == 4
    if not usual or input.dtype == torch.float64 or not own_kernels():
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if torch.is_autocast_enabled("cuda"):
        input, weight = input.to(torch.bfloat16), weight.to(torch.bfloat16)
    out = stacked_convolution.convolution(input, weight, _pair(stride), _pair(padding))
    return out if bias is None else out + bias.to(out.dtype)[:, None, None]


def _pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else tuple(n) * (2 // len(tuple(n)))
