"""Experiments small enough to train in a moment, on a user's own code."""

from contextlib import suppress

import pytest
from hypothesis import settings

from fedbayes.experiments.experiment import Experiment

with suppress(ImportError):
    import setuptools  # noqa: F401  (torch's compiler needs it, and it can't follow Python's own distutils)

settings.register_profile("any machine", deadline=None)  # no example is too slow on a busy one
settings.load_profile("any machine")


@pytest.fixture
def tiny() -> Experiment:
    return Experiment(
        data="own_code:blobs",
        network="own_code:net",
        clients=6,
        cohort=3,
        rounds=4,
        method="own_code:momentum_at_home",
        partition="dirichlet",
        partition_options={"alpha": 1.0, "least": 4},
        engine="loop",
        checkpoint_every=1,
    )
