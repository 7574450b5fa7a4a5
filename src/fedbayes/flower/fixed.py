"""Statistics as whole numbers of 64 bits whose sums wrap around: what a secure sum can add. Knows nothing of Flower."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedbayes.federation.program import Program, Terms
from fedbayes.flower.wire import Refused

RANGE = 2.0**24  # the largest statistic that a client may add, in units of the reference and of a typical weight
METRIC = "metric"  # the part under which a client's training figures are added


def levels(clients: int) -> float:
    """Steps a unit, so that the sum over so many clients can't reach the sign: 2^28, or 4e-9 each, for a thousand."""
    return 2.0 ** (62 - int(math.log2(RANGE)) - math.ceil(math.log2(clients)))


def split(program: Program, terms: Terms) -> tuple[Terms, Terms]:
    """What adds, and what takes the largest; a maximum can't be hidden in a sum and travels in the clear."""
    maxima = {part: program.pooling.rules[part].maxima if part in program.pooling.rules else () for part in terms}
    hidden = {p: {key: t for key, t in s.items() if key not in maxima[p]} for p, s in terms.items()}
    clear = {p: {key: t for key, t in s.items() if key in maxima[p]} for p, s in terms.items()}
    return {p: s for p, s in hidden.items() if s}, {p: s for p, s in clear.items() if s}


def flat(terms: Terms) -> dict[str, Tensor]:
    """Statistics under one name each, in the order in which they are added."""
    return {f"{part}/{key}": t for part in sorted(terms) for key, t in sorted(terms[part].items())}


def quantise(terms: Terms, clients: int) -> np.ndarray:
    """All statistics as one vector; Refused where one is so large that the sum could not hold it."""
    pieces = []
    for name, t in flat(terms).items():
        largest = float(t.abs().max()) if t.numel() else 0.0
        if not largest <= RANGE:
            part, key = name.split("/")
            raise Refused(
                f"its {key} of part {part!r} is {largest:.3g}, a secure sum holds up to {RANGE:.3g} a client: its "
                "posterior is far from the broadcast or very narrow (did it diverge? try a smaller lr)"
            )
        pieces.append((t.double().reshape(-1) * levels(clients)).round().to(torch.int64).cpu().numpy())
    return np.concatenate(pieces).view(np.uint64)


def dequantise(total: np.ndarray, like: Mapping[str, tuple[int, ...]], clients: int) -> Terms:
    """The inverse, of a sum: statistics of these names and shapes."""
    values = torch.from_numpy(total.view(np.int64).copy()).double() / levels(clients)
    sizes = [math.prod(shape) for shape in like.values()]
    terms: Terms = {}
    for (name, shape), piece in zip(like.items(), values.split(sizes)):
        part, key = name.split("/")
        terms.setdefault(part, {})[key] = piece.reshape(shape)
    return terms
