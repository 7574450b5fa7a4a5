"""Warm starts from runs, state dicts and files; networks taken out of runs."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.folder import run

X = torch.linspace(-1, 1, 60).reshape(20, 3)
Y = (X[:, 0] > 0).long()
CLIENTS = fb.data.from_clients([(X[::2], Y[::2]), (X[1::2], Y[1::2])], test=(X, Y))


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def fitted(method, **options):
    return fb.fit(network(), CLIENTS, method=method, **{"rounds": 2, **options})


def test_the_module_predicts_as_the_run_of_a_point_does():
    made = fitted("fedavg")
    module = made.module()
    assert not module.training
    with torch.no_grad():
        assert torch.allclose(module(X).softmax(-1), made.predict(X).probs, atol=1e-6)
    fresh = network(1)
    fresh.load_state_dict(made.state_dict())
    assert int(fresh[1].num_batches_tracked) > 0


def test_draws_of_the_module_are_those_that_predict():
    made = fitted(fb.methods.feduab(draws=3))
    with torch.no_grad():
        each = torch.stack([made.module(draw)(X).softmax(-1) for draw in range(3)])
    assert torch.allclose(each.mean(0), made.predict(X).probs, atol=1e-5)
    assert not torch.allclose(each[0], each[1])
    with pytest.raises(InputError, match="draw must be a number from 0"):
        made.module(-1)


@pytest.mark.parametrize("kind", ["run", "state dict", "file", "path"])
@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_training_begins_where_another_ended(kind, method, tmp_path):
    first = fitted("fedavg")
    save_file({n: t.contiguous() for n, t in first.state_dict().items()}, tmp_path / "first.safetensors")
    file = tmp_path / "first.safetensors"
    init = {"run": first, "state dict": first.state_dict(), "file": str(file), "path": file}[kind]
    begun = fitted(method, init=init, rounds=0)
    for name, tensor in first.state_dict().items():
        assert torch.allclose(begun.state_dict()[name].float(), tensor.float()), name


def test_a_posterior_goes_on_as_it_was():
    first = fitted("feduab")
    begun = fitted("feduab", init=first, rounds=0)
    assert torch.equal(begun.posterior.scale, first.posterior.scale)


@pytest.mark.parametrize("method", ["pvi", "bayes_admm", "fedlap_cov"])
def test_where_a_prior_is_sent_first_clients_begin_at_the_given_weights(method):
    """The prior stays, so that rows count once; training used to begin at the network's own weights."""
    first = fitted("fedavg", rounds=20)
    prior = fitted(method, init=first, rounds=0).posterior
    assert not prior.mean.any()
    nll = [fitted(method, init=init, rounds=1).scores()["nll"] for init in (None, first)]
    assert nll[1] < 0.9 * nll[0]


def test_laplace_begins_at_the_given_weights_under_its_own_prior():
    first = fb.fit(nn.Linear(3, 2), CLIENTS, method="fedavg", rounds=1)
    begun = fb.fit(nn.Linear(3, 2), CLIENTS, method="laplace", rounds=0, init=first).posterior
    assert torch.equal(begun.mean, first.posterior.mean)
    torch.testing.assert_close(begun.covariance, torch.eye(len(begun.mean)))


def test_what_does_not_fit_is_named(tmp_path):
    first = fitted("fedavg", rounds=0)
    whole = first.state_dict()
    for init, says in (
        ({k: v for k, v in whole.items() if k != "0.bias"}, "lacks 1 weights, first '0.bias'"),
        ({**whole, "0.bias": torch.zeros(5)}, r"0.bias has shape \[5\], the network's is \[4\]"),
        ({**whole, "more": torch.zeros(5)}, "no weight 'more'"),
        (tmp_path / "none.safetensors", "none.safetensors"),
        (3, "init is a int; give a run, a state dict"),
        ({}, "init holds nothing"),
        ({**whole, "0.bias": torch.full((4,), torch.nan)}, "0.bias holds values that are not finite"),
        ({"model": 3}, "part 'model' must be a Point over .* weights, not a int"),
        ({"model": fb.Point(torch.full_like(first.posterior.mean, torch.inf))}, "part 'model': .* not finite"),
    ):
        with pytest.raises(InputError, match=says):
            fitted("fedavg", init=init)
    for method, init, says in (
        (
            "fedper",
            {"0.bias": torch.full((4,), torch.nan), **{n: t for n, t in whole.items() if n != "0.bias"}},
            "0.bias",
        ),
        ("fedper", {}, "init holds nothing"),
        ("feduab", {"model": fb.Gaussian(*torch.zeros(2, 26))}, "scale must be positive"),
    ):
        with pytest.raises(InputError, match=says):
            fitted(method, init=init)


def test_an_experiment_file_names_the_weights_to_begin_with(tmp_path):
    common = {"network": "linear", "clients": 4, "cohort": 2, "options": {"epochs": 1}, "method": "fedavg"}
    first = run(Experiment(**common, rounds=2), tmp_path / "first")["fedavg"]
    save_file({n: t.contiguous() for n, t in first.state_dict().items()}, tmp_path / "w.safetensors")
    begun = run(Experiment(**common, rounds=0, init=str(tmp_path / "w.safetensors")), tmp_path / "second")["fedavg"]
    assert torch.equal(begun.posterior.mean, first.posterior.mean)


