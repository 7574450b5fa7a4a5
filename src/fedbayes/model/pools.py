"""Pools of clients side by side on a GPU as plain operations, which are fused with what stands around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.model.convolution import pair, side_by_side
from fedbayes.model.tracing import takes_own_functions

PLACES = 9  # of a window at most that are told apart one by one
USUAL = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}  # options of a plain max-pool


def pools(x: Tensor) -> dict[Any, Any]:
    """Pools that networks on this input's device do our way."""
    if not x.is_cuda:
        return {}
    return {**dict.fromkeys((F.max_pool2d, torch.max_pool2d), max_pool2d), F.adaptive_avg_pool2d: adaptive_avg_pool2d}


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """F.adaptive_avg_pool2d; to one number of each channel as a plain mean.

    Where channels lie last PyTorch's changes the strides of its result in place, client by client: what is traced then
    holds for the memory of that trace alone.
    """
    if pair(output_size) == (1, 1):
        return input.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, output_size)


def max_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, *args: Any, **kwargs: Any) -> Any:
    """F.max_pool2d; windows side by side, of clients side by side on a GPU, as choices between their places.

    These are fused with what stands around them, backward too, where PyTorch's adds each slope to a place of zeros.
    """
    size, step, given = pair(kernel_size), pair(stride or kernel_size), {**dict(zip(USUAL, args)), **kwargs}
    plain = all(pair(given.get(name, usual)) == pair(usual) for name, usual in USUAL.items())
    (rows, columns), (height, width) = size, input.shape[-2:]
    fits = plain and step == size and rows * columns <= PLACES and rows <= height and columns <= width
    if not fits or not side_by_side(input) or not takes_own_functions():
        return F.max_pool2d(input, kernel_size, stride, *args, **kwargs)
    out: Tensor = _Largest.apply(input, rows, columns)[0]
    return out


class _Largest(torch.autograd.Function):
    """The largest number of each window of [..., C, H, W], and which of its places has it: of equal ones the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        high, wide = x.shape[-2] // rows * rows, x.shape[-1] // columns * columns
        out, *others = (x[..., i:high:rows, j:wide:columns] for i in range(rows) for j in range(columns))
        which = torch.zeros_like(out, dtype=torch.int8)
        for number, place in enumerate(others, 1):
            larger = (place > out) | place.isnan()
            out, which = torch.where(larger, place, out), torch.where(larger, number, which)
        return out, which

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.rows, ctx.columns = inputs
        ctx.size = x.shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Tensor) -> Any:
        (which,) = ctx.saved_tensors
        here = torch.arange(ctx.rows * ctx.columns, device=d.device).view(ctx.rows, 1, ctx.columns, 1)
        which, d = (t.movedim(-3, -1)[..., :, None, :, None, :] for t in (which, d))  # channels last, as all is there
        spread = torch.where(which == here, d, 0).flatten(-5, -4).flatten(-3, -2)
        down, right = (whole - part for whole, part in zip(ctx.size, spread.shape[-3:-1]))
        spread = F.pad(spread, (0, 0, 0, right, 0, down)) if down or right else spread
        return spread.movedim(-1, -3), None, None
