"""Bounds that nobody reaches change nothing, for every method; a sweep over bounds equals its members run alone."""

from typing import Any

import pytest
from test_sweeps import TOLERANCE, built, difference, member, trained_alone, trained_together

from fedbayes.errors import InputError
from fedbayes.methods import METHODS

WIDE: dict[str, Any] = {"cap_precision": 1e30, "clip_change": 1e30, "cap_rows": 10**6}
QUICK = {"rounds": 1, "evaluate_every": 1, "personal_every": 0}
# What a method refuses, and by which words.
REFUSED = {
    "pvi": (("cap_precision", "clip_change"), "keep a factor"),
    "bayes_admm": (("cap_precision", "clip_change"), "keep a factor"),
    "fedlap_cov": (("cap_precision", "clip_change"), "keep a factor"),
    **dict.fromkeys(("feddyn", "fedlap", "scaffold"), (("clip_change", "cap_precision"), "keep a vector|points")),
    "laplace": (("cap_precision", "clip_change"), "is the posterior of all rows"),
    "fedswag": (("cap_precision",), "start from points"),
}


@pytest.mark.parametrize("method", METHODS)
def test_bounds_that_nobody_reaches_change_nothing(method: str) -> None:
    names, words = REFUSED.get(method, ((), ""))
    for name in names:
        with pytest.raises(InputError, match=words):
            built(member(method, **{name: WIDE[name]}))
    bounds = {name: bound for name, bound in WIDE.items() if name not in names}
    plain, bounded = (trained_alone(member(method, **QUICK, **some)) for some in ({}, bounds))
    assert plain.keys() == bounded.keys()
    assert not {name for name in plain if not plain[name].equal(bounded[name])}


@pytest.mark.parametrize("method", ["fedavg", "feduab", "fedag", "bpfed"])
def test_a_sweep_over_bounds_equals_its_members_run_alone(method: str) -> None:
    """Members with other numbers are bounded as one, those with other bounds or none apart."""
    members = [
        member(method),
        member(method, clip_change=0.01),
        member(method, clip_change=0.002),
        member(method, clip_quantile=0.5, cap_rows=5),
        member(method, clip_quantile=0.25, cap_rows=6),
        member(method, cap_precision=1.001),
    ]
    alone = [trained_alone(one) for one in members]
    for ours, theirs in zip(trained_together(members), alone, strict=True):
        assert max(difference(ours[name], theirs[name]) for name in theirs) <= TOLERANCE
    bounded = [any(not one[name].equal(alone[0][name]) for name in one) for one in alone[1:]]
    assert bounded == [True, True, True, True, method in ("feduab", "bpfed")]
