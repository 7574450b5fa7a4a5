"""pFedPF over three methods: clients refine their classifier's posterior by flows (Luo et al., 2024)."""

from __future__ import annotations

from typing import ClassVar

from fedbayes.methods.groups import Descent
from fedbayes.methods.method import Method
from fedbayes.methods.personal import FedPer, LGFedAvg
from fedbayes.methods.points import FedAvg, PointTraining
from fedbayes.methods.refined import Refining
from fedbayes.options import record, with_default


@record
class LocalTraining(Method):
    """pFedPF's local training, where it differs from what the methods do by themselves."""

    lr: float = with_default(Descent, "lr", default=0.01)
    momentum: float = with_default(Descent, "momentum", default=0.9)
    weight_decay: float = with_default(PointTraining, "weight_decay", default=0.0005)
    batch: int = with_default(Descent, "batch", default=128)
    refine: str | None = with_default(Refining, "refine", default="flow")


@record
class FedAvgPF(LocalTraining, FedAvg):
    """pFedPF over FedAvg: Laplace posteriors of the classifier pooled by moments, refined at home by radial flows."""

    name: ClassVar[str] = "fedavg_pf"


@record
class FedPerPF(LocalTraining, FedPer):
    """pFedPF over FedPer: the classifier and its posterior stay home (Luo et al., 2024)."""

    name: ClassVar[str] = "fedper_pf"


@record
class LGFedAvgPF(LocalTraining, LGFedAvg):
    """pFedPF over LG-FedAvg: only the classifier and its posterior are shared (Luo et al., 2024)."""

    name: ClassVar[str] = "lg_fedavg_pf"
