"""Accounts against dp_accounting called directly, and against published figures."""

import math

import numpy as np
import pytest

from fedbayes.errors import InputError
from fedbayes.federation.accounting import Spent, affordable, epsilon_of, interval_for, noise_for, with_more

accounting = pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
pld = pytest.importorskip("dp_accounting.pld")
rdp = pytest.importorskip("dp_accounting.rdp")


def event(rate: float, noise: float, uses: int):
    one = accounting.GaussianDpEvent(noise)
    return accounting.SelfComposedDpEvent(accounting.PoissonSampledDpEvent(rate, one) if rate < 1 else one, uses)


def settings() -> list[tuple[float, float, int, float]]:
    random = np.random.default_rng(0)
    rows = []
    for k in range(50):
        rate = 1.0 if k % 10 == 0 else float(10 ** random.uniform(-1.5, 0))
        noise, uses = float(random.uniform(2, 12)), int(10 ** random.uniform(0, 3))
        rows.append((rate, noise, uses, float(10 ** random.uniform(-7, -3))))
    return rows


def test_epsilon_is_that_of_the_library_for_many_settings() -> None:
    for rate, noise, uses, delta in settings()[::2]:
        direct = pld.PLDAccountant(value_discretization_interval=interval_for(rate, noise))
        direct.compose(event(rate, noise, uses))
        want = direct.get_epsilon(delta)
        assert epsilon_of((Spent(rate, noise, uses),), delta) == pytest.approx(want, rel=1e-9)


def test_divergences_are_those_of_the_library_and_never_less() -> None:
    for rate, noise, uses, delta in settings()[::5]:
        direct = rdp.RdpAccountant()
        direct.compose(event(rate, noise, uses))
        spent = (Spent(rate, noise, uses),)
        assert epsilon_of(spent, delta, "rdp") == pytest.approx(direct.get_epsilon(delta), rel=1e-12)
        assert epsilon_of(spent, delta, "rdp") >= epsilon_of(spent, delta) * (1 - 1e-3)


def test_known_figures() -> None:
    assert epsilon_of((Spent(0.1, 1.0, 100),), 1e-5) == pytest.approx(7.05, abs=0.005)
    assert epsilon_of((Spent(0.1, 1.0, 100),), 1e-5, "rdp") == pytest.approx(7.90, abs=0.005)
    assert epsilon_of((), 1e-5) == 0
    for rate, noise, uses in ((0.1, 0.0, 1), (1.0, 1e-9, 1), (0.5, 1e-3, 3), (1.0, 1.0, 10**6), (0.1, 1.0, 10**9)):
        assert epsilon_of((Spent(rate, noise, uses),), 1e-5) == math.inf


def test_one_gaussian_has_the_exact_epsilon() -> None:
    """Balle and Wang (2018): delta = F(1/(2z) - eps z) - exp(eps) F(-1/(2z) - eps z)."""
    normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    for noise in (1.0, 2.5, 10.0):
        e = epsilon_of((Spent(1.0, noise, 1),), 1e-5)
        delta = normal(0.5 / noise - e * noise) - math.exp(e) * normal(-0.5 / noise - e * noise)
        assert delta == pytest.approx(1e-5, rel=2e-2)


def test_two_mechanisms_compose_in_any_order_and_cost_more_than_each() -> None:
    a, b = Spent(0.1, 1.5, 20), Spent(1.0, 8.0, 5)
    both = epsilon_of((a, b), 1e-5)
    assert both == pytest.approx(epsilon_of((b, a), 1e-5), rel=1e-6)
    assert max(epsilon_of((a,), 1e-5), epsilon_of((b,), 1e-5)) < both
    assert with_more((a,), 0.1, 1.5, 3) == (Spent(0.1, 1.5, 23),)
    assert with_more((a,), 1.0, 8.0, 5) == (a, b)


@pytest.mark.parametrize(("epsilon", "rate", "uses"), [(2.0, 0.1, 50), (0.1, 1.0, 30), (8.0, 0.3, 40)])
def test_the_noise_is_the_least_that_keeps_within_epsilon(epsilon: float, rate: float, uses: int) -> None:
    noise = noise_for(epsilon, 1e-5, rate, uses)
    assert 0.995 * epsilon < epsilon_of((Spent(rate, noise, uses),), 1e-5) <= epsilon
    assert epsilon_of((Spent(rate, noise * 0.997, uses),), 1e-5) > epsilon
    assert float(f"{noise:.4g}") == noise  # what a file shows is what is used


def test_a_budget_buys_so_many_uses_and_not_one_more() -> None:
    account = (Spent(0.2, 4.0, 10),)
    most = affordable(1.0, 1e-5, 0.1, 2.0, 10**4, account)
    assert epsilon_of(with_more(account, 0.1, 2.0, most), 1e-5) <= 1.0
    assert epsilon_of(with_more(account, 0.1, 2.0, most + 1), 1e-5) > 1.0
    assert affordable(1.0, 1e-5, 0.1, 2.0, most - 1, account) == most - 1
    assert affordable(0.01, 1e-5, 1.0, 1.0, 5) == 0


def test_what_no_noise_can_keep_is_refused() -> None:
    with pytest.raises(InputError, match="epsilon: no noise"):
        noise_for(1.0, 1e-5, 0.5, 10, (Spent(1.0, 1.0, 1),))
