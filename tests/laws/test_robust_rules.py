"""Laws of every robust rule: what a minority sends hardly matters, and what all agree on is the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from few_rows import few_rows, small_network
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import fedbayes as fb
from fedbayes import Gaussian, Point, pool
from fedbayes.errors import InputError
from fedbayes.federation.pooling import pooled
from fedbayes.federation.program import Contribution, Outcome
from fedbayes.federation.robust import count_of
from fedbayes.federation.round import open_round
from fedbayes.federation.rules import RULES, robust_rules
from fedbayes.training.prepare import prepare

ROBUST = [name for name, rule in RULES.items() if rule.robust]
P = 4
IN_FRONT = [{}, {"mixing": True}, {"twins": 0.1}, {"mixing": True, "twins": 0.1}]


def honest_clients(seed: int, k: int, dtype: torch.dtype = torch.float64) -> list[Gaussian]:
    random = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(k, P, generator=random, dtype=torch.float64)
    scales = 0.3 * torch.randn(k, P, generator=random, dtype=torch.float64).exp()
    return [Gaussian(m.to(dtype), s.to(dtype)) for m, s in zip(means, scales)]


def both(q: Gaussian) -> Tensor:
    """Mean and scale as one vector, whose distances are Wasserstein's."""
    return torch.cat([q.mean, q.scale]).double()


def test_there_are_four() -> None:
    assert ROBUST == ["median", "trimmed_mean", "geometric_median", "multi_krum"]


@pytest.mark.parametrize("in_front", IN_FRONT, ids=str)
@pytest.mark.parametrize("name", ROBUST)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), k=st.integers(1, 8), factor=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
def test_other_units_and_another_origin_change_nothing_else(
    name, in_front, seed: int, k: int, factor: float, shift: float
):
    qs = honest_clients(seed, k)
    q = pool(name, qs, **in_front)
    moved = pool(name, [Gaussian(factor * q.mean + shift, factor * q.scale) for q in qs], **in_front)
    torch.testing.assert_close(moved.mean, factor * q.mean + shift, rtol=1e-7, atol=1e-7 * factor)
    torch.testing.assert_close(moved.scale, factor * q.scale, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", ROBUST)
@settings(max_examples=20)
@given(data=st.data(), k=st.integers(1, 6), width=st.sampled_from([32, 64]))
def test_scales_are_positive_and_all_is_finite_whatever_finite_values_come(name: str, data, k: int, width: int):
    most, least = (1e38, 1e-37) if width == 32 else (1e300, 1e-300)
    kind = np.float32 if width == 32 else np.float64
    most, least = float(kind(most)), float(kind(least))
    means = data.draw(hnp.arrays(kind, (k, P), elements=st.floats(-most, most, width=width)))
    scales = data.draw(hnp.arrays(kind, (k, P), elements=st.floats(least, most, width=width)))
    for qs in (
        [Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in zip(means, scales)],
        [Point(torch.tensor(m)) for m in means],
    ):
        for in_front in IN_FRONT:
            q, _ = robust_rules(**in_front)[name].combined(qs, torch.ones(k), qs[0])
            assert q.mean.dtype == qs[0].mean.dtype
            assert torch.isfinite(q.mean).all()
            if isinstance(q, Gaussian):
                assert torch.isfinite(q.scale).all()
                assert (q.scale > 0).all()


FALSE = st.floats(-1e30, 1e30) | st.sampled_from([1e30, -1e30, 1e-30, 0.0, 1e4])


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 1000), k=st.integers(3, 12), outliers=st.sampled_from([0.1, 0.2, 0.4]))
def test_a_minority_of_arbitrary_uploads_is_borne(name: str, dtype, data, seed: int, k: int, outliers: float):
    lying = count_of(outliers, k)
    assume(lying)
    honest = honest_clients(seed, k - lying, dtype)
    means = data.draw(hnp.arrays(np.float64, (lying, P), elements=FALSE))
    scales = data.draw(hnp.arrays(np.float64, (lying, P), elements=st.sampled_from([1e-30, 1e-4, 1.0, 1e30])))
    liars = [Gaussian(torch.tensor(m).to(dtype), torch.tensor(s).to(dtype)) for m, s in zip(means, scales)]
    q = pool(name, [*honest, *liars], outliers=outliers)
    rows, answer = torch.stack([both(h) for h in honest]), both(q)
    if name in ("median", "trimmed_mean"):  # between the honest, weight by weight
        slack = 1e-6 * rows.abs() + 1e-12
        assert (answer >= (rows - slack).amin(0)).all()
        assert (answer <= (rows + slack).amax(0)).all()
        return
    spread = float(torch.cdist(rows, rows).max())
    share = lying / k
    # The geometric median is within 2 (1 - share) / (1 - 2 share) radii of the honest where a share is arbitrary; who
    # is kept by Krum is within sqrt(k) diameters of an honest client.
    bound = 2 * (1 - share) / (1 - 2 * share) if name == "geometric_median" else 1 + k**0.5
    assert float((answer - rows).norm(dim=1).max()) <= (1 + bound) * spread * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("name", ROBUST)
