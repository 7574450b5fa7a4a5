"""Changes from an older broadcast, added to a newer one: each rule's formula, and who is refused."""

import pytest
import torch
from torch import Tensor

from fedbayes.federation.moves import Move
from fedbayes.federation.rules import RULES
from fedbayes.posterior.values import Gaussian, Point, Posterior

CHANGES = [name for name, rule in RULES.items() if rule.change]
WEIGHTS = torch.tensor([2.0, 3.0], dtype=torch.float64)


def drawn(seed: int, count: int, point: bool) -> list[Posterior]:
    random = torch.Generator().manual_seed(seed)
    means = torch.randn(count, 5, generator=random, dtype=torch.float64)
    scales = torch.rand(count, 5, generator=random, dtype=torch.float64) * 0.2 + 0.3
    return [Point(m) if point else Gaussian(m, s) for m, s in zip(means, scales)]


def values(name: str, q: Posterior) -> tuple[Tensor, ...]:
    """What the rule adds: means; means and variances; natural parameters."""
    if isinstance(q, Point):
        return (q.mean,)
    assert isinstance(q, Gaussian)
    return (q.mean, q.scale.square()) if name == "nwa" else (q.mean / q.scale**2, q.scale**-2)


def test_the_rules_that_are_sums_of_changes() -> None:
    assert CHANGES == ["fedavg", "nwa", "log_pool", "dwc"]


@pytest.mark.parametrize("discount", [1.0, 0.25])
@pytest.mark.parametrize("name", CHANGES)
def test_terms_of_two_versions_add(name: str, discount: float) -> None:
    """value(now) + (s w_a (value(a) - value(old)) + w_b (value(b) - value(now))) / sum of w; products do not divide."""
    rule = RULES[name]
    old, now, a, b = drawn(2, 4, point=Point in rule.takes)
    assert rule.change is not None
    late = rule.change(rule.encode(a, WEIGHTS[0], old), Move(old, old, now, now, discount))
    pooled = rule.decode(rule.add(late, rule.encode(b, WEIGHTS[1], now)), now)
    w, whole = (WEIGHTS, WEIGHTS.sum()) if rule.weighted else (torch.ones(2), 1.0)
    for got, at, was, first, second in zip(*(values(name, q) for q in (pooled, now, old, a, b))):
        want = at + (discount * w[0] * (first - was) + w[1] * (second - at)) / whole
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["nwa", "log_pool"])
def test_the_units_of_terms_do_not_matter(name: str) -> None:
    """Under a fixed prior terms are in its units, whatever clients started from."""
    rule = RULES[name]
    old, now, a, prior = drawn(3, 4, point=False)
    assert rule.change is not None
    moved = [
        rule.decode(rule.change(rule.encode(a, WEIGHTS[0], was), Move(old, was, now, unit)), unit)
        for was, unit in ((old, now), (prior, prior))
    ]
    torch.testing.assert_close(moved[0].mean, moved[1].mean)
    torch.testing.assert_close(moved[0].moments()[1], moved[1].moments()[1])


@pytest.mark.parametrize("name", CHANGES)
def test_a_move_to_the_same_broadcast_changes_nothing(name: str) -> None:
    rule = RULES[name]
    old, a = drawn(4, 2, point=Point in rule.takes)
    assert rule.change is not None
    terms = rule.encode(a, WEIGHTS[0], old)
    for key, t in rule.change(terms, Move(old, old, old, old)).items():
        torch.testing.assert_close(t, terms[key])
