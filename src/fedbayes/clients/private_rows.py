"""Private steps: the gradient of every row is shortened, and noise is added to their sum (Abadi et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def private_gradients(
    loss: Callable[..., Any],
    vectors: Vectors,
    b: Batch,
    tape: Tape,
    info: Info,
    rest: Callable[[Batch, Tape], tuple[Any, ...]],
    *,
    normals: int = 0,
    units: Mapping[str, Tensor] | None = None,
) -> Vectors:
    """(sum over rows of g_i min(1, clip / |g_i|) + noise * clip * N(0, 1)) / rows expected, of all vectors together.

    `loss(vectors, *rest(row, tape))` is that of a batch of one row, which reads so many normals. A gradient is taken
    in the units given. The last place of a batch is nobody's: it only says that the step is taken, with or without
    rows. A gradient that is not finite counts as none.
    """
    noise = {name: tape(v) for name, v in vectors.items()}
    x, y = b.x[:-1], b.y[:-1]
    first = next(iter(vectors.values()))
    own = tape(first, (len(x), normals))

    def one(x: Tensor, y: Tensor, z: Tensor) -> Vectors:
        row = Batch(x[None], y[None], None, b.step)
        return gradients(loss, vectors, *rest(row, Tape(z)))[0]

    each = vmap(one, randomness="different")(x, y, own)
    each = {name: g if units is None or name not in units else g * units[name] for name, g in each.items()}
    length = torch.stack([g.square().sum(-1) for g in each.values()]).sum(0).sqrt()
    known = torch.isfinite(length)
    clip, strength = info.options[ROW_CLIP], info.options[ROW_NOISE]
    factor = torch.where(known, (WITHIN * clip / length.clamp(min=1e-30)).clamp(max=1), 0.0)
    if b.mask is not None:
        factor = factor * b.mask[:-1].to(factor)
    expected = torch.minimum(info.options[ROW_BATCH], info.n.to(first))
    return {
        name: (factor @ torch.where(known[:, None], g, 0.0) + strength * clip * noise[name]) / expected
        for name, g in each.items()
    }
