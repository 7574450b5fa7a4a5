"""pFedPF over three methods: clients refine their classifier's posterior by flows (Luo et al., 2024)."""

from __future__ import annotations

from typing import Any

from fedbayes.composition import Method
from fedbayes.methods.options import builds_on, call
from fedbayes.methods.personal import fedper, lg_fedavg
from fedbayes.methods.points import fedavg

# pFedPF's local training, where it differs from what the methods do by themselves.
PFEDPF = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "batch": 128, "refine": "flow"}


@builds_on(fedavg)
def fedavg_pf(**options: Any) -> Method:
    """pFedPF over FedAvg: Laplace posteriors of the classifier pooled by moments, refined at home by radial flows."""
    return call(fedavg, {**PFEDPF, **options})


@builds_on(fedper)
def fedper_pf(**options: Any) -> Method:
    """pFedPF over FedPer: the classifier and its posterior stay home (Luo et al., 2024)."""
    return call(fedper, {**PFEDPF, **options})


@builds_on(lg_fedavg)
def lg_fedavg_pf(**options: Any) -> Method:
    """pFedPF over LG-FedAvg: only the classifier and its posterior are shared (Luo et al., 2024)."""
    return call(lg_fedavg, {**PFEDPF, **options})
