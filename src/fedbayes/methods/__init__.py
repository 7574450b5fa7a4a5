"""The table of methods: a paper's name -> a composition of client, rule, weighting and predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbayes.errors import unknown
from fedbayes.methods.distilling import FedBE as fedbe
from fedbayes.methods.distilling import FedPPDDistill as fedppd_distill
from fedbayes.methods.duals import FedDyn as feddyn
from fedbayes.methods.duals import FedLap as fedlap
from fedbayes.methods.duals import Scaffold as scaffold
from fedbayes.methods.iterates import FedPA as fedpa
from fedbayes.methods.iterates import FedSWAG as fedswag
from fedbayes.methods.method import Composed, Method, Setting
from fedbayes.methods.newton import Laplace as laplace
from fedbayes.methods.partitioned import PVI as pvi
from fedbayes.methods.partitioned import BayesADMM as bayes_admm
from fedbayes.methods.partitioned import FedLapCov as fedlap_cov
from fedbayes.methods.personal import BPFed as bpfed
from fedbayes.methods.personal import FedPer as fedper
from fedbayes.methods.personal import LGFedAvg as lg_fedavg
from fedbayes.methods.personal import PFedBayes as pfedbayes
from fedbayes.methods.pfedpf import FedAvgPF as fedavg_pf
from fedbayes.methods.pfedpf import FedPerPF as fedper_pf
from fedbayes.methods.pfedpf import LGFedAvgPF as lg_fedavg_pf
from fedbayes.methods.points import FedAG as fedag
from fedbayes.methods.points import FedAvg as fedavg
from fedbayes.methods.points import FedProx as fedprox
from fedbayes.methods.students import FedPPD as fedppd
from fedbayes.methods.variational import FedIVON as fedivon
from fedbayes.methods.variational import FedUAB as feduab
from fedbayes.methods.variational import FedVI as fedvi

__all__ = [
    "METHODS",
    "Composed",
    "Method",
    "Setting",
    "bayes_admm",
    "bpfed",
    "fedag",
    "fedavg",
    "fedavg_pf",
    "fedbe",
    "feddyn",
    "fedivon",
    "fedlap",
    "fedlap_cov",
    "fedpa",
    "fedper",
    "fedper_pf",
    "fedppd",
    "fedppd_distill",
    "fedprox",
    "fedswag",
    "feduab",
    "fedvi",
    "laplace",
    "lg_fedavg",
    "lg_fedavg_pf",
    "method_named",
    "pfedbayes",
    "pvi",
    "scaffold",
]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(fedavg, fedprox, feddyn, scaffold, fedlap, fedag, feduab, fedvi, fedivon, pvi, bayes_admm, fedlap_cov),
        laplace,
        *(pfedbayes, bpfed, fedper, lg_fedavg, fedavg_pf, fedper_pf, lg_fedavg_pf),
        *(fedppd, fedswag, fedpa, fedbe, fedppd_distill),
    )
}


def method_named(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method of the table with options, each checked by name and value."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](**(options or {}))
