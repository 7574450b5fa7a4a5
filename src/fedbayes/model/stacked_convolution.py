"""Convolutions of many networks at once on a GPU, as kernels of our own: forward, and the gradients of both inputs.

PyTorch's convolution of many groups moves its tensors between layouts, and takes its weights' gradient group by group;
patches that are stored are nine times the input. These kernels gather patches as they go. Written in Triton.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BUSY = 512  # programs that keep a large GPU busy
TILE = 64  # channels of a tile at most


def available() -> bool:
    """Whether Triton is there to make the kernels, and products may be TF32's."""
    if torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cuda"):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def convolution(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding) of [N, C, H, W] and [O, C, R, S], made for vmap; channels lie last."""
    last = (0, 2, 3, 1)
    rows, filters = x.permute(last).contiguous(), weight.permute(last).contiguous()
    return _Convolution.apply(rows, filters, *stride, *padding).permute(0, 3, 1, 2)


class _Convolution(torch.autograd.Function):
    """Of [N, H, W, C] and [O, R, S, C]: [N, HO, WO, O]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, down: int, right: int, top: int, left: int) -> Tensor:
        return _forward(x, w, down, right, top, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how = inputs[2:]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, w = ctx.saved_tensors
        (height, width), (rows, columns) = x.shape[-3:-1], w.shape[-3:-1]
        d = d.contiguous()
        return (
            _to_input(d, w, height, width, *ctx.how),
            _to_weight(d, x, rows, columns, *ctx.how),
            None,
            None,
            None,
            None,
        )


def _run_forward(x, w, down, right, top, left):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    x, w = x.contiguous(), w.contiguous()
    out = _like_forward(x, w, down, right, top, left)
    *stack, images, height, width, channels = x.shape
    high, wide, outs = out.shape[-3:]
    positions, groups = images * high * wide, math.prod(stack)
    tiles = _tiles(positions * groups, outs, channels)
    kernels.forward[(-(-positions // tiles[0]), -(-outs // tiles[1]), groups)](
        x, w, out, positions, height, width, high, wide, channels, outs, *w.shape[-3:-1], down, right, top, left,
        *tiles, "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _run_to_input(d, w, height, width, down, right, top, left):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    d, w = d.contiguous(), w.contiguous()
    out = _like_to_input(d, w, height, width, down, right, top, left)
    *stack, images, high, wide, outs = d.shape
    rows, columns, channels = w.shape[-3:]
    pixels, groups = images * height * width, math.prod(stack)
    tiles = _tiles(pixels * groups, channels, outs)
    kernels.to_input[(-(-pixels // tiles[0]), -(-channels // tiles[1]), groups)](
        d, w, out, pixels, height, width, high, wide, channels, outs, rows, columns, down, right, top, left,
        *tiles, "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _run_to_weight(d, x, rows, columns, down, right, top, left):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    d, x = d.contiguous(), x.contiguous()
    *stack, images, high, wide, outs = d.shape
    height, width, channels = x.shape[-3:]
    positions, groups, depth = images * high * wide, math.prod(stack), rows * columns * channels
    coarse = d.dtype == torch.bfloat16
    tile_m, tile_n, tile_k = _power(outs), _power(depth), 128 if coarse else 32
    grid = (-(-outs // tile_m), -(-depth // tile_n))
    # Few filters, many positions: these are shared, and the shares added in one order.
    shares = max(1, min(BUSY // (grid[0] * grid[1] * groups), positions // (4 * tile_k)))
    share = tile_k * math.ceil(positions / shares / tile_k)
    shares = math.ceil(positions / share)
    parts = d.new_empty((shares, *stack, outs, rows, columns, channels), dtype=torch.float32)
    kernels.to_weight[(*grid, groups * shares)](
        d, x, parts, groups, positions, height, width, high, wide, share, channels, outs, rows, columns,
        down, right, top, left, tile_m, tile_n, tile_k, "tf32",
        num_warps=2 if coarse and outs < TILE else 4, num_stages=2,
    )  # fmt: skip
    return (parts[0] if shares == 1 else parts.sum(0)).to(d.dtype)


def _like_forward(x, w, down, right, top, left):  # type: ignore[no-untyped-def]
    high = (x.shape[-3] + 2 * top - w.shape[-3]) // down + 1
    wide = (x.shape[-2] + 2 * left - w.shape[-2]) // right + 1
    return x.new_empty((*x.shape[:-3], high, wide, w.shape[-4]))


def _like_to_input(d, w, height, width, down, right, top, left):  # type: ignore[no-untyped-def]
    return d.new_empty((*d.shape[:-3], height, width, w.shape[-1]))


def _like_to_weight(d, x, rows, columns, down, right, top, left):  # type: ignore[no-untyped-def]
    return d.new_empty((*d.shape[:-4], d.shape[-1], rows, columns, x.shape[-1]))


def _stacked(op: Any) -> Any:
    """Under vmap the networks are a leading axis more of both tensors."""

    def rule(info: Any, axes: Any, *arguments: Any) -> tuple[Tensor, int]:
        pair = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(arguments[:2], axes)
        ]
        return op(*(t.contiguous() for t in pair), *arguments[2:]), 0

    return rule


def _operator(name: str, arguments: str, run: Any, like: Any) -> Any:
    """An operation that traces, compilers and vmap know; it has no gradient of its own."""
    name = f"fedbayes::{name}"
    torch.library.define(name, f"({arguments}, int down, int right, int top, int left) -> Tensor")
    torch.library.impl(name, ("cpu", "cuda"), run)
    torch.library.register_fake(name, like)
    op = getattr(torch.ops.fedbayes, name.removeprefix("fedbayes::")).default
    torch.library.register_vmap(name, _stacked(op))
    return op


_forward = _operator("convolution", "Tensor x, Tensor w", _run_forward, _like_forward)
_to_input = _operator("convolution_input", "Tensor d, Tensor w, int height, int width", _run_to_input, _like_to_input)
_to_weight = _operator(
    "convolution_weight", "Tensor d, Tensor x, int rows, int columns", _run_to_weight, _like_to_weight
)


def _power(n: int) -> int:
    """The power of two from 16 to TILE that holds n, or TILE."""
    return min(TILE, max(16, 1 << (n - 1).bit_length()))


def _tiles(positions: int, outs: int, channels: int) -> tuple[int, int, int]:
    """Of positions, of channels that come out, and of numbers summed at once, as they were fastest on an H200."""
    columns = _power(outs)
    rows = 128 if columns < TILE and positions >= 128 * BUSY else 64
    return rows, columns, max(16, min(TILE, channels)) if channels % 16 == 0 else 32
