"""Clients that a CPU trains side by side, a few at a time, come out as they do all at once, whatever the method."""

import pytest
from few_rows import fallbacks
from test_engines import METHODS, one_round, same

from fedbayes.engine import stacked
from fedbayes.engine.workers import threads

FEW = [3, 9, 6, 7]  # rows of a client: two chunks of clients, each with a batch that is not full


@pytest.mark.parametrize("method", METHODS)
def test_rounds_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = one_round("batchnorm, dropout", method, "stacked", FEW, rounds=2)
    monkeypatch.setattr(stacked, "default_chunk", lambda program, store: 2)
    with threads(2):
        apart = one_round("batchnorm, dropout", method, "stacked", FEW, rounds=2)
    assert all(bound.workers > 1 for bound in apart.task.engine._bounds.values())
    assert not fallbacks(*apart.journal)
    same(together, apart, 1e-9)
