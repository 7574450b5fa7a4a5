"""Which engine a run gets, and the line that says why."""

import shutil

import pytest
import torch
from torch import nn

from fedbayes.data import from_clients
from fedbayes.engine import choice, stacked
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.loop import Loop
from fedbayes.engine.stacked import Stacked
from fedbayes.engine.workers import threads
from fedbayes.errors import InputError
from fedbayes.training.fit import train
from fedbayes.training.prepare import prepare
from fedbayes.training.task import Task

SITES = from_clients([(torch.randn(20, 1, 6, 6), torch.randint(3, (20,))) for _ in range(4)], classes=3)


def task(network: nn.Module | None = None, **options: object) -> Task:
    return prepare(network or nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), SITES, **{"method": "fedavg", **options})


def test_a_short_run_on_a_cpu_is_stacked_and_not_compiled() -> None:
    made = task(rounds=3, method="feduab")
    assert isinstance(made.engine, Stacked)
    assert made.engine.steps.mode == "eager"
    assert "about 30 steps, compiling pays from 20,000" in made.choice


def test_the_gradient_of_a_chain_of_linear_maps_is_taken_by_hand() -> None:
    for rounds in (3, 5000):
        made = task(rounds=rounds)
        assert made.engine.steps.mode == "by hand"
        assert "a chain of linear maps, its gradient by hand" in made.choice
    assert task(rounds=3, compile="off").engine.steps.mode == "by hand"


def test_a_long_run_is_compiled_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    assert task(rounds=5000, method="feduab").engine.steps.mode == "compiled"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    without = task(rounds=5000, method="feduab")
    assert without.engine.steps.mode == "eager"
    assert "no C++ compiler" in without.choice


def test_a_long_run_of_points_with_convolutions_is_not_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    long = {"network": network, "rounds": 5000}
    assert task(**long).engine.steps.mode == "eager"
    assert "points with convolutions" in task(**long).choice
    assert task(**long, compile="on").engine.steps.mode == "compiled"
    assert task(**long, method="feduab").engine.steps.mode == "compiled"


def test_convolutions_of_tiny_images_run_a_few_clients_at_once_on_a_cpu() -> None:
    made = task(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3)), rounds=3)
    assert made.engine.chunk == choice.FEW_TINY
    assert "8 clients at once" in made.choice


def test_clients_at_once_are_those_asked_for_and_change_nothing() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    made = {n: task(network, method="feduab", rounds=2, at_once=n) for n in (1, 3)}
    assert [t.engine.chunk for t in made.values()] == [1, 3]
    assert made[1].choice.endswith("; 1 client at once, as asked")
    assert made[3].choice.endswith("; 3 clients at once, as asked")
    one, three = (train(t).posterior for t in made.values())
    assert torch.allclose(one.mean, three.mean, atol=1e-6)
    assert torch.allclose(one.scale, three.scale, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at_once": 0}, "at_once .* at least 1, not 0"),
        ({"at_once": "2"}, "at_once .* whole number"),
        ({"at_once": 2, "engine": "loop"}, "the loop engine trains one client at a time, not 2"),
    ],
)
def test_clients_at_once_that_can_not_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        task(rounds=2, **options)


def test_convolutions_run_client_by_client_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TINY", 0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    made = task(network, rounds=3)
    assert made.engine.chunk == 1
    assert "convolutions run client by client" in made.choice
    assert made.engine.workers > 1
    asked = task(network, rounds=3, engine="stacked").engine
    assert asked.chunk > 1, "what was asked for is done"
    assert asked.workers < 2


class Attentive(nn.Module):
    """Convolution and attention, whose dropout reads PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.attention = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


def test_a_network_that_draws_for_itself_has_its_clients_one_after_another() -> None:
    assert isinstance(task(Attentive(), rounds=3).engine, Loop)
    made = task(Attentive(), rounds=3, compile="on")
    assert (made.engine.chunk, made.engine.workers) == (1, 1)
    assert "side by side" not in made.choice


def test_convolutions_of_many_weights_have_all_cores() -> None:
    """Side by side they would wait for memory together."""
    wide = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 9000), nn.ReLU(), nn.Linear(9000, 3))
    made = task(wide, rounds=3)
    assert isinstance(made.engine, Loop)
    assert "client by client" in made.choice


def test_small_networks_leave_other_cores_alone_and_large_ones_take_them() -> None:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(36, 4000), nn.ReLU(), nn.Linear(4000, 3))
    convolved = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    for network, small in ((None, True), (wide, False), (convolved, False)):
        for engine in ("auto", "loop"):
            assert task(network, rounds=3, engine=engine).engine.small is small


@pytest.mark.parametrize(
    ("machine", "cores", "small"), [("x86_64", 2, True), ("x86_64", 4, False), ("aarch64", 2, False)]
)
def test_compiled_steps_of_small_networks_have_one_thread_on_two_x86_cores(
    machine: str, cores: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice.platform, "machine", lambda: machine)
    with threads(cores):
        assert task(rounds=3, compile="on").engine.small is small


def test_clients_at_once_fit_in_caches_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 36 * 3 + 3
    monkeypatch.setattr(stacked, "CACHED", 4 * weights)
    assert task(rounds=3).engine.chunk == 4
    monkeypatch.setattr(stacked, "CACHED", weights // 2)
    assert task(rounds=3).engine.chunk == 1


def test_what_is_asked_for_is_taken() -> None:
    assert isinstance(task(engine="loop").engine, Loop)
    assert task(compile="on").engine.steps.mode == "compiled"
    for asked, mode in (("graph", "compiled"), ("captured", "eager")):
        here = task(compile=asked)
        assert here.engine.steps.mode == mode
        assert "CUDA graphs need a CUDA device" in here.choice


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


def settings() -> tuple[bool, str, bool]:
    return torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def broken_round(precision: str) -> None:
    with quick_cpu(), tensor_cores(precision):
        assert settings()[1:] == (("highest", False) if precision == "float32" else ("high", True))
        raise RuntimeError("inside")


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_settings_of_the_process_are_as_before_after_a_round(precision: str) -> None:
    before = settings()
    with pytest.raises(RuntimeError, match="inside"):
        broken_round(precision)
    assert settings() == before
