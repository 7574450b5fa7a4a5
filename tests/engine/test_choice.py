"""Which engine a run gets, and the line that says why."""

import shutil

import pytest
import torch
from torch import nn

from fedbayes.data import from_clients
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.loop import Loop
from fedbayes.engine.stacked import Stacked
from fedbayes.errors import InputError
from fedbayes.training import Task, prepare

SITES = from_clients([(torch.randn(20, 1, 6, 6), torch.randint(3, (20,))) for _ in range(4)], classes=3)


def task(network: nn.Module | None = None, **options: object) -> Task:
    return prepare(network or nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), SITES, method="fedavg", **options)


def test_a_short_run_on_a_cpu_is_stacked_and_not_compiled() -> None:
    made = task(rounds=3)
    assert isinstance(made.engine, Stacked)
    assert made.engine.steps.mode == "eager"
    assert "about 30 steps, compiling pays from 20,000" in made.choice


def test_a_long_run_is_compiled_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    assert task(rounds=5000).engine.steps.mode == "compiled"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    without = task(rounds=5000)
    assert without.engine.steps.mode == "eager"
    assert "no C++ compiler" in without.choice


def test_convolutions_run_client_by_client_on_a_cpu() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    made = task(network, rounds=3)
    assert made.engine.chunk == 1
    assert "convolutions run client by client" in made.choice
    assert task(network, rounds=3, engine="stacked").engine.chunk > 1, "what was asked for is done"


def test_what_is_asked_for_is_taken() -> None:
    assert isinstance(task(engine="loop").engine, Loop)
    assert task(compile="on").engine.steps.mode == "compiled"
    asked = task(compile="graph")
    assert asked.engine.steps.mode == "compiled"
    assert "CUDA graphs need a CUDA device" in asked.choice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "stack"}, "did you mean 'stacked'"),
        ({"compile": "yes"}, "unknown compile"),
        ({"precision": "fp32"}, "unknown precision"),
    ],
)
def test_an_unknown_choice_is_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(**options)


def broken_round() -> None:
    with quick_cpu(), tensor_cores("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError("inside")


def test_settings_of_the_process_are_as_before_after_a_round() -> None:
    before = torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="inside"):
        broken_round()
    assert (torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()) == before
