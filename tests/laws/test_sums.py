"""Sums of terms: any tree of them, in any order, in place, gives one posterior, and leaves the terms as they were."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import Gaussian, Point
from fedbayes.federation.rules import RULES, largest
from fedbayes.federation.sums import add_terms

P = 4
NAMES = [n for n, rule in RULES.items() if rule.combine is None and (Gaussian in rule.takes or Point in rule.takes)]
# A tree: a client's number, or branches. Each number is met once.
TREES = st.integers(2, 9).flatmap(
    lambda k: st.permutations(range(k)).flatmap(
        lambda order: st.lists(st.integers(1, k - 1), max_size=4).map(lambda cuts: _nest(list(order), sorted({*cuts})))
    )
)


def pooled_by(rules: Any) -> Any:
    """As much of a program as a sum needs."""
    return SimpleNamespace(pooling=SimpleNamespace(rules=rules))


def _nest(order: list, cuts: list) -> list:
    """Groups between cuts, each again halved: sums of sums of clients."""
    bounds = [0, *[c for c in cuts if c < len(order)], len(order)]
    groups = [order[a:b] for a, b in pairwise(bounds)]
    return [[g[: len(g) // 2], g[len(g) // 2 :]] if len(g) > 2 else g for g in groups]


def _leaves(tree) -> list:
    return [tree] if isinstance(tree, int) else [leaf for branch in tree for leaf in _leaves(branch)]


def _total(program, terms: list, tree):
    return terms[tree] if isinstance(tree, int) else add_terms(program, (_total(program, terms, b) for b in tree))


def _terms(rule, k: int) -> list:
    g = torch.Generator().manual_seed(k)
    reference = Gaussian(torch.randn(P, generator=g), torch.full((P,), 4.0))
    made = []
    for n in range(k):
        mean, scale = torch.randn(P, generator=g), torch.rand(P, generator=g) + 0.1
        q = Gaussian(mean, scale) if Gaussian in rule.takes else Point(mean)
        counters = {"largest": torch.randint(100, (2,), generator=g)}
        made.append({"model": rule.encode(q, torch.tensor(1.0 + n), reference), "counters": counters})
    return made


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(tree=TREES)
def test_any_tree_in_any_order_is_one_sum(name, tree):
    program = pooled_by({"model": RULES[name], "counters": largest})
    k = len(_leaves(tree))
    terms, untouched = _terms(RULES[name], k), _terms(RULES[name], k)
    made, flat = _total(program, terms, tree), add_terms(program, terms)
    for part, statistics in flat.items():
        for key, t in statistics.items():
            torch.testing.assert_close(made[part][key], t, rtol=1e-12, atol=1e-12)
            assert all(torch.equal(a[part][key], b[part][key]) for a, b in zip(terms, untouched))
    # The exact sum, of another kind of addition: the largest is the largest, a sum is within rounding of its own.
    assert torch.equal(made["counters"]["largest"], torch.stack([t["counters"]["largest"] for t in untouched]).amax(0))
    assert float(made["model"]["count"]) == k


def test_a_running_total_keeps_its_memory():
    program = pooled_by({"model": RULES["nwa"], "counters": largest})
    terms = _terms(RULES["nwa"], 3)
    total = add_terms(program, terms[:1])
    place = total["model"]["mean"].data_ptr()
    assert place != terms[0]["model"]["mean"].data_ptr()
    total = add_terms(program, terms[1:], total)
    assert total["model"]["mean"].data_ptr() == place
    expected = torch.stack([t["model"]["mean"] for t in terms]).sum(0)
    torch.testing.assert_close(total["model"]["mean"], expected, rtol=1e-14, atol=1e-14)
