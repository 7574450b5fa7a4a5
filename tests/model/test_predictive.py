"""The predictive distribution: Kwon's parts, entropies, units, ensembles, MC dropout."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedbayes.model import predictive as predict
from fedbayes.model.likelihood import bernoulli, categorical, custom, normal
from fedbayes.model.model import Model
from fedbayes.model.predictive import Predictive, draw_weights, predictive
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Draws, Gaussian, Grafted, Point


def _classifier(dtype=torch.float64) -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)
    return Model.of(net, categorical(), prepare=lambda x: x)


def _parts(model: Model, scale: float = 0.5) -> dict:
    mean = model.initial()["model"]
    return {"model": Gaussian(mean, torch.full_like(mean, scale), model.layouts["model"])}


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _member_probs(model: Model, values: torch.Tensor) -> torch.Tensor:
    """Each member's probabilities by torch.nn alone."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(values.dtype)
    out = []
    for row in values:
        nn.utils.vector_to_parameters(row, net.parameters())
        out.append(net(X.to(values.dtype)).softmax(-1).detach())
    return torch.stack(out)


def _draws(model: Model, count: int = 6) -> Draws:
    mean = model.initial()["model"]
    g = torch.Generator().manual_seed(3)
    return Draws(mean + torch.randn(count, len(mean), generator=g, dtype=mean.dtype), model.layouts["model"])


def test_an_ensembles_prediction_is_kwons_split_of_its_members():
    model = _classifier()
    q = _draws(model)
    p = predictive(model, {"model": q}, X, draws=99)
    probs = _member_probs(model, q.values)
    torch.testing.assert_close(p.probs, probs.mean(0))
    torch.testing.assert_close(p.aleatoric, (probs - probs**2).mean(0))
    torch.testing.assert_close(p.epistemic, probs.var(0, unbiased=False))
    # The whole matrices of FedUAB eq. 12, of which ours are the diagonals.
    spread = probs - probs.mean(0)
    epistemic = torch.einsum("znc,znd->ncd", spread, spread) / len(probs)
    aleatoric = (torch.diag_embed(probs) - torch.einsum("znc,znd->zncd", probs, probs)).mean(0)
    torch.testing.assert_close(p.epistemic, epistemic.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(p.aleatoric, aleatoric.diagonal(dim1=-2, dim2=-1))


def test_the_two_parts_add_up_to_the_variance_of_the_mixture():
    model = _classifier()
    p = predictive(model, _parts(model), X, draws=40)
    torch.testing.assert_close(p.aleatoric + p.epistemic, p.probs - p.probs**2)
    torch.testing.assert_close(p.total, p.probs - p.probs**2)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(7).double())
    assert (p.epistemic > 0).all()


def test_a_network_trained_in_bfloat16_predicts_in_the_precision_of_its_weights():
    """A posterior so narrow that bfloat16 would round its draws to one and the same network."""
    model = _classifier(torch.float32)
    coarse, parts, x = replace(model, bfloat16=True), _parts(model, 1e-4), X.float()
    got, want = (predictive(m, parts, x, draws=40) for m in (coarse, model))
    torch.testing.assert_close(got.epistemic, want.epistemic, rtol=1e-4, atol=0)
    assert (want.epistemic > 1e-12).all()
    drawn = draw_weights(parts, 40, 0, "predict")["model"]
    rounded = torch.stack([coarse.output(coarse.weights({"model": w}), x).softmax(-1) for w in drawn])
    assert ((rounded.var(0) / want.epistemic.clamp(min=1e-30)).log().abs() > 0.5).any()  # why it matters


def test_entropy_and_mutual_information_of_an_ensemble():
    model = _classifier()
    q = _draws(model)
    p = predictive(model, {"model": q}, X)
    probs = _member_probs(model, q.values)
    total = torch.distributions.Categorical(probs.mean(0)).entropy()
    each = torch.distributions.Categorical(probs).entropy().mean(0)
    torch.testing.assert_close(p.entropy, total)
    torch.testing.assert_close(p.expected_entropy, each)
    torch.testing.assert_close(p.mutual_information, total - each)


def _sure(probs: list[list[float]], each: float) -> Predictive:
    zero = torch.zeros(1, len(probs[0]))
    return Predictive(torch.tensor(probs), zero, zero, torch.tensor([each]))


