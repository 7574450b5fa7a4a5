"""Promises by site: every way on one run, what calibration writes and who reads it; regression and survival too."""

import json
import math
import runpy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes import scores
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.evaluate import calibration, conformal, ood, outside, recalibrated, scoring, unseen
from fedbayes.evaluate.calibration import held_out, target_spread
from fedbayes.export.predictions import as_csv, promised
from fedbayes.export.sets import promises_in, write_sets
from fedbayes.federation.randomness import Randomness
from fedbayes.model.predictive import Predictive
from fedbayes.runs import calibrated
from fedbayes.runs.evaluation import prediction_arrays
from fedbayes.scores.label_shift import mix_of_labels
from fedbayes.training.private import PrivateRun


def fitted(clients, **options):
    torch.manual_seed(0)
    shape = clients.data.shape
    net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 30), nn.ReLU(), nn.Linear(30, clients.data.classes))
    return fb.fit(net, clients, engine="loop", **options)


@pytest.fixture(scope="module")
def digits():
    """Sites of two labels each."""
    clients = fb.data.load("digits").split(fb.partition.labels_per_client(2), clients=10, seed=0)
    return fitted(clients, method=fb.methods.fedavg(lr=0.3, epochs=3, batch=40), rounds=8, evaluate_every=8)


@pytest.fixture(scope="module")
def line():
    random = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(1400, 1, generator=random)
    y = 5 * x + x * torch.randn(1400, 1, generator=random)
    clients = from_arrays(x[:400], y[:400], x[400:], y[400:], standardise=True).split(fb.partition.iid(), clients=4)
    return fitted(clients, method=fb.methods.feduab(draws=5, lr=0.05, batch=40), rounds=2, evaluate_every=2)


@pytest.fixture(scope="module")
def lives():
    random = np.random.default_rng(0)
    x = random.standard_normal((900, 2)).astype(np.float32)
    time, end = random.exponential(np.exp(-x[:, 0])), random.exponential(3.0, 900)
    y = np.stack([np.minimum(time, end), time <= end], 1).astype(np.float32)
    pairs = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 400, 100)]
    clients = fb.data.from_clients(pairs, test=(x[400:], y[400:]), kind="survival")
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    return fb.fit(net, clients, method=fb.methods.fedavg(lr=0.05), likelihood="hazard", rounds=3, engine="loop")


def averaged(run, splits=30, **options):
    """Coverage by site over splits, and the mean size."""
    p = held_out(run).p
    made = [conformal.fit(run, held=held_out(run, seed=s, p=p), **options).judged for s in range(splits)]
    hits, rows = (np.sum([m[name] for m in made], 0) for name in ("hits", "rows"))
    return hits / rows, float(np.mean([m["size"] for m in made]))


def test_label_shift_holds_at_every_site_where_pooled_does_not(digits):
    pooled, _ = averaged(digits, 10, way="pooled")
    shifted, size = averaged(digits, 10, way="label_shift")
    blind, _ = averaged(digits, 10, way="unlabelled")
    assert pooled.min() < 0.84
    assert shifted.min() > 0.87
    assert blind.min() > 0.85
    assert size < 1.6


@pytest.mark.parametrize("way", conformal.WAYS)
@pytest.mark.parametrize("score", conformal.BY_KIND["classes"])
def test_every_way_keeps_what_it_promises_over_all_rows(digits, way, score):
    covered, size = averaged(digits, splits=4, way=way, score=score)
    assert covered.mean() > (0.83 if way == "quantiles" else 0.87)
    assert size < 5


def test_pooled_is_the_threshold_of_before(digits):
    held = held_out(digits)
    made = conformal.fit(digits, way="pooled", held=held)
    assert float(made.everywhere[0]) == pytest.approx(float(fb.calibrate.conformal(digits, held=held).threshold))
    assert made.rows == fb.calibrate.conformal(digits, held=held).rows


