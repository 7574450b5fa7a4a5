"""A client of the user's own, in every method that takes one: the same work gives the same posterior."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.clients.point import PointStep, point
from fedbayes.clients.variational import VariationalStep, variational
from fedbayes.data import Clients, from_clients
from fedbayes.errors import InputError
from fedbayes.methods import METHODS
from fedbayes.methods.composition import batch_like
from fedbayes.methods.groups import optimiser_named
from fedbayes.methods.own_client import OwnClient
from fedbayes.methods.variational import FedVI
from fedbayes.model.estimators import plan
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.options import options_of
from fedbayes.posterior.values import Gaussian, Parts, Point

TAKERS = [name for name, method in METHODS.items() if issubclass(method, OwnClient) and "client" not in method.fixed]
POINTS = [name for name in TAKERS if not issubclass(METHODS[name], FedVI)]
GAUSSIANS = [name for name in TAKERS if name not in POINTS]
FAST = {"epochs": 2, "batch": 4, "lr": 0.2, "optimiser": "sgd", "momentum": 0.5, "lr_within": "constant"}
PLAIN = {**FAST, "weight_decay": 0.0, "clip": 0.0}


def sites() -> Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=random), torch.randint(2, (n,), generator=random)) for n in (4, 9, 6)]
    return from_clients(pairs, pairs[0], classes=2)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def same_point(model: Model, *, epochs: int, batch: int, optimiser: str, momentum: float) -> Client:
    return point(PointStep(model, optimiser_named(optimiser, momentum), epochs), batch)


def same_variational(model: Model, *, prior: str, kl: str, estimator: str, train_draws: int, **options: Any) -> Client:
    made = plan(model, "model", batch_like(sites().data.x[:1], options["batch"]), estimator)
    optimiser = optimiser_named("sgd", FAST["momentum"])
    step = VariationalStep(model, made, optimiser, options["epochs"], train_draws, kl, prior)
    return variational(step, options["batch"])


def gaussian_client(model: Model, *, epochs: int, batch: int, optimiser: str, momentum: float, **more: Any) -> Client:
    return same_variational(
        model, prior="broadcast", kl="constant", estimator="local", train_draws=1, epochs=epochs, batch=batch, **more
    )


def run(method: str, engine: str, **options: Any) -> fb.Run:
    flow = {"flow_epochs": 1, "flow_length": 1, "flow_draws": 1} if method.endswith("_pf") else {}
    options |= {name: value for name, value in flow.items() if name in options_of(METHODS[method])}
    return fb.fit(network(), sites(), method=METHODS[method](**options), rounds=2, engine=engine, seed=3)


def assert_equal(a: fb.Run, b: fb.Run) -> None:
    for part, q in a.progress.state.broadcast.items():
        assert torch.equal(q.mean, b.progress.state.broadcast[part].mean)


def test_the_methods_that_take_a_client() -> None:
    assert set(POINTS) == {"fedavg", "fedag", "fedper", "lg_fedavg", "fedavg_pf", "fedper_pf", "lg_fedavg_pf"}
    assert set(GAUSSIANS) == {"fedvi", "feduab", "bpfed"}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", POINTS)
def test_the_same_point_client_gives_the_same_posterior(method: str, engine: str) -> None:
    assert_equal(run(method, engine, client=same_point, **PLAIN), run(method, engine, **PLAIN))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", GAUSSIANS)
def test_the_same_variational_client_gives_the_same_posterior(method: str, engine: str) -> None:
    own = {"client": same_variational, "client_options": {"epochs": 2, "batch": 4}}
    assert_equal(run(method, engine, **own, lr=0.2, lr_within="constant"), run(method, engine, **FAST))


@pytest.mark.parametrize("method", POINTS)
def test_a_method_of_points_refuses_a_client_of_gaussians(method: str) -> None:
    with pytest.raises(InputError, match="client"):
        run(method, "loop", client=gaussian_client, **PLAIN)


@pytest.mark.parametrize("method", GAUSSIANS)
def test_a_method_of_gaussians_refuses_a_client_of_points(method: str) -> None:
    with pytest.raises(InputError, match=r"client: it uploads a Point over \d+ weights as part 'model'; .* a Gaussian"):
        run(method, "loop", client=same_point, **FAST)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in TAKERS])
def test_a_method_whose_work_is_the_method_refuses_another_client(method: str) -> None:
    with pytest.raises(InputError, match=r"client is fixed in|unknown option of \w+ 'client'"):
        METHODS[method](client=same_point)


def written(model: Model, *, upload: Any = None, keep: Any = None, **options: Any) -> Client:
    """A client as a user would write it, all of it in one function."""

    def start(own: Own, info: Info) -> Any:
        return {"w": info.broadcast["model"].mean, "seen": torch.zeros(())}

    def step(state: Any, b: Batch, tape: Tape, info: Info) -> Any:
        def loss(w: Tensor) -> Tensor:
            weights = model.weights({"model": w})
            return model.nll(model.train_output(weights, b.x, tape, b.mask)[0], b.y, b.mask, weights)

        return {"w": state["w"] - info.options["lr"] * torch.func.grad(loss)(state["w"]), "seen": state["seen"] + 1}

    def finish(state: Any, info: Info) -> Upload:
        parts: Parts = {"model": Point(state["w"], model.layouts["model"])}
        return Upload(parts if upload is None else upload(parts), keep or {}, {"steps": state["seen"]})

    return Client(start, (Phase(step, 2, 4),), finish)


def refused(words: str, client: Any, **options: Any) -> None:
    plain = nn.Sequential(nn.Linear(3, 2)).double()
    with pytest.raises(InputError, match=words) as caught:
        fb.fit(plain, sites(), method=fb.methods.fedavg(client=client, lr=0.2, **options), rounds=1)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_written_by_hand_trains_as_the_methods_own(engine: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 2)).double()
    ours = fb.fit(plain, sites(), method=fb.methods.fedavg(client=written, lr=0.2), rounds=2, engine=engine)
    usual = fb.fit(plain, sites(), method=fb.methods.fedavg(epochs=2, batch=4, lr=0.2), rounds=2, engine=engine)
    torch.testing.assert_close(ours.posterior.mean, usual.posterior.mean)
    assert "notes" not in ours.journal[-1]


@pytest.mark.parametrize("within", ["falling", "steps"])
def test_the_methods_schedule_reaches_the_users_client(within: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 2)).double()
    options = {"lr": 0.2, "lr_within": within}
    ours = fb.fit(plain, sites(), method=fb.methods.fedavg(client=written, **options), rounds=1)
    usual = fb.fit(plain, sites(), method=fb.methods.fedavg(epochs=2, batch=4, **options), rounds=1)
    torch.testing.assert_close(ours.posterior.mean, usual.posterior.mean)


def test_what_does_not_fit_is_refused_before_training() -> None:
    refused("client must be a function", 3)
    refused("client must be a function", "written")
    refused("epochs: the client does not take it", lambda model: written(model), epochs=3)
    refused("client: lr may change from round to round", lambda model, lr: written(model))
    refused("client needs 'depth'", lambda model, depth: written(model))
    refused("unknown option of client 'dpeth': did you mean 'depth'", lambda model, depth=1: written(model),
            client_options={"dpeth": 3})  # fmt: skip
    refused("gave a NoneType; it must give a Client", lambda model: None)
    refused("it failed on a first batch .*no_such", lambda model: written(model, upload=lambda parts: parts["no_such"]))
    refused("no part 'model'", lambda model: written(model, upload=lambda parts: {}))
    refused(
        "uploads a Gaussian over 8 weights",
        lambda model: written(model, upload=lambda p: {"model": Gaussian(p["model"].mean, p["model"].mean.exp())}),
    )
    refused("uploads a Point over 3", lambda model: written(model, upload=lambda p: {"model": Point(torch.zeros(3))}))
    refused("must have the same names", lambda model: written(model, keep={"last": torch.zeros(())}))
    with pytest.raises(InputError, match="client_options are of a client of your own"):
        fb.methods.fedavg(client_options={"a": 1})