def test_known_entropies():
    assert float(_sure([[0.25] * 4], 0.0).entropy) == pytest.approx(math.log(4))
    assert float(_sure([[1.0, 0.0]], 0.0).entropy) == 0
    # Two members, each sure, of opposite opinion: all uncertainty is disagreement.
    assert float(_sure([[0.5, 0.5]], 0.0).mutual_information) == pytest.approx(math.log(2))
    assert float(_sure([[0.5, 0.5]], math.log(2)).mutual_information) == pytest.approx(0, abs=1e-7)
    assert float(_sure([[0.5, 0.5]], 0.7).mutual_information) == 0  # never below zero by rounding


def test_a_point_has_no_epistemic_part_whatever_the_draws():
    model = _classifier()
    p = predictive(model, {"model": Point(model.initial()["model"])}, X, draws=50)
    assert (p.epistemic == 0).all()
    assert (p.mutual_information < 1e-12).all()
    torch.testing.assert_close(p.probs, model.still(X).softmax(-1))


def test_many_draws_of_a_linear_regression_have_the_analytic_moments():
    model = Model.of(nn.Linear(3, 1).double(), normal(0.3), prepare=lambda x: x)
    mean, scale = torch.tensor([1.0, -1.0, 0.5, 0.2]).double(), torch.tensor([0.5, 0.1, 0.3, 0.2]).double()
    p = predictive(model, {"model": Gaussian(mean, scale)}, X, draws=40_000)
    rows = torch.cat([X, torch.ones(7, 1)], -1)
    variance = (rows**2) @ scale**2
    assert ((p.mean[:, 0] - rows @ mean).abs() < 5 * (variance / 40_000).sqrt()).all()
    torch.testing.assert_close(p.epistemic[:, 0], variance, rtol=5 * (2 / 40_000) ** 0.5, atol=0)
    torch.testing.assert_close(p.aleatoric, torch.full((7, 1), 0.09).double())


def test_a_regression_is_told_in_the_original_units():
    net = nn.Linear(3, 1).double()
    units = (torch.tensor([100.0]), torch.tensor([20.0]))
    plain, scaled = (Model.of(net, normal(0.5), prepare=lambda x: x, units=u) for u in (None, units))
    parts = _parts(plain, 0.2)
    a, b = (predictive(model, parts, X, draws=10) for model in (plain, scaled))
    torch.testing.assert_close(b.mean, a.mean * 20 + 100)
    torch.testing.assert_close(b.aleatoric, a.aleatoric * 400)
    torch.testing.assert_close(b.epistemic, a.epistemic * 400)
    torch.testing.assert_close(b.aleatoric, torch.full((7, 1), 100.0).double())


def test_a_regression_has_no_class_probabilities():
    model = Model.of(nn.Linear(3, 1).double(), normal(), prepare=lambda x: x)
    p = predictive(model, _parts(model), X, draws=3)
    for name in ("probs", "entropy", "mutual_information"):
        with pytest.raises(TypeError, match=r"\.mean and \.total"):
            getattr(p, name)


def test_learned_noise_is_the_aleatoric_part():
    model = Model.of(nn.Linear(3, 1).double(), normal(2.0, learn=True), prepare=lambda x: x)
    start = {part: Point(v.double()) for part, v in model.initial().items()}
    p = predictive(model, start, X)
    torch.testing.assert_close(p.aleatoric, torch.full((7, 1), 4.0).double())


def test_labels_have_entropies_that_add_over_labels():
    model = Model.of(nn.Linear(3, 4).double(), bernoulli(), prepare=lambda x: x)
    p = predictive(model, {"model": Point(model.initial()["model"])}, X)
    want = torch.distributions.Bernoulli(model.still(X).sigmoid()).entropy().sum(-1)
    torch.testing.assert_close(p.entropy, want)
    assert p.kind == "labels"


def test_a_custom_likelihood_predicts_the_outputs():
    model = Model.of(nn.Linear(3, 2).double(), custom(lambda out, y: -(out - y).abs().sum(-1)), prepare=lambda x: x)
    p = predictive(model, {"model": Point(model.initial()["model"])}, X)
    torch.testing.assert_close(p.mean, model.still(X))
    assert (p.total == 0).all()


