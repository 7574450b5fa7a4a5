"""OOD scores of runs: one road for every predictor, held against predictions, closed forms and numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbayes as fb
from fedbayes.data import Prepare, from_arrays
from fedbayes.errors import InputError
from fedbayes.evaluate import ood
from fedbayes.evaluate.outside import outside as outside_set
from fedbayes.model.predictive import draw_weights
from fedbayes.posterior.values import Draws

PREPARE = Prepare((0.4,), (0.2,))


def pictures(rows: int = 120, seed: int = 0):
    """Three classes of 1x4x4 pictures in bytes, which the network sees normalised."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % 3
    x = 40 * torch.rand(rows, 1, 4, 4, generator=random)
    x[torch.arange(rows), 0, y] += 150
    return from_arrays(x.to(torch.uint8)[40:], y[40:], x.to(torch.uint8)[:40], y[:40], prepare=PREPARE, classes=3)


def network(drop: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 3))


def trained(method, net=None, data=None, rounds=3):
    clients = (data or pictures()).split(fb.partition.iid(), clients=4, seed=0)
    return fb.fit(net or network(), clients, method=method, rounds=rounds, engine="loop")


def with_parts(run, parts):
    state = run.progress.state._replace(broadcast=parts)
    return replace(run, progress=run.progress._replace(state=state))


@pytest.fixture(scope="module")
def runs():
    point = trained(fb.methods.fedavg(lr=0.1))
    gaussian = trained(fb.methods.feduab(draws=7, initial=0.3))
    member = point.posterior.mean
    values = member + 0.2 * torch.randn(5, len(member), generator=torch.Generator().manual_seed(2))
    return {
        "point": point,
        "gaussian": gaussian,
        "ensemble": with_parts(point, {**point.parts, "model": Draws(values, point.posterior.layout)}),
        "mc dropout": trained(fb.methods.fedavg(lr=0.1, mc_dropout=True, test_draws=6), network(0.4)),
    }


PREDICTORS = ("point", "gaussian", "ensemble", "mc dropout")


