"""Likelihoods of survival against loops and lifelines; what a federation of linear models must come to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.data import from_arrays, from_clients
from fedbayes.errors import InputError
from fedbayes.model.likelihood import cox, hazard, likelihood_for
from fedbayes.model.model import Model
from fedbayes.model.predictive import band_of
from fedbayes.model.survival import Cuts, chances_in, exponential_log_likelihood

KEPT = json.loads((Path(__file__).parents[1] / "scores/survival_oracle.json").read_text())
TIMES = (0.2, 0.6, 1.5)
TARGET = torch.tensor([[0.1, 1.0], [0.2, 1], [0.35, 0], [0.45, 0], [1.0, 1], [2.0, 1], [0.0, 1]])


def _baseline(likelihood):
    return {"likelihood.baseline": likelihood.parameters["baseline"].double()}


def test_the_hazards_of_intervals_by_a_loop():
    likelihood = hazard(TIMES, chances=(0.1, 0.2, 0.3))
    output = torch.linspace(-1, 1, len(TARGET), dtype=torch.float64)[:, None]
    found = likelihood.log_prob(output, TARGET.double(), _baseline(likelihood))
    # (intervals survived, the interval of the event)
    story = [(0, 0), (0, 0), (1, None), (2, None), (2, 2), (3, None), (0, 0)]
    logits = torch.tensor([0.1, 0.2, 0.3]).double().logit()
    for (survived, last), f, value in zip(story, output[:, 0], found):
        chance = (logits + f).sigmoid()
        expected = (1 - chance[:survived]).log().sum() + (0 if last is None else chance[last].log())
        assert float(value) == pytest.approx(float(expected), abs=1e-6)
    curve, variance = likelihood.moments(output, _baseline(likelihood))
    torch.testing.assert_close(curve[0], (1 - (logits - 1).sigmoid()).cumprod(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(variance, curve * (1 - curve))


def test_coxs_partial_likelihood_by_a_loop_and_padding_is_free():
    likelihood = cox(TIMES)
    net = nn.Linear(2, 1)
    model = Model.of(net, likelihood, prepare=lambda x: x)
    x = torch.randn(len(TARGET), 2, generator=torch.Generator().manual_seed(0))
    vectors = model.initial()
    weights = model.weights(vectors)
    output = model.output(weights, x)
    partial = 0.0
    for (t, event), f in zip(TARGET.tolist(), output[:, 0]):
        if event:
            partial += float(f - output[TARGET[:, 0] >= t, 0].logsumexp(0))
    empty = TARGET * torch.tensor([1.0, 0.0])
    rows = likelihood.log_prob(output, TARGET, weights).sum() - likelihood.log_prob(output, empty, weights).sum()
    masses = torch.full((3,), 0.1).neg().log1p().neg()
    inside = torch.tensor([3.0, 0, 1])  # events of each interval
    baseline = (inside * masses.log()).sum() + output[[0, 1, 4, 6], 0].sum()
    assert float(rows) == pytest.approx(partial + float(baseline), abs=1e-5)
    padded = torch.cat([output, torch.full((3, 1), 50.0)])
    mask = torch.tensor([True] * len(TARGET) + [False] * 3)
    rubbish = torch.full((3, 2), 9.0)
    whole = model.nll(output, TARGET, None, weights)
    torch.testing.assert_close(model.nll(padded, torch.cat([TARGET, rubbish]), mask, weights), whole)


def test_a_draw_that_expects_many_events_does_not_outweigh_the_others():
    """The baseline's slope by a row is that of the likelihood up to two events expected, and bounded beyond."""
    cuts, target = Cuts.of((1.0, 2.0)), torch.tensor([[2.0, 0.0]]).double()

    def slope(risk):
        masses = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        value = exponential_log_likelihood(torch.tensor([risk]).double(), masses, target, cuts).sum()
        return torch.autograd.grad(value, masses)[0].tolist()

    assert slope(0.5) == pytest.approx([-np.exp(0.5)] * 2)
    assert slope(30.0) == pytest.approx([-2.0] * 2)


def test_first_chances_are_those_of_the_rows():
    y = torch.tensor([[0.5, 1.0]] * 10 + [[1.0, 0.0]] * 90)
    assert chances_in(y, (1.0,))[0] == pytest.approx(1 - np.exp(-10.5 / 96), rel=1e-6)


def test_a_band_holds_nine_tenths_of_the_draws():
    draws = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    low, high = band_of(draws)
    torch.testing.assert_close(torch.stack([low, high]), draws.quantile(torch.tensor([0.05, 0.95]), dim=0))


def _sites(stratified: bool):
    x, y = np.array(KEPT["x"], np.float32), np.array([KEPT["time"], KEPT["event"]], np.float32).T
    site = np.array(KEPT["site"]) if stratified else np.zeros(len(x), int)
    return from_clients([(x[site == k], y[site == k]) for k in np.unique(site)], kind="survival")


@pytest.mark.parametrize("stratified", [False, True], ids=["one site", "three sites"])
def test_full_batches_of_cox_come_to_the_pooled_fit(stratified):
    """One site: Cox's own fit. Several: the fit stratified by site, as risk sets are those of a site."""
    clients = _sites(stratified)
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    method = fb.methods.fedavg(lr=2.0, epochs=1, batch=80)
    run = fb.fit(net, clients, method=method, rounds=90, likelihood="cox", evaluate_every=90)
    expected = torch.tensor(KEPT["stratified" if stratified else "cox"])
    torch.testing.assert_close(run.posterior.mean[:3], expected, atol=2e-5, rtol=0)


def test_hazards_of_sites_are_those_of_the_pooled_rows():
    """A sum over rows: full batches of three sites make the step of one batch of all."""
    runs = []
    for stratified in (True, False):
        clients = _sites(stratified)
        torch.manual_seed(0)
        method = fb.methods.fedavg(lr=0.5, epochs=1, batch=80)
        net = nn.Linear(3, 1)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        runs.append(fb.fit(net, clients, method=method, rounds=10, likelihood="hazard", evaluate_every=10))
    torch.testing.assert_close(runs[0].posterior.mean, runs[1].posterior.mean, atol=1e-5, rtol=1e-4)


def test_likelihoods_and_targets_must_fit():
    data = from_arrays(np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="cox is not for classes targets"):
        likelihood_for(data, "cox")
    clients = _sites(True)
    with pytest.raises(InputError, match="classes is not for survival targets; use one of hazard, cox"):
        fb.fit(nn.Linear(3, 1), clients, rounds=1, likelihood="classes")
    with pytest.raises(InputError, match="chances: give one"):
        hazard(TIMES, chances=(0.1,))
    with pytest.raises(InputError, match="no accuracy"):
        fb.fit(nn.Linear(3, 1), clients, rounds=1, monitor="accuracy")
