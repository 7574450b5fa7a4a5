"""Robust rules against byzfl's aggregators on stacked vectors (robust_oracle.json), and against exact answers."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbayes import Gaussian, Point, pool
from fedbayes.federation import robust
from fedbayes.federation.rules import RULES

ORACLE = json.loads(Path(__file__).with_name("robust_oracle.json").read_text())
ROBUST = [name for name, rule in RULES.items() if rule.robust]


def halves(vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return vector[: len(vector) // 2], vector[len(vector) // 2 :]


def gaussian_of(name: str, vector: np.ndarray, means: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and scale that byzfl's aggregate of a rule's vectors stands for."""
    first, second = halves(vector)
    if name == "median":
        return first, np.exp(second)
    if name == "trimmed_mean":
        middle, unit = np.median(means, 0), np.exp(np.median(np.log(scales), 0))
        return middle + unit * second / first, unit / np.sqrt(first)
    return first, second


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda c: f"{len(c['means'])} clients, {c['attackers']} lie")
def test_a_robust_rule_equals_byzfl(name: str, case: dict) -> None:
    means, scales = np.array(case["means"]), np.array(case["scales"])
    share = case["attackers"] / len(means)
    points = pool(name, [Point(torch.tensor(m)) for m in means], outliers=share)
    np.testing.assert_allclose(points.mean.numpy(), case[name][0], rtol=1e-6, atol=1e-6)
    q = pool(name, [Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in zip(means, scales)], outliers=share)
    mean, scale = gaussian_of(name, np.array(case[name][1]), means, scales)
    np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(q.scale.numpy(), scale, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda c: f"{len(c['means'])} clients, {c['attackers']} lie")
def test_a_robust_rule_over_means_of_neighbours_equals_byzfl(name: str, case: dict) -> None:
    means, scales = np.array(case["means"]), np.array(case["scales"])
    share, mixed = case["attackers"] / len(means), case["mixed"]
    points = pool(name, [Point(torch.tensor(m)) for m in means], outliers=share, mixing=True)
    np.testing.assert_allclose(points.mean.numpy(), mixed[name][0], rtol=1e-6, atol=1e-6)
    qs = [Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in zip(means, scales)]
    q = pool(name, qs, outliers=share, mixing=True)
    mean, scale = gaussian_of(name, np.array(mixed[name][1]), np.array(mixed["means"]), np.array(mixed["scales"]))
    np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(q.scale.numpy(), scale, rtol=1e-6, atol=1e-6)


def test_one_sure_liar_among_a_hundred_owns_the_log_pool_and_no_robust_rule() -> None:
    honest, liar = Gaussian(torch.zeros(2), torch.full((2,), 0.1)), Gaussian(torch.ones(2), torch.full((2,), 1e-4))
    everybody = [honest] * 99 + [liar]
    assert float(pool("log_pool", everybody).mean[0]) > 0.999
    for name, mixing in itertools.product(ROBUST, (False, True)):
        q = pool(name, everybody, mixing=mixing)
        assert float(q.mean.abs().max()) < 1e-6
        torch.testing.assert_close(q.scale, honest.scale, rtol=1e-6, atol=0)


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    """Seen from there, the three corners are 120 degrees apart."""
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    rays = pool("geometric_median", [Point(corner) for corner in corners]).mean - corners
    rays = rays / rays.norm(dim=1, keepdim=True)
    torch.testing.assert_close(rays @ rays.T, 1.5 * torch.eye(3).double() - 0.5, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("name", ROBUST)
def test_blocks_of_weights_change_nothing(name: str, mixing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(3)
    qs = [Gaussian(torch.randn(23, generator=random), torch.rand(23, generator=random) + 0.1) for _ in range(7)]
    whole = pool(name, qs, mixing=mixing)
    monkeypatch.setattr(robust, "BLOCK", 7 * 5)
    cut = pool(name, qs, mixing=mixing)
    torch.testing.assert_close(cut.mean, whole.mean)
    torch.testing.assert_close(cut.scale, whole.scale)


def test_the_median_of_counters_is_one_of_them() -> None:
    counters = [Point(torch.tensor([n, 2 * n])) for n in (3, 5, 4, 10**15)]
    q = RULES["median"].combine(counters, torch.ones(4), counters[0])
    assert q.mean.dtype == torch.int64
    assert q.mean.tolist() == [4, 8]
