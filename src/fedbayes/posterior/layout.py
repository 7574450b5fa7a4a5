"""Where each named tensor of a network lies in one flat vector."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that make up a flat vector of length `size`, in order.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.names, layout.size
    (('weight', 'bias'), 8)
    >>> {name: tuple(t.shape) for name, t in layout.split(torch.zeros(5, 8)).items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, source: nn.Module | Mapping[str, Tensor], *, frozen: Iterable[str] = ()) -> Layout:
        """The layout of a module's parameters, or of any mapping of tensors, without those that match `frozen`."""
        tensors = dict(source.named_parameters()) if isinstance(source, nn.Module) else dict(source)
        whole = cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()))
        return whole.without(*frozen)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Length P of the vector."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash by which two sides can tell that they speak of the same network."""
        text = json.dumps([self.names, self.shapes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector [..., P] as named tensors [..., *shape]. One split, so that its backward is one cat."""
        if vector.shape[-1] != self.size:
            raise ValueError(
                f"the vector has {vector.shape[-1]} entries, this layout {self.size}: "
                f"was it made for another network? (layout {self.fingerprint}, first entry {self.names[:1]})"
            )
        pieces = torch.split_with_sizes(vector, self.sizes, -1)
        return {n: t.reshape((*t.shape[:-1], *s)) for n, t, s in zip(self.names, pieces, self.shapes)}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors [..., *shape] as one vector [..., P]; names that the layout lacks are ignored."""
        missing = [n for n in self.names if n not in tensors]
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing, first {missing[0]!r}; have {list(tensors)[:5]}")
        if not self.names:
            return torch.zeros(0)
        pieces = []
        for name, shape in zip(self.names, self.shapes):
            t = tensors[name]
            lead = t.dim() - len(shape)
            if lead < 0 or tuple(t.shape[lead:]) != shape:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, the layout says {shape}")
            pieces.append(t.reshape(*t.shape[:lead], -1))
        return torch.cat(pieces, -1)

    def cut(self, vector: Tensor) -> dict[str, Tensor]:
        """`split` of one vector [P] in one call: for tensors that are not differentiated by the vector."""
        pieces = torch.split_with_sizes(vector, self.sizes)
        return {n: t if len(s) == 1 else t.view(s) for n, t, s in zip(self.names, pieces, self.shapes)}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """`join` into one vector [P] in one call, of tensors that have the layout's shapes."""
        return torch._utils._flatten_dense_tensors([tensors[name] for name in self.names])

    def select(self, *patterns: str) -> Layout:
        """The entries whose name matches one of the patterns (`head.*`), in the same order."""
        return self._keep(lambda name: matches(name, patterns))

    def without(self, *patterns: str) -> Layout:
        """The entries whose name matches none of the patterns."""
        return self._keep(lambda name: not matches(name, patterns))

    def _keep(self, belongs: Any) -> Layout:
        rows = [(n, s) for n, s in zip(self.names, self.shapes) if belongs(n)]
        return Layout(tuple(n for n, _ in rows), tuple(s for _, s in rows))

    def where(self, *patterns: str) -> Tensor:
        """Which entries of the vector belong to names that match: bool [P]."""
        flags = [torch.full((size,), matches(name, patterns)) for name, size in zip(self.names, self.sizes)]
        return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)

    def layers(self) -> list[tuple[str, ...]]:
        """Names grouped by the module that owns them, in order of first appearance."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return [tuple(group) for group in groups.values()]

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "shapes": [list(s) for s in self.shapes]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Layout:
        return cls(tuple(record["names"]), tuple(tuple(s) for s in record["shapes"]))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
