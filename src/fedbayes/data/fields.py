"""Rows of several tensors: stored side by side as one, and taken apart again for the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.given import native


@dataclass(frozen=True)
class Fields:
    """What a row is made of: tensors by name, as a network takes them by keyword, or in order where nobody named them.

    Stored rows are one tensor [n, W], of the fields' own type, or of float32 where some are whole numbers and some are
    not; all that deals, sends and saves rows knows nothing else. It is a preparation: called with stored rows it gives
    what the network sees. Bytes become numbers in [0, 1], as everywhere.

    >>> rows = {"ids": torch.tensor([[5, 7], [8, 9]]), "mask": torch.tensor([[True, False], [True, True]])}
    >>> fields = Fields.of(rows)
    >>> fields.pack(rows).tolist()
    [[5, 7, 1, 0], [8, 9, 1, 1]]
    >>> fields(fields.pack(rows))["mask"].tolist()
    [[True, False], [True, True]]
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any] | tuple[Any, ...]) -> Fields:
        names, tensors = _named(values)
        kinds = tuple(torch.float32 if t.dtype.is_floating_point else t.dtype for t in tensors)
        return cls(names, tuple(tuple(t.shape[1:]) for t in tensors), kinds)

    @property
    def stored(self) -> torch.dtype:
        """The type of stored rows."""
        if len({*self.dtypes}) == 1 and self.dtypes[0] is not torch.bool:
            return self.dtypes[0]
        return torch.float32 if torch.float32 in self.dtypes else torch.int64

    def pack(self, values: Mapping[str, Any] | tuple[Any, ...], where: str = "x") -> Tensor:
        """Rows as they are stored; refused where fields, their shapes or their types differ from these."""
        names, tensors = _named(values)
        if names != self.names or len(tensors) != len(self.shapes):
            own, theirs = ", ".join(self.names) or len(self.shapes), ", ".join(names) or len(tensors)
            raise ValueError(f"{where} has the fields {theirs}, rows here have {own}: give the same in the same order")
        pieces = []
        for place, (t, shape, kind) in enumerate(zip(tensors, self.shapes, self.dtypes)):
            name = names[place] if names else str(place)
            if tuple(t.shape[1:]) != shape or t.dtype.is_floating_point != kind.is_floating_point:
                raise ValueError(
                    f"{where}: field {name} is {t.dtype} {list(t.shape[1:])} per row, not {kind} {list(shape)}: "
                    "pad rows to one length, and keep their type"
                )
            if len(t) != len(tensors[0]):
                raise ValueError(f"{where}: field {name} has {len(t)} rows, the first {len(tensors[0])}: give as many")
            piece = t.reshape(len(t), -1).to(self.stored)
            if not kind.is_floating_point and not torch.equal(piece.to(t.dtype), t.reshape(len(t), -1)):
                raise ValueError(f"{where}: field {name} has numbers above 2^24, too large beside floats: renumber")
            pieces.append(piece)
        return torch.cat(pieces, 1).contiguous()

    def __call__(self, x: Tensor) -> dict[str, Tensor] | tuple[Tensor, ...]:
        pieces = x.split([prod(shape) for shape in self.shapes], -1)
        seen = tuple(
            _as(piece.reshape(*piece.shape[:-1], *shape), kind)
            for piece, shape, kind in zip(pieces, self.shapes, self.dtypes)
        )
        return dict(zip(self.names, seen)) if self.names else seen

    def on(self, device: torch.device) -> Fields:
        """The same for inputs on a device."""
        return self


def _as(values: Tensor, kind: torch.dtype) -> Tensor:
    if kind is torch.uint8:
        return values.float() / 255
    return values != 0 if kind is torch.bool else values.to(kind)


def _named(values: Mapping[str, Any] | tuple[Any, ...]) -> tuple[tuple[str, ...], list[Tensor]]:
    names = tuple(map(str, values)) if isinstance(values, Mapping) else ()
    rows = list(values.values()) if isinstance(values, Mapping) else list(values)
    tensors = []
    for place, value in enumerate(rows):
        t = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(native(np.asarray(value)))
        if t.dim() == 0:
            raise ValueError(f"field {names[place] if names else place} has no rows: give arrays [n, ...]")
        whole = not t.dtype.is_floating_point and t.dtype not in (torch.uint8, torch.bool)
        tensors.append(t.long() if whole else t)
    return names, tensors


def has_fields(values: Any, rows: int | None = None) -> bool:
    """Whether inputs are several tensors: a mapping from names, or a tuple in which each has a row per target."""
    if isinstance(values, Mapping):
        return True
    arrays = isinstance(values, tuple) and all(isinstance(v, Tensor | np.ndarray) and v.ndim for v in values)
    return arrays and len(values) not in (0, rows) and all(len(v) == (rows or len(values[0])) for v in values)
