"""What the figures show, against the library's scores and scikit-learn, and the marks that show it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedbayes import scores
from fedbayes.report.charts import Curve, histogram, line_chart, ticks
from fedbayes.report.drawing import INKS, Drawing, Text, beside, page_style, svg
from fedbayes.report.raster import png_of
from fedbayes.runs.numbers import SLACK, coverage, extremes, reliability, retention, roc
from fedbayes.scores import bins

seeds = st.integers(0, 10_000)


def made_up(seed: int, rows: int = 60, classes: int = 4):
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.ones(classes) * 0.5, rows)
    return probs, random.integers(0, classes, rows), random


@given(seeds)
def test_reliability_is_that_of_the_scores(seed):
    probs, labels, _ = made_up(seed)
    assert SLACK == bins.SLACK
    ours = reliability(probs.max(1), probs.argmax(1) == labels)
    theirs = scores.reliability(torch.tensor(probs), torch.tensor(labels))
    for name in ours._fields:
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name).numpy(), atol=1e-12)


@given(seeds, st.booleans())
def test_retention_is_that_of_the_scores(seed, tied):
    probs, labels, random = made_up(seed)
    uncertainty = random.integers(0, 5, len(labels)).astype(float) if tied else random.random(len(labels))
    correct = probs.argmax(1) == labels
    share, accuracy = retention(uncertainty, correct)
    theirs = scores.retention_curve(torch.tensor(uncertainty), torch.tensor(correct))
    np.testing.assert_allclose(share, theirs.fraction.numpy())
    np.testing.assert_allclose(accuracy, theirs.accuracy.numpy())


@given(seeds, st.integers(1, 40), st.integers(1, 40))
def test_the_area_under_the_roc_is_that_of_scikit_learn(seed, inside, outside):
    random = np.random.default_rng(seed)
    a, b = random.integers(0, 9, inside).astype(float), random.integers(3, 12, outside).astype(float)
    false, true, area = roc(a, b)
    assert false[0] == true[0] == 0
    assert false[-1] == true[-1] == 1
    assert area == pytest.approx(roc_auc_score(np.r_[np.zeros(inside), np.ones(outside)], np.r_[a, b]))


def test_coverage_of_an_honest_normal_is_its_level():
    random = np.random.default_rng(0)
    scale = np.exp(random.normal(size=(20_000, 1)))
    mean = random.normal(size=(20_000, 1))
    arrays = {"mean": mean, "labels": mean + scale * random.normal(size=mean.shape)}
    arrays |= {"aleatoric": 0.25 * scale**2, "epistemic": 0.75 * scale**2}
    levels = np.linspace(0.1, 0.95, 9)
    np.testing.assert_allclose(coverage(arrays, levels), levels, atol=0.015)


def test_extremes_are_at_the_ends():
    probs = np.array([[0.98, 0.02], [0.6, 0.4], [0.1, 0.9], [0.05, 0.95]])
    arrays = {"probs": probs, "labels": np.array([0, 0, 0, 0]), "entropy": -(probs * np.log(probs)).sum(1)}
    arrays |= {"aleatoric": probs - probs**2, "epistemic": np.zeros_like(probs)}
    found = extremes(arrays, 1)
    assert {name: rows.tolist() for name, rows in found.items()} == {"certain": [0], "aleatoric": [1], "wrong": [3]}
    assert extremes(arrays, 2, np.array([1, 2]))["wrong"].tolist() == [2]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.2, 0.21), (-3, 5), (1, 60), (2, 2), (1e-7, 3e-7)])
def test_ticks_cover_the_range_with_round_steps(low, high):
    made = ticks(low, high)
    assert made[0] <= low
    assert made[-1] >= high
    assert 2 <= len(made) <= 8


def test_a_chart_leaves_out_what_is_not_finite():
    x = np.array([1.0, 2, 3])
    chart = line_chart("NLL", [Curve("a <b>", "c0", "", 0, x, np.array([0.5, np.nan, 0.1]))], "round", "NLL")
    assert "nan" not in svg(chart)
    assert "a &lt;b&gt;" in svg(chart)
    assert line_chart("NLL", [Curve("a", "c0", "", 0, x, np.full(3, np.inf))], "round", "NLL") is None


@pytest.mark.parametrize("values", [np.zeros(5), np.array([1.0, np.nan]), np.array([2.0, 3.0])], ids=str)
def test_a_histogram_takes_constant_and_missing_values(values):
    chart = histogram("h", [("a", "c0", values), ("b", "wrong", values + 1)], "score")
    assert "nan" not in svg(chart)
    assert histogram("h", [("a", "c0", np.array([np.nan]))], "score") is None


def test_every_ink_has_both_schemes_and_enough_contrast_for_text():
    style = page_style()
    for name, pair in INKS.items():
        assert f"--{name}:light-dark({pair[0]},{pair[1]})" in style
    for name, back in (("ink", ("#fbfbfa", "#14161a")), ("soft", ("#fbfbfa", "#14161a"))):
        for ours, theirs in zip(INKS[name], back):
            assert contrast(ours, theirs) > 4.5


def contrast(a: str, b: str) -> float:
    """WCAG's ratio of the luminances of two colours."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    dark, light = sorted([luminance(a), luminance(b)])
    return (light + 0.05) / (dark + 0.05)


def test_drawings_stand_beside_each_other_and_become_pixels():
    one = Drawing(40, 20, "one", [Text(2, 10, "costs $5 & <b>")])
    both = beside([one, one], "both", gap=10)
    assert (both.width, both.height) == (90, 20)
    assert [mark.x for mark in both.marks] == [2, 52]
    assert png_of(both, scale=1).startswith(b"\x89PNG")
    assert "&amp; &lt;b&gt;" in svg(both)
