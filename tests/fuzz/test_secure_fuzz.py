"""A short pass of changed replies in a secure sum; `make fuzz` makes the long one."""

import collections

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

import secure_replies
from harness import verdicts

pytestmark = pytest.mark.flower


def test_changed_replies_of_one_client_leave_the_sum_of_the_others_or_do_no_harm() -> None:
    counts: collections.Counter[str] = collections.Counter()
    failures = {}
    secure_replies.world()  # before the clock runs
    for seed, verdict in verdicts(secure_replies.case, [*range(100), 2703]):
        counts[verdict.kind] += 1
        if not verdict.fine:
            failures[seed] = verdict
    assert not failures
    assert counts["done"] > 10  # else it only tries the first check
    assert counts["refused"] > 40