def test_more_confidence_is_more_coverage(digits):
    held = held_out(digits)
    plain, sure = (conformal.fit(digits, held=held, confidence=c) for c in (None, 0.95))
    assert bool((sure.thresholds >= plain.thresholds).all())
    assert sure.judged["hits"].sum() > plain.judged["hits"].sum()


@pytest.mark.parametrize("score", conformal.BY_KIND["real"])
@pytest.mark.parametrize("way", conformal.WITHOUT_CLASSES)
def test_intervals_hold_at_every_site(line, score, way):
    covered, _ = averaged(line, splits=8, score=score, way=way)
    assert covered.min() > 0.86
    assert covered.mean() < 0.95


@pytest.mark.parametrize("score", conformal.BY_KIND["survival"])
def test_bounds_are_outlived_as_often_as_promised(lives, score):
    covered, size = averaged(lives, splits=8, score=score)
    # Weighted bounds promise of events, some of which were not seen: they reach further.
    assert covered.mean() > (0.88 if score == "observed" else 0.8)
    assert 0 < size < 3


def test_a_site_of_short_follow_up_promises_no_more_than_it_has_seen(lives):
    """Rows of one site, all lost from sight at .12: of new rows as many outlive their bound as was promised."""
    random = np.random.default_rng(1)
    x = torch.from_numpy(random.standard_normal((4000, 2)).astype(np.float32))
    time = torch.from_numpy(random.exponential(np.exp(-x[:, 0].numpy())).astype(np.float32))
    y = torch.stack([time.clamp(max=0.12), (time <= 0.12).float()], 1)
    p, edges = lives.predict(x).cpu(), scores.PROBABILITY_EDGES
    counts = conformal.site_histograms(p.at(torch.arange(500)), y[:500], "weighted", edges, torch.ones(1), 0.8, 0, 0)
    assert float(counts.sum()) == pytest.approx(500)
    threshold = scores.conformal_threshold(counts[0], edges, 0.8)
    assert float((time >= scores.survival_lower(p.survival, torch.tensor(p.times), threshold)).double().mean()) > 0.8


def test_of_events_and_censorings_at_one_time_the_events_come_first():
    y = torch.tensor([[1.0, 1], [1, 1], [1, 0], [2, 1]])  # of those left after year 1 half were censored
    survival = torch.tensor([[0.9, 0.7], [0.8, 0.6], [0.9, 0.6], [0.8, 0.5]])
    none = torch.zeros_like(survival)
    p = Predictive(survival, none, none, torch.zeros(4), "survival", times=(1.0, 2.0))
    edges = torch.tensor([0.55, 0.85, 0.95], dtype=torch.float64)
    counts = conformal.site_histograms(p, y, "weighted", edges, torch.ones(1), 0.5, 0, 0)
    assert counts.tolist() == [[pytest.approx(n) for n in (2, 1, 1, 0)]]


def test_what_is_written_is_what_is_read(digits, tmp_path):
    made = conformal.fit(digits, confidence=0.8, score="regularised", penalty=0.05, free=1)
    calibrated.write(tmp_path, made)
    again = calibrated.read(tmp_path)
    x = digits.task.clients.data.test_x[:20]
    p = digits.predict(x)
    for site in (None, 0, "7"):
        assert torch.equal(made.sets(p, site), again.sets(p, site))
    assert (again.way, again.confidence, again.sites) == (made.way, 0.8, made.sites)
    assert np.array_equal(again.judged["hits"], made.judged["hits"])
    torch.testing.assert_close(again.for_mix(again.mix[3]), made.thresholds[3])
    damaged = dict(np.load(tmp_path / calibrated.FILE))
    damaged["counts"] = damaged["counts"][:, :-1]
    np.savez(tmp_path / calibrated.FILE, **damaged)
    with pytest.raises(InputError, match=r"calibration.npz can't be read"):
        calibrated.read(tmp_path)


