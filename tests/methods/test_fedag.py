"""FedAG: hand-computed rounds, closed forms, message sizes, the code for single rows, and odd data."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.engine.fast.rowwise import compiler
from fedbayes.engine.sharing import share_store
from fedbayes.errors import InputError
from fedbayes.export.program import predictor_of
from fedbayes.federation.cohorts import cohort_of
from fedbayes.federation.round import predicting
from fedbayes.model.likelihood import normal
from fedbayes.training.fit import fit
from fedbayes.training.observation import observation_noise
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory, with_noise


def line(weight: float = 0.0) -> nn.Module:
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, weight)
    return network


def sites(sizes: list[int], features: int = 3, seed: int = 0) -> fb.data.Clients:
    random = torch.Generator().manual_seed(seed)
    pairs = []
    for n in sizes:
        x = torch.randn(n, features, generator=random)
        pairs.append((x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(n, 1, generator=random)))
    return from_clients(pairs, test=pairs[0], kind="real")


def mlp(features: int = 3, hidden: int = 5, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))


BY_HAND = {"lr": 0.5, "epochs": 1, "lr_within": "constant", "clip": 0.0}
TWO = [(torch.ones(1, 1), torch.full((1, 1), 2.0)), (torch.ones(1, 1), torch.full((1, 1), 4.0))]


@pytest.mark.parametrize("predict", ["bootstrap", "closed"])
def test_two_clients_by_hand(predict):
    """From w = 0 the clients step to 1 and 2; the normal is N(1.5, 0.5^2); at x = 2 it predicts 3 with variance 1."""
    run = fit(line(), from_clients(TWO, kind="real"), method=fb.methods.fedag(predict=predict, **BY_HAND), rounds=1)
    assert run.posterior.mean.tolist() == [1.5]
    assert run.posterior.scale.tolist() == [0.5]
    p = run.predict(torch.full((1, 1), 2.0))
    assert (float(p.mean), float(p.epistemic)) == (3.0, 1.0)
    # Judged by the other's network the rows miss by 0 and 3: their mean square is the noise.
    assert float(p.aleatoric) == pytest.approx(4.5)
    assert float(p.total) == pytest.approx(5.5)


@pytest.mark.parametrize(("noise", "variance"), [("none", 0.0), ("own", 2.5), ("likelihood", 1.0)])
def test_readings_of_the_noise_by_hand(noise, variance):
    """Own rows miss by 1 and 2 after the step."""
    run = fit(line(), from_clients(TWO, kind="real"), method=fb.methods.fedag(noise=noise, **BY_HAND), rounds=1)
    assert float(run.predict(torch.ones(1, 1)).aleatoric) == pytest.approx(variance)


@pytest.mark.parametrize("weighting", ["equal", "size"])
@pytest.mark.parametrize("predict", ["bootstrap", "monte_carlo", "closed"])
def test_one_network_without_noise_has_the_likelihoods_own(predict, weighting):
    """Before any round, of one client, and in a cohort of one."""
    clients = sites([7, 9, 8])
    method = fb.methods.fedag(noise="none", predict=predict, weighting=weighting, epochs=2, lr=0.03)
    likelihood = normal(0.3)
    for options, several in (({"rounds": 0}, False), ({"cohort": 1}, False), ({}, True)):
        run = fit(nn.Linear(3, 1), clients, method=method, likelihood=likelihood, **{"rounds": 2, **options})
        noise = run.predict(clients.data.test_x).aleatoric
        torch.testing.assert_close(noise, torch.full_like(noise, 0.0 if several else 0.09))


def test_clients_go_on_from_the_mean():
    run = fit(line(), from_clients(TWO, kind="real"), method=fb.methods.fedag(**BY_HAND), rounds=2)
    assert run.posterior.mean.tolist() == [2.25]  # 1.5 goes to 1.75 and 2.75
    assert run.posterior.scale.tolist() == [0.5]


def test_the_learning_rate_falls_to_zero_within_a_round():
    """Two rows with y = 1 from w = 0, the rates 0.5 and 0.25: to 0.5, and half of that nearer by a quarter."""
    pair = [(torch.ones(2, 1), torch.ones(2, 1))]
    method = fb.methods.fedag(lr=0.5, epochs=1, clip=0.0, noise="none")
    for engine in ("loop", "stacked"):
        run = fit(line(), from_clients(pair, kind="real"), method=method, rounds=1, engine=engine)
        assert float(run.posterior.mean) == pytest.approx(0.5 + 0.25 * 0.5)


def test_a_gradient_is_clipped():
    pair = [(torch.ones(1, 1), torch.full((1, 1), 100.0))]
    method = fb.methods.fedag(lr=1.0, epochs=1, clip=3.0, lr_within="constant", noise="none")
    for engine in ("loop", "stacked"):
        run = fit(line(), from_clients(pair, kind="real"), method=method, rounds=1, engine=engine)
        assert float(run.posterior.mean) == pytest.approx(3.0)


def test_the_linear_model_after_one_round_is_the_closed_form():
    """Eq. 6 from the uploads themselves, in float64."""
    clients = fb.data.load("diabetes").split(fb.partition.iid(), clients=10, seed=0)
    method = fb.methods.fedag(predict="closed", epochs=5, lr=0.01)
    run = fit(nn.Linear(10, 1), clients, method=method, rounds=1)
    uploads = run.progress.state.kept.members["model"].values.double()
    mean, variance = uploads.mean(0), uploads.var(0, correction=0)
    x = clients.data.prepare(clients.data.test_x)
    phi = torch.cat([x, torch.ones(len(x), 1)], 1)
    shift, scale = (t.double() for t in clients.data.target_scale)
    noise = float(run.parts["noise"].mean[0])
    p = run.predict(clients.data.test_x)
    torch.testing.assert_close(p.mean[:, 0].double(), (phi @ mean) * scale + shift, rtol=1e-5, atol=1e-5)
    expected = (phi.square() @ variance + noise) * scale**2
    torch.testing.assert_close(p.total[:, 0].double(), expected, rtol=1e-5, atol=1e-5)


def test_monte_carlo_tends_to_the_closed_form():
    clients = sites([6, 7, 8])
    network = nn.Linear(3, 1)
    closed, drawn = (
        fit(network, clients, method=fb.methods.fedag(predict=predict, epochs=2), rounds=1)
        for predict in ("closed", "monte_carlo")
    )
    closed, p = closed.predict(clients.data.x), drawn.predict(clients.data.x, draws=20_000)
    torch.testing.assert_close(p.mean, closed.mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(p.epistemic, closed.epistemic, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize(("features", "hidden", "size"), [(6, 50, 1604), (90, 100, 36_804)])
def test_message_sizes_are_the_papers(features, hidden, size):
    clients = sites([1] * 10, features)
    run = fit(mlp(features, hidden), clients, method=fb.methods.fedag(epochs=1), rounds=2)
    for record in run.journal:
        assert record["bytes_up"] == 10 * size
        assert record["bytes_down"] == 10 * 2 * size


NETWORKS = {"linear": lambda: nn.Linear(3, 1), "one hidden layer": mlp}


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("options", [{}, {"clip": 0.3, "lr": 0.1}, {"lr_within": "constant", "clip": 0.0}], ids=str)
def test_single_rows_in_c_are_the_clients_own_steps(network, options):
    def trained(**how):
        torch.manual_seed(1)
        method = fb.methods.fedag(epochs=3, **options)
        return fit(NETWORKS[network](), sites([4, 9, 1, 6]), method=method, rounds=2, likelihood=normal(0.7), **how)

    fast, slow = trained(), trained(engine="loop")
    assert "in C" in fast.task.choice
    torch.testing.assert_close(fast.posterior.mean, slow.posterior.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.posterior.scale, slow.posterior.scale, rtol=1e-3, atol=1e-5)
    assert fast.journal[1]["train"]["loss"] == pytest.approx(slow.journal[1]["train"]["loss"], rel=1e-4)


def test_other_networks_and_options_do_not_run_in_c():
    for network, options in (
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), {}),
        (nn.Linear(3, 1, bias=False), {}),
        (mlp(), {"momentum": 0.5}),
        (mlp(), {"weight_decay": 0.1}),
        (mlp(), {"batch": 2}),
        (mlp().double(), {}),
    ):
        task = prepare(network, sites([3, 3]), method=fb.methods.fedag(epochs=1, **options), rounds=1)
        assert "in C" not in task.choice


def test_a_client_that_diverges_is_seen():
    method = fb.methods.fedag(lr=1e6, clip=0.0, epochs=40, lr_within="constant")
    task = prepare(mlp(), sites([5, 5]), method=method, rounds=1)
    ((_, record),) = rounds(task, task.begin(), Memory())
    assert set(record["left_out"]) == {"0", "1"}


def test_folds_trained_together_are_the_folds_trained_alone():
    def tasks():
        made = [sites([4, 6, 5], seed=fold) for fold in range(3)]
        return [
            prepare(mlp(seed=fold), one, method=fb.methods.fedag(epochs=2), rounds=2, seed=fold)
            for fold, one in enumerate(made)
        ]

    alone = []
    for task in tasks():
        *_, (progress, _) = rounds(task, task.begin(), Memory())
        alone.append(progress)
    many = tasks()
    share_store([task.engine for task in many], [task.program for task in many])
    *_, made = rounds_together(many, [task.begin() for task in many], [Memory() for _ in many])
    for one, entry in zip(alone, made):
        together = entry[0]
        torch.testing.assert_close(one.state.broadcast["model"].mean, together.state.broadcast["model"].mean)
        torch.testing.assert_close(one.state.kept.noise, together.state.kept.noise)


def test_a_classification_is_an_ensemble_without_observation_noise():
    clients = fb.data.load("digits").split(fb.partition.iid(volume=30), clients=4, seed=0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run = fit(network, clients, method=fb.methods.fedag(epochs=20, batch=5, lr=0.5), rounds=2)
    assert run.scores()["accuracy"] > 0.7
    p = run.predict(clients.data.test_x[:9])
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(9))
    assert float(p.epistemic.sum()) > 0
    assert "noise" not in run.parts
    assert isinstance(run.posterior, fb.Gaussian)
    assert isinstance(run.parts["model"], fb.Draws)


@pytest.mark.parametrize("predict", ["bootstrap", "monte_carlo", "closed"])
def test_constant_inputs_constant_targets_and_single_rows_are_predicted_with_a_finite_density(predict):
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 7.0  # a constant feature
    y = torch.full((10, 1), 5.0)  # a constant target
    data = fb.data.from_arrays(x, y, x, y, kind="real", standardise=True)
    clients = data.split(fb.partition.iid(), clients=10, seed=0)  # one row each
    run = fit(nn.Linear(3, 1), clients, method=fb.methods.fedag(predict=predict), rounds=2)
    p = run.predict(data.test_x)
    assert torch.isfinite(p.mean).all()
    assert (p.total > 0).all()
    assert float((p.mean - 5.0).abs().max()) < 2.0
    assert run.posterior.scale.min() > 0  # also of the weight that no one moved
    assert all(torch.isfinite(torch.tensor(v)) for v in run.scores().values())


def test_one_client_alone_is_judged_on_its_own_rows():
    run = fit(line(), from_clients(TWO[:1], kind="real"), method=fb.methods.fedag(**BY_HAND), rounds=1)
    p = run.predict(torch.ones(1, 1))
    assert float(p.epistemic) == 0.0
    assert float(p.aleatoric) == pytest.approx(1.0)  # w = 1, y = 2


def test_noise_is_fitted_beside_the_disagreement():
    """Targets with variance 1 around networks that disagree with variance 0.25: 0.75 is left for the noise."""
    random = torch.Generator().manual_seed(0)
    y = torch.randn(4000, 1, generator=random)
    variance, factor = observation_noise("train", torch.zeros(4000, 1), torch.full((4000, 1), 0.25), y)
    assert float(factor) == 1.0
    assert float(variance) == pytest.approx(0.75, abs=0.06)


def test_noise_is_learned_again_from_kept_networks():
    run = fit(mlp(), sites([8, 9, 10]), method=fb.methods.fedag(epochs=2), rounds=1)
    state = run.progress.state
    again = with_noise(run.task, state._replace(kept=state.kept._replace(noise=None)))
    torch.testing.assert_close(again.kept.noise, state.kept.noise)
    assert isinstance(state.broadcast["model"], fb.Gaussian)
    assert isinstance(predicting(run.task.program, state)["model"], fb.Draws)


def test_wrong_options_are_named():
    with pytest.raises(InputError, match="noise"):
        fb.methods.fedag(noise="held-out")
    with pytest.raises(InputError, match="clip"):
        fb.methods.fedag(clip=-1.0)
    with pytest.raises(InputError, match="closed"):
        prepare(mlp(), sites([3]), method=fb.methods.fedag(predict="closed"))


@pytest.mark.parametrize("what", ["classes", "survival", "mean_variance"])
def test_a_closed_form_that_is_not_the_predictions_is_refused(what):
    x, y = torch.randn(6, 3), torch.rand(6, 1) + 0.1
    targets = {"classes": torch.arange(6) % 2, "survival": torch.cat([y, torch.ones(6, 1)], 1), "mean_variance": y}[
        what
    ]
    kind, likelihood = ("real", what) if what == "mean_variance" else (what, None)
    clients = from_clients([(x, targets)], test=(x, targets), kind=kind)
    network = nn.Linear(3, 1 if what == "survival" else 2)
    with pytest.raises(InputError, match='predict = "closed" is for real targets, one output each; use "bootstrap"'):
        prepare(network, clients, method=fb.methods.fedag(predict="closed"), likelihood=likelihood)


def test_an_ensemble_of_a_closed_form_is_not_exported():
    run = fit(nn.Linear(3, 1), sites([6, 7]), method=fb.methods.fedag(predict="closed", epochs=1), rounds=1)
    with pytest.raises(InputError, match='export the mean, or train with predict = "monte_carlo"'):
        predictor_of(run, "ensemble")
    x = run.task.clients.data.test_x
    torch.testing.assert_close(predictor_of(run, "mean")(x)["mean"], run.predict(x).mean)


def test_a_run_that_is_stopped_between_evaluations_knows_its_noise():
    """Stopped by its training loss in round 2 of 9, evaluated every 5: 90 % intervals covered 98 %, with variance 1."""
    clients = sites([30, 30, 30])
    quick = fb.methods.fedag(epochs=3, lr=0.03)
    stopped = fit(mlp(), clients, method=quick, rounds=9, evaluate_every=5, target_loss=10.0)
    assert stopped.progress.state.round == 1
    assert "test" not in stopped.journal[0]
    asked = fit(mlp(), clients, method=quick, rounds=1)
    x = clients.data.test_x
    torch.testing.assert_close(stopped.predict(x).total, asked.predict(x).total)
    assert float(stopped.predict(x).aleatoric.max()) < 0.9
    assert stopped.progress.state.kept.noise is not None  # which a run folder keeps


def test_members_of_a_sweep_that_are_stopped_know_their_noise():
    clients = sites([20, 20])
    tasks = [
        prepare(mlp(), clients, method=fb.methods.fedag(epochs=1), rounds=4, evaluate_every=3, seed=seed,
                engine="stacked", target_loss=10.0)
        for seed in (0, 1)
    ]  # fmt: skip
    *_, last = rounds_together(tasks, [t.begin() for t in tasks], [Memory() for _ in tasks])
    assert all(progress.state.kept.noise is not None for progress, _ in last)


def test_a_last_round_that_nobody_answers_leaves_the_noise_of_those_who_did():
    """Of two clients each drops out with probability .7: a seed whose first round has both and whose third nobody."""

    def answers(seed: int) -> list[int]:
        return [len(cohort_of(r, clients=2, cohort=2, seed=seed, dropout=0.7)[0]) for r in range(3)]

    seed = next(s for s in range(500) if answers(s) == [2, 0, 0])
    options = {"seed": seed, "method": fb.methods.fedag(epochs=2, lr=0.03)}
    run = fit(mlp(), sites([25, 15]), rounds=3, dropout=0.7, evaluate_every=3, **options)
    assert [record["cohort"] for record in run.journal] == [2, 0, 0]
    first = fit(mlp(), sites([25, 15]), rounds=1, **options)
    x = run.task.clients.data.test_x
    torch.testing.assert_close(run.predict(x).total, first.predict(x).total)
    assert run.journal[2]["test"] == pytest.approx(first.journal[0]["test"])


def test_the_noise_is_judged_on_the_rows_of_those_who_answered():
    """Two of four clients a round: their rows, and not those of clients 0 and 1."""
    run = fit(mlp(), sites([12, 9, 14, 11]), method=fb.methods.fedag(epochs=1), rounds=1, cohort=2, seed=1)
    state = run.progress.state
    who = state.kept.who
    assert who != (0, 1)
    again = with_noise(run.task, state._replace(kept=state.kept._replace(noise=None)), who)
    torch.testing.assert_close(again.kept.noise, run.parts["noise"].mean)


@pytest.mark.parametrize("predict", ["bootstrap", "monte_carlo"])
def test_a_personal_model_has_the_noise_of_one_network(predict):
    """The mean square by which each network, taken alone, misses the rows of every other client."""
    clients = sites([10, 14, 12])
    method = fb.methods.fedag(epochs=2, lr=0.03, predict=predict, test_draws=30)
    run = fit(mlp(), clients, method=method, rounds=1)
    members = run.progress.state.kept.members["model"].values
    layout, network = run.posterior.layout, mlp()
    squares = []
    for k in range(3):
        rows = clients.train_rows(k)
        x, y = clients.data.x[rows], clients.data.y[rows]
        missed = [(torch.func.functional_call(network, layout.split(members[j]), (x,)) - y).square() for j in range(3)]
        squares.append(torch.stack([m for j, m in enumerate(missed) if j != k]).mean(0))
    p = run.personal(1).predict(clients.data.test_x)
    torch.testing.assert_close(p.total, torch.cat(squares).mean().expand_as(p.total), rtol=1e-4, atol=0)
    torch.testing.assert_close(run.personal(1).as_run.predict(clients.data.test_x).total, p.total)


def test_intervals_of_personal_models_cover_what_they_say():
    clients = sites([150, 150, 150, 150])
    method = fb.methods.fedag(epochs=5, lr=0.03)
    run = fit(mlp(hidden=20), clients, method=method, rounds=2, evaluate_every=2, personal_every=1)
    assert 0.8 < run.personal_scores()["coverage90"] < 0.98
    assert 0.8 < run.journal[0]["personal"]["coverage90"] < 0.98  # in a round that is not evaluated otherwise
