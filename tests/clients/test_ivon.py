"""IVON: its steps against ivon-opt's own figures, its fixed point, what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Batch, Info
from fedbayes.clients.ivon import IvonStep, ivon
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.model.estimators import plan
from fedbayes.model.likelihood import LIKELIHOODS, normal
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian
from fedbayes.training.scales import note

# As in ivon_oracle.py.
ROWS, BATCH, N, DELTA, FIRST = 48, 8, 300.0, 0.02, 0.2
OPTIONS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "kl_weight": 1 / N, "least_curvature": 0.0, "clip_step": 0.05}
OPTIONS |= {"prior_scale": (N * DELTA) ** -0.5}
CASES = {
    "price": {},
    "two draws": {"draws": 2},
    "clipped": {"clips": True},
    "squared": {"curvature": "squared"},
    "no momentum": {},
}
OTHERS = {"no momentum": {"beta1": 0.0, "lr": 0.01}, "squared": {"beta2": 0.9995}}


@pytest.mark.parametrize("case", CASES)
def test_two_hundred_steps_are_those_of_ivon_opt(case: str) -> None:
    with np.load(Path(__file__).with_name("ivon_oracle.npz")) as file:
        kept = {name: torch.from_numpy(file[name]) for name in file.files}
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    nn.utils.vector_to_parameters(kept["start"], network.parameters())
    model = Model.of(network, LIKELIHOODS["classes"](), parts={"model": ["*"]})
    estimation = plan(model, "model", kept["x"][:BATCH], "weight")
    step = IvonStep(
        model, estimation, 1, kl="constant", prior="fixed", remembers=True, **{"curvature": "price", **CASES[case]}
    )
    given = {**OPTIONS, **OTHERS.get(case, {})}
    options = {name: torch.tensor(v, dtype=torch.float64) for name, v in given.items()}
    start = Gaussian(kept["start"], torch.full_like(kept["start"], (N * (FIRST + DELTA)) ** -0.5))
    whole = torch.tensor(1)
    info = Info({"model": start}, options, whole * 0, whole * ROWS, (whole * 6,))
    client = ivon(step, BATCH)
    state = client.start({}, info)
    noise = kept[f"{case}.noise"].reshape(200, -1)
    for at in range(200):
        rows = torch.arange(at * BATCH, (at + 1) * BATCH) % ROWS
        state = step(state, Batch(kept["x"][rows], kept["y"][rows], None, whole * at), Tape(noise[at]), info)
        if at % 20 == 19:
            mean, curvature = (kept[f"{case}.{name}"][at // 20] for name in ("mean", "curvature"))
            torch.testing.assert_close(state.vectors["mean"], mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(state.vectors["precision"] / N - DELTA, curvature, rtol=1e-6, atol=1e-6)


def sites() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    truth, pairs = torch.linspace(-1, 1, 5)[:, None], []
    for _ in range(4):
        x = torch.randn(5, 5, generator=random) + 0.3 * torch.randn(5, 1, generator=random)
        pairs.append((x, x @ truth + torch.randn(5, 1, generator=random)))
    return pairs


@pytest.mark.parametrize(("method", "initial"), [("fedivon", 0.01), ("fedivon", 1.0), ("bayes_admm", 0.01)])
def test_scales_are_those_of_the_posterior_wherever_they_began(method: str, initial: float) -> None:
    made = fb.methods.method_named(method, {"initial": initial})
    run = fb.fit(
        nn.Linear(5, 1, bias=False), from_clients(sites(), kind="real"), method=made, rounds=50,
        likelihood=normal(1.0), evaluate_every=50,
    )  # fmt: skip
    x = torch.cat([x for x, _ in sites()]).double()
    scale = (made.prior_scale**-2 + x.square().sum(0)).rsqrt()
    gaps = (run.posterior.scale.double() / scale).log().abs()
    assert gaps.median() < 0.1
    assert gaps.max() < 0.2
    assert run.journal[-1]["scales"]["moved"] > 0.5


def test_a_run_whose_scales_stay_where_they_began_says_so() -> None:
    words = [note({"moved": moved, "moving": moving}, 50, 50, "sgd") for moved, moving in ((0.01, 0), (1, 0.1), (1, 0))]
    assert "set by initial" in words[0]
    assert "still moved" in words[1]
    assert words[2] == note({"moved": 0.01, "moving": 0.0}, 5, 5, "sgd") == ""


def test_what_ivon_needs() -> None:
    with pytest.raises(InputError, match="kl_weight: ivon needs"):
        fb.methods.feduab(optimiser="ivon", kl_weight=0.0)
    with pytest.raises(InputError, match="blundell"):
        fb.methods.feduab(optimiser="ivon", kl="blundell")
    with pytest.raises(InputError, match="optimiser is fixed in fedivon"):
        fb.methods.fedivon(optimiser="sgd")
