"""Gradients by hand: for every form that is taken, the client's own step; no other form is taken."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Phase
from fedbayes.clients.optimisers import sgd
from fedbayes.clients.point import PointStep
from fedbayes.data import from_clients
from fedbayes.data.augment import crop_flip
from fedbayes.engine.fast.forms import dense, rowwise
from fedbayes.engine.stacked import run_all
from fedbayes.methods import method_named
from fedbayes.model.likelihood import Likelihood, categorical, custom, mean_variance, normal
from fedbayes.model.model import Model
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.run import Memory

SIZES = [3, 30, 7, 16, 20]  # tenfold unequal


def sites(kind: str = "classes", shape: tuple[int, ...] = (6,)) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)

    def targets(n: int) -> torch.Tensor:
        if kind == "real":
            return torch.randn(n, 2, generator=random, dtype=torch.float64)
        return torch.randint(3, (n,), generator=random)

    pairs = [(torch.randn(n, *shape, generator=random, dtype=torch.float64), targets(n)) for n in SIZES]
    return from_clients(pairs, test=pairs[0], kind=kind, classes=2 if kind == "real" else 3)


CHAINS = {
    "one linear map": lambda out: nn.Linear(6, out),
    "relu": lambda out: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, out)),
    "deep, nested, without biases": lambda out: nn.Sequential(
        nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh()),
        nn.Linear(8, 7),
        nn.Sigmoid(),
        nn.Sequential(nn.Linear(7, out, bias=False)),
    ),
}
OPTIONS = {
    "plain": {},
    "all at once": {
        "momentum": 0.9, "weight_decay": 0.1, "proximal": 0.3, "clip": 0.2, "lr_within": "falling", "lr_decay": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["classes", "real"])
@pytest.mark.parametrize("chain", CHAINS)
def test_it_is_the_step_of_the_client(chain: str, kind: str, options: str) -> None:
    runs = []
    for engine in ("stacked", "loop"):
        torch.manual_seed(3)
        network = CHAINS[chain](2 if kind == "real" else 3).double()
        made = method_named("fedavg", {"batch": 5, "epochs": 2, **OPTIONS[options]})
        likelihood = normal(0.3) if kind == "real" else None
        runs.append(fit(network, sites(kind), method=made, rounds=2, seed=4, engine=engine, likelihood=likelihood))
    by_hand, loop = runs
    assert by_hand.task.engine.steps.mode == "by hand"
    assert "notes" not in by_hand.journal[0]
    torch.testing.assert_close(by_hand.posterior.mean, loop.posterior.mean, rtol=1e-9, atol=1e-9)
    assert by_hand.journal[1]["train"] == pytest.approx(loop.journal[1]["train"], rel=1e-6)


@pytest.mark.parametrize("pulled", [True, False])
def test_members_of_a_sweep_have_rates_pulls_and_centres_of_their_own(pulled: bool) -> None:
    data = sites()
    torch.manual_seed(3)
    network = CHAINS["relu"](3).double()
    methods = [
        method_named("fedprox", {"batch": 5, "lr": lr, "proximal": pull, "clip": clip, "lr_within": "falling"})
        if pulled
        else method_named("fedavg", {"batch": 5, "lr": lr})
        for lr, pull, clip in ((0.05, 0.1, 0.5), (0.1, 1.0, 0.2), (0.2, 0.5, 5.0))
    ]
    tasks = [prepare(network, data, method=m, rounds=1, cohort=3, seed=s) for s, m in enumerate(methods)]
    orders = [task.orders(task.begin())[-1] for task in tasks]
    together = run_all(
        [task.engine for task in tasks], [task.program for task in tasks], orders, [Memory().get for _ in tasks]
    )
    for task, order, outcome in zip(tasks, orders, together, strict=True):
        alone = prepare(network, data, method=methods[task.seed], rounds=1, cohort=3, seed=task.seed, engine="loop")
        want = alone.engine.run(alone.program, order, Memory().get)
        for key, value in want.terms["model"].items():
            torch.testing.assert_close(outcome.terms["model"][key], value, rtol=1e-9, atol=1e-9)


def test_a_client_whose_rows_are_not_finite_is_left_out_alone() -> None:
    data = sites()
    data.data.x[data.train_rows(0)[0]] = torch.inf
    torch.manual_seed(3)
    run = fit(CHAINS["relu"](3).double(), data, method=method_named("fedavg", {"batch": 7}), rounds=1)
    assert list(run.journal[0]["left_out"]) == ["0"]
    assert torch.isfinite(run.posterior.mean).all()


class Doubled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    network = nn.Linear(6, 3)
    network.register_forward_hook(lambda module, given, out: 2 * out)
    return network


def tied() -> nn.Module:
    square = nn.Linear(6, 6)
    return nn.Sequential(square, nn.ReLU(), square, nn.ReLU(), nn.Linear(6, 3))


REFUSED = {
    "a forward of its own": lambda: Doubled(nn.Linear(6, 3)),
    "a hook": hooked,
    "a weight used twice": tied,
    "ends in a function": lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU()),
    "two functions in a row": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Tanh(), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
    "flattens from another axis": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(6, 3)),
}


def phase(model: Model) -> Phase:
    return Phase(PointStep(model, sgd(), 1), 1, 5)


@pytest.mark.parametrize("network", REFUSED)
def test_no_other_network_is_taken(network: str) -> None:
    assert dense(phase(Model.of(REFUSED[network](), categorical()))) is None


@pytest.mark.parametrize("likelihood", [custom(lambda out, y: -out.sum(-1)), mean_variance(), normal(learn=True)])
def test_no_other_likelihood_is_taken(likelihood: Likelihood) -> None:
    assert dense(phase(Model.of(nn.Linear(6, 2), likelihood))) is None


def test_nor_frozen_weights_nor_augmented_inputs_nor_bfloat16() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    for options in ({"frozen": ("0.*",)}, {"augment": crop_flip}, {"bfloat16": True}, {"parts": {"a": ["*"]}}):
        assert dense(phase(Model.of(network, categorical(), **options))) is None
    assert dense(phase(Model.of(network, categorical()))) is not None


@pytest.mark.parametrize("options", [{"optimiser": "adam"}, {"adversarial": 0.1}])
def test_nor_other_steps(options: dict[str, object]) -> None:
    task = prepare(CHAINS["relu"](3).double(), sites(), method=method_named("fedavg", options), rounds=1)
    assert dense(task.program.client.phases[0]) is None


def test_nor_a_phase_whose_step_was_replaced() -> None:
    task = prepare(CHAINS["relu"](3).double(), sites(), method=method_named("fedavg"), rounds=1)
    (own,) = task.program.client.phases
    assert dense(own) is not None
    other = own._replace(step=lambda state, b, tape, info: state)
    assert dense(other) is None
    assert rowwise(other) is None


def test_a_rate_that_falls_within_other_epochs_than_the_phase_has_is_left_to_python() -> None:
    step = PointStep(Model.of(nn.Linear(6, 1), normal()), sgd(), 3, falling=True)
    assert rowwise(Phase(step, 3, 1)) is not None
    assert rowwise(Phase(step, 7, 1)) is None
    form = dense(Phase(step, 7, 1))
    assert form is not None
    assert form.falling == 3
