"""Bayesian federated learning: any PyTorch network, trained across clients that keep their data, gives a posterior."""

from fedbayes import data, methods, scores
from fedbayes.data import partition
from fedbayes.layout import Layout
from fedbayes.posterior import Draws, Gaussian, Point
from fedbayes.server import rules
from fedbayes.server.rules import pool
from fedbayes.training import Run, fit

__all__ = [
    "Draws",
    "Gaussian",
    "Layout",
    "Point",
    "Run",
    "data",
    "fit",
    "methods",
    "partition",
    "pool",
    "rules",
    "scores",
]
