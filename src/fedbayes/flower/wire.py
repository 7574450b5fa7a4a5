"""The wire: parts of a posterior as plain arrays under a head that both sides check. Knows nothing of Flower."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import shown
from fedbayes.experiments.experiment import Experiment, table_of
from fedbayes.posterior.values import (
    KINDS,
    Draws,
    FullGaussian,
    Gaussian,
    LowRank,
    Parts,
    Point,
    Posterior,
    check,
    flatten_parts,
    unflatten_parts,
)
from fedbayes.runs.checkpoint import FREE
from fedbayes.version import __version__

FORMAT = 1
HELD = "held"  # as the tensors are held: float32, or float64 where the network is
DTYPES: dict[str, torch.dtype | None] = {
    HELD: None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
HALF = ("float16", "bfloat16")
Head = dict[str, Any]  # text, numbers, truth values


class Refused(ValueError):
    """A letter that can't be used; the message says why."""


class Letter(NamedTuple):
    """What travels: a head of plain values, and named arrays."""

    head: Head
    arrays: dict[str, np.ndarray]

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in self.arrays.values())


class Coding(NamedTuple):
    """How numbers travel: in which type, and an upload as its difference from the broadcast or as it is."""

    dtype: str = HELD
    delta: bool = False


def fingerprint(experiment: Experiment) -> str:
    """A short hash of what is trained; where it runs, how long, and how it is carried may differ."""
    table = {key: v for key, v in table_of(experiment).items() if key not in (*FREE, "methods", "flower")}
    return _hash(table)


def layouts_of(parts: Parts) -> str:
    """A short hash of the kinds and layouts of parts, by which two sides can tell that they hold one network."""
    names = {kind: name for name, kind in KINDS.items()}
    rows = {
        part: [names[type(q)], q.layout.fingerprint if q.layout else int(q.mean.shape[-1])] for part, q in parts.items()
    }
    return _hash(rows)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def head_of(experiment: Experiment, layouts: str, body: str = "") -> Head:
    """What the letters of a federation have in common; a letter adds its round and what it is about.

    `body` is the hash of weights that nobody trains: they do not travel, each machine loads them.
    """
    return {
        "format": FORMAT,
        "version": __version__,
        "method": experiment.method,
        "experiment": fingerprint(experiment),
        "layouts": layouts,
        **({"body": body} if body else {}),
    }


MENDS = {
    "format": "install one version of fedbayes everywhere",
    "version": "install one version of fedbayes everywhere",
    "method": "use one experiment.toml everywhere",
    "experiment": "use one experiment.toml everywhere",
    "layouts": "use one network everywhere",
    "body": "load the same frozen weights everywhere",
    "run": "it answers another run",
    "round": "it answers another round",
    "client": "it speaks for another client",
}


def check_head(head: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a head that differs from what is expected, and say where."""
    for key, ours in expected.items():
        theirs = head.get(key)
        if theirs != ours or type(theirs) is not type(ours):
            raise Refused(f"{key} is {shown(theirs)}, not {shown(ours)}: {MENDS[key]}")


def write(parts: Parts, coding: Coding, reference: Parts | None = None) -> dict[str, np.ndarray]:
    """Parts as arrays; with a reference and `delta` as differences from it, in which half precision loses less."""
    if coding.delta and reference is not None:
        parts = {part: _difference(q, reference[part]) for part, q in parts.items()}
        whole = {part for part, q in parts.items() if not isinstance(reference[part], Gaussian)}
    else:
        whole = set(parts)
    parts = {part: _above_zero(q, coding.dtype) if part in whole else q for part, q in parts.items()}
    return {name: _array(t, coding.dtype) for name, t in flatten_parts(parts)[0].items()}


def read(
    arrays: Mapping[str, np.ndarray], like: Parts, coding: Coding, reference: Parts | None = None, what: str = "upload"
) -> Parts:
    """The inverse of `write`, for parts of known kinds and layouts; Refused where an array is not what it must be."""
    tensors, header = flatten_parts(like)
    for name in sorted({*arrays, *tensors}):
        if name not in arrays or name not in tensors:
            raise Refused(f"{what}: array {name!r} {'was not expected' if name in arrays else 'is missing'}")
    values = {name: _tensor(arrays[name], t, coding.dtype, f"{what}: {name}") for name, t in tensors.items()}
    parts = unflatten_parts(values, header)
    if coding.delta and reference is not None:
        parts = {part: _sum(q, reference[part]) for part, q in parts.items()}
    for part, q in parts.items():
        try:
            check(q, f"{what}: part {part!r}")
        except ValueError as error:
            raise Refused(str(error)) from error
    return parts


def _difference(q: Posterior, of: Posterior) -> Posterior:
    """q minus the broadcast: means by subtraction, scales by the logarithm of their ratio; all else as it is."""
    if not q.mean.is_floating_point():
        return q
    if isinstance(q, Gaussian) and isinstance(of, Gaussian):
        return Gaussian(q.mean - of.mean, (q.scale / of.scale).log(), q.layout)
    return _moved(q, -of.mean)


def _sum(d: Posterior, of: Posterior) -> Posterior:
    """The inverse of `_difference`."""
    if not d.mean.is_floating_point():
        return d
    if isinstance(d, Gaussian) and isinstance(of, Gaussian):
        return Gaussian(of.mean + d.mean, of.scale * d.scale.exp(), d.layout)
    return _moved(d, of.mean)


def _moved(q: Posterior, by: Tensor) -> Posterior:
    """A value elsewhere: its weights move, its spread does not."""
    if isinstance(q, Draws):
        return replace(q, values=q.values + by)
    return replace(q, mean=q.mean + by) if isinstance(q, Point | Gaussian | LowRank | FullGaussian) else q


def _above_zero(q: Posterior, dtype: str) -> Posterior:
    """A scale below the smallest number of the wire's type travels as that number, and not as 0."""
    kind = DTYPES[dtype]
    if kind is None or not isinstance(q, Gaussian):
        return q
    about = torch.finfo(kind)
    return Gaussian(q.mean, q.scale.clamp(min=about.smallest_normal * about.eps), q.layout)


def _array(t: Tensor, dtype: str) -> np.ndarray:
    t = t.detach().cpu()
    kind = DTYPES[dtype]
    if kind is not None and t.is_floating_point():
        t = t.to(kind)
    if t.dtype == torch.bfloat16:  # numpy has none: the same bits under another name
        t = t.view(torch.uint16)
    return t.contiguous().numpy()


def _tensor(a: np.ndarray, like: Tensor, dtype: str, what: str) -> Tensor:
    expected = _array(like.new_zeros(0), dtype).dtype
    if a.dtype != expected:
        raise Refused(f"{what} is {a.dtype}, not {expected}")
    if a.shape != tuple(like.shape):
        raise Refused(f"{what} has shape {list(a.shape)}, not {list(like.shape)}; is it of another network?")
    t = torch.from_numpy(a.copy())  # what Flower gives may be read-only
    if like.is_floating_point() and DTYPES[dtype] is torch.bfloat16:
        t = t.view(torch.bfloat16)
    return t.to(like.device, like.dtype)
