"""Bounds on Flower: the posterior of the loop engine, in the clear and under masks; no node is taken at its word."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess

import fedbayes as fb
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.bounds import capped
from fedbayes.flower.federated import carried, run
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter
from fedbayes.posterior.values import Gaussian, Posterior
from fedbayes.runs.folder import run as run_here
from fedbayes.training.influence import HIDDEN

BOUNDS = {
    "fixed": {"cap_precision": 1.001, "clip_change": 0.02, "cap_rows": 12},
    "following": {"clip_quantile": 0.5},
}


def close(a: Posterior, b: Posterior, tolerance: float) -> None:
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    if isinstance(a, Gaussian):
        torch.testing.assert_close(a.scale, b.scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("method", ["feduab", "fedavg"])
def test_bounded_rounds_are_the_loop_engines_in_the_clear_and_under_masks(
    tiny: Experiment, tmp_path: Path, method: str, bounds: str
) -> None:
    pytest.importorskip("flwr")
    tiny = replace(tiny, partition="dirichlet", partition_options={"alpha": 2.0})  # clients of unequal size
    x = replace(tiny, method=method, clients=4, **BOUNDS[bounds])
    near = run_here(replace(x, engine="loop"), tmp_path / "near")[method]
    free = run_here(replace(tiny, method=method, clients=4, engine="loop"), tmp_path / "free")[method]
    assert not torch.allclose(near.posterior.mean, free.posterior.mean, rtol=1e-4)
    for secure in (False, True):
        there = replace(x, flower={**x.flower, "secure": secure, "timeout": 5.0})
        far = run(there, tmp_path / f"{secure}", InProcess(carried(there)))[method]
        close(far.posterior, near.posterior, 1e-6 if secure else 1e-10)
        if secure:
            assert [record["influence"] for record in far.journal] == [{"hidden": HIDDEN}] * 2
        else:
            for ours, theirs in zip(far.influence(), near.influence(), strict=True):
                numbers = ("change", "share")
                assert [ours[name] for name in numbers] == pytest.approx([theirs[name] for name in numbers], rel=1e-5)
                assert {**ours, "change": 0, "share": 0} == {**theirs, "change": 0, "share": 0}
        if bounds == "following":
            assert [r["next_clip_change.model"] for r in far.journal] == [
                r["next_clip_change.model"] for r in near.journal
            ]


def sure(client: int) -> object:
    """A client with a right mean that claims a scale of 1e-4."""

    def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        if kind != "train" or k != client or not isinstance(answer, Letter):
            return answer
        scale = np.full_like(answer.arrays["model.scale"], 1e-4)
        return Letter(answer.head, {**answer.arrays, "model.scale": scale})

    return spoil


@pytest.mark.parametrize("rule", ["log_pool", "conflation", "wc", "dwc"])
def test_the_server_caps_what_a_node_claims(tiny: Experiment, tmp_path: Path, rule: str) -> None:
    """By default, under rules that weigh by precision: the posterior is that of the capped upload."""
    x = replace(tiny, rounds=1, options={**tiny.options, "rule": rule})
    sent: dict[int, Gaussian] = {}

    def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        answer = sure(1)(kind, k, letter, answer)
        if kind == "train":
            sent[k] = Gaussian(*(torch.from_numpy(answer.arrays[f"model.{name}"]) for name in ("mean", "scale")))
        return answer

    far = run(x, tmp_path / "far", InProcess(carried(x), spoil=spoil))["feduab"]
    start = far.task.program.initial["model"]
    assert isinstance(start, Gaussian)
    bounded = [capped(sent[k], start, 10.0) for k in range(3)]
    assert float((start.scale / bounded[1].scale).square().max()) == pytest.approx(10.0)
    weights = None if rule in ("conflation", "dwc") else far.task.clients.sizes.tolist()
    plain = [Gaussian(q.mean, q.scale, start.layout) for q in bounded]
    close(far.posterior, fb.pool(rule, plain, weights=weights, reference=start), 1e-9)
    assert [row["capped"] for row in far.influence()] == [0.0, 1.0, 0.0]
