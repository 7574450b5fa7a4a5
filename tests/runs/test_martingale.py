"""The watch's arithmetic: ranks that are uniform, fair bets, few false alarms, equal bits however a stream is cut."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, kstest

from fedbayes.runs import martingale as m


def followed(reference: np.ndarray, stream: np.ndarray, random: np.random.Generator, piece: int = 50) -> np.ndarray:
    """The logarithm of the fortune after every row, [rows, streams]."""
    ranks, fortune, logs = m.ranks_of(m.bins_of(reference)), m.begin(lead=reference.shape[:-1]), []
    uniforms = random.random(stream.shape)
    for start in range(0, stream.shape[-1], piece):
        rows = slice(start, start + piece)
        ranks, p = m.p_values(ranks, m.bins_of(stream[..., rows]), uniforms[..., rows])
        for i in range(p.shape[-1]):
            fortune = m.bet(fortune, m.beta_odds(p[..., i]))
            logs.append(fortune.log)
    return np.array(logs)


def test_ranks_are_the_shares_that_are_stranger():
    ranks = m.ranks_of(m.bins_of(np.array([1.0, 2.0, 2.0, 4.0])))
    after, p = m.p_values(ranks, m.bins_of(np.array([2.0, 9.0, 0.5])), np.array([0.5, 0.5, 0.25]))
    assert p.tolist() == [(1 + 0.5 * 3) / 5, 0.5 / 6, (6 + 0.25) / 7]
    assert after.counts.sum() == 7


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_of_a_quiet_stream_are_uniform_and_independent(ties):
    random = np.random.default_rng(0)
    rows = random.standard_normal((400, 60))
    rows = np.round(rows) if ties else rows
    ranks = m.ranks_of(m.bins_of(rows[:, :10]))
    _, p = m.p_values(ranks, m.bins_of(rows[:, 10:]), random.random((400, 50)))
    assert kstest(p.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(p[:, :-1].ravel(), p[:, 1:].ravel())[0, 1]) < 4 / math.sqrt(p.size)


def test_ranks_within_a_group_know_nothing_of_other_groups():
    random = np.random.default_rng(1)
    values, group, u = random.standard_normal(40), random.integers(0, 3, 40), random.random(40)
    ranks = m.ranks_of(m.bins_of(values[:20]), 3, group[:20])
    _, p = m.p_values(ranks, m.bins_of(values[20:]), u[20:], group[20:])
    for g in range(3):
        old, new = group[:20] == g, group[20:] == g
        alone = m.ranks_of(m.bins_of(values[:20][old]))
        _, expected = m.p_values(alone, m.bins_of(values[20:][new]), u[20:][new])
        assert np.array_equal(p[new], expected)


@pytest.mark.parametrize("bet", range(len(m.BETAS)))
def test_bets_are_fair(bet):
    value, _ = quad(lambda p: math.exp(m.beta_odds(np.array(p))[bet]), 0, 1, limit=200)
    assert value == pytest.approx(1, abs=1e-6)


def test_bets_on_the_mix_are_fair():
    random = np.random.default_rng(2)
    counts = np.array([5.0, 0.0, 12.0, 3.0])
    mix = m.begin_mix(4)
    for label in (0, 0, 3, 1):
        mix, _ = m.mix_odds(mix, counts, np.array(0.5), np.array(label))
    p = (np.arange(20000) + 0.5) / 20000
    copies = m.Mix(np.broadcast_to(mix.lately, (20000, *mix.lately.shape)))
    _, odds = m.mix_odds(copies, np.broadcast_to(counts, (20000, 4)), p, random.integers(0, 4, 20000))
    np.testing.assert_allclose(np.exp(odds).mean(0), 1, atol=2e-3)


def test_a_fortune_that_wins_nothing_is_one():
    fortune = m.begin()
    for _ in range(500):
        fortune = m.bet(fortune, np.zeros(len(m.BETAS)))
    assert float(fortune.log) == pytest.approx(0, abs=1e-12)


def test_quiet_streams_hardly_ever_alarm_though_looked_at_after_every_row():
    random = np.random.default_rng(3)
    rows = random.standard_t(3, (400, 530))  # 30 reference rows: against a fixed reference nearly all would alarm
    logs = followed(rows[:, :30], rows[:, 30:], random)
    alarms = (logs.max(0) >= math.log(20)).sum()
    assert binom.sf(alarms - 1, 400, 0.05) > 0.01
    assert logs[-1].max() > math.log(1.5)  # bets are laid


@pytest.mark.parametrize(
    ("change", "most"),
    [(lambda z: z + 1, 120), (lambda z: z - 1, 120), (lambda z: 2.5 * z, 200)],
    ids=["rises", "falls", "spreads"],
)
@pytest.mark.parametrize("quiet", [0, 300])
def test_a_change_is_found_soon(change, most, quiet):
    random = np.random.default_rng(4)
    rows = random.standard_normal((100, 300 + quiet + most))
    rows[:, 300 + quiet :] = change(rows[:, 300 + quiet :])
    logs = followed(rows[:, :300], rows[:, 300:], random)
    assert (logs[quiet:].max(0) >= math.log(20)).mean() >= 0.9


@pytest.mark.parametrize("pieces", [[1] * 37, [5, 32], [36, 1]])
def test_a_stream_cut_elsewhere_gives_the_same_bits(pieces):
    random = np.random.default_rng(5)
    reference, stream, u = random.standard_normal(25), random.standard_normal(37), random.random(37)
    group, labels = random.integers(0, 2, 62), random.integers(0, 3, 37)

    def state(cuts):
        ranks, fortune, start = m.ranks_of(m.bins_of(reference), 2, group[:25]), m.begin(), 0
        mix, kinds = m.begin_mix(3), m.begin(len(m.RATES))
        for size in cuts:
            rows = slice(start, start + size)
            ranks, p = m.p_values(ranks, m.bins_of(stream[rows]), u[rows], group[25:][rows])
            for value, label in zip(p, labels[rows]):
                fortune = m.bet(fortune, m.beta_odds(value))
                mix, odds = m.mix_odds(mix, np.array([9.0, 4, 2]), value, label)
                kinds = m.bet(kinds, odds)
            start += size
        return ranks.counts.tobytes(), fortune.logs.tobytes(), kinds.logs.tobytes(), mix.lately.tobytes()

    assert state([37]) == state(pieces)
