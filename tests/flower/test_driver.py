"""The driver: a run that Flower fails is started again, until it is complete, stopped, or fails without progress."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.flower.driver import DONE, FAILED, STOPPED, UNREACHABLE, Driver, Plan, Unanswered, flwr


class Link:
    """A SuperLink whose runs end as they are told to, one after another; `silent` calls fail before it answers."""

    def __init__(self, ends: Sequence[str], silent: int = 0, folder: Path | None = None, rounds: int = 0) -> None:
        self.ends, self.silent, self.folder, self.rounds = list(ends), silent, folder, rounds
        self.started: list[list[str]] = []
        self.looks = 0

    def __call__(self, arguments: Sequence[str]) -> str:
        if self.silent:
            self.silent -= 1
            raise Unanswered("connection refused")
        if arguments[0] == "run":
            self.started.append(list(arguments))
            return "Loading ...\n" + json.dumps({"success": True, "run-id": f"{len(self.started)}"})
        if arguments[0] == "log":
            return "round 3: 1.0 s\nerror: the disk is full at runs/demo: free some space\nTraceback\n"
        self.looks += 1
        status = "running" if self.looks % 2 else self.ends[len(self.started) - 1]
        if self.folder and not self.looks % 2:
            self.folder.mkdir(exist_ok=True)
            with (self.folder / "rounds.jsonl").open("a") as file:
                file.write("{}\n" * self.rounds)
        return json.dumps({"success": True, "runs": [{"run-id": f"{len(self.started)}", "status": status}]})


def plan(folder: Path | None = None, **more: object) -> Plan:
    return Plan(Path("demo"), "demo", "runs/demo", folder=folder, pause=0.001, **{"patience": 0.05, **more})


BAD, GOOD = "finished:failed", "finished:completed"


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([GOOD], DONE),
        ([BAD, BAD, GOOD], DONE),
        ([BAD, "finished:stopped"], STOPPED),
        ([BAD] * 5, FAILED),
        (["not known", GOOD], DONE),
    ],
)
def test_a_run_is_driven_to_its_end(ends: list[str], status: int) -> None:
    link, said = Link(ends), []
    assert Driver(plan(), said.append, link).drive() == status
    assert len(link.started) == len(ends)
    assert (BAD in ends) == any(
        "finished:failed after 0 rounds: the disk is full at runs/demo" in text for text in said
    )
    assert link.started[0][-2:] == ["-c", 'output="runs/demo"']
    assert len({tuple(command) for command in link.started}) == 1  # into the same folder, where it goes on


def test_failures_with_rounds_between_them_are_borne(tmp_path: Path) -> None:
    link = Link([BAD] * 9 + [GOOD], folder=tmp_path / "run", rounds=2)
    assert Driver(plan(tmp_path / "run"), lambda text: None, link).drive() == DONE
    still = Link([BAD] * 9 + [GOOD], folder=tmp_path / "still", rounds=0)
    assert Driver(plan(tmp_path / "still"), lambda text: None, still).drive() == FAILED


def test_a_superlink_that_is_away_is_waited_for_and_not_for_ever() -> None:
    assert Driver(plan(patience=60), lambda text: None, Link([GOOD], silent=7)).drive() == DONE
    said: list[str] = []
    assert Driver(plan(), said.append, Link([GOOD], silent=10**9)).drive() == UNREACHABLE
    assert "connection refused" in said[-1]


def test_settings_travel_as_text(tmp_path: Path) -> None:
    link = Link([GOOD])
    Driver(plan(settings="rounds=3 options.lr=0.1"), lambda text: None, link).drive()
    assert link.started[0][-2:] == ["-c", 'set="rounds=3 options.lr=0.1"']


def test_flower_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="flwr is not installed"):
        flwr(["list"])
    done = CliRunner().invoke(app, ["flower", "train", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "no pyproject.toml" in str(done.exception)
