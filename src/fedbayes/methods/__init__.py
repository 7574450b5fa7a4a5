"""The table of methods: a paper's name -> a composition of client, rule, weighting and predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedbayes.composition import Method, Setting
from fedbayes.errors import unknown
from fedbayes.methods.distilling import fedbe, fedppd_distill
from fedbayes.methods.iterates import fedpa, fedswag
from fedbayes.methods.options import call, option_names
from fedbayes.methods.personal import bpfed, fedper, lg_fedavg, pfedbayes
from fedbayes.methods.pfedpf import fedavg_pf, fedper_pf, lg_fedavg_pf
from fedbayes.methods.points import fedag, fedavg, fedprox
from fedbayes.methods.students import fedppd
from fedbayes.methods.variational import feduab, fedvi, pvi
from fedbayes.refined import refined

__all__ = [
    "METHODS",
    "Method",
    "Setting",
    "bpfed",
    "fedag",
    "fedavg",
    "fedavg_pf",
    "fedbe",
    "fedpa",
    "fedper",
    "fedper_pf",
    "fedppd",
    "fedppd_distill",
    "fedprox",
    "fedswag",
    "feduab",
    "fedvi",
    "lg_fedavg",
    "lg_fedavg_pf",
    "method_named",
    "option_names",
    "pfedbayes",
    "pvi",
    "refined",
]

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedag": fedag,
    "feduab": feduab,
    "fedvi": fedvi,
    "pvi": pvi,
    "pfedbayes": pfedbayes,
    "bpfed": bpfed,
    "fedper": fedper,
    "lg_fedavg": lg_fedavg,
    "fedavg_pf": fedavg_pf,
    "fedper_pf": fedper_pf,
    "lg_fedavg_pf": lg_fedavg_pf,
    "fedppd": fedppd,
    "fedswag": fedswag,
    "fedpa": fedpa,
    "fedbe": fedbe,
    "fedppd_distill": fedppd_distill,
}


def method_named(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method of the table with options, each checked by name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return call(METHODS[name], dict(options or {}))
