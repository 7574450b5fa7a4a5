"""The system's randomness is normal, Poisson, and never the same twice; a seed's is."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedbayes.federation.randomness import Randomness, fresh_key, system_normals, system_sample

SYSTEM = Randomness()


def test_normals_of_the_system_are_normal() -> None:
    """By Kolmogorov and Smirnov: a right sampler is refused once in a million runs."""
    draws = system_normals(200_001).numpy()
    assert len(draws) == 200_001
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(draws[:100_000], draws[100_001:])[0, 1]) < 0.017


def test_samples_of_the_system_are_poisson() -> None:
    counts = np.array([len(system_sample(1000, 0.3)) for _ in range(200)])
    assert abs(counts.mean() - 300) < 5 * np.sqrt(210 / 200)
    assert 0.5 < counts.var() / 210 < 1.8
    assert system_sample(50, 1.0) == list(range(50))
    assert system_sample(0, 0.5) == []


def test_nothing_comes_twice_but_from_a_seed() -> None:
    assert SYSTEM.is_private
    assert not torch.equal(SYSTEM.normals(20, 3), SYSTEM.normals(20, 3))
    assert fresh_key() != fresh_key()
    seeded = Randomness(1)
    assert not seeded.is_private
    assert torch.equal(seeded.normals(20, 3), Randomness(1).normals(20, 3))
    assert not torch.equal(seeded.normals(20, 3), seeded.normals(20, 4))
    assert seeded.sample(1000, 0.4, 3) == Randomness(1).sample(1000, 0.4, 3) != seeded.sample(1000, 0.4, 4)


def test_the_global_generators_are_not_read() -> None:
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    first = SYSTEM.normals(5, 0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert not torch.equal(first, SYSTEM.normals(5, 0))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_number_of_normals(count: int) -> None:
    assert SYSTEM.normals(count, 0).shape == (count,)
