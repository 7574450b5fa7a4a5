"""Training as a user would call it: reproducible, any network, any likelihood, and clear refusals."""

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.federation.round import open_round
from fedbayes.federation.rule import Rule
from fedbayes.methods import METHODS, fedavg, feduab, fedvi, method_named
from fedbayes.model.likelihood import bernoulli, custom, normal
from fedbayes.options import options_of
from fedbayes.training.prepare import prepare

FAST = {"epochs": 1, "batch": 5}
SMALL = {"rounds": 2, "cohort": 2, "engine": "loop"}


def _clients(shape=(4,), classes=3, sizes=(7, 10, 5), seed=0):
    g = torch.Generator().manual_seed(seed)

    def pair(n):
        return torch.randn(n, *shape, generator=g), torch.randint(classes, (n,), generator=g)

    return fb.data.from_clients([pair(n) for n in sizes], pair(12), classes=classes)


def _net(inputs=4, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, outputs))


def _everything(run) -> list[torch.Tensor]:
    found = [t for q in run.parts.values() for t in (q.moments() if q.mean.is_floating_point() else (q.mean,))]
    whole = run if run.task.program.prediction.whole else run.personal(0)
    return [*found, whole.predict(run.task.clients.data.test_x).mean]


def _same(a, b) -> bool:
    return all(torch.equal(s, t) for s, t in zip(_everything(a), _everything(b), strict=True))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", METHODS)
def test_two_runs_with_one_seed_are_identical_and_another_seed_differs(method, engine):
    def run(seed, disturbance):
        torch.manual_seed(disturbance)  # the global generator plays no role
        options = {**SMALL, "engine": engine, "server_data": torch.ones(64, 4).cumsum(0) / 64}
        short = {**FAST, **({"flow_epochs": 2} if method.endswith("_pf") else {})}
        short = {name: v for name, v in short.items() if name in options_of(METHODS[method])}
        return fb.fit(_fixed, _clients(), method=method_named(method, short), seed=seed, **options)

    _fixed = _net()
    one, two, other = run(0, 1), run(0, 2), run(1, 1)
    assert _same(one, two)
    assert not _same(one, other)
    assert [r["test"] for r in one.journal] == [r["test"] for r in two.journal]


def test_training_leaves_the_users_network_and_the_global_generator_alone():
    net = _net()
    net[2].eval()
    before, state = [p.clone() for p in net.parameters()], torch.get_rng_state()
    fb.fit(net, _clients(), method=feduab(**FAST), **SMALL)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert net.training
    assert not net[2].training


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_the_order_of_the_cohort_does_not_matter(method):
    def uploads(order_of):
        task = prepare(_net(), _clients(), method=method_named(method, FAST), engine="loop")
        order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
        return {k: task.engine.client(task.program, order, k, None)[0].parts["model"] for k in order_of}

    first, last = uploads([0, 1, 2]), uploads([2, 0, 1])
    for k in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first[k].moments(), last[k].moments(), strict=True))


def test_a_client_does_the_same_whoever_else_is_in_the_cohort():
    method = fedavg(**FAST)
    pairs = [(x, torch.arange(len(x)) % 3) for x in (torch.randn(6, 4), torch.randn(8, 4))]
    alone = fb.fit(_net(), fb.data.from_clients(pairs[:1], classes=3), method=method, rounds=1, engine="loop")
    task = prepare(_net(), fb.data.from_clients(pairs, classes=3), method=method, engine="loop")
    order = open_round(task.program, task.begin().state, clients=2, cohort=2, seed=0)
    upload = task.engine.client(task.program, order, 0, None)[0].parts["model"].mean
    torch.testing.assert_close(alone.posterior.mean, upload, rtol=1e-6, atol=1e-7)