def test_far_liars_leave_no_trace_in_who_is_kept(name: str, mixing: bool) -> None:
    honest = honest_clients(5, 8)
    far = [Gaussian(torch.full((P,), 1e30).double(), torch.full((P,), 1e-30).double())] * 2
    q, rows = both(pool(name, [*honest, *far], mixing=mixing)), torch.stack([both(h) for h in honest])
    assert (q >= rows.amin(0)).all()
    assert (q <= rows.amax(0)).all()
    if name == "multi_krum" or mixing:  # each honest client's nearest are the honest ones
        torch.testing.assert_close(q, rows.mean(0))


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), k=st.integers(1, 7))
def test_without_attackers_the_trimmed_mean_is_the_log_pool_and_krum_the_mean(seed: int, k: int) -> None:
    qs = honest_clients(seed, k)
    ours, plain = pool("trimmed_mean", qs, outliers=0.0), pool("log_pool", qs)
    torch.testing.assert_close(ours.mean, plain.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.scale, plain.scale, rtol=1e-9, atol=1e-9)
    mean = torch.stack([both(q) for q in qs]).mean(0)
    torch.testing.assert_close(both(pool("multi_krum", qs, outliers=0.0)), mean)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), k=st.sampled_from([1, 3, 5, 9]))
def test_what_is_trimmed_to_one_client_is_the_median(seed: int, k: int) -> None:
    qs = honest_clients(seed, k)
    torch.testing.assert_close(both(pool("trimmed_mean", qs, outliers=0.499)), both(pool("median", qs)))


CASES = [(method, name) for method in ("fedavg", "fedvi") for name in ROBUST] + [("pfedbayes", "median")]


@pytest.mark.parametrize(("method", "name"), [*CASES, ("fedswag", "trimmed_mean")])
def test_engines_agree_under_every_robust_rule(method: str, name: str) -> None:
    key = "pooled" if method == "fedswag" else "rule"
    made = getattr(fb.methods, method)(epochs=1, batch=4, lr=0.05, optimiser="sgd", test_draws=2, **{key: name})
    runs = [
        fb.fit(small_network(), few_rows((4, 9, 6, 5, 8)), method=made, rounds=1, compile="off", **options)
        for options in ({"engine": "loop"}, {"engine": "stacked", "at_once": 2})
    ]
    first = runs[0].progress.state.broadcast
    assert set(first) >= {"model", "buffers", "counters"}
    for run in runs[1:]:
        assert "notes" not in run.journal[-1]
        for part, q in run.progress.state.broadcast.items():
            torch.testing.assert_close(q.mean, first[part].mean, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ROBUST)
def test_a_server_that_learns_from_every_upload_takes_no_robust_rule(name: str) -> None:
    with pytest.raises(InputError, match=r"^rule: the server of fedbe learns from every .*use fedavg with that rule"):
        fb.methods.fedbe(rule=name)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("method", ["fedavg", "fedvi"])
def test_no_part_is_owned_by_a_liar_with_many_rows(method: str, name: str) -> None:
    made = getattr(fb.methods, method)(epochs=1, batch=4, rule=name, outliers=0.2)
    task = prepare(small_network(), few_rows((4, 9, 6, 5, 8)), method=made, rounds=1, engine="loop")
    order = open_round(task.program, task.begin().state, clients=5, cohort=5, seed=0)
    uploads = task.engine.run(task.program, order, lambda k: None).uploads
    rows = [u.parts for u in uploads[:-1]]

    def far(q):
        mean = q.mean + (10**12 if not q.mean.is_floating_point() else 1e12)
        return Gaussian(mean, q.scale * 1e-9, q.layout) if isinstance(q, Gaussian) else Point(mean, q.layout)

    lie = Contribution(4, {part: far(q) for part, q in uploads[-1].parts.items()}, torch.tensor(10**9))
    parts, _ = pooled(task.program, order, Outcome(None, [*uploads[:-1], lie], {}, {}, {}, 5))
    assert set(parts) == {"model", "buffers", "counters", *(["points"] if method == "fedvi" else [])}
    for part, q in parts.items():
        honest = torch.stack([row[part].mean for row in rows]).double()
        slack = float(torch.cdist(honest, honest).max()) + 1e-9  # geometric median: near the honest, not among them
        assert (q.mean >= honest.amin(0) - slack).all()
        assert (q.mean <= honest.amax(0) + slack).all()
