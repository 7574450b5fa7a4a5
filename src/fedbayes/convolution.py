"""A network's first convolution on a CPU without oneDNN, as one matrix product over the whole batch.

The plain kernels go image by image and copy patches of three channels number by number; for small images that is a
third of a step. Only for inputs of few channels that need no gradient: elsewhere the plain kernels are as good.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 4  # channels


class _Patches(torch.autograd.Function):
    """x [B, H, W, C], weight [O, C, h, w] -> x * weight without padding, [B * H' * W', O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (batch, height, width, channels), (outputs, _, h, w) = x.shape, weight.shape
        stride = x.stride()
        shape = (batch, height - h + 1, width - w + 1, h, w * channels)
        # A row of a patch is contiguous where channels are last.
        patches = x.as_strided(shape, (*stride[:3], stride[1], 1)).reshape(-1, h * w * channels)
        ctx.save_for_backward(patches)
        ctx.shape = weight.shape
        return patches @ weight.permute(2, 3, 1, 0).reshape(-1, outputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor]:
        outputs, channels, h, w = ctx.shape
        (patches,) = ctx.saved_tensors
        return None, (d.T @ patches).reshape(outputs, h, w, channels).permute(0, 3, 1, 2)


def first_convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d, done our way where that is faster."""
    plain = not kwargs and all(given in (usual, (usual, usual)) for given, usual in zip(args, (1, 0, 1, 1)))
    if not plain or input.requires_grad or input.dim() != 4 or input.shape[1] > FEW:
        return F.conv2d(input, weight, bias, *args, **kwargs)
    x = input.permute(0, 2, 3, 1).contiguous()
    out = _Patches.apply(x, weight)
    out = out if bias is None else out + bias
    height, width = (n - k + 1 for n, k in zip(input.shape[2:], weight.shape[2:]))
    return out.reshape(len(x), height, width, -1).permute(0, 3, 1, 2)
