"""Convolutions of many networks at once on a GPU, as kernels of our own: forward, and the gradients of both inputs.

PyTorch's convolution of many groups moves its tensors between layouts, and takes its weights' gradient group by group;
patches that are stored are nine times the input. These kernels gather patches as they go. Written in Triton.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

BUSY = 512  # programs that keep a large GPU busy
TILE = 64  # channels of a tile at most, where they are not WIDE
WIDE = 128
TURNING = 2**15  # pixels that are worth filters of another layout, which is a launch more
ONE, LOCAL, FLIPPED = 0, 1, 2  # what goes with a convolution: see convolution_kernels.py

Pair = tuple[int, int]


def available() -> bool:
    """Whether Triton is there to make the kernels, and products may be TF32's."""
    if torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cuda"):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def convolution(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding) of [N, C, H, W] and [O, C, R, S], made for vmap; channels lie last."""
    return _apply(x, weight, None, None, None, stride, padding)


def local(x: Tensor, weights: Tensor, bias: Tensor | None, noise: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """mean + sqrt(variance) noise: means of x by weights[0], variances of x^2 by weights[1], plus a bias' [2, O].

    The noise is [N, O, HO, WO].
    """
    return _apply(x, weights, bias, None, noise, stride, padding)


def flipped(x: Tensor, weights: Tensor, before: Tensor, after: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """That of x by weights[0], plus that of x times signs [N, C] by weights[1], which has signs [N, O] itself."""
    return _apply(x, weights, None, before, after, stride, padding)


def _apply(x: Tensor, w: Tensor, bias: Any, p: Any, q: Any, stride: Pair, padding: Pair) -> Tensor:
    rows, filters = x.permute(0, 2, 3, 1).contiguous(), w.movedim(-3, -1).to(x.dtype).contiguous()
    out: Tensor = _Convolution.apply(rows, filters, bias, p, q, *stride, *padding)[0]
    return out.permute(0, 3, 1, 2)


class _Convolution(torch.autograd.Function):
    """Of [N, H, W, C] and [O, R, S, C], or [2, O, R, S, C]: [N, HO, WO, O], and its slopes in the variance if local."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Any, p: Any, q: Any, *how: int) -> tuple[Tensor, Tensor]:
        out, slope = _forward(x, w, bias, p, q, *how)
        return out, slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, bias, p, q, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.biased = bias is not None
        ctx.save_for_backward(x, w, p, output[1] if _kind(x, w, p) == LOCAL else q)

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Tensor) -> Any:
        x, w, p, q = ctx.saved_tensors
        d = d.contiguous()
        shares = _to_weight(d, x, p, q, *w.shape[-3:-1], *ctx.how).sum(0)
        size = w.shape[-4:].numel()
        weight = shares[..., :size].reshape(w.shape).to(w.dtype)
        bias = shares[..., size:] if ctx.biased else None
        return _to_input(d, x, w, p, q, *ctx.how), weight, bias, *[None] * 6


def _kind(x: Tensor, w: Tensor, p: Tensor | None) -> int:
    """What goes with the convolution: nothing where there is one filter, else by signs."""
    return ONE if w.dim() == x.dim() else LOCAL if p is None else FLIPPED


def _run_forward(x, w, bias, p, q, *how):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    x, w, bias, p = _contiguous(x, w, bias, p)
    out, slope = _like_forward(x, w, bias, p, q, *how)
    *stack, images, height, width, channels = x.shape
    high, wide, outs = out.shape[-3:]
    positions, groups, kind = images * high * wide, math.prod(stack), _kind(x, w, p)
    q = None if q is None else q.reshape(groups, -1)  # of normals a part of a tape, which is not copied
    tiles, warps = _tiles(positions, groups, outs, channels, x.dtype, kind)
    kernels.forward[(-(-positions // tiles[0]), -(-outs // tiles[1]), groups)](
        x, w, bias, p, q, out, slope, positions, 0 if q is None else q.stride(0), height, width, high, wide,
        channels, outs, *w.shape[-3:-1], *how, kind, high * wide % tiles[0] == 0, *tiles, "tf32",
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out, slope


def _run_to_input(d, x, w, p, q, *how):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    d, x, w, p, q = _contiguous(d, x, w, p, q)
    out = _like_to_input(d, x, w, p, q, *how)
    *stack, images, height, width, channels = x.shape
    high, wide, outs = d.shape[-3:]
    pixels, groups, kind = images * height * width, math.prod(stack), _kind(x, w, p)
    tiles, warps = _tiles(pixels, groups, channels, outs, x.dtype, kind)
    exact = x.dtype == torch.float32
    stages, turned = 3, exact and kind != FLIPPED and pixels * groups >= TURNING
    if turned:  # what a product of TF32 sums over lies side by side in both factors, as it must for the quickest
        tiles, w = (min(64, tiles[0]), *tiles[1:]), w.transpose(-1, -4).contiguous()
    elif exact:
        tiles, warps, stages = (min(32, tiles[0]), *tiles[1:]), 2, 2
    kernels.to_input[(-(-pixels // tiles[0]), -(-channels // tiles[1]), groups)](
        d, x, w, p, q, out, pixels, height, width, high, wide, channels, outs, *w.shape[-3:-1], *how,
        kind, height * width % tiles[0] == 0, turned, *tiles, "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _run_to_weight(d, x, p, q, rows, columns, *how):  # type: ignore[no-untyped-def]
    from fedbayes.model import convolution_kernels as kernels

    d, x, p, q = _contiguous(d, x, p, q)
    out = _like_to_weight(d, x, p, q, rows, columns, *how)
    images, height, width, channels = x.shape[-4:]
    high, wide, outs = d.shape[-3:]
    positions, groups = images * high * wide, math.prod(x.shape[:-4])
    kind = _kind_of_gradient(p, q)
    way = _way(d, x, rows, columns, kind)
    shares = -(-positions // way.share)
    kernels.to_weight[(*way.grid, groups * shares)](
        d, x, p, q, out, groups, positions, way.share, shares, height, width, high, wide, channels, outs, rows, columns,
        *how, kind, high * wide % way.tiles[2] == 0, way.swap, way.direct, *way.tiles, "tf32",
        num_warps=way.warps, num_stages=3 if way.tiles[2] < 128 else 2,
    )  # fmt: skip
    return out


def _kind_of_gradient(p: Tensor | None, q: Tensor | None) -> int:
    return ONE if q is None else LOCAL if p is None else FLIPPED


class _Way(NamedTuple):
    """How the filters' gradient is found: its tiles in [outputs, depth], and of positions summed at once."""

    grid: Pair
    tiles: tuple[int, int, int]
    share: int  # positions that a program adds up
    swap: bool  # tiles are [depth, outputs]
    direct: bool  # the first factor is read with positions last
    warps: int


def _way(d: Tensor, x: Tensor, rows: int, columns: int, kind: int) -> _Way:
    """As it was fastest on an H200.

    Of few filters and many positions these are shared; the shares are added in one order.
    """
    outs, depth, positions = d.shape[-1], rows * columns * x.shape[-1], math.prod(d.shape[-3:-1]) * x.shape[-4]
    depth += kind == LOCAL  # of the bias
    exact, (high, wide) = d.dtype == torch.float32, (_power(outs), _power(depth))
    swap, direct, busy = not exact, exact, 4 * BUSY
    if kind == FLIPPED:  # the longer a product, the fewer times it takes signs
        tiles, warps = (high, wide, 16 if exact else 64 if outs >= TILE else 128), 4
        swap, direct, busy = False, False, BUSY
    elif exact:
        swap = kind == LOCAL and wide == TILE
        tiles, warps = (high, wide, 16 if swap or high == TILE else 32), 2
    elif _is_wide(outs, d.dtype, kind):
        tiles, warps = (WIDE, WIDE, 64), 8
    else:
        tiles, warps = (high, wide, 64), 2 if wide < TILE else 4
    grid = -(-outs // tiles[0]), -(-depth // tiles[1])
    programs = busy // (grid[0] * grid[1] * math.prod(x.shape[:-4]))
    shares = max(1, min(programs, positions // max(128, 4 * tiles[2])))
    return _Way(grid, tiles, tiles[2] * math.ceil(positions / shares / tiles[2]), swap, direct, warps)


def _is_wide(outs: int, dtype: torch.dtype, kind: int) -> bool:
    """Whether tiles of twice as many channels pay: of one convolution in bfloat16, which has the registers."""
    return kind == ONE and dtype == torch.bfloat16 and outs % WIDE == 0


def _like_forward(x, w, bias, p, q, down, right, top, left):  # type: ignore[no-untyped-def]
    high = (x.shape[-3] + 2 * top - w.shape[-3]) // down + 1
    wide = (x.shape[-2] + 2 * left - w.shape[-2]) // right + 1
    shape = (*x.shape[:-3], high, wide, w.shape[-4])
    return x.new_empty(shape), x.new_empty(shape if _kind(x, w, p) == LOCAL else (*x.shape[:-4], 0))


def _like_to_input(d, x, w, p, q, *how):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_to_weight(d, x, p, q, rows, columns, *how):  # type: ignore[no-untyped-def]
    kind, outs, depth = _kind_of_gradient(p, q), d.shape[-1], rows * columns * x.shape[-1]
    shares = -(-x.shape[-4] * d.shape[-3] * d.shape[-2] // _way(d, x, rows, columns, kind).share)
    copies, length = () if kind == ONE else (2,), outs * depth + (outs if kind == LOCAL else 0)
    return d.new_empty((*x.shape[:-4], shares, *copies, length), dtype=torch.float32)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _stacked(op: Any) -> Any:
    """Under vmap the networks are a leading axis more of all tensors."""

    def leading(size: int, t: Any, axis: int | None) -> Any:
        if not isinstance(t, Tensor) or axis == 0:  # a view of its own would be a copy for the compiler
            return t
        return (t.expand(size, *t.shape) if axis is None else t.movedim(axis, 0)).contiguous()

    def rule(info: Any, axes: Any, *arguments: Any) -> Any:
        found = op(*(leading(info.batch_size, t, axis) for t, axis in zip(arguments, axes, strict=True)))
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)

    return rule


def _operator(name: str, tensors: str, run: Any, like: Any, gives: str = "Tensor") -> Any:
    """An operation that traces, compilers and vmap know; it has no gradient of its own."""
    name = f"fedbayes::{name}"
    torch.library.define(name, f"({tensors}, int down, int right, int top, int left) -> {gives}")
    torch.library.impl(name, ("cpu", "cuda"), run)
    torch.library.register_fake(name, like)
    op = getattr(torch.ops.fedbayes, name.removeprefix("fedbayes::")).default
    torch.library.register_vmap(name, _stacked(op))
    return op


_forward = _operator(
    "convolution",
    "Tensor x, Tensor w, Tensor? bias, Tensor? p, Tensor? q",
    _run_forward,
    _like_forward,
    "(Tensor, Tensor)",
)
_to_input = _operator(
    "convolution_input", "Tensor d, Tensor x, Tensor w, Tensor? p, Tensor? q", _run_to_input, _like_to_input
)
_to_weight = _operator(
    "convolution_weight",
    "Tensor d, Tensor x, Tensor? p, Tensor? q, int rows, int columns",
    _run_to_weight,
    _like_to_weight,
)


def _power(n: int) -> int:
    """The power of two from 16 to TILE that holds n, or TILE."""
    return min(TILE, max(16, 1 << (n - 1).bit_length()))


def _tiles(
    positions: int, groups: int, outs: int, channels: int, dtype: torch.dtype, kind: int
) -> tuple[tuple[int, int, int], int]:
    """Of positions, of channels that come out, and of numbers summed at once, and warps: fastest on an H200."""
    columns, bits, total = _power(outs), dtype == torch.bfloat16, positions * groups
    whole = channels & -channels  # the largest power of two that divides them
    depth = min(TILE if bits else 32, whole) if whole >= 16 else 32
    if _is_wide(outs, dtype, kind) and total >= WIDE * BUSY:
        return (WIDE, WIDE, depth), 8
    rows = 64 if positions > 16 else 16
    if total >= 128 * BUSY and (kind == ONE or (columns < TILE and (bits or kind == FLIPPED))):
        rows = 128
    if total >= 4 * 256 * BUSY and kind == ONE and bits and columns < TILE:
        rows = 256
    return (rows, columns, depth), 4
