"""Federations small enough to train in a moment, on a user's own code."""

from pathlib import Path

import pytest

from fedbayes.experiments.experiment import Experiment


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def tiny() -> Experiment:
    return Experiment(
        data="flower_code:plane",
        network="flower_code:net",
        clients=3,
        rounds=2,
        method="feduab",
        options={"epochs": 2, "batch": 8, "test_draws": 3},
        flower={"wait": 0.2, "timeout": 0.2},
    )
