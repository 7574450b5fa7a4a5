"""Bayesian federated learning: any PyTorch network, trained across clients that keep their data, gives a posterior."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbayes.version import __version__

if TYPE_CHECKING:
    from fedbayes import calibrate, data, methods, ood, scores
    from fedbayes.data import partition
    from fedbayes.layout import Layout
    from fedbayes.posterior import Draws, Flowed, FullGaussian, Gaussian, Grafted, Point
    from fedbayes.server import rules
    from fedbayes.server.rules import pool
    from fedbayes.study.run import load
    from fedbayes.trained import Run
    from fedbayes.training import fit

# OpenMP threads that spin while they wait bring a machine to its knees as soon as another process is busy on it.
# Read when torch is first loaded, so it must be said before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "Draws",
    "Flowed",
    "FullGaussian",
    "Gaussian",
    "Grafted",
    "Layout",
    "Point",
    "Run",
    "__version__",
    "calibrate",
    "data",
    "fit",
    "load",
    "methods",
    "ood",
    "partition",
    "pool",
    "rules",
    "scores",
]

# Names are fetched when they are first used: the command line's help and reports must not wait for torch.
_HOMES = {
    "Draws": "fedbayes.posterior",
    "Flowed": "fedbayes.flow",
    "FullGaussian": "fedbayes.covariance",
    "Gaussian": "fedbayes.posterior",
    "Grafted": "fedbayes.grafted",
    "Layout": "fedbayes.layout",
    "Point": "fedbayes.posterior",
    "Run": "fedbayes.trained",
    "fit": "fedbayes.training",
    "load": "fedbayes.study.run",
    "pool": "fedbayes.server.rules",
}
_MODULES = {
    "calibrate": "fedbayes.calibrate",
    "data": "fedbayes.data",
    "methods": "fedbayes.methods",
    "ood": "fedbayes.ood",
    "partition": "fedbayes.data.partition",
    "rules": "fedbayes.server.rules",
    "scores": "fedbayes.scores",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'fedbayes' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