def test_sites_have_exact_intervals(digits):
    rows = conformal.by_site(conformal.fit(digits))
    assert len(rows) == 10
    for row in rows:
        assert row.low < row.coverage <= row.high
    assert rows[0].rows == len(held_out(digits).judge_sites[0])


def test_predictions_carry_sets(digits, line, lives):
    data = digits.task.clients.data
    p = digits.predict(data.test_x[:9])
    arrays = {**prediction_arrays(p), **promised(conformal.fit(digits), p, "2")}
    head, first, *_ = as_csv(arrays).splitlines()
    assert head.split(",")[-1] == "set"
    chosen = [c for c in first.split(",")[-1].split("|") if c]
    assert chosen == [str(c) for c in np.flatnonzero(arrays["set"][0])]
    p = line.predict(line.task.clients.data.test_x[:9])
    arrays = {**prediction_arrays(p), **promised(conformal.fit(line), p)}
    assert as_csv(arrays).splitlines()[0].endswith("interval_low_0,interval_high_0")
    p = lives.predict(lives.task.clients.data.test_x[:9])
    assert "outlives" in as_csv({**prediction_arrays(p), **promised(conformal.fit(lives), p)}).splitlines()[0]


@pytest.mark.parametrize("what", ["digits", "line", "lives"])
def test_exported_sets_need_no_fedbayes(what, request, tmp_path):
    run = request.getfixturevalue(what)
    made = conformal.fit(run, score={"digits": "regularised", "line": "quantile", "lives": None}[what])
    assert promises_in(tmp_path, run) is None  # not calibrated
    calibrated.write(tmp_path, made)
    p = run.predict(run.task.clients.data.test_x[:6])
    (tmp_path / "model.json").write_text(json.dumps({"times": list(p.times)}))
    assert [path.name for path in write_sets(promises_in(tmp_path, run), tmp_path)] == ["sets.json", "sets.py"]
    assert "import fedbayes" not in (tmp_path / "sets.py").read_text()
    promise = runpy.run_path(str(tmp_path / "sets.py"))["promise"]
    arrays = {name: torch.from_numpy(a) for name, a in prediction_arrays(p).items()}
    for site in (None, "1"):
        ours = {"digits": made.sets, "line": made.interval, "lives": made.lower}[what](p, site)
        torch.testing.assert_close(promise(arrays, site), ours, rtol=1e-6, atol=1e-6, check_dtype=False)


def test_maps_by_site_lean_on_all_and_mend(digits):
    table = recalibrated.compared(digits)
    assert set(table) == {"as they are", *(f"{h}, {by}" for h in recalibrated.HOW for by in ("pooled", "by site"))}
    assert table["temperature, by site"]["nll"] < table["as they are"]["nll"]
    assert table["isotonic, by site"]["nll"] < table["as they are"]["nll"]
    held = held_out(digits)
    nobody = held._replace(sites=[held.sites[0], *(rows[:0] for rows in held.sites[1:])])
    maps = recalibrated.fit(digits, "temperature", held=nobody)
    assert float(maps.sites[3]) == pytest.approx(float(maps.everywhere))
    assert float(maps.everywhere) == pytest.approx(fb.calibrate.temperature(digits, held=nobody))


