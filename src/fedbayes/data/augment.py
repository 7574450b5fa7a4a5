"""Random crop and flip as tensor operations that read their randomness from the caller's normals."""

from collections.abc import Callable

import torch
from torch import Tensor

CROP_FLIP_NORMALS = 3  # Row shift, column shift, flip.


def crop_flip_normals(examples: int) -> int:
    """How many standard normals `crop_flip` reads for a batch."""
    return CROP_FLIP_NORMALS * examples


def crop_flip(x: Tensor, noise: Tensor, *, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels each way (zeros come in) and mirror every other one, on average.

    x is [..., n, channels, height, width] of any dtype, noise [..., n, 3] or that many in one axis; uniforms are
    Phi(noise). Only gathers: runs under vmap and compile, and never waits for the host.
    """
    height, width = x.shape[-2:]
    u = torch.special.ndtr(noise.reshape(*x.shape[:-3], CROP_FLIP_NORMALS).float())
    shift = (u[..., :2] * (2 * pad + 1)).floor().clamp(max=2 * pad).long() - pad
    rows = torch.arange(height, device=x.device) + shift[..., :1]
    columns = torch.arange(width, device=x.device) + shift[..., 1:2]
    columns = torch.where(u[..., 2:] < 0.5, columns.flip(-1), columns)
    inside = _within(rows, height).unsqueeze(-1) & _within(columns, width).unsqueeze(-2)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    x = x.gather(-2, rows[..., None, :, None].expand(x.shape))
    x = x.gather(-1, columns[..., None, None, :].expand(x.shape))
    return x * inside.unsqueeze(-3).to(x.dtype)


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"crop_flip": crop_flip}


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
