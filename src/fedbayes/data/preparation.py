"""What a network sees of stored inputs, and units of real targets: bytes, channels, columns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
