"""Federated calibration: the temperature is the pooled one, coverage is as promised, and where skew breaks it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import fedbayes as fb
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.evaluate import calibration as calibrate
from fedbayes.evaluate.recalibrated import compared


def fitted(clients, **options):
    torch.manual_seed(0)
    shape = clients.data.shape
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 30), nn.ReLU(), nn.Linear(30, clients.data.classes)
    )
    return fb.fit(net, clients, engine="loop", **options)


@pytest.fixture(scope="module")
def digits():
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=10, seed=0)
    return fitted(clients, method=fb.methods.fedavg(lr=0.3, epochs=3, batch=40), rounds=4, evaluate_every=4)


@pytest.fixture(scope="module")
def line():
    """y = x + noise that grows with x: a normal of one scale is wrong everywhere."""
    random = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(1400, 1, generator=random)
    y = 5 * x + x * torch.randn(1400, 1, generator=random)
    clients = from_arrays(x[:400], y[:400], x[400:], y[400:], standardise=True).split(fb.partition.iid(), clients=5)
    return fitted(clients, method=fb.methods.feduab(draws=5, lr=0.05, batch=40), rounds=3, evaluate_every=3)


def splits(run, count, **options):
    p = calibrate.held_out(run).p
    return [calibrate.held_out(run, seed=s, p=p, **options) for s in range(count)]


def test_the_temperature_is_that_of_the_pooled_rows(digits):
    held = calibrate.held_out(digits)
    rows = torch.cat(list(calibrate.distinct(held.sites)))
    logits, y = held.p.probs[rows].double().log().numpy(), held.y[rows].numpy()

    def nll(t):
        z = logits / t
        return (np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean()

    best = minimize_scalar(nll, bounds=(0.05, 20), method="bounded").x
    assert calibrate.temperature(digits, held=held) == pytest.approx(best, rel=5e-3)
    torch.testing.assert_close(calibrate.tempered(held.p, 1.0), held.p.probs.double(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("score", calibrate.SET_SCORES)
def test_sets_of_held_out_digits_cover_as_promised(digits, score):
    covered = []
    for held in splits(digits, 120):
        made = calibrate.conformal(digits, 0.9, score=score, held=held)
        rows = torch.cat(list(calibrate.distinct(held.judge_sites)))
        covered.append(float(calibrate.covered(made, held.judge, held.judge_y)[rows].double().mean()))
    if score == "least_ambiguous":
        assert np.mean(covered) == pytest.approx(0.9, abs=0.01)
    else:
        assert np.mean(covered) >= 0.9 - 0.005


def test_intervals_cover_as_promised_and_wrong_scales_are_mended(line):
    covered, plain = [], []
    for held in splits(line, 30):
        made = calibrate.conformal(line, 0.9, held=held)
        rows = torch.cat(list(calibrate.distinct(held.judge_sites)))
        covered.append(float(calibrate.covered(made, held.judge, held.judge_y)[rows].double().mean()))
        low, high = made.interval(held.judge)
        assert bool((low < high).all())
        plain.append(fb.scores.coverage(held.judge.mean, held.judge.total.sqrt(), held.judge_y))
    assert np.mean(covered) == pytest.approx(0.9, abs=0.01)
    assert abs(np.mean(plain) - 0.9) > 0.02  # what the network claims by itself


def test_a_network_that_claims_no_scale_gets_intervals_too(line):
    held = calibrate.held_out(line)
    none = torch.zeros_like(held.p.mean)
    p = held.p._replace(aleatoric=none, epistemic=none)
    made = calibrate.conformal(line, held=held._replace(p=p, judge=p))
    rows = torch.cat(list(calibrate.distinct(held.judge_sites)))
    assert float(calibrate.covered(made, p, held.y)[rows].double().mean()) == pytest.approx(0.9, abs=0.04)


def skewed(digits):
    """The digits run as judged by sites that hold two labels each."""
    clients = fb.data.load("digits").split(fb.partition.labels_per_client(2), clients=10, seed=0)
    return replace(digits, task=replace(digits.task, clients=clients))


def test_under_label_skew_the_pooled_promise_fails_a_class_and_the_promise_by_class_does_not(digits):
    run = skewed(digits)
    least = {False: [], True: []}
    for held in splits(run, 60):
        for by_class, found in least.items():
            made = calibrate.conformal(run, 0.9, by_class=by_class, held=held)
            hit = calibrate.covered(made, held.judge, held.judge_y).double()
            rows = torch.cat(list(calibrate.distinct(held.judge_sites)))
            found.append([float(hit[rows][held.judge_y[rows] == c].mean()) for c in range(10)])
    assert np.mean(least[False], 0).min() < 0.85
    assert np.mean(least[True], 0).min() > 0.88


def test_no_row_both_calibrates_and_judges_and_none_counts_twice(digits):
    held = calibrate.held_out(digits)
    here, there = torch.cat(held.sites), torch.cat(held.judge_sites)
    assert not set(here.tolist()) & set(there.tolist())
    assert len(here) > len(here.unique())  # 100 rows a client of 355: they overlap
    assert calibrate.conformal(digits, held=held).rows == len(here.unique())


def test_a_site_may_calibrate_alone_and_too_few_rows_rule_nothing_out(digits):
    held = calibrate.held_out(digits)
    alone = calibrate.conformal(digits, sites=[3], held=held)
    assert alone.rows == len(held.sites[3])
    few = held._replace(sites=[held.sites[3][:5]])
    assert calibrate.conformal(digits, held=few).sets(held.p).all()
    missing = held._replace(sites=[rows[held.y[rows] != 4] for rows in held.sites])
    sets = calibrate.conformal(digits, by_class=True, held=missing).sets(held.p)
    assert sets[:, 4].all()
    assert not sets.all()


def test_validation_rows_calibrate_where_the_run_has_them():
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=10, seed=0)
    run = fitted(clients, method=fb.methods.fedavg(epochs=1), rounds=1, validation=0.2)
    held = calibrate.held_out(run)
    assert held.source == "validation rows"
    assert calibrate.conformal(run, held=held).rows == len(run.task.validation)
    torch.testing.assert_close(held.y, clients.data.y[run.task.validation])


def test_what_can_t_be_calibrated_says_so(digits, line):
    with pytest.raises(InputError, match="did you mean 'adaptive'"):
        calibrate.conformal(digits, score="adaptiv")
    with pytest.raises(InputError, match="by_class needs classes"):
        calibrate.conformal(line, by_class=True)
    with pytest.raises(InputError, match="temperature scaling is for classes"):
        calibrate.temperature(line)
    with pytest.raises(ValueError, match="coverage must lie strictly between"):
        calibrate.conformal(digits, 90)
    nothing = calibrate.held_out(digits)._replace(sites=[torch.zeros(0).long()])
    with pytest.raises(InputError, match="no held-out row"):
        calibrate.conformal(digits, held=nothing)
    with pytest.raises(InputError, match="temperature: no held-out row at any site"):
        calibrate.temperature(digits, held=nothing)
    unjudged = calibrate.held_out(digits)._replace(judge_sites=[torch.zeros(0).long()])
    with pytest.raises(InputError, match="no row is left to judge by"):
        compared(digits, unjudged)
    blind = replace(digits.task.clients.data, test_x=digits.task.clients.data.test_x[:0])
    run = replace(digits, task=replace(digits.task, clients=replace(digits.task.clients, data=blind)))
    with pytest.raises(InputError, match="no test rows"):
        calibrate.held_out(run)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_a_site_calibrates_on_its_own_rows_alone(validation):
    """Of a validation share too: rows that a site held out itself, found by hand."""
    clients = fb.data.load("digits").split(fb.partition.dirichlet(0.3), clients=4, seed=0)
    run = fitted(clients, method=fb.methods.fedavg(epochs=1), rounds=1, validation=validation)
    held = calibrate.held_out(run)
    alone = [calibrate.conformal(run, 0.9, sites=[k], held=held).rows for k in range(4)]
    if validation:
        trained = [set(run.task.clients.train_rows(k).tolist()) for k in range(4)]
        own = [len(set(clients.train_rows(k).tolist()) - trained[k]) for k in range(4)]
        assert alone == own
        for k, rows in enumerate(held.sites):
            assert set(run.task.validation[rows].tolist()) <= set(clients.train_rows(k).tolist()) - trained[k]
        assert calibrate.conformal(run, 0.9, sites=[0, 2], held=held).rows == own[0] + own[2]
        assert calibrate.conformal(run, 0.9, held=held).rows == sum(own)
    else:
        assert alone == [len(rows.unique()) for rows in held.sites]


@pytest.mark.parametrize("site", [4, -1, "north"])
def test_a_site_that_is_not_there_is_named(digits, site):
    site = 10 if site == 4 else site
    with pytest.raises(InputError, match=f"there is no site {site!r}; there are 0 to 9"):
        calibrate.conformal(digits, sites=[site])
