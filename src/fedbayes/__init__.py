"""Bayesian federated learning: any PyTorch network, trained across clients that keep their data, gives a posterior."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbayes.version import __version__

if TYPE_CHECKING:
    from fedbayes import data, methods, scores
    from fedbayes.data import partition
    from fedbayes.engine.clock import profile
    from fedbayes.evaluate import calibration as calibrate
    from fedbayes.evaluate import conformal, ood
    from fedbayes.evaluate.watch import watch
    from fedbayes.experiments.trust import trust
    from fedbayes.federation import attacks, rules
    from fedbayes.federation.pool import pool
    from fedbayes.posterior.layout import Layout
    from fedbayes.posterior.values import Draws, Flowed, FullGaussian, Gaussian, Grafted, Point
    from fedbayes.report import write_report
    from fedbayes.runs import trackers
    from fedbayes.runs.folder import load
    from fedbayes.runs.saved import save
    from fedbayes.training.estimators import FederatedClassifier, FederatedRegressor
    from fedbayes.training.fit import fit
    from fedbayes.training.run import Run

# OpenMP threads that spin while they wait bring a machine to its knees as soon as another process is busy on it.
# Read when torch is first loaded, so it must be said before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "Draws",
    "FederatedClassifier",
    "FederatedRegressor",
    "Flowed",
    "FullGaussian",
    "Gaussian",
    "Grafted",
    "Layout",
    "Point",
    "Run",
    "__version__",
    "attacks",
    "calibrate",
    "conformal",
    "data",
    "fit",
    "load",
    "methods",
    "ood",
    "partition",
    "pool",
    "profile",
    "rules",
    "save",
    "scores",
    "trackers",
    "trust",
    "watch",
    "write_report",
]

# Names are fetched when they are first used: the command line's help and reports must not wait for torch.
_HOMES = {
    "Draws": "fedbayes.posterior.values",
    "FederatedClassifier": "fedbayes.training.estimators",
    "FederatedRegressor": "fedbayes.training.estimators",
    "Flowed": "fedbayes.posterior.flow",
    "FullGaussian": "fedbayes.posterior.full",
    "Gaussian": "fedbayes.posterior.values",
    "Grafted": "fedbayes.posterior.spliced",
    "Layout": "fedbayes.posterior.layout",
    "Point": "fedbayes.posterior.values",
    "Run": "fedbayes.training.run",
    "fit": "fedbayes.training.fit",
    "load": "fedbayes.runs.folder",
    "pool": "fedbayes.federation.pool",
    "profile": "fedbayes.engine.clock",
    "save": "fedbayes.runs.saved",
    "trust": "fedbayes.experiments.trust",
    "watch": "fedbayes.evaluate.watch",
    "write_report": "fedbayes.report",
}
_MODULES = {
    "attacks": "fedbayes.federation.attacks",
    "calibrate": "fedbayes.evaluate.calibration",
    "conformal": "fedbayes.evaluate.conformal",
    "data": "fedbayes.data",
    "methods": "fedbayes.methods",
    "ood": "fedbayes.evaluate.ood",
    "partition": "fedbayes.data.partition",
    "rules": "fedbayes.federation.rules",
    "scores": "fedbayes.scores",
    "trackers": "fedbayes.runs.trackers",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'fedbayes' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
