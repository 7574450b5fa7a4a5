"""Private steps: the gradient of every row is shortened, and noise is added to their sum (Abadi et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedbayes.clients.client import Batch, Info
from fedbayes.model.gradient import gradients
from fedbayes.noise import Tape

# Among a round's options: the largest length of a row's gradient, the noise in terms of it, and the rows of a step.
ROW_CLIP, ROW_NOISE, ROW_BATCH = "row_clip", "row_noise", "row_batch"
WITHIN = 1 - 1e-6  # of the clip, as options are rounded to float32
Vectors = dict[str, Tensor]


class Rows(NamedTuple):
    """The gradients of rows [..., B]: their squared lengths, and their sum under a factor for each.

    A row whose factor is 0 adds nothing, whatever it holds.
    """

    square: Tensor
    total: Callable[[Tensor], Vectors]


RowsOf = Callable[[Vectors, Tensor, Tensor, Tensor], Rows]  # of vectors, x, y, and normals [B, normals]


def private_gradients(rows_of: RowsOf, vectors: Vectors, b: Batch, tape: Tape, info: Info, normals: int = 0) -> Vectors:
    """(sum over rows of g_i min(1, clip / |g_i|) + noise * clip * N(0, 1)) / rows expected, of all vectors together.

    A row reads so many normals. The last place of a batch is nobody's: it only says that the step is taken, with or
    without rows.
    """
    noise = {name: tape(v) for name, v in vectors.items()}
    x, y = b.x[:-1], b.y[:-1]
    own = tape(next(iter(vectors.values())), (len(x), normals))
    rows = rows_of(vectors, x, y, own)
    return noisy_sum(rows, noise, None if b.mask is None else b.mask[:-1], info.options, info.n)


def noisy_sum(rows: Rows, noise: Vectors, mask: Tensor | None, options: Mapping[str, Tensor], n: Tensor) -> Vectors:
    """The sum of shortened gradients with its noise, over the rows expected; options and n with a last axis, or none.

    A gradient that is not finite counts as none.
    """
    length, clip = rows.square.sqrt(), options[ROW_CLIP]
    factor = torch.where(torch.isfinite(length), (WITHIN * clip / length.clamp(min=1e-30)).clamp(max=1), 0.0)
    if mask is not None:
        factor = factor * mask.to(factor)
    expected, strength = torch.minimum(options[ROW_BATCH], n.to(length)), options[ROW_NOISE] * clip
    return {name: torch.addcmul(g, noise[name], strength) / expected for name, g in rows.total(factor).items()}


def by_row(
    loss: Callable[..., Any],
    rest: Callable[[Batch, Tape], tuple[Any, ...]],
    step: Tensor,
    units: Mapping[str, Tensor] | None = None,
) -> RowsOf:
    """A gradient for each row: of `loss(vectors, *rest(row, tape))`, that of a batch of one, in the units given."""

    def rows_of(vectors: Vectors, x: Tensor, y: Tensor, z: Tensor) -> Rows:
        def one(x: Tensor, y: Tensor, z: Tensor) -> Vectors:
            return gradients(loss, vectors, *rest(Batch(x[None], y[None], None, step), Tape(z)))[0]

        each = vmap(one, randomness="different")(x, y, z)
        each = {name: g if units is None or name not in units else g * units[name] for name, g in each.items()}
        square = torch.stack([g.square().sum(-1) for g in each.values()]).sum(0)

        def total(factor: Tensor) -> Vectors:
            counts = (factor > 0)[:, None]
            return {name: factor @ torch.where(counts, g, 0.0) for name, g in each.items()}

        return Rows(square, total)

    return rows_of
