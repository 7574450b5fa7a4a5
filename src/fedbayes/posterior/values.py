"""Posteriors over a flat weight vector, as immutable values: Point, Gaussian, Draws, and values over parts of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as pack_safetensors
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbayes.files import write_atomically
from fedbayes.posterior.flow import FLOWS, Flowed
from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.lowrank import LowRank
from fedbayes.posterior.spliced import Grafted

LOG_2PI = math.log(2 * math.pi)


def softplus_inverse(scale: Tensor) -> Tensor:
    """rho with softplus(rho) = scale, without loss for small scales: log(e^s - 1) = s + log(1 - e^-s)."""
    return scale + torch.log(-torch.expm1(-scale))


def softplus_and_slope(rho: Tensor) -> tuple[Tensor, Tensor]:
    """softplus(rho) = log(1 + e^rho), which is never below rho, and its derivative, from one exponential.

    Where one kernel is made of all its operations it is max(rho, 0) + log(1 + t), t = e^-|rho|, by the series of
    log(1 + t) = 2 artanh(z), z = t / (2 + t) <= 1/3: exact to rounding in float32, and faster than a logarithm.
    """
    if rho.dtype == torch.float32 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        t = (-rho.abs()).exp()
        z, slope = t / (2 + t), 1 / (1 + t)
        q = z.square()
        series = 1 / 9 + q * (1 / 11 + q * (1 / 13))
        series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * series)))
        return rho.clamp(min=0) + 2 * z * series, torch.where(rho < 0, t * slope, slope)
    t = rho.clamp(max=30.0).exp_()
    scale = torch.maximum(t.log1p(), rho)  # not a choice by where, which takes as long as the logarithm on a CPU
    return scale, t.div_(1 + t)


@dataclass(frozen=True)
class Point:
    """All mass at one weight vector, mean [..., P]."""

    mean: Tensor
    layout: Layout | None = None

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        return self.mean.expand(draws, *self.mean.shape)

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., P] stand for; a point ignores them."""
        return self.mean.expand(noise.shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.mean, torch.zeros_like(self.mean)

    def log_prob(self, weights: Tensor) -> Tensor:
        raise TypeError("a Point has no density; fit a Gaussian first, for example with the rule 'fedag'")

    def kl(self, prior: Gaussian) -> Tensor:
        raise TypeError("a Point has no density, so KL(point || prior) is infinite; use a Gaussian posterior")

    def naturals(self) -> tuple[Tensor, Tensor]:
        raise TypeError("a Point has infinite precision; rules of natural parameters need Gaussian posteriors")

    def named(self) -> dict[str, Point]:
        """One Point for each named tensor of the network."""
        return {n: Point(t) for n, t in _layout(self).split(self.mean).items()}


@dataclass(frozen=True)
class Gaussian:
    """Independent normals over the weights: mean and scale (standard deviation), each [..., P]."""

    mean: Tensor
    scale: Tensor
    layout: Layout | None = None

    @classmethod
    def from_moments(cls, mean: Tensor, variance: Tensor, layout: Layout | None = None) -> Gaussian:
        return cls(mean, variance.sqrt(), layout)

    @classmethod
    def from_naturals(cls, shift: Tensor, precision: Tensor, layout: Layout | None = None) -> Gaussian:
        """From precision * mean and precision."""
        return cls(shift / precision, precision.rsqrt(), layout)

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors [draws, ..., P]."""
        shape = (draws, *self.mean.shape)
        noise = torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        return self.at(noise)

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., P] stand for: mean + scale * noise."""
        return self.mean + self.scale * noise

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights [..., P], summed over P."""
        z = (weights - self.mean) / self.scale
        return -(0.5 * z.square() + self.scale.log() + 0.5 * LOG_2PI).sum(-1)

    def kl(self, prior: Gaussian) -> Tensor:
        """KL(self || prior) in nats, closed form, summed over P."""
        ratio = self.scale / prior.scale
        shift = (self.mean - prior.mean) / prior.scale
        return (0.5 * (ratio.square() + shift.square() - 1) - ratio.log()).sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        return self.mean, self.scale.square()

    def naturals(self) -> tuple[Tensor, Tensor]:
        """precision * mean, and precision."""
        precision = self.scale.square().reciprocal()
        return precision * self.mean, precision

    def named(self) -> dict[str, Gaussian]:
        """One Gaussian for each named tensor of the network."""
        layout = _layout(self)
        means, scales = layout.split(self.mean), layout.split(self.scale)
        return {n: Gaussian(means[n], scales[n]) for n in layout.names}


@dataclass(frozen=True)
class Draws:
    """Equally likely weight vectors, values [..., S, P]: an ensemble, or samples of a chain."""

    values: Tensor
    layout: Layout | None = None

    @property
    def mean(self) -> Tensor:
        return self.values.mean(-2)

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Members picked with replacement: [draws, ..., P]."""
        pick = torch.randint(self.values.shape[-2], (draws,), generator=generator, device=self.values.device)
        return self.values.index_select(-2, pick).movedim(-2, 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and (population) variance of the members."""
        return self.mean, self.values.var(-2, correction=0)

    def log_prob(self, weights: Tensor) -> Tensor:
        raise TypeError("Draws have no density; fit a Gaussian to their moments first")

    def kl(self, prior: Gaussian) -> Tensor:
        raise TypeError("Draws have no density; fit a Gaussian to their moments first")

    def naturals(self) -> tuple[Tensor, Tensor]:
        raise TypeError("Draws have no natural parameters; fit a Gaussian to their moments first")

    def named(self) -> dict[str, Draws]:
        """The members of each named tensor: values [S, *shape]."""
        return {n: Draws(t) for n, t in _layout(self).split(self.values).items()}


Posterior = Point | Gaussian | Draws | LowRank | FullGaussian | Flowed | Grafted
Parts = dict[str, Posterior]  # what is broadcast, uploaded or kept: named parts, each with its own layout
KINDS: dict[str, type[Any]] = {
    "point": Point,
    "gaussian": Gaussian,
    "draws": Draws,
    "lowrank": LowRank,
    "full": FullGaussian,
    "flowed": Flowed,
    "grafted": Grafted,
}


def fields_of(q: Any) -> list[str]:
    """The names of the tensors (or values) of a value, or of a kind of values."""
    return [name for name in q.__dataclass_fields__ if name != "layout"]


def _layout(q: Posterior) -> Layout:
    if q.layout is None:
        raise ValueError(f"this {type(q).__name__} does not know its layout; pass layout=Layout.of(network)")
    return q.layout


# Values pass through vmap, grad and compile as they are: tensors are leaves, the layout is part of the structure.
for _kind in KINDS.values():
    pytree.register_pytree_node(
        _kind,
        lambda q: ([getattr(q, name) for name in fields_of(q)], (type(q), q.layout)),
        lambda leaves, context: context[0](*leaves, context[1]),
    )


def map_tensors(q: Any, f: Any) -> Any:
    """The same value with f applied to each of its tensors."""
    return pytree.tree_map(f, q)


def check(q: Posterior, what: str = "posterior") -> None:
    """Raise where a value is not a distribution: not finite, or a scale that is not positive."""
    for name, t in _named_tensors(q).items():
        if not torch.isfinite(t).all():
            raise ValueError(f"{what}: {int((~torch.isfinite(t)).sum())} of {t.numel()} entries of {name} not finite")
    if isinstance(q, Gaussian) and q.mean.shape != q.scale.shape:
        raise ValueError(f"{what}: mean has shape {tuple(q.mean.shape)}, scale {tuple(q.scale.shape)}")
    scale = scales(q)
    if scale is not None and (bad := (scale <= 0).sum()):
        raise ValueError(
            f"{what}: scale must be positive: {int(bad)} of {scale.numel()} entries are not. "
            "Was a log-scale or rho passed? (softplus or exp gives a scale)"
        )


def scales(q: Any) -> Tensor | None:
    """What must be positive for q to be a distribution: scales, or the diagonal of a triangle; None: nothing."""
    if isinstance(q, Gaussian):
        return q.scale
    return torch.diagonal(q.tril, dim1=-2, dim2=-1) if isinstance(q, FullGaussian) else None


def _named_tensors(q: Any) -> dict[str, Tensor]:
    """The tensors of a value by field (`mean`); those of a value inside it by the way there (`base.mean`)."""
    tensors: dict[str, Tensor] = {}
    for name in fields_of(q):
        t = getattr(q, name)
        tensors |= (
            {name: t} if isinstance(t, Tensor) else {f"{name}.{n}": inner for n, inner in _named_tensors(t).items()}
        )
    return tensors


_NAMES = {kind: name for name, kind in {**KINDS, **FLOWS}.items()}


def _header(q: Any) -> dict[str, Any]:
    """How to read a value's tensors: its kind, its layout, and the same of the values inside it."""
    layout = getattr(q, "layout", None)
    inner = {name: getattr(q, name) for name in fields_of(q)}
    nested = {name: _header(value) for name, value in inner.items() if not isinstance(value, Tensor)}
    return {"kind": _NAMES[type(q)], "layout": layout.to_json() if layout else None, **nested}


def flatten_parts(parts: Mapping[str, Posterior]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parts as plain named tensors (`model.mean`) and a JSON header that says how to read them."""
    tensors = {f"{part}.{name}": t for part, q in parts.items() for name, t in _named_tensors(q).items()}
    return tensors, {part: _header(q) for part, q in parts.items()}


def unflatten_parts(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Parts:
    """The inverse of `flatten_parts`."""
    return {part: _read(tensors, part, row) for part, row in header.items()}


def _read(tensors: Mapping[str, Tensor], place: str, row: Mapping[str, Any]) -> Any:
    kind = {**KINDS, **FLOWS}[row["kind"]]
    values = [
        _read(tensors, f"{place}.{n}", row[n]) if isinstance(row.get(n), dict) else tensors[f"{place}.{n}"]
        for n in fields_of(kind)
    ]
    if "layout" not in kind.__dataclass_fields__:
        return kind(*values)
    return kind(*values, Layout.from_json(row["layout"]) if row["layout"] else None)


def save(path: str | Path, parts: Mapping[str, Posterior] | Posterior) -> None:
    """Write a posterior, or named parts, as one safetensors file (atomically)."""
    tensors, header = flatten_parts(parts if isinstance(parts, Mapping) else {"model": parts})
    data = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}  # values may share tensors
    write_atomically(path, pack_safetensors(data, metadata={"fedbayes": json.dumps(header)}))


def load(path: str | Path) -> Parts:
    """Read what `save` wrote: named parts."""
    try:
        with safe_open(str(path), "pt") as file:
            header = (file.metadata() or {}).get("fedbayes")
            if header is None:
                raise ValueError(f"{path} is a safetensors file, but not one of fedbayes (no header)")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            return unflatten_parts(tensors, json.loads(header))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a readable posterior file ({error}); was it cut short?") from error
