"""What an operator sees: figures for Prometheus, a sign of life within a round, and where a run stands."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import InProcess
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.metrics import FILE, HELP, Metrics, reason
from fedbayes.flower.post import Answer
from fedbayes.flower.status import lines, standings
from fedbayes.flower.wire import Letter
from fedbayes.runs import journal
from fedbayes.runs.home import in_use, locked

LINE = re.compile(r'fedbayes_([a-z_]+)(?:\{([a-z]+)="((?:[^"\\\n]|\\.)*)"\})? (\S+)')


def figures(text: str) -> dict[tuple[str, str | None], float]:
    """The file as a strict reader of Prometheus's format takes it."""
    found: dict[tuple[str, str | None], float] = {}
    types: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, *_ = line.split()
            assert name.startswith("fedbayes_")
            types |= {name.removeprefix("fedbayes_")} if word == "TYPE" else set()
            continue
        match = LINE.fullmatch(line)
        assert match, line
        name, _, label, value = match.groups()
        assert name in types
        assert (name, label) not in found
        found[name, label] = float(value.replace("Inf", "inf").replace("NaN", "nan"))
    assert types <= HELP.keys()
    return found


def silent(times: int) -> Callable[[str, int, Letter, Answer], Answer | None]:
    left = [times]

    def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        if kind == "train" and k == 1 and left[0]:
            left[0] -= 1
            return None
        return answer

    return spoil


def test_the_figures_are_those_of_the_journal(tiny: Experiment, tmp_path: Path) -> None:
    made = run(tiny, tmp_path, InProcess(carried(tiny), spoil=silent(1)))["feduab"]
    got = figures((tmp_path / FILE).read_text())
    records = made.journal
    assert got["round", None] == got["rounds_planned", None] == 2
    assert got["left_out_total", "silent"] == got["client_left_out_total", "1"] == 1
    assert [got["client_rounds_total", str(k)] for k in range(3)] == [2, 1, 2]
    for way in ("down", "up"):
        assert got["bytes_total", way] == sum(r[f"bytes_{way}"] for r in records)
    assert got["round_seconds_total", None] == pytest.approx(sum(r["seconds"] for r in records))
    for phase in ("query", "train", "server"):
        assert got["phase_seconds_total", phase] == pytest.approx(sum(r["phases"].get(phase, 0) for r in records))
    assert got["phase_seconds_total", "train"] >= 0.2  # the silent client's whole time
    for record in records:
        assert sum(record["phases"].values()) == pytest.approx(record["seconds"], rel=0.01, abs=0.05)
        assert set(record["client_seconds"]) == {str(k) for k in record["took_part"]}
    assert got["score", "nll"] == pytest.approx(records[-1]["test"]["nll"])
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "phases.train" in header
    assert "client_seconds" in header  # a count, not a column for each client


def test_figures_go_on_after_a_restart(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=3)
    lost = {**tiny.flower, "min_clients": 3, "attempts": 1}

    def gone(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        return None if kind == "train" and k == 1 and letter.head["round"] == 1 else answer

    with pytest.raises(InputError, match="min_clients"):
        run(replace(x, flower=lost), tmp_path, InProcess(carried(x), spoil=gone))
    run(replace(x, flower=lost), tmp_path, InProcess(carried(x)))
    got = figures((tmp_path / FILE).read_text())
    assert got["client_rounds_total", "1"] == got["round", None] == 3
    assert got["bytes_total", "up"] == sum(r["bytes_up"] for r in journal.read(tmp_path))


def test_names_and_numbers_can_be_anything(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 5)
    name = 'ward "7"\\\nnorth'
    metrics.add({"round": 1, "left_out": {name: "x"}, "took_part": [name], "test": {"nll": float("nan")}})
    got = figures((tmp_path / FILE).read_text())
    assert got["client_rounds_total", 'ward \\"7\\"\\\\\\nnorth'] == 1
    assert got["score", "nll"] != got["score", "nll"]
    many = {str(k): float(k) for k in range(3000)}
    metrics.add({"round": 2, "client_seconds": many, "took_part": list(many)})
    kept = [row for row in figures((tmp_path / FILE).read_text()) if row[0] == "client_seconds"]
    assert len(kept) == 1000
    assert ("client_seconds", "2999") in kept


REASON_WORDS = {
    "no reply within 0.2 s": "silent",
    "no node was online; client 3 stood in": "offline",
    "error 4: ZeroDivisionError": "error",
    "upload: part 'model': 1 of 30 values are not finite": "not finite",
    "upload: model.mean has shape [3], not [4]; is it of another network?": "arrays",
    "version is '9', not '1'": "mismatch",
    "\x1b[31m anything a client may say": "refused",
}


@pytest.mark.parametrize("text", REASON_WORDS)
def test_reasons_are_few_words(text: str) -> None:
    assert reason(text) == REASON_WORDS[text]


def test_within_a_round_the_server_says_who_it_waits_for(tiny: Experiment, tmp_path: Path) -> None:
    seen: list[tuple[list[str], bool]] = []

    def look(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        if kind == "train" and letter.head["round"] == 1 and k == 2:
            (standing,) = standings(tmp_path)
            seen.append((lines(standing), standing.alive))
        return None if kind == "train" and k == 1 else answer

    run(tiny, tmp_path, InProcess(carried(tiny), spoil=look))
    ((text, alive),) = seen
    assert alive
    assert text[0].startswith("feduab: in progress, 1 of 2 rounds")
    assert "  took part: 0, 2" in text
    assert any(line.startswith("  left out: client 1: no reply") for line in text)
    doing = json.loads((tmp_path / "status.json").read_text())
    assert (doing["round"], doing["phase"]) == (2, "train")
    done = CliRunner().invoke(app, ["flower", "status", str(tmp_path)])
    assert done.exit_code == 0
    assert "feduab: finished, 2 of 2 rounds" in done.output


def test_a_run_on_which_nobody_works_is_a_failure(tiny: Experiment, tmp_path: Path) -> None:
    run(tiny, tmp_path, InProcess(carried(tiny)))
    kept = (tmp_path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rounds.jsonl").write_text(kept[0])
    assert not in_use(tmp_path)
    done = CliRunner().invoke(app, ["flower", "status", str(tmp_path)])
    assert done.exit_code == 1
    assert "not finished, and nobody works on it" in done.output
    with locked(tmp_path):
        assert in_use(tmp_path)
        assert CliRunner().invoke(app, ["flower", "status", str(tmp_path)]).exit_code == 0
        (tmp_path / "status.json").write_text("[]")
        done = CliRunner().invoke(app, ["flower", "status", str(tmp_path)])
        assert isinstance(done.exception, InputError)
    assert not in_use(tmp_path / "nothing")
