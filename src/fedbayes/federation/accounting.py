"""The account of a private run: which mechanisms were used how often, and the epsilon that they come to.

A mechanism is a Gaussian of `noise` times the sensitivity, on a sum over a Poisson sample at `rate` (1: of everybody).
Two data sets are neighbours where one client, or one row, is in one of them and not in the other. The arithmetic is
that of Google's `dp-accounting`, in the extra `fedbayes[dp]`. Needs no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from fedbayes.errors import InputError

WIDEST, FINEST = 1e-3, 1e-5  # intervals at which privacy losses are rounded up
STEPS = 5  # intervals within the loss of one typical step
LEAST, LARGEST = 0.05, 1e6  # noise: below there is no privacy to speak of, beyond nothing to learn
NOTHING = 0.02  # the same of all uses together: epsilon is above a thousand


class Spent(NamedTuple):
    """A mechanism, and how often it was used."""

    rate: float
    noise: float
    uses: int = 1


Account = tuple[Spent, ...]


def with_more(account: Account, rate: float, noise: float, count: int = 1) -> Account:
    """The account after some more uses of a mechanism."""
    uses = {(s.rate, s.noise): s.uses for s in account}
    uses[rate, noise] = uses.get((rate, noise), 0) + count
    return tuple(Spent(*mechanism, many) for mechanism, many in uses.items() if many)


def epsilon_of(account: Account, delta: float, by: str = "pld", *, coarseness: int = 1) -> float:
    """The epsilon of an account at a delta: by privacy loss distributions, or by Renyi divergences ("rdp").

    Losses are rounded up at intervals that are `coarseness` times as wide as they should be.
    """
    used = [s for s in account if s.uses]
    if not used:
        return 0.0
    if any(s.noise < LEAST or s.noise < NOTHING * s.rate * math.sqrt(s.uses) for s in used):
        return math.inf
    return _by_divergences(tuple(used), delta) if by == "rdp" else _by_losses(tuple(used), delta, coarseness)


def noise_for(epsilon: float, delta: float, rate: float, count: int, account: Account = ()) -> float:
    """The least noise, to a thousandth, by which `count` uses at a rate stay within epsilon after an account."""
    if count == 0:
        return LEAST

    def excess(log_noise: float, coarseness: int = 1) -> float:
        more = with_more(account, rate, math.exp(log_noise), count)
        return math.log(max(epsilon_of(more, delta, coarseness=coarseness), 1e-9) / epsilon)

    low, high = math.log(LEAST), math.log(LARGEST)
    if epsilon_of(account, delta) >= epsilon or excess(high) > 0:
        raise InputError(f"epsilon: no noise keeps {count} uses within {epsilon:g} at delta {delta:g}; raise it")
    # First at wide intervals, which takes a tenth of the time.
    near = _crossing(lambda x: excess(x, 10), low, high, math.log(rate * math.sqrt(count) / epsilon + 0.5))
    return _rounded_up(math.exp(_crossing(excess, low, high, near)))


def _crossing(excess: Callable[[float], float], low: float, high: float, guess: float) -> float:
    """Where a falling function comes down to 0, to a thousandth and from above: by secants within a bracket."""
    at: dict[float, float] = {}
    x = min(max(guess, low), high)
    while high - low > 1e-3:
        at[x] = excess(x)
        low, high = (x, high) if at[x] > 0 else (low, x)
        known = sorted((v for v in at if math.isfinite(at[v])), key=lambda v: abs(at[v]))[:2]
        slope = (at[known[0]] - at[known[1]]) / (known[0] - known[1]) if len(known) == 2 else -1.0
        x = known[0] - at[known[0]] / min(slope, -0.2) + (4e-4 if at[known[0]] > 0 else -4e-4) if known else low
        if not low + 1e-4 < x < high - 1e-4:
            x = 0.5 * (low + high)
    return high


def affordable(epsilon: float, delta: float, rate: float, noise: float, most: int, account: Account = ()) -> int:
    """How many uses of a mechanism stay within epsilon after an account, of at most `most`."""

    def within(count: int) -> bool:
        return epsilon_of(with_more(account, rate, noise, count), delta) <= epsilon

    if within(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _rounded_up(noise: float) -> float:
    """To four digits, upwards: what an experiment file shows is what is used."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
    return float(f"{math.ceil(noise / unit - 1e-9) * unit:.6g}")


@lru_cache(maxsize=256)
def _by_losses(used: Account, delta: float, coarseness: int) -> float:
    interval = coarseness * min(interval_for(s.rate, s.noise) for s in used)
    total: Any = None
    for s in used:
        if s.rate == 1:  # a sum of Gaussians is one
            one = _losses(1.0, s.noise / math.sqrt(s.uses), interval)
        else:
            one = _losses(s.rate, s.noise, interval).self_compose(s.uses)
        total = one if total is None else total.compose(one)
    return float(total.get_epsilon_for_delta(delta))


def interval_for(rate: float, noise: float) -> float:
    """The interval at which losses are rounded: a part of a step's typical loss. Rounding is upwards, so it is safe."""
    return float(f"{min(WIDEST, max(FINEST, rate / noise / STEPS)):.1e}")


@lru_cache(maxsize=64)
def _losses(rate: float, noise: float, interval: float) -> Any:
    accounting = library()
    make = accounting.pld.privacy_loss_distribution.from_gaussian_mechanism
    return make(noise, sampling_prob=rate, value_discretization_interval=interval)


@lru_cache(maxsize=256)
def _by_divergences(used: Account, delta: float) -> float:
    accounting = library()
    accountant = accounting.rdp.RdpAccountant()
    with _quiet():
        for s in used:
            event = accounting.GaussianDpEvent(s.noise)
            if s.rate < 1:
                event = accounting.PoissonSampledDpEvent(s.rate, event)
            accountant.compose(event, s.uses)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its warnings of orders that it leaves out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def library() -> Any:
    """The library that accounts."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise InputError('privacy needs dp-accounting: pip install "fedbayes[dp]"') from error
    return dp_accounting
