"""What `fit` shows while it trains: a line in a notebook, a bar in a terminal, nothing where nobody looks."""

import sys
from types import ModuleType

import pytest

import fedbayes as fb
from fedbayes.training import showing


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> fb.data.Clients:
    monkeypatch.setattr(showing, "SECONDS", 0.0)
    monkeypatch.setattr(showing, "OFTEN", 0.0)
    return fb.data.load("digits").split(fb.partition.iid(volume=20), clients=2, seed=0)


def shown(clients: fb.data.Clients, capsys: pytest.CaptureFixture[str]) -> str:
    fb.fit("linear", clients, method="fedavg", rounds=2)
    return capsys.readouterr().err


def test_a_notebook_has_one_line_that_is_gone_at_the_end(clients, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    text = shown(clients, capsys)
    lines = text.split("\r")
    assert lines[1].startswith("fedavg 1/2  accuracy ")
    assert lines[2].startswith("fedavg 2/2  accuracy ")
    assert lines[3].isspace()
    assert "\n" not in text


def test_a_terminal_has_a_bar(clients, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "fedavg" in shown(clients, capsys)


def test_nothing_is_shown_where_nobody_looks(clients, capsys):
    assert shown(clients, capsys) == ""