def test_the_same_seed_gives_the_same_answer_and_another_seed_another():
    model = _classifier()
    a, b, c = (predictive(model, _parts(model), X, draws=5, seed=s).probs for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_every_input_meets_the_same_draws_however_it_is_batched():
    model = _classifier()
    whole, cut = (predictive(model, _parts(model), X, draws=5, batch=b) for b in (1024, 2))
    torch.testing.assert_close(whole.probs, cut.probs)
    torch.testing.assert_close(whole.epistemic, cut.epistemic)
    alone = predictive(model, _parts(model), X[3:4], draws=5)
    torch.testing.assert_close(alone.probs, whole.probs[3:4])


def test_one_draw_at_a_time_equals_all_at_once(monkeypatch):
    model = _classifier()
    together = predictive(model, _parts(model), X, draws=5)

    def refuse(*_, **__):
        raise RuntimeError("vmap can't take this network")

    monkeypatch.setattr(predict, "vmap", refuse)
    alone = predictive(model, _parts(model), X, draws=5)
    for a, b in zip(together[:4], alone[:4], strict=True):
        torch.testing.assert_close(a, b)


def _dropping(*layers: nn.Module) -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), *layers, nn.Linear(50, 4))
    return Model.of(net, categorical())


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5)], ids=str)
def test_mc_dropout_varies_with_the_draws_and_repeats_with_the_seed(layer):
    model = _dropping(layer, nn.BatchNorm1d(50))
    parts = {part: Point(v) for part, v in model.initial().items()}
    x = X.float()
    still = predictive(model, parts, x, draws=30)
    a, b, c = (predictive(model, parts, x, draws=30, seed=s, dropout=True) for s in (0, 0, 1))
    assert (still.epistemic == 0).all()
    assert (a.epistemic > 0).all()
    assert torch.equal(a.probs, b.probs)
    assert not torch.equal(a.probs, c.probs)


def test_mc_dropout_has_the_moments_of_dropout():
    # One linear map of dropped inputs: mean x w, variance p / (1 - p) * sum (x w)^2.
    net = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 1, bias=False)).double()
    model = Model.of(net, normal(), prepare=lambda x: x)
    p = predictive(model, {"model": Point(model.initial()["model"])}, X, draws=20_000, dropout=True)
    terms = X * net[1].weight.detach()
    variance = 0.25 * terms.square().sum(-1)
    assert ((p.mean[:, 0] - terms.sum(-1)).abs() < 5 * (variance / 20_000).sqrt()).all()
    torch.testing.assert_close(p.epistemic[:, 0], variance, rtol=0.06, atol=0)


def test_mc_dropout_works_inside_a_transformer_layer():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)

        def forward(self, x):
            return self.layer(x).mean(1)

    torch.manual_seed(0)
    model = Model.of(Net(), categorical())
    parts = {"model": Point(model.initial()["model"])}
    x = torch.randn(3, 5, 4)
    a, b = (predictive(model, parts, x, draws=20, dropout=True) for _ in range(2))
    assert (a.epistemic > 0).all()
    assert torch.equal(a.probs, b.probs)


def test_prediction_leaves_no_graph_and_no_trace_in_the_global_generator():
    model = _classifier()
    before = torch.get_rng_state()
    p = predictive(model, _parts(model), X, draws=5)
    assert not p.probs.requires_grad
    assert torch.equal(before, torch.get_rng_state())


def test_parts_that_the_model_does_not_hold_are_ignored():
    model = _classifier()
    parts = {**_parts(model), "teacher": Gaussian(torch.zeros(3), torch.ones(3), Layout(("t",), ((3,),)))}
    a, b = (predictive(model, given, X, draws=4).probs for given in (parts, _parts(model)))
    assert torch.equal(a, b)


@pytest.mark.parametrize("convolves", [False, True], ids=["linear", "convolution"])
def test_features_are_computed_once_where_only_the_classifier_differs(convolves, monkeypatch):
    torch.manual_seed(0)
    body = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten()] if convolves else [nn.Linear(6, 8)]
    network = nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 3)).double()
    model = Model.of(network, categorical())
    mean, layout = model.initial()["model"], model.layouts["model"]
    head = layout.where("*").nonzero()[-27:, 0]
    graft = Gaussian(mean[head], torch.full((27,), 0.3).double(), layout.select("4.*" if convolves else "2.*"))
    parts = {"model": Grafted(Point(mean, layout), graft, head, layout)}
    x = torch.randn(11, 6).double()
    calls = []
    whole = Model.output
    monkeypatch.setattr(Model, "output", lambda self, *args: calls.append(1) or whole(self, *args))
    p = predictive(model, parts, x, draws=30, seed=3)
    assert len(calls) < 6
    drawn = draw_weights(parts, 30, 3, "predict")["model"]
    outputs = torch.stack([whole(model, model.weights({"model": w}), x).softmax(-1) for w in drawn])
    torch.testing.assert_close(p.probs, outputs.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(p.epistemic, outputs.var(0, correction=0), rtol=1e-8, atol=1e-12)
    # Anything else that differs, and each draw is a pass of its own.
    calls.clear()
    predictive(model, {"model": Gaussian(mean, torch.full_like(mean, 0.1), layout)}, x, draws=30)
    assert len(calls) >= (30 if convolves else 1)