def test_a_personal_model_is_a_module_too():
    made = fitted("fedavg")
    mine = made.personal(0)
    with torch.no_grad():
        assert torch.allclose(mine.module()(X).softmax(-1), mine.predict(X).probs, atol=1e-6)


class Tied(nn.Module):
    """A weight with two names, and constants that no part holds: a state dict has all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x):
        return self.head(self.second(self.first(x)) @ self.mask.exp())


def test_a_state_dict_with_tied_weights_and_masks_is_a_start():
    first = Tied()
    begun = fb.fit(Tied(), CLIENTS, method="fedavg", rounds=0, init=first.state_dict())
    torch.testing.assert_close(dict(begun.state_dict()), dict(first.state_dict()))
    once = {name: t for name, t in first.state_dict().items() if name != "first.weight"}  # as some files have it
    begun = fb.fit(Tied(), CLIENTS, method="fedavg", rounds=0, init=once)
    torch.testing.assert_close(dict(begun.state_dict()), dict(first.state_dict()))
    for name, says in (("second.weight", "one weight in the network"), ("mask", "constant of another value")):
        with pytest.raises(InputError, match=says):
            fb.fit(Tied(), CLIENTS, method="fedavg", rounds=0, init={**first.state_dict(), name: torch.ones(3, 3)})


@pytest.mark.parametrize("method", ["fedper", "lg_fedavg", "bpfed", "fedper_pf"])
def test_what_stays_at_home_begins_there_too(method):
    first = fitted("feduab")
    network_before = network(1)
    before = {name: t.clone() for name, t in network_before.state_dict().items()}
    for init in (first, first.state_dict()):
        begun = fb.fit(network_before, CLIENTS, method=method, rounds=0, init=init)
        federation = begun.home
        own = federation.task.program.client.first(federation.state.broadcast)
        named = {}
        for q in (*federation.state.broadcast.values(), *own["home"].values()):
            named |= q.layout.split(q.mean)
        for name, tensor in first.state_dict().items():
            assert torch.allclose(named[name].float(), tensor.float()), name
    assert all(torch.equal(before[name], t) for name, t in network_before.state_dict().items())
    with pytest.raises(InputError, match="lacks 2 weights"):
        fb.fit(network(), CLIENTS, method=method, rounds=0, init={n: t for n, t in before.items() if n[0] != "3"})
    again = fb.fit(
        network(), CLIENTS, method=method, rounds=1, init=fb.fit(network(), CLIENTS, method=method, rounds=1)
    )
    assert again.journal


def same_predictions(run, other):
    torch.testing.assert_close(run.predict(X).probs, other.predict(X).probs, rtol=1e-4, atol=1e-5)


PARTLY = {"adapters": {"adapters": {"rank": 2}}, "a frozen layer": {"frozen": ("0.*",)}}


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
@pytest.mark.parametrize("how", PARTLY)
def test_a_run_of_the_whole_network_begins_with_one_that_trained_a_part(how, method):
    first = fitted("fedavg", **PARTLY[how])
    begun = fb.fit(network(1), CLIENTS, method=method, rounds=0, init=first)
    own = begun.task.program.client.first(begun.broadcast)  # what clients have at home
    parts = (*begun.broadcast.values(), *own.get("home", {}).values())
    named = {n: t for q in parts for n, t in q.layout.split(q.mean).items()}
    for name, tensor in first.state_dict().items():
        assert torch.allclose(named[name].float(), tensor.float(), atol=1e-6), name
    if method == "fedavg":
        same_predictions(begun, first)


def test_weights_learned_over_another_body_are_refused():
    adapted, frozen, plain = (fitted("fedavg", **how) for how in (*PARTLY.values(), {}))
    for init, seed, options, says in (
        (adapted, 1, {"adapters": {"rank": 2}}, "init: 0.weight is frozen, and was another in that run"),
        (adapted, 0, {"adapters": {"rank": 2, "seed": 3}}, "init: 0.lora_A is frozen"),
        (adapted, 0, {"adapters": {"rank": 1}}, "init: 0.lora_A is frozen"),
        (frozen, 1, {"frozen": ("0.*",)}, "init: 0.weight is frozen"),
        (plain, 0, {"adapters": {"rank": 2}}, r"has adapters that are not those .* fit\(run.module\(\)"),
        (plain.state_dict(), 0, {"adapters": {"rank": 2}}, "by load_state_dict"),
    ):
        with pytest.raises(InputError, match=says):
            fb.fit(network(seed), CLIENTS, method="fedavg", rounds=0, init=init, **options)
    goes_on = fb.fit(network(), CLIENTS, method="feduab", rounds=0, init=adapted, adapters={"rank": 2})
    assert torch.equal(goes_on.posterior.mean, adapted.posterior.mean)
    same_predictions(fb.fit(plain.module(), CLIENTS, method="fedavg", rounds=0, adapters={"rank": 2}), plain)
