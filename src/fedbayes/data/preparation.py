"""What a network sees of stored inputs, and units of real targets: bytes, channels, columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.data.fields import Fields


class Scale(NamedTuple):
    """Mean and standard deviation per column: `apply` standardises, `undo` gives the original units back."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Scale":
        mean, std = _column_moments(values)
        return cls(mean.float(), std.float())

    def apply(self, values: Tensor) -> Tensor:
        return ((values.double() - self.mean.to(values.device)) / self.std.to(values.device)).float()

    def undo(self, values: Tensor) -> Tensor:
        return values * self.std.to(values.device) + self.mean.to(values.device)


def _column_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = values.double().mean(0), values.double().std(0, correction=0)
    # A column that is constant to its precision carries nothing: leave it near zero instead of blowing up its rounding.
    rounding = 1e-12 if values.dtype == torch.float64 else 1e-7
    return mean, torch.where(std > rounding * mean.abs(), std, 1.0)


@dataclass(frozen=True)
class Prepare:
    """What the network sees of a stored batch: bytes become [0, 1], then (x - mean) / std per channel when set.

    Channels are axis -3. Tokens (int64) pass as they are. Only scalars enter: it runs under vmap, compile and graphs.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.int64:
            return x
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if not self.mean:
            return x
        if len(self.mean) == 1:
            return (x - self.mean[0]) / self.std[0]
        planes = zip(x.split(1, -3), self.mean, self.std, strict=True)
        return torch.cat([(plane - mean) / std for plane, mean, std in planes], -3)


AS_STORED = Prepare()


class Standardise:
    """What the network sees of table rows [..., F] in their own units: (x - mean) / std for each column.

    In float64, so that a column far from zero (a year, an income) keeps its digits.
    """

    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = (torch.as_tensor(v, dtype=torch.float64) for v in (mean, std))
        if self.mean.ndim != 1 or self.mean.shape != self.std.shape:
            raise ValueError(
                f"Standardise: mean and std need one number for each column, "
                f"not shapes {list(self.mean.shape)} and {list(self.std.shape)}"
            )
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.std).all() and (self.std > 0).all()):
            raise ValueError("Standardise: means must be finite, standard deviations finite and positive")

    @classmethod
    def of(cls, values: Tensor) -> "Standardise":
        """By the statistics of rows [n, F]."""
        return cls(*_column_moments(values))

    def __call__(self, x: Tensor) -> Tensor:
        return (x.double() - self.mean) / self.std

    def on(self, device: torch.device) -> "Standardise":
        """The same for inputs on a device; bound once, as a captured graph can't copy from the host."""
        return Standardise(self.mean.to(device), self.std.to(device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Standardise):
            return NotImplemented
        return torch.equal(self.mean, other.mean) and torch.equal(self.std, other.std)

    def __hash__(self) -> int:
        return hash((Standardise, len(self.mean)))

    def __repr__(self) -> str:
        few = "[" + ", ".join(f"{v:.6g}" for v in self.mean[:4].tolist()) + (", ...]" if len(self.mean) > 4 else "]")
        return f"Standardise({len(self.mean)} columns, mean {few})"


class Seen(NamedTuple):
    """One number that a network sees of a stored table row: a column's value, whether it equals one, or is missing.

    `what` is "number" (standardised; `value` in place of a missing one; `sites` are mean and deviation by site),
    "equal" (to `value`) or "missing"; `place` is the stored column.
    """

    what: str
    place: int
    value: float = 0.0
    mean: float = 0.0
    deviation: float = 1.0
    sites: tuple[tuple[float, float], ...] = ()


class TableColumns:
    """What the network sees of stored table rows [..., F]: numbers standardised, categories as a column per value,
    missing values filled and flagged.

    A missing value is nan. With `site`, that stored column is the number of a row's site, whose own scales are used;
    a row of no known site (-1) has the federation's. In float64, so that a column far from zero keeps its digits.
    """

    def __init__(self, parts: Sequence[Seen], site: int | None = None, device: torch.device | None = None) -> None:
        self.parts, self.site = tuple(parts), site

        def tensor(values: Sequence[Any], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.places = tensor([part.place for part in parts], torch.int64)
        self.values = tensor([part.value for part in parts])
        self.numbers = tensor([part.what == "number" for part in parts], torch.bool)
        self.flags = tensor([part.what == "missing" for part in parts], torch.bool)
        count = max((len(part.sites) for part in parts), default=0)
        scales = [
            [part.sites[k] if part.sites else (part.mean, part.deviation) for part in parts] for k in range(count)
        ]
        own = [(part.mean, part.deviation) for part in parts]
        # Means and deviations, each [1 + sites, G]; copies, as an export can't keep half of a tensor.
        self.scales = tuple(scale.clone() for scale in tensor([own, *scales]).unbind(-1))

    def __call__(self, x: Tensor) -> Tensor:
        stored = x.double()
        values = stored[..., self.places]
        gone = values.isnan()
        if self.site is None:
            mean, deviation = (scale[0] for scale in self.scales)
        else:
            site = (stored[..., self.site].nan_to_num(-1.0) + 1).long().clamp(0, len(self.scales[0]) - 1)
            mean, deviation = (scale[site] for scale in self.scales)
        numbers = (torch.where(gone, self.values, values) - mean) / deviation
        equal = torch.where(self.flags, gone, values == self.values)
        return torch.where(self.numbers, numbers, equal.double())

    def on(self, device: torch.device) -> "TableColumns":
        """The same for inputs on a device; bound once, as a captured graph can't copy from the host."""
        return TableColumns(self.parts, self.site, device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableColumns):
            return NotImplemented
        return (self.parts, self.site) == (other.parts, other.site)

    def __hash__(self) -> int:
        return hash((TableColumns, self.parts, self.site))

    def __repr__(self) -> str:
        return f"TableColumns({len(set(self.places.tolist()))} columns, seen as {len(self.parts)} numbers)"


Preparation = Prepare | Standardise | TableColumns | Fields
