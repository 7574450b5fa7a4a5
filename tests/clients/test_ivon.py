"""IVON: its steps against ivon-opt's own figures, its fixed point, what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.clients.client import Batch, Info
from fedbayes.clients.ivon import IvonStep, ivon
from fedbayes.model.estimators import plan
from fedbayes.model.likelihood import LIKELIHOODS
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian

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
