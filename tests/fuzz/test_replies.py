"""A short pass over changed replies of a node; `make fuzz` makes the long one."""

import collections

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

import replies
from harness import verdicts


def test_changed_replies_are_refused_or_counted_and_end_nothing():
    counts: collections.Counter[str] = collections.Counter()
    failures = {}
    for seed, verdict in verdicts(replies.case, range(70)):
        counts[verdict.kind] += 1
        if not verdict.fine:
            failures[seed] = verdict
    assert not failures
    assert counts["done"] > 7  # else it only tries the first check
    assert counts["refused"] > 28