def test_what_can_t_be_promised_says_so(digits, line):
    with pytest.raises(InputError, match="epsilon: way 'unlabelled' shows what is not noised"):
        conformal.fit(digits, way="unlabelled", epsilon=1.0)
    with pytest.raises(InputError, match="all rows of all sites may be noise"):
        conformal.fit(digits, epsilon=1e-3, private_seed=0)
    with pytest.raises(InputError, match="did you mean 'label_shift'"):
        conformal.fit(digits, way="labelshift")
    with pytest.raises(InputError, match="did you mean 'adaptive'"):
        conformal.fit(digits, score="adaptiv")
    with pytest.raises(InputError, match="way 'by_class' needs classes"):
        conformal.fit(line, way="by_class")
    with pytest.raises(InputError, match="sets are for classes targets"):
        conformal.fit(line).sets(line.predict(line.task.clients.data.test_x[:2]))
    with pytest.raises(InputError, match="unknown site 'north'"):
        conformal.fit(digits).threshold("north")
    with pytest.raises(InputError, match="maps of probabilities are for classes"):
        recalibrated.fit(line)
    with pytest.raises(InputError, match="is not calibrated yet"):
        calibrated.read("/nowhere")
    nothing = held_out(digits)._replace(sites=[torch.zeros(0).long()] * 10)
    with pytest.raises(InputError, match="no held-out row"):
        conformal.fit(digits, held=nothing)


@pytest.fixture(scope="module")
def private():
    """Runs of private clients of two labels each: with test rows that are a secret, and with others that are not."""
    pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
    clients = fb.data.load("digits").split(fb.partition.labels_per_client(2), clients=5, seed=0)
    given = {"private": "clients", "noise_multiplier": 0.1, "rounds": 1}
    method = fb.methods.fedavg(epochs=1, weighting="equal")
    return {public: fitted(clients, method=method, public_test=public, **given) for public in (False, True)}


def test_of_a_private_run_nothing_is_told_of_test_rows_without_noise(private):
    run = private[False]
    for calibrate in (conformal.fit, recalibrated.fit):
        with pytest.raises(InputError, match=r"the run is private, and \w+ of its test rows have no noise"):
            calibrate(run)
    made = conformal.fit(run, epsilon=200.0, private_seed=0)
    assert "noised, epsilon 200" in made.source


def test_of_a_private_run_nothing_is_scored_but_public_test_rows_and_no_training_row_is_looked_at(private, tmp_path):
    secret, public = private[False], private[True]
    x = secret.task.clients.data.test_x
    for act in (
        secret.scores,
        lambda: secret.scores(by="site"),
        secret.personal_scores,
        lambda: secret.to_columns("scores"),
        lambda: secret.to_columns("predictions"),
        lambda: scoring.score_run(secret),
        lambda: calibration.temperature(secret),
        lambda: calibration.conformal(secret),
        lambda: unseen.flagged(secret, x, secret.predict(x)),
    ):
        with pytest.raises(InputError, match=r"the run is private, and \w+ of its test rows have no noise: train with"):
            act()
    assert len(secret.to_columns()["round"]) == 1
    assert "accuracy" in public.scores()
    assert {*unseen.flagged(public, x, public.predict(x)).thresholds} == {"entropy"}
    for run in private.values():
        with pytest.raises(InputError, match="mahalanobis: the run is private"):
            ood.scores(run, x, only=["mahalanobis"])
        assert "mahalanobis" not in ood.scores(run, x)
        with pytest.raises(InputError, match="ood train@2000: the run is private"):
            outside.outside("train@2000", run)


def test_of_a_private_run_mixes_are_those_of_public_test_rows_alone(private):
    run = private[True]
    held = held_out(run)
    for way in ("blended", "label_shift"):
        made = conformal.fit(run, way=way)
        everywhere = made.counts.sum(1)
        own = [torch.bincount(held.y[rows], minlength=10) for rows in held.sites]
        torch.testing.assert_close(made.mix, torch.stack([mix_of_labels(n, everywhere) for n in own]))


def test_the_unit_of_private_targets_is_what_the_model_tells(line):
    privacy = PrivateRun("rows", {}, {}, 1.0, 1.0, 1e-5, None, Randomness(), True)
    run = replace(line, task=replace(line.task, privacy=privacy))
    scale = line.task.clients.data.target_scale
    torch.testing.assert_close(target_spread(run), scale.std.double())
    clients = replace(line.task.clients, data=replace(line.task.clients.data, target_scale=None))
    assert target_spread(replace(run, task=replace(run.task, clients=clients))).tolist() == [1.0]
