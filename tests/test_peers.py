"""The comparison with other libraries, with scripts in their place that write what they should, or do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"seconds": [0.5, 0.4, 0.6], "processor": [0.4, 0.4, 0.5], "accuracy": 0.94, "threads": 2, "versions": {}}
OPTIONS: dict[str, Any] = {"rounds": 4, "turns": 1, "limit": 60.0, "install": 60.0}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers

    return peers


def rows_of(peers: ModuleType, place: Path, **scripts: str) -> dict[str, dict[str, Any]]:
    """The rows of libraries, each a script by name, beside ours that takes half a second."""
    figures = peers.Figures(place / "figures.json", "cpu")
    ours = place / "ours.py"
    ours.write_text(f"print({json.dumps(json.dumps(OURS))})")
    for name, text in scripts.items():
        script = place / f"{name}.py"
        script.write_text(text)
        peers.compare(figures, name, peers.Peer(script), place, peers.Peer(ours), folder=place, **OPTIONS)
    return {row["what"]: row for row in json.loads((place / "figures.json").read_text())["rows"]}


def telling(**told: Any) -> str:
    line = json.dumps({**OURS, **told})
    return f"import sys\nprint('a log')\nprint({line!r})\nprint('its last words', sys.argv[2])"


def test_times_are_compared_alone_and_beside_a_busy_process(peers: ModuleType, tmp_path: Path) -> None:
    slower = telling(seconds=[1.2, 1.5, 2.0], processor=[0.8], accuracy=0.933, versions={"slower": "1.0"})
    rows = rows_of(peers, tmp_path, slower=slower)
    assert list(rows) == ["slower, alone", "slower, beside a busy process"]
    for row in rows.values():
        assert (row["best"], row["median"], row["our_best"], row["our_median"]) == (1.2, 1.5, 0.4, 0.5)
        assert (row["ratio_best"], row["ratio_median"], row["ratio_processor"]) == (3.0, 3.0, 2.0)
        assert row["versions"] == {"slower": "1.0"}
        assert "not_compared" not in row


def test_another_accuracy_is_not_compared(peers: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(peers, tmp_path, worse=telling(accuracy=0.92), lost=telling(accuracy=float("nan")))
    worse = rows["worse, alone"]
    assert worse["not_compared"] == "accuracy 0.920 against 0.940: more than 1% apart"
    assert rows["lost"]["left_out"] == "did not run: its accuracy is not finite"
    assert not [key for row in rows.values() for key in row if key.startswith("ratio")]
    assert worse["best"] == 0.4


def test_what_does_not_run_says_why(peers: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(peers, tmp_path, failing="raise ImportError('no part of it')", silent="", told=telling())
    assert rows["failing"] == {"what": "failing", "left_out": "did not run: ImportError: no part of it"}
    assert rows["silent"]["left_out"] == "did not run: it wrote no figures"
    assert "told, alone" in rows


def test_a_library_that_was_left_out_and_then_runs_has_its_figures_alone(peers: ModuleType, tmp_path: Path) -> None:
    figures = peers.Figures(tmp_path / "figures.json", "cpu")
    ours, script = tmp_path / "ours.py", tmp_path / "later.py"
    ours.write_text(telling())
    for text, expected in (("", ["later"]), (telling(), ["later, alone", "later, beside a busy process"])):
        script.write_text(text)
        peers.compare(figures, "later", peers.Peer(script), tmp_path, peers.Peer(ours), folder=tmp_path, **OPTIONS)
        assert [row["what"] for row in figures.rows] == expected


def test_what_cannot_be_installed_says_why(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is a script here that fails as it does."""
    home = tmp_path / "absent" / "bin"
    home.mkdir(parents=True)
    pip = home / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for absent==1' >&2\nexit 1\n")
    pip.chmod(0o755)
    run = peers.finished
    monkeypatch.setattr(peers, "finished", lambda words, *rest, **more: "venv" in words or run(words, *rest, **more))
    with pytest.raises(peers.LeftOut, match="not installed: ERROR: No matching distribution found for absent==1"):
        peers.interpreter("absent", peers.Peer(tmp_path / "absent.py", ("absent==1",)), tmp_path, 60.0)
    (tmp_path / "absent" / ".installed").write_text("absent==1\n")
    assert peers.interpreter("absent", peers.Peer(tmp_path, ("absent==1",)), tmp_path, 60.0) == str(pip)


def test_a_script_that_hangs_is_left_out(peers: ModuleType) -> None:
    with pytest.raises(peers.LeftOut, match="did not run: not done after 1 s"):
        peers.finished([sys.executable, "-c", "import time; time.sleep(60)"], 1.0, "did not run")


def test_ours_learns_the_made_up_rows(peers: ModuleType, tmp_path: Path) -> None:
    """By the script, as the comparison runs it."""
    data = peers.write(tmp_path / "setting.npz", peers.made_up(60, 200))
    told = peers.turn(sys.executable, peers.OURS, data, 12, 120.0)
    assert len(told["seconds"]) == len(told["processor"]) == 11
    assert told["accuracy"] > 0.5
