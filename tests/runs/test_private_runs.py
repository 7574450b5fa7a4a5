"""A private run on disk: nothing is seen before it is committed, nothing is released twice, the budget is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbayes as fb
import fedbayes.experiments.build
import fedbayes.report
import fedbayes.runs.records
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.runs import checkpoint, journal, sealed
from fedbayes.runs.folder import load, resume, run
from fedbayes.runs.spending import spending
from fedbayes.runs.sweep import sweep

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
# Who took part, how many came, how it went at home, how long it took.
HIDDEN = {"influence", "seconds", "test", "validation", "personal", "took_part", "attackers"}


class Killed(BaseException):
    """In place of a kill: nothing catches it."""


@pytest.fixture
def x(tiny: Experiment) -> Experiment:
    return replace(
        tiny, method="pvi", options={"epochs": 1}, rounds=4, private="clients", noise_multiplier=4.0, checkpoint_every=3
    )


def releases(folder: Path) -> list[str]:
    return [record["release"] for record in journal.read(folder)]


def test_a_private_journal_tells_nothing_of_who_came(x: Experiment, tmp_path: Path) -> None:
    run(x, tmp_path)
    records = journal.read(tmp_path)
    assert len(records) == 4
    for record in records:
        assert not HIDDEN & {*record}
        assert (record["cohort"], record["dropped"], record["left_out"], record["train"]) == (3, [], {}, {})
    assert len({record["bytes_up"] for record in records}) == 1
    assert len({*releases(tmp_path)}) == 4
    spent = [epsilon_of((Spent(0.5, 4.0, n),), 1e-5) for n in range(1, 5)]
    assert [record["epsilon"] for record in records] == pytest.approx(spent)
    with (tmp_path / "evaluation.npz").open("rb") as file:
        assert {*fb.runs.records.arrays_in(Path(file.name))} == {"kind", "class_names"}
    row = sealed.read(checkpoint.paths(tmp_path)[-1], checkpoint.ROW)
    assert "rows" not in row


def test_noise_and_cohorts_are_the_systems_own(x: Experiment, tmp_path: Path) -> None:
    """The same seed twice gives other sums; a seed for the noise gives the same, and says that it is not private."""
    for name in ("a", "b"):
        run(x, tmp_path / name)
        run(replace(x, private_seed=3), tmp_path / f"seeded-{name}")
    assert not {*releases(tmp_path / "a")} & {*releases(tmp_path / "b")}
    assert releases(tmp_path / "seeded-a") == releases(tmp_path / "seeded-b")
    assert all("NOT PRIVATE" in record["notes"][-1] for record in journal.read(tmp_path / "seeded-a"))
    assert not any("notes" in record for record in journal.read(tmp_path / "a"))
    assert "NOT PRIVATE" in spending(tmp_path / "seeded-a")[0].who


@pytest.mark.parametrize("moment", ["before the commit", "after the commit", "within the journal"])
def test_a_round_cut_short_is_released_once_or_never(
    x: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    write, append = checkpoint.write, journal.append
    seen: list[str] = []

    def writing(*arguments: Any) -> None:
        if moment == "before the commit" and arguments[3].state.round == 3:
            raise Killed
        write(*arguments)

    def appending(folder: Path, record: dict[str, Any]) -> None:
        if record["round"] == 3 and moment != "before the commit":
            if moment == "within the journal":
                seen.append(record["release"])
                with (folder / journal.LINES).open("a") as file:
                    file.write(journal.line_of(record)[:-9])
            raise Killed
        append(folder, record)
        seen.append(record["release"])

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", writing)
        patch.setattr(journal, "append", appending)
        with pytest.raises(Killed):
            run(x, tmp_path)
    committed = len(checkpoint.paths(tmp_path)) and sealed.read(checkpoint.paths(tmp_path)[-1], checkpoint.ROW)["round"]
    assert committed == (2 if moment == "before the commit" else 3)
    resume(tmp_path)
    assert len(journal.read(tmp_path)) == 4
    assert releases(tmp_path)[: len(seen)] == seen
    assert spending(tmp_path)[0].uses == 4


@pytest.mark.parametrize("lost", ["the last checkpoint", "all checkpoints"])
def test_a_folder_that_has_forgotten_a_round_does_not_release_it_again(
    x: Experiment, tmp_path: Path, lost: str
) -> None:
    run(x, tmp_path)
    before = releases(tmp_path)
    for path in checkpoint.paths(tmp_path)[-1 if lost == "the last checkpoint" else 0 :]:
        path.unlink()
    (tmp_path / "evaluation.npz").unlink()
    with pytest.raises(InputError, match=r"has told of 4 private rounds, and its last checkpoint is of round [03]: "):
        resume(tmp_path)
    assert releases(tmp_path) == before


def test_nobody_is_told_to_delete_the_checkpoint_of_a_private_run(x: Experiment, tmp_path: Path) -> None:
    run(replace(x, rounds=2), tmp_path)
    checkpoint.paths(tmp_path)[-1].write_bytes(b"damaged")
    with pytest.raises(InputError, match="put it back from a copy") as error:
        resume(tmp_path)
    assert "or delete" not in str(error.value)


def test_a_run_ends_before_it_passes_its_budget_also_when_it_goes_on(x: Experiment, tmp_path: Path) -> None:
    three, four = (epsilon_of((Spent(0.5, 4.0, n),), 1e-5) for n in (3, 4))
    x = replace(x, rounds=50, epsilon=0.5 * (three + four))
    run(replace(x, rounds=2), tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(x))
    for _ in range(2):
        resume(tmp_path)
        records = journal.read(tmp_path)
        assert len(records) == 3
        assert records[-1]["epsilon"] == pytest.approx(three)
        assert "would pass the budget" in records[-1]["stopped"]


def test_epsilon_chooses_the_noise_for_all_rounds(x: Experiment, tmp_path: Path) -> None:
    run(replace(x, noise_multiplier=None, epsilon=3.0), tmp_path)
    records = journal.read(tmp_path)
    assert len(records) == 4
    assert "stopped" not in records[-1]
    assert 2.97 < records[-1]["epsilon"] <= 3.0
    row = spending(tmp_path, more=10)[0]
    assert row.epsilon == records[-1]["epsilon"] < row.later
    assert load(tmp_path).epsilon == row.epsilon
    for word in ("epsilon", "noise_multiplier", "private_clip"):
        with pytest.raises(InputError, match=word):
            run(replace(x, **{"noise_multiplier": None, "epsilon": 3.0, word: 2.0}), tmp_path)


def test_test_rows_that_are_public_are_scored(x: Experiment, tmp_path: Path) -> None:
    run(replace(x, public_test=True), tmp_path)
    assert all("accuracy" in record["test"] for record in journal.read(tmp_path))
    arrays = fb.runs.records.arrays_in(tmp_path / "evaluation.npz")
    assert "scores" in arrays
    assert not {"client_sizes", "label_counts", "client_names"} & {*arrays}
    page = fb.report.write([tmp_path], tmp_path / "report.html").read_text()
    assert "clients are private, epsilon" in page


def test_members_of_a_sweep_are_private_each_on_its_own(x: Experiment, tmp_path: Path) -> None:
    base = replace(x, engine="stacked", rounds=2, method="fedavg", options={"weighting": "equal", "epochs": 1})
    runs = sweep(base, ["seed=0..1", "noise_multiplier=2,4"], tmp_path)
    assert len(runs) == 4
    for name, one in runs.items():
        noise = float(name.partition("noise_multiplier=")[2])
        assert one.epsilon == pytest.approx(epsilon_of((Spent(0.5, noise, 2),), 1e-5))
    assert len({r for name in runs for r in releases(tmp_path / name)}) == 8


def test_flower_and_runs_that_are_not_private_are_refused(x: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="private: on Flower"):
        fb.experiments.build.build(replace(x, engine="flower", private="rows"))
    run(replace(x, private=None, noise_multiplier=None, rounds=1), tmp_path)
    with pytest.raises(InputError, match="no private run"):
        spending(tmp_path)
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["train"]
