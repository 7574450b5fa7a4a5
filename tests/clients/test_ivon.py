"""IVON: its steps against ivon-opt's own figures, its fixed point, what it refuses."""

from pathlib import Path
from typing import Any

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


def sites(common: float = 0.3, apart: float = 0.0, widest: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four sites of five rows: features share `common`, sites are `apart`, the last feature is `widest`."""
    random = torch.Generator().manual_seed(1)
    truth, pairs = torch.linspace(-1, 1, 5)[:, None], []
    for _ in range(4):
        x = torch.randn(5, 5, generator=random) + common * torch.randn(5, 1, generator=random)
        x = (x + apart * torch.randn(1, 5, generator=random)) * torch.linspace(1, widest, 5)
        pairs.append((x, x @ truth + torch.randn(5, 1, generator=random)))
    return pairs


DESIGNS = {"plain": {}, "correlated, apart": {"common": 1.0, "apart": 0.7}, "wide": {"widest": 3.0}}
SCALED = [("plain", method) for method in ("fedvi", "pvi", "bayes_admm", "fedivon")]
SCALED += [(design, "fedivon") for design in DESIGNS if design != "plain"]  # where one draw is noisiest


@pytest.mark.parametrize(("design", "method"), SCALED)
def test_scales_are_those_of_the_posterior_wherever_they_began(design: str, method: str) -> None:
    """By default settings; more designs and rows are in benchmarks/conjugate.py."""
    pairs, found = sites(**DESIGNS[design]), []
    clients, x = from_clients(pairs, kind="real"), torch.cat([x for x, _ in pairs]).double()
    rounds = 60 if method == "fedivon" else 30  # one draw in place of two
    for initial in (0.01, 1.0):
        made = fb.methods.method_named(method, {"initial": initial})
        torch.manual_seed(0)
        run = fb.fit(
            nn.Linear(5, 1, bias=False),
            clients,
            method=made,
            rounds=rounds,
            likelihood=normal(1.0),
            evaluate_every=rounds,
        )
        scale = (made.prior_scale**-2 + x.square().sum(0)).rsqrt()
        found.append((run.posterior.scale.double() / scale).log())
        assert run.journal[-1]["scales"]["moved"] > 0.3
    assert max(float(gaps.abs().max()) for gaps in found) < 0.1
    assert float((found[0] - found[1]).abs().max()) < 0.02


def curvatures(estimator: str, draws: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """What single steps of one draw each say of the curvature [draws, 8], and the Hessian's diagonal: five rows of
    correlated features, at a mean that is not the best."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(5, 8, generator=random) + torch.randn(5, 1, generator=random)
    x, y = x.double(), (2 * torch.randn(5, 1, generator=random)).double()
    model = Model.of(nn.Linear(8, 1, bias=False).double(), normal(1.0), parts={"model": ["*"]})
    estimation = plan(model, "model", x, estimator)
    step = IvonStep(model, estimation, 1, kl="constant", prior="fixed", curvature="average", remembers=True)
    numbers = {
        "lr": 0.0,
        "beta1": 0.9,
        "beta2": 1 - 1e-6,
        "kl_weight": 0.05,
        "prior_scale": 1.0,
        "least_curvature": 0.0,
    }
    options = {name: torch.tensor(v, dtype=torch.float64) for name, v in numbers.items()}
    start = Gaussian(torch.zeros(8, dtype=torch.float64), torch.full((8,), 0.2, dtype=torch.float64))
    whole = torch.tensor(1)
    info = Info({"model": start}, options, whole * 0, whole * 5, (whole,))
    state, before = ivon(step, 5).start({}, info), start.scale**-2
    noise = torch.randn(draws, estimation.normals, generator=random, dtype=torch.float64)
    after = [step(state, Batch(x, y, None, whole * 0), Tape(z), info).vectors["precision"] for z in noise]
    seen = ((torch.stack(after) - before) / 1e-6 + before - 1) * 0.05
    return seen, x.square().mean(0)


def test_one_draw_of_the_outputs_tells_the_curvature_with_a_fraction_of_the_noise_of_one_of_the_weights() -> None:
    spread = {}
    for estimator in ("weight", "local"):
        seen, exact = curvatures(estimator)
        errors = (seen.mean(0) - exact) / (seen.std(0) / len(seen) ** 0.5)
        assert float(errors.abs().max()) < 4  # unbiased
        spread[estimator] = float((seen.std(0) / exact).mean())
    assert spread["local"] < 0.5 * spread["weight"]


def test_the_first_step_of_one_draw_tells_the_size_of_the_curvature() -> None:
    """Its sign is noise: a curvature taken for less than it is would let means leave for good."""
    options = {"kl_weight": 0.1, "prior_scale": 1.0, "least_curvature": 0.1}
    spread = (1 + 0.1 / 0.1) ** -0.5  # of an output: the prior's precision, and what the least curvature adds
    for z in (1.0, -1.0):
        noise = torch.full((3,), z, dtype=torch.float64)
        got = stepped(options, noise, estimator="local", implicit=True)["precision"]
        slope = (z * z - z * torch.tensor([1.0, 2.0], dtype=torch.float64) / spread) / 3  # by the scale, over it
        torch.testing.assert_close(got, 1 + 10 * slope.abs(), rtol=1e-6, atol=0)


def test_a_weight_whose_first_noise_is_small_has_a_part_of_its_slope_for_curvature() -> None:
    """Else one weight of some hundred would begin with next to none, and its mean would leave for good."""
    options = {"kl_weight": 0.01, "prior_scale": 1.0, "least_curvature": 0.1}
    got = stepped(options, torch.zeros(3, dtype=torch.float64), estimator="local", implicit=True)["precision"]
    slope = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3 * (1 + 0.1 / 0.01) ** 0.5  # in units of the scale
    torch.testing.assert_close(got, 1 + 100 * 0.05 * slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rounds", "steps", "share"), [(0, 10, 40), (0, 1000, 2000), (30, 1000, 30500)])
def test_the_noise_of_one_first_draw_is_forgotten_the_sooner_the_more_steps_there_are(
    rounds: int, steps: int, share: int
) -> None:
    """It grows with the root of the rows: at 5000 rows it was 13 % of a scale after 30 rounds."""
    model = Model.of(nn.Linear(2, 1), normal(1.0), parts={"model": ["*"]})
    whole, at = torch.tensor(1), torch.zeros(1, 2)
    options = {name: torch.tensor(v) for name, v in {"curvature_memory": 40.0, "lr": 0.1}.items()}
    info = Info({}, options, whole * rounds, whole, (whole * steps,))
    for opposite, so_far in ((False, share), (True, (rounds + 4) * steps)):
        step = IvonStep(model, plan(model, "model", at, "local"), 1, draws=2, opposite=opposite)
        assert step.share(Batch(at, at, None, whole * 0), info) == 2 / (so_far + 2)


def stepped(
    options: dict[str, float],
    noise: torch.Tensor,
    scale: float = 0.01,
    estimator: str = "weight",
    **how: Any,
) -> dict[str, torch.Tensor]:
    """Mean and precision after one step on three rows of a linear map without noise in its mean's gradient."""
    x, y = torch.eye(3, dtype=torch.float64)[:, :2], torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64)
    model = Model.of(nn.Linear(2, 1, bias=False).double(), normal(1.0), parts={"model": ["*"]})
    estimation = plan(model, "model", x, estimator)
    step = IvonStep(model, estimation, 1, kl="constant", prior="fixed", curvature="average", **how)
    start = Gaussian(torch.zeros(2, dtype=torch.float64), torch.full((2,), scale, dtype=torch.float64))
    given = {**OPTIONS, "beta1": 0.0, "curvature_memory": 1.0, "least_curvature": 0.0, **options}
    numbers = {name: torch.tensor(v, dtype=torch.float64) for name, v in given.items()}
    whole = torch.tensor(1)
    info = Info({"model": start}, numbers, whole * 0, whole * 3, (whole,))
    state = ivon(step, 3).start({}, info)
    return step(state, Batch(x, y, None, whole * 0), Tape(noise), info).vectors


def test_draws_of_opposite_noise_leave_the_curvature_of_a_quadratic() -> None:
    """The mean NLL has the Hessian diag(1, 1) / 3; the first step takes it as it is, whatever the first scale was."""
    noise = torch.tensor([1.0, -1.0], dtype=torch.float64)  # whose squares are 1
    got = stepped({"kl_weight": 0.1, "prior_scale": 1.0}, noise, draws=2, opposite=True, implicit=True)
    torch.testing.assert_close(got["precision"], torch.full((2,), 1 + 10 / 3, dtype=torch.float64), rtol=1e-9, atol=0)


def test_a_curvature_that_is_not_known_counts_as_the_least_and_no_first_scale_matters() -> None:
    """Scales begin as narrow as steps take the loss for curved: noise must not drown what means are to learn."""
    noise, options = torch.tensor([0.3, -0.3], dtype=torch.float64), {"kl_weight": 0.1, "prior_scale": 1.0}
    wide, narrow = (
        stepped({**options, "least_curvature": 2.0}, noise, scale, draws=2, opposite=True, implicit=True)
        for scale in (5.0, 0.01)
    )
    for name in ("mean", "precision"):
        assert torch.equal(wide[name], narrow[name])
    want = torch.full(
        (2,), (1 + 2 / 0.1) / 2 + (1 + 0.09 / 0.3) / 2, dtype=torch.float64
    )  # the first, and what is seen
    torch.testing.assert_close(wide["precision"], want, rtol=1e-9, atol=0)


def test_one_draw_tells_the_curvature_by_what_it_did_to_the_gradient() -> None:
    """A running mean of gradients is taken off: at a mean far from the best the estimate is that of a quadratic."""
    x, y = torch.ones(2, 1, dtype=torch.float64), torch.full((2, 1), 50.0, dtype=torch.float64)
    model = Model.of(nn.Linear(1, 1, bias=False).double(), normal(1.0), parts={"model": ["*"]})
    step = IvonStep(model, plan(model, "model", x, "weight"), 1, kl="constant", prior="fixed", curvature="average")
    start = Gaussian(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    given = {
        **OPTIONS,
        "lr": 0.0,
        "kl_weight": 0.1,
        "prior_scale": 1.0,
        "curvature_memory": 1.0,
        "least_curvature": 1.0,
    }
    numbers = {name: torch.tensor(v, dtype=torch.float64) for name, v in given.items()}
    whole = torch.tensor(1)
    info = Info({"model": start}, numbers, whole * 0, whole * 2, (whole,))
    state, z = ivon(step, 2).start({}, info), torch.ones(1, dtype=torch.float64)
    for at in range(40):  # as many draws of one sign as of the other
        state = step(state, Batch(x, y, None, whole * at), Tape(z * (-1) ** at), info)
    assert 10 < float(state.vectors["precision"]) < 12.5  # exactly 1 + 1 / .1; gradients are 50, a hundred times that


@pytest.mark.parametrize("prior_scale", [1e-4, 1.0, 100.0])
def test_an_implicit_step_balances_data_and_prior_however_narrow_it_is(prior_scale: float) -> None:
    """With step size 1 it is Newton's: for a quadratic the posterior's mean, at once."""
    noise = torch.tensor([1.0, -1.0], dtype=torch.float64)
    options = {"kl_weight": 0.1, "prior_scale": prior_scale, "lr": 1.0}
    data, prior = 10 / 3, prior_scale**-2
    got = stepped(options, noise, (data + prior) ** -0.5, draws=2, opposite=True, implicit=True, remembers=True)
    want = torch.tensor([1.0, 2.0], dtype=torch.float64) * data / (data + prior)
    torch.testing.assert_close(got["mean"], want, rtol=1e-9, atol=0)


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
    with pytest.raises(InputError, match="train_draws: opposite draws come in pairs"):
        fb.methods.fedvi(train_draws=3, opposite=True)
    with pytest.raises(InputError, match="optimiser is fixed in fedivon"):
        fb.methods.fedivon(optimiser="sgd")
