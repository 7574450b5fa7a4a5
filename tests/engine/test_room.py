"""Where memory is too short, a line says what is needed, what is free and what would fit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fedbayes.engine.room import Shortage
from fedbayes.engine.steps import Steps
from fedbayes.errors import InputError
from fedbayes.methods import fedavg
from fedbayes.training.fit import fit

METHOD = fedavg(batch=64, epochs=1)
FREE = 240  # KiB


class Network(nn.Module):
    """Blocks that are wide inside."""

    def __init__(self, full: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(4))
        self.full = full

    def forward(self, x: Tensor) -> Tensor:
        if self.full and torch.is_grad_enabled() and get_proxy_mode() is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for block in self.blocks:
            x = block(x)
        return x


def sites(many: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(64, 4), torch.arange(64) % 4) for _ in range(many)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbayes.engine.room.available", lambda device: FREE * 1024)


def test_clients_at_once_that_do_not_fit_become_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes = Steps._run, []

    def short(self: Steps, work, state):
        sizes.append(work.together.size)
        if work.together.size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return whole(self, work, state)

    monkeypatch.setattr(Steps, "_run", short)
    run = fit(Network(), sites(6), method=METHOD, rounds=1, engine="stacked", compile="off")
    (line,) = run.journal[0]["notes"]
    numbers = (
        r"about (\d+\.\d) KiB, 240\.0 KiB are free, enough for (\d); with recompute=True (\d+\.\d) KiB, enough for (\d)"
    )
    found = re.fullmatch(
        f"out of memory: steps of 6 clients at once need {numbers}: 2 clients at once from now on", line
    )
    assert found, line
    needed, fits, less, more = map(float, found.groups())
    assert fits == FREE * 6 // needed == 2
    assert more == min(FREE * 6 // less, 6) > fits
    assert sizes == [6, 2, 2, 2]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_that_does_not_fit_alone_is_one_line(engine) -> None:
    options = {"at_once": 1} if engine == "stacked" else {}
    says = r"^out of memory: a client's step needs about \d.* KiB, 240\.0 KiB are free; with recompute=True \d.* KiB;"
    with pytest.raises(InputError, match=says):
        fit(Network(full=True), sites(2), method=METHOD, rounds=1, engine=engine, compile="off", **options)


def test_what_would_fit_is_a_share_of_what_is_free() -> None:
    short = Shortage(10, 21 * 2**30, 8 * 2**30, None)
    assert short.fits == 3
    assert (
        str(short) == "out of memory: steps of 10 clients at once need about 21.0 GiB, 8.0 GiB are free, enough for 3"
    )
