"""Two-dimensional convolutions by the way that is fastest where they run; any other as PyTorch does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.model import stacked_convolution
from fedbayes.model.tracing import alone, takes_own_functions
from fedbayes.noise import Tape

Normal = tuple[Tensor, Tensor]  # mean, and scale or, for `local`, variance

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


def few(x: Tensor) -> bool:
    """Whether images, or filters, have so few channels that a CPU's kernels are slow where channels lie last."""
    return x.shape[1] <= FEW and x.is_cpu and not torch.backends.mkldnn.enabled


def side_by_side(x: Tensor) -> bool:
    """Whether this is of clients side by side on a GPU, within compiled steps."""
    return _STACKED and x.is_cuda


def unfused(x: Tensor) -> bool:
    """Whether it is on a GPU and nothing fuses plain operations: each would be a pass over memory."""
    return x.is_cuda and not side_by_side(x) and takes_own_functions()


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d.

    Of clients side by side on a GPU it is kernels of our own (`stacked_convolution.py`), in float32 without TF32 one
    convolution of many groups; where steps are not compiled, filters of 1 x 1, as adapters have, are products. On a CPU
    without oneDNN the first in training is a product of patches, but where it is compiled, as that makes it slower.
    """
    if side_by_side(input):
        return _stacked(input, weight, bias, *args, **kwargs)
    if not args and not kwargs and weight.shape[2:] == (1, 1) and unfused(input) and not alone():
        return _mixed(input, weight, bias)
    if input.dim() == 4 and few(weight) and alone():
        if weight.requires_grad and not input.requires_grad and not _COMPILED:
            return _product(input, weight, bias, *args, **kwargs)
        out = F.conv2d(input.contiguous(), weight, bias, *args, **kwargs)
        return out.contiguous(memory_format=torch.channels_last)
    return F.conv2d(input, weight, bias, *args, **kwargs)


def _mixed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution with filters of 1 x 1 as products of channels: nothing is moved between layouts, as for groups."""
    filters = weight.flatten(1).expand(input.shape[0], -1, -1)
    out = torch.bmm(filters, input.flatten(2)).unflatten(2, input.shape[2:])
    return out if bias is None else out + bias[:, None, None]


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
    (down, right), (rows, columns), fits = pair(stride), weight.shape[-2:], not isinstance(padding, str)
    top, left = pair(padding) if fits else (0, 0)
    count, channels, height, width = (*input.shape[:2], input.shape[2] + 2 * top, input.shape[3] + 2 * left)
    high, wide, size = (height - rows) // down + 1, (width - columns) // right + 1, channels * rows * columns
    small = 0 < size * count * high * wide <= PATCHES
    if not (fits and small) or groups > 1 or pair(dilation) != (1, 1):
        out = F.conv2d(input.contiguous(), weight, bias, stride, padding, dilation, groups)
        return out.contiguous(memory_format=torch.channels_last)
    x = (F.pad(input, (left, left, top, top)) if top or left else input).contiguous()
    image, channel, row, column = x.stride()
    strides = (channel, row, column, image, row * down, column * right)
    patches = x.as_strided((channels, rows, columns, count, high, wide), strides).reshape(size, -1)
    filters = weight.flatten(1).T.contiguous()  # so that its gradient is a product of rows that lie side by side
    out = patches.T @ filters if bias is None else torch.addmm(bias, patches.T, filters)
    return out.view(count, high, wide, -1).permute(0, 3, 1, 2)


def _stacked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """That of one of many clients within compiled steps."""
    kernels = own_kernels_for(input, *args, **kwargs)
    if kernels is None:
        return F.conv2d(input, weight, bias, *args, **kwargs)
    out = kernels.one(input, weight)
    return out if bias is None else out + bias.to(out.dtype)[:, None, None]


class Kernels(NamedTuple):
    """Convolutions of one of many clients by kernels of our own, one or two at once; under autocast in bfloat16."""

    stride: tuple[int, int]
    padding: tuple[int, int]

    def one(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of x."""
        return stacked_convolution.convolution(_cast(x), weight, *self)

    def local(self, x: Tensor, weight: Normal, bias: Normal | None, tape: Tape) -> Tensor:
        """Normal outputs: their means are those of x by means, variances those of x^2 by variances; bias [O, 1, 1]."""
        x, high, wide = _cast(x), *self._image(x, weight[0])
        noise = tape(weight[0], (len(x), len(weight[0]), high, wide))
        biases = None if bias is None else torch.stack(bias).flatten(1)  # [2, O]
        return stacked_convolution.local(x, torch.stack(weight), biases, noise, *self)

    def flipped(self, x: Tensor, weight: Tensor, second: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """That of x by `weight`, plus `after` times that of `before` x by `second`; signs are [N, channels, 1, 1]."""
        x = _cast(x)
        first, last = (t.flatten(1).to(x.dtype) for t in (before, after))
        return stacked_convolution.flipped(x, torch.stack([weight, second]), first, last, *self)

    def _image(self, x: Tensor, weight: Tensor) -> list[int]:
        """The size of an output."""
        sizes = zip(x.shape[-2:], weight.shape[-2:], self.stride, self.padding)
        return [(n + 2 * pad - k) // step + 1 for n, k, step, pad in sizes]


def own_kernels_for(x: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Kernels | None:
    """The kernels of our own for a convolution of this input with these options, where there are any."""
    usual = groups == 1 and pair(dilation) == (1, 1) and not isinstance(padding, str) and x.dim() == 4
    fits = usual and side_by_side(x) and x.dtype != torch.float64 and stacked_convolution.available()
    fits = fits and takes_own_functions()
    return Kernels(pair(stride), pair(padding)) if fits else None


def _cast(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if torch.is_autocast_enabled("cuda") else x


def pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else tuple(n) * (2 // len(tuple(n)))