@pytest.mark.parametrize("kind", PREDICTORS)
def test_scores_of_probabilities_are_those_of_the_prediction(runs, kind):
    x = pictures(seed=5).x
    p, found = runs[kind].predict(x), ood.scores(runs[kind], x)
    near = {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(found["msp"], 1 - p.probs.amax(-1), **near)
    torch.testing.assert_close(found["entropy"], p.entropy, **near)
    if kind == "point":
        assert not {"mutual_information", "epistemic"} & set(found)
    else:
        torch.testing.assert_close(found["mutual_information"], p.mutual_information, **near)
        torch.testing.assert_close(found["epistemic"], p.epistemic.sum(-1), **near)
    assert all(v.shape == (len(x),) and v.dtype == torch.float64 and v.isfinite().all() for v in found.values())


@pytest.mark.parametrize("kind", ["point", "gaussian", "ensemble"])
def test_logit_scores_are_means_over_draws(runs, kind):
    run, x = runs[kind], pictures(seed=5).x
    model = run.task.program.model
    drawn = draw_weights(run.parts, 1 if kind == "point" else 7, run.task.seed, "predict")["model"]
    logits = torch.stack([model.output(model.weights({"model": v}), x) for v in drawn]).double()
    found = ood.scores(run, x, temperature=2.0)
    torch.testing.assert_close(found["max_logit"], -logits.amax(-1).mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["energy"], -2 * (logits / 2).logsumexp(-1).mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PREDICTORS)
def test_bytes_and_numbers_of_the_same_picture_score_alike(runs, kind):
    x = pictures().test_x
    bytes_, numbers = ood.scores(runs[kind], x), ood.scores(runs[kind], x.float() / 255)
    seen = ood.scores(ood.as_seen(runs[kind]), (x.float() / 255 - 0.4) / 0.2, distance=ood.fit_distance(runs[kind]))
    for name in bytes_:
        torch.testing.assert_close(bytes_[name], numbers[name])
        torch.testing.assert_close(bytes_[name], seen[name], rtol=1e-4, atol=1e-6)


def test_odin_moves_what_the_network_sees(runs):
    # With one linear map f = W x the gradient of log max softmax(f / T) is known in closed form.
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    run = trained(fb.methods.fedavg(lr=0.05), net)
    weight, bias = (q.mean.double() for q in run.posterior.named().values())
    weight, bias = weight.reshape(3, 16), bias.reshape(3)
    x = pictures().test_x
    seen = ((x.double() / 255 - 0.4) / 0.2).flatten(1)
    probs = ((seen @ weight.mT + bias) / 1000).softmax(-1)
    slope = weight[probs.argmax(-1)] - probs @ weight
    moved = ((seen + 0.0014 * slope.sign()) @ weight.mT + bias) / 1000
    torch.testing.assert_close(ood.scores(run, x)["odin"], 1 - moved.softmax(-1).amax(-1), rtol=1e-6, atol=1e-8)


def test_mahalanobis_equals_numpy_on_pooled_features(runs):
    run = runs["point"]
    data, x = run.task.clients.data, pictures(seed=9).x
    named = {n: q.mean.reshape(s) for (n, q), s in zip(run.posterior.named().items(), [(8, 16), (8,), (3, 8), (3,)])}

    def hidden(rows):
        seen = ((rows.float() / 255 - 0.4) / 0.2).flatten(1)
        return F.linear(seen, named["1.weight"], named["1.bias"]).relu().double().numpy()

    train, y = hidden(data.x), data.y.numpy()
    means = np.stack([train[y == c].mean(0) for c in range(3)])
    within = train - means[y]
    covariance = within.T @ within / len(train)
    covariance = (1 - 1e-6) * covariance + 1e-6 * covariance.trace() / 8 * np.eye(8)
    apart = hidden(x)[:, None] - means
    expected = np.einsum("ncd,de,nce->nc", apart, np.linalg.inv(covariance), apart).min(1)
    np.testing.assert_allclose(ood.scores(run, x)["mahalanobis"].numpy(), expected, rtol=2e-3)


def test_an_ensemble_measures_distance_with_each_members_own_features(runs):
    run, x = runs["ensemble"], pictures().test_x
    values = run.posterior.values
    each = [
        ood.scores(with_parts(run, {**run.parts, "model": Draws(v[None], run.posterior.layout)}), x)["mahalanobis"]
        for v in values
    ]
    torch.testing.assert_close(ood.scores(run, x)["mahalanobis"], torch.stack(each).mean(0))


@pytest.mark.parametrize("kind", ["point", "gaussian", "ensemble"])
def test_batches_don_t_change_a_score(runs, kind):
    x = pictures(2400).x[:2100]
    whole = ood.scores(runs[kind], x)
    last = ood.scores(runs[kind], x[-50:])
    for name in whole:
        torch.testing.assert_close(whole[name][-50:], last[name], rtol=1e-4, atol=1e-6)


def test_the_head_of_a_users_own_module_is_found():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Parameter(0.1 * torch.randn(3, 16))
            self.side = nn.Linear(3, 7)

        def forward(self, x):
            logits = F.linear(x.flatten(1), self.head)
            self.side(logits)  # a linear map after the head whose result is not the output
            return logits

    run = trained(fb.methods.fedavg(), Own(), rounds=1)
    model = run.task.program.model
    x = pictures().test_x
    found = ood.features(model, {part: q.mean for part, q in run.parts.items()}, x)
    torch.testing.assert_close(found, model.inputs(x).flatten(1))


def test_a_network_without_a_linear_head_has_no_distance():
    net = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    run = trained(fb.methods.fedavg(), net, rounds=1)
    assert "mahalanobis" not in ood.scores(run, pictures().test_x)
    with pytest.raises(InputError, match="no linear layer"):
        ood.scores(run, pictures().test_x, only=["mahalanobis"])


def test_mc_dropout_is_offered_where_the_predictor_leaves_dropout_off(runs):
    run = trained(fb.methods.fedavg(), network(0.4), rounds=1)
    x = pictures().test_x
    found = ood.scores(run, x)
    assert {"mc_dropout", "msp"} <= set(found)
    assert not torch.equal(found["mc_dropout"], found["msp"])
    torch.testing.assert_close(found["mc_dropout"], ood.scores(run, x)["mc_dropout"])
    assert all("mc_dropout" not in ood.scores(runs[kind], x) for kind in PREDICTORS)


def test_inputs_far_along_their_own_direction_are_far_by_distance(runs):
    run = runs["gaussian"]
    data = run.task.clients.data
    seen, far = ood.as_seen(run), 300 * run.task.program.model.inputs(data.x)
    distance = ood.fit_distance(run)
    inside = ood.scores(run, data.test_x, distance=distance)
    outside = ood.scores(seen, far, distance=distance)
    assert fb.scores.auroc(inside["mahalanobis"], outside["mahalanobis"]) > 0.95


def test_real_and_multilabel_targets_have_the_scores_that_mean_something():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    method = fb.methods.feduab(draws=4, initial=0.2)
    real = trained(method, net, from_arrays(x[:40], x[:40, :2], x[40:], x[40:, :2], standardise=True))
    found = ood.scores(real, x)
    assert set(found) == {"epistemic", "mahalanobis"}
    units = real.task.clients.data.target_scale.std
    expected = (real.predict(x).epistemic / units**2).sum(-1)
    torch.testing.assert_close(found["epistemic"], expected, check_dtype=False, rtol=1e-4, atol=1e-6)
    labels = trained(method, net, from_arrays(x[:40], (x[:40, :2] > 0).long(), x[40:], (x[40:, :2] > 0).long()))
    p, found = labels.predict(x), ood.scores(labels, x)
    assert set(found) == set(ood.OF_KIND["labels"])
    torch.testing.assert_close(found["entropy"], p.entropy, check_dtype=False, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found["mutual_information"], p.mutual_information, check_dtype=False, rtol=1e-3, atol=1e-6
    )


def test_inputs_that_do_not_fit_are_refused_with_the_mend(runs):
    run = runs["point"]
    good = pictures().test_x
    for bad, said in [
        (torch.zeros(3, 1, 5, 5), r"\[1, 5, 5\], the run was trained on \[1, 4, 4\]: resize"),
        (good[:0], "x is empty"),
        (torch.full((2, 1, 4, 4), torch.nan), "not finite"),
        (good.long(), "tokens and measurements"),
        (good.int(), "give bytes"),
    ]:
        with pytest.raises(InputError, match=said):
            ood.scores(run, bad)
    with pytest.raises(InputError, match="did you mean 'entropy'"):
        ood.scores(run, good, only=["entropi"])
    with pytest.raises(InputError, match="unknown score for this run 'mutual_information'"):
        ood.scores(run, good, only=["mutual_information"])


def test_noise_for_tables_is_of_what_the_network_sees():
    """Categories and flags make that wider than stored rows."""
    table = {"age": [*range(40, 79), np.nan], "ward": ["a", "b"] * 20, "ill": [0, 1] * 20}
    sites = fb.data.from_tables({"aachen": table, "basel": table}, target="ill", kind="classes", seed=0)
    run = fb.fit("linear", sites, method=fb.methods.feduab(epochs=1), rounds=1)
    for name in ("uniform-noise", "train@5"):
        place = outside_set(name, run)
        assert place.x.shape[1:] == sites.data.seen_shape == (4,)
        scores = ood.scores(place.run, place.x, distance=ood.fit_distance(run))
        assert all(score.isfinite().all() for score in scores.values())
    with pytest.raises(InputError, match=r"inputs of shape \[2\], the run was trained on \[4\]"):
        ood.scores(ood.as_seen(run), sites.data.x.nan_to_num())


def test_scores_take_what_predictions_take():
    table = {"age": np.linspace(40, 80, 40), "ward": np.array(["a", "b"] * 20), "ill": np.array([0, 1] * 20)}
    sites = fb.data.from_tables({"aachen": table, "basel": table}, target="ill", kind="classes", seed=0)
    run = fb.fit("linear", sites, method=fb.methods.feduab(epochs=1), rounds=1)
    new = {"age": [60.0, 199.0], "ward": ["a", "b"]}
    scored, stored = fb.ood.scores(run, new), fb.ood.scores(run, run.stored(new))
    assert {name: score.tolist() for name, score in scored.items()} == {n: s.tolist() for n, s in stored.items()}
    rows = [[1.0, 2.0], [3.0, 4.0]]
    pairs = [(np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32), np.array([0, 1] * 6))] * 2
    plain = fb.fit(nn.Linear(2, 2), pairs, method="fedavg", rounds=1)
    for x in (rows, np.array(rows, np.float32)):
        torch.testing.assert_close(fb.ood.scores(plain, x), fb.ood.scores(plain, torch.tensor(rows)))