class Encoder(nn.Module):
    """A small transformer encoder, as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.norm(self.layer(self.embedding(tokens))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


def _convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


def _tokens(sizes=(7, 10, 5)):
    g = torch.Generator().manual_seed(0)

    def pair(n):
        return torch.randint(11, (n, 6), generator=g), torch.randint(3, (n,), generator=g)

    return fb.data.from_clients([pair(n) for n in sizes], pair(12), classes=3)


NETWORKS = {
    "transformer encoder": (Encoder, _tokens),
    "BatchNorm convnet": (_convnet, lambda: _clients((1, 6, 6))),
    "GRU": (Recurrent, lambda: _clients((5, 4))),
}


@pytest.mark.parametrize("method", ["fedavg", "feduab", "feduab with draws"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_users_network_trains_unchanged_and_repeats(name, method):
    make, clients = NETWORKS[name]
    chosen = {
        "fedavg": fedavg(**FAST),
        "feduab": feduab(test_draws=3, **FAST),
        "feduab with draws": feduab(draws=2, **FAST),
    }[method]

    def run():
        torch.manual_seed(0)
        return fb.fit(make(), clients(), method=chosen, **SMALL)

    one, two = run(), run()
    assert _same(one, two)
    assert not any(r["left_out"] for r in one.journal)
    assert all(torch.isfinite(t).all() for t in _everything(one))
    moved = one.posterior.named()
    for name, q in one.task.program.initial["model"].named().items():
        assert not torch.equal(moved[name].mean, q.mean), f"{name} was not trained"


def test_attention_dropout_does_not_depend_on_who_came_first():
    # Dropout inside attention reads torch's own generator; counting noise by a dry run must not advance it.
    def uploads(order_of):
        torch.manual_seed(0)
        task = prepare(Encoder(), _tokens(), method=fedavg(**FAST), engine="loop")
        order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
        return {k: task.engine.client(task.program, order, k, None)[0].parts["model"].mean for k in order_of}

    first, last = uploads([0, 1, 2]), uploads([2, 0, 1])
    assert all(torch.equal(first[k], last[k]) for k in range(3))


def test_batch_norm_scales_and_shifts_are_points_by_default():
    torch.manual_seed(0)
    run = fb.fit(_convnet(), _clients((1, 6, 6)), method=feduab(**FAST), **SMALL)
    assert run.parts["points"].layout.names == ("1.weight", "1.bias")
    assert isinstance(run.parts["points"], fb.Point)
    assert isinstance(run.posterior, fb.Gaussian)
    assert "1.weight" not in run.posterior.layout.names


def test_training_learns_a_separable_problem():
    g = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(5):
        x = torch.randn(30, 2, generator=g)
        pairs.append((x, (x[:, 0] > x[:, 1]).long()))
    x = torch.randn(200, 2, generator=g)
    clients = fb.data.from_clients(pairs, (x, (x[:, 0] > x[:, 1]).long()))
    for method in (fedavg(lr=0.2), feduab(lr=0.2, draws=3, test_draws=20)):
        torch.manual_seed(0)
        run = fb.fit(nn.Linear(2, 2), clients, method=method, rounds=5)
        assert run.scores()["accuracy"] > 0.93
        assert run.journal[-1]["test"]["nll"] < run.journal[0]["test"]["nll"]


def _regression(dims=1, noise=0.5, standardise=False):
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(3, dims, generator=g)

    def pair(n):
        x = torch.randn(n, 3, generator=g)
        return x, 5 + 2 * (x @ weights + noise * torch.randn(n, dims, generator=g))

    return fb.data.from_clients([pair(40) for _ in range(3)], pair(300), standardise=standardise)


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_learned_observation_noise_finds_the_noise_of_the_data(method):
    options = {"optimiser": "adam", "lr": 0.1, "epochs": 10, "batch": 20}
    torch.manual_seed(0)
    likelihood = normal(2.0, learn=True)
    run = fb.fit(nn.Linear(3, 1), _regression(), method=method_named(method, options), likelihood=likelihood, rounds=10)
    p = run.predict(run.task.clients.data.test_x)
    assert float(p.aleatoric.mean() ** 0.5) == pytest.approx(1.0, rel=0.2)
    assert float(run.scores()["rmse"]) == pytest.approx(1.0, rel=0.15)


def test_fixed_observation_noise_stays_fixed():
    torch.manual_seed(0)
    run = fb.fit(nn.Linear(3, 1), _regression(), method=fedavg(**FAST), likelihood=normal(0.7), **SMALL)
    assert torch.allclose(run.predict(run.task.clients.data.test_x).aleatoric, torch.tensor(0.49))
    assert all(n in ("weight", "bias") for n in run.posterior.layout.names)


def test_standardised_targets_are_predicted_in_their_own_units():
    torch.manual_seed(0)
    clients = _regression(standardise=True)
    run = fb.fit(nn.Linear(3, 1), clients, method=fedavg(lr=0.1, epochs=10), likelihood=normal(0.5), rounds=3)
    p = run.predict(clients.data.test_x)
    y = clients.data.target_scale.undo(clients.data.test_y)
    assert float((p.mean - y).square().mean().sqrt()) == pytest.approx(run.scores()["rmse"], rel=1e-4)
    assert 0.8 < run.scores()["rmse"] < 1.3
    assert abs(float(p.mean.mean()) - 5) < 1


def test_several_real_targets_train():
    torch.manual_seed(0)
    run = fb.fit(nn.Linear(3, 2), _regression(dims=2), method=feduab(**FAST), likelihood=normal(), **SMALL)
    assert run.predict(torch.zeros(4, 3)).mean.shape == (4, 2)


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_many_labels_train_under_the_bernoulli_likelihood(method):
    g = torch.Generator().manual_seed(0)

    def pair(n):
        x = torch.randn(n, 4, generator=g)
        return x, torch.stack([x[:, 0] > 0, x[:, 1] > x[:, 2]], -1).long()

    clients = fb.data.from_clients([pair(30) for _ in range(3)], pair(100))
    assert clients.data.kind == "labels"
    torch.manual_seed(0)
    options = {"lr": 0.3, "epochs": 3, "batch": 10}
    run = fb.fit(nn.Linear(4, 2), clients, method=method_named(method, options), likelihood=bernoulli(), rounds=4)
    p = run.predict(clients.data.test_x)
    assert ((p.probs > 0.5) == clients.data.test_y.bool()).float().mean() > 0.9
    assert p.entropy.shape == (100,)


def test_a_users_own_likelihood_is_one_function():
    # Laplace noise: the fitted constant is the median, not the mean.
    x = torch.zeros(9, 1)
    y = torch.tensor([[0.0], [0], [0], [0], [1], [1], [2], [50], [50]])
    clients = fb.data.from_clients([(x, y)], (x, y))
    method = fedavg(lr=0.5, epochs=40, batch=9, lr_decay=0.5)
    likelihood = custom(lambda out, target: -(out - target).abs().sum(-1))
    run = fb.fit(nn.Linear(1, 1), clients, method=method, likelihood=likelihood, rounds=10)
    assert float(run.predict(torch.zeros(1, 1)).mean) == pytest.approx(1.0, abs=0.1)
    assert all(np.isfinite(v) for v in run.scores().values())


def test_a_new_rule_of_ten_lines_runs_through_fit():
    def encode(q, w, reference):
        return {"sum": w.double() * q.mean.double().sign() * q.mean.double() ** 2, "weight": w.double()}

    def decode(total, reference):
        mean = total["sum"] / total["weight"]
        root = (mean.sign() * mean.abs().sqrt()).to(reference.mean.dtype)
        return fb.Gaussian(root, torch.full_like(root, 0.1), reference.layout)

    rule = Rule(encode, decode, "signed root of the mean square")
    run = fb.fit(_net(), _clients(), method=fedvi(rule=rule, **FAST), **SMALL)
    assert (run.posterior.scale == 0.1).all()
    assert torch.isfinite(run.posterior.mean).all()
    assert not torch.equal(run.posterior.mean, run.task.program.initial["model"].mean)


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_frozen_weights_do_not_move_and_do_not_travel(method):
    net = _net()
    run = fb.fit(net, _clients(), method=method_named(method, FAST), frozen=("0.*",), **SMALL)
    assert run.posterior.layout.names == ("3.weight", "3.bias")
    free = fb.fit(net, _clients(), method=method_named(method, FAST), **SMALL)
    assert run.journal[0]["bytes_up"] < free.journal[0]["bytes_up"]
    own = dict(run.task.program.model.module.named_parameters())
    assert torch.equal(own["0.weight"], net[0].weight)
    # Zero input: the hidden layer is relu(bias) of the frozen bias, so a change of it would show.
    hidden = net[0].bias.relu()
    q = run.posterior.named()
    want = (q["3.weight"].mean @ hidden + q["3.bias"].mean).softmax(-1)
    if method == "fedavg":
        torch.testing.assert_close(run.predict(torch.zeros(1, 4)).probs[0], want.detach())


def test_points_given_by_pattern_get_no_distribution():
    run = fb.fit(_net(), _clients(), method=fedvi(points=("*.bias",), **FAST), **SMALL)
    assert run.posterior.layout.names == ("0.weight", "3.weight")
    assert run.parts["points"].layout.names == ("0.bias", "3.bias")


def test_mc_dropout_is_a_point_method_that_predicts_with_dropout():
    run = fb.fit(_net(), _clients(), method=fedavg(mc_dropout=True, test_draws=10, **FAST), **SMALL)
    plain = fb.fit(_net(), _clients(), method=fedavg(**FAST), **SMALL)
    assert torch.equal(run.posterior.mean, plain.posterior.mean)
    assert (run.predict(torch.ones(2, 4)).epistemic > 0).all()
    assert (plain.predict(torch.ones(2, 4)).epistemic == 0).all()


@pytest.mark.parametrize("rule", ["nwa", "ws", "lp", "conflation", "wc", "log_pool", "dwc", "mean_rho"])
@pytest.mark.parametrize("prior", ["broadcast", "fixed"])
def test_every_rule_and_prior_trains_finite(rule, prior):
    method = fedvi(rule=rule, prior=prior, kl="1/n", kl_weight=1.0, **FAST)
    run = fb.fit(_net(), _clients(), method=method, rounds=3, engine="loop")
    assert torch.isfinite(run.posterior.mean).all()
    assert (run.posterior.scale > 0).all()
    assert torch.isfinite(run.posterior.scale).all()


@pytest.mark.parametrize("weighting", ["equal", "distance", "discrepancy"])
def test_fedag_gives_point_clients_a_spread(weighting):
    run = fb.fit(_net(), _clients(), method=fedavg(rule="fedag", weighting=weighting, **FAST), rounds=3)
    assert isinstance(run.posterior, fb.Gaussian)
    assert (run.posterior.scale > 0).all()


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_clients_of_one_row_train(method):
    run = fb.fit(_net(), _clients(sizes=(1, 1, 4)), method=method_named(method, FAST), rounds=2)
    assert all(torch.isfinite(t).all() for t in _everything(run))


def test_bytes_and_a_prepared_input_are_read_as_stored():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (20, 1, 2, 2), generator=g, dtype=torch.uint8)
    clients = fb.data.from_clients([(x, torch.randint(2, (20,), generator=g))], (x, torch.zeros(20).long()), classes=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    run = fb.fit(net, clients, method=fedavg(**FAST), rounds=0)
    torch.testing.assert_close(run.predict(x).probs, net(x / 255).softmax(-1).detach())


def _fit(**changed):
    options = {"network": _net(), "clients": _clients(), "method": "fedavg", "rounds": 1, **changed}
    return fb.fit(options.pop("network"), options.pop("clients"), **options)


def _pairs(x=None, y=None):
    good = (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    return [good, (good[0] if x is None else x, good[1] if y is None else y)]


def _with_nan():
    x = torch.randn(5, 4)
    x[3, 1] = torch.nan
    return x


REFUSED = {
    "unknown method": (lambda: _fit(method="feduba"), "method 'feduba'.*did you mean 'feduab'"),
    "unknown option": (lambda: _fit(method=method_named("feduab", {"epoch": 3})), "option.*'epoch'.*'epochs'"),
    "option of another method": (lambda: method_named("fedavg", {"train_draws": 3}), "option of fedavg 'train_draws'"),
    "unknown rule": (lambda: fedvi(rule="logpool"), "rule 'logpool'.*'log_pool'"),
    "unknown weighting": (lambda: _fit(method=fedavg(weighting="sizes")), "weighting 'sizes'.*'size'"),
    "unknown estimator": (lambda: fedvi(estimator="locl"), "estimator 'locl'.*'local'"),
    "unknown prior": (lambda: fedvi(prior="broadcasts"), "prior 'broadcasts'.*'broadcast'"),
    "unknown kl": (lambda: fedvi(kl="blundel"), "kl 'blundel'.*'blundell'"),
    "unknown optimiser": (lambda: fedavg(optimiser="adm"), "optimiser 'adm'.*'adam'"),
    "unknown server optimiser": (lambda: fedavg(server="adm"), "server 'adm'.*'adam'"),
    "unknown engine": (lambda: _fit(engine="lop"), "engine 'lop'.*'loop'"),
    "unknown device": (lambda: _fit(device="gpu"), "device 'gpu'"),
    "gaussian rule for points": (lambda: _fit(method=fedavg(rule="nwa")), "can't pool a Point: use one of fedavg"),
    "point rule for gaussians": (lambda: _fit(method=fedvi(rule="fedavg")), "can't pool a Gaussian: use one of"),
    "cohort too large": (lambda: _fit(cohort=4), "cohort: 4 clients.*only 3"),
    "cohort of none": (lambda: _fit(cohort=0), "cohort must be a positive"),
    "wrong input shape": (lambda: _fit(network=_net(inputs=5)), r"can't take inputs of shape \[4\]"),
    "too many outputs": (lambda: _fit(network=_net(outputs=5)), r"gives \[5\] for each input.*needs \[3\]"),
    "labels out of range": (
        lambda: fb.data.from_clients(_pairs(y=torch.tensor([0, 1, 2, 9, 1])), classes=3),
        "client 1: label 9 at row 3 is outside 0..2",
    ),
    "negative labels": (lambda: _fit(clients=_pairs(y=torch.tensor([0, 1, -2, 0, 1]))), "label -2 at row 2"),
    "NaN in data": (lambda: _fit(clients=_pairs(x=_with_nan())), "client 1: x is not finite in 1 of 5.*row 3"),
    "empty client": (lambda: _fit(clients=_pairs(torch.zeros(0, 4), torch.zeros(0).long())), "client 1 has no rows"),
    "no clients": (lambda: _fit(clients=[]), "at least one"),
    "patience without validation": (lambda: _fit(patience=3), "patience.*validation=0.1"),
    "a monitor without validation": (lambda: _fit(monitor="accuracy"), "monitor: the best round is.*validation=0.1"),
    "patience of zero": (lambda: _fit(patience=0, validation=0.2), "patience must be a whole number of at least 1"),
    **{
        f"fedswag that may stop early by {name}": (
            lambda stop=stop: _fit(method=fb.methods.fedswag(swag_rounds=2), rounds=3, **stop),
            f"{name}: .*last 2 of 3 rounds; set swag_rounds = 3, or leave it out",
        )
        for name, stop in {
            "patience": {"patience": 1, "validation": 0.4},
            "target_loss": {"target_loss": 0.1},
            "target_accuracy": {"target_accuracy": 0.9},
        }.items()
    },
    "validation of everything": (lambda: _fit(validation=1.0), r"validation .* in \[0, 1\)"),
    "validation of nothing": (lambda: _fit(validation=0.001), "leaves no client a row"),
    "everybody drops out": (lambda: _fit(dropout=1.0), r"dropout .* in \[0, 1\)"),
    "negative rounds": (lambda: _fit(rounds=-1), "rounds must be a whole number"),
    "half a round": (lambda: _fit(rounds=1.5), "rounds must be a whole number"),
    "never evaluate": (lambda: _fit(evaluate_every=0), "evaluate_every must be a whole number of at least 1"),
    "negative lr": (lambda: fedavg(lr=-0.1), "lr must be positive, not -0.1"),
    "lr that is no number": (lambda: fedavg(lr=float("nan")), "lr must be positive, not nan"),
    "infinite lr": (lambda: fedavg(lr=float("inf")), "lr must be"),
    "lr as text": (lambda: fedavg(lr="0.1"), "lr must be positive, not '0.1'"),
    "no epochs": (lambda: feduab(epochs=0), "epochs must be a whole number of at least 1"),
    "half a batch": (lambda: feduab(batch=2.5), "batch must be a whole number"),
    "no draws": (lambda: feduab(draws=0), "draws must be a whole number"),
    "momentum of one": (lambda: fedavg(momentum=1.0), r"momentum must be in \[0, 1\)"),
    "growing lr": (lambda: fedavg(lr_decay=1.1), r"lr_decay must be in \(0, 1\]"),
    "negative kl weight": (lambda: feduab(kl_weight=-1.0), "kl_weight must be not negative"),
    "initial scale of zero": (lambda: feduab(initial=0.0), "initial must be positive"),
    "division by zero": (lambda: feduab(division=0.0), "division must be positive"),
    "fedprox without its term": (lambda: method_named("fedprox", {"proximal": 0.0}), "proximal must be positive"),
    "frozen pattern that matches nothing": (lambda: _fit(frozen=("head.*",)), r"frozen: no weight matches 'head\.\*'"),
    "everything frozen": (lambda: _fit(frozen=("*",)), "no trainable weights"),
    "points pattern that matches nothing": (
        lambda: _fit(method=fedvi(points=("head.*",))),
        r"points: no weight matches 'head\.\*'",
    ),
    "everything a point": (lambda: _fit(method=fedvi(points=("*",))), "points: .*no weight.*fedavg"),
    "BatchNorm with batches of one": (
        lambda: _fit(network=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), method=fedavg(batch=1)),
        "BatchNorm.*batch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_that_names_it(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_swag_in_every_round_may_stop_early():
    swag = fb.methods.fedswag(swag_rounds=9, swag_start=0.0, epochs=3, batch=2)
    run = _fit(method=swag, rounds=9, target_accuracy=0.01)
    assert len(run.journal) == 1
    assert run.posterior.scale.max() > 1e-6


def test_inputs_of_another_shape_or_not_finite_are_refused_at_prediction():
    run = _fit()
    with pytest.raises(ValueError, match=r"x has shape \[2, 5\].*\[N, 4\]"):
        run.predict(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="not finite"):
        run.predict(torch.full((2, 4), torch.inf))
    assert run.predict(np.zeros((2, 4))).probs.shape == (2, 3)


def test_numbers_that_the_stored_type_can_not_hold_are_refused_at_prediction():
    x = torch.randint(256, (20, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clients = fb.data.from_clients([(x, torch.arange(20) % 3)], classes=3)
    run = fb.fit(_net(), clients, method=fedavg(**FAST), rounds=1)
    with pytest.raises(ValueError, match="x holds values that uint8"):
        run.predict(x / 255)  # bytes are scaled by the model: this would be all zeros
    assert torch.equal(run.predict(x.double()).probs, run.predict(x).probs)
