"""What a private run releases beside its rounds is in its account, before it is made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbayes as fb
import fedbayes.report
from fedbayes.errors import InputError
from fedbayes.evaluate import conformal
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.runs import journal, releases
from fedbayes.runs.folder import load, resume, run
from fedbayes.runs.spending import IN_ALL, TEST_ROWS, spending

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
MUCH = 1e4  # an epsilon whose noise rounds to none


class Killed(BaseException):
    """In place of a kill: nothing catches it."""


@pytest.fixture
def x(tiny: Experiment) -> Experiment:
    return replace(
        tiny,
        method="fedavg",
        options={"epochs": 1, "weighting": "equal"},
        data="digits",
        data_options={},
        network="linear",
        rounds=2,
        engine="auto",
        partition="iid",
        partition_options={},
        private="clients",
        noise_multiplier=4.0,
    )


def trained(x: Experiment, folder: Path) -> Path:
    run(x, folder)
    return folder


def in_training(rounds: int = 2) -> float:
    return epsilon_of((Spent(0.5, 4.0, rounds),), 1e-5)


def test_every_calibration_spends_anew_and_the_account_holds_all(x: Experiment, tmp_path: Path) -> None:
    folder = trained(x, tmp_path)
    one = load(folder)
    assert one.epsilon == pytest.approx(in_training())
    assert [row.who for row in spending(folder)] == ["clients"]
    for times in (1, 2):
        conformal.fit(one, epsilon=MUCH)
        for again in (one, load(folder)):
            assert again.epsilon == pytest.approx(in_training() + times * MUCH)
        rows = {row.who: row for row in spending(folder, more=1)}
        assert (rows[TEST_ROWS].uses, rows[TEST_ROWS].epsilon) == (times, times * MUCH)
        assert rows["clients"].epsilon == pytest.approx(in_training())
        assert rows[IN_ALL].epsilon == pytest.approx(in_training() + times * MUCH)
        assert rows[IN_ALL].later == pytest.approx(in_training(3) + times * MUCH)
    page = fb.report.write([folder], tmp_path / "report.html").read_text()
    assert "20000 in 2 calibrations" in page.replace("2e+04", "20000")
    assert "in all" in page


def test_the_account_is_on_disk_before_anything_is_noised(
    x: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(x, tmp_path)

    def killed(*arguments: Any) -> None:
        assert [release.epsilon for release in releases.releases_in(folder)] == [3.0]
        raise Killed

    monkeypatch.setattr(conformal, "noised_sums", killed)
    with pytest.raises(Killed):
        conformal.fit(load(folder), epsilon=3.0)
    assert load(folder).epsilon == pytest.approx(in_training() + 3.0)
    for wrong in ({"way": "blended"}, {"score": "adaptiv"}, {"coverage": 2.0}):  # refused, so that nothing is spent
        with pytest.raises(InputError):
            conformal.fit(load(folder), epsilon=3.0, **wrong)
    assert len(releases.releases_in(folder)) == 1


def test_a_calibration_that_would_pass_the_budget_is_refused(x: Experiment, tmp_path: Path) -> None:
    folder = trained(replace(x, epsilon=in_training() + 1.5 * MUCH), tmp_path)
    made = conformal.fit(load(folder), epsilon=MUCH)
    with pytest.raises(InputError, match=r"^epsilon: this calibration would spend 10000 .* 5000 left") as error:
        conformal.fit(load(folder), epsilon=MUCH)
    assert "\n" not in str(error.value)
    assert len(releases.releases_in(folder)) == 1
    assert made.rows > 0


def test_a_run_whose_training_took_all_of_its_budget_is_not_calibrated(x: Experiment, tmp_path: Path) -> None:
    folder = trained(replace(x, noise_multiplier=None, epsilon=2.0), tmp_path)
    with pytest.raises(InputError, match="a noise_multiplier that leaves more"):
        conformal.fit(load(folder), epsilon=0.5)
    assert not (folder / releases.FILE).exists()


def test_rounds_after_a_calibration_keep_within_the_budget_too(x: Experiment, tmp_path: Path) -> None:
    x = replace(x, rounds=40, epsilon=0.5 * (in_training(4) + in_training(5)) + MUCH)
    folder = trained(replace(x, rounds=2), tmp_path)
    conformal.fit(load(folder), epsilon=MUCH)
    (folder / "config.toml").write_text(to_toml(x))
    resume(folder)
    records = journal.read(folder)
    assert len(records) == 4
    assert "beside the rounds, and one more round would pass the budget" in records[-1]["stopped"]
    assert load(folder).epsilon <= x.epsilon


def test_methods_of_a_comparison_add(x: Experiment, tmp_path: Path) -> None:
    """Whoever is in one is in the others: their rounds are one account, and their calibrations add."""
    folder = trained(replace(x, methods=("fedavg", "fedprox")), tmp_path)
    rows = {row.who: row for row in spending(folder)}
    assert {*rows} == {"fedavg: clients", "fedprox: clients", IN_ALL}
    assert rows[IN_ALL].epsilon == pytest.approx(in_training(4))
    conformal.fit(load(folder), epsilon=3.0 * MUCH)
    assert (folder / "fedavg" / releases.FILE).is_file()
    assert spending(folder)[-1].epsilon == pytest.approx(in_training(4) + 3.0 * MUCH)


def test_runs_in_memory_have_an_account_too(tmp_path: Path) -> None:
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=6, seed=0)
    asked: list[str] = []

    def look(run: fb.Run, record: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="still in training") as error:
            conformal.fit(run, epsilon=MUCH)
        asked.append(str(error.value))

    made = fb.fit(
        "linear", clients, method=fb.methods.fedavg(epochs=1, weighting="equal"), rounds=1, on_round=look,
        private="clients", noise_multiplier=4.0, epsilon=2.5 * MUCH,
    )  # fmt: skip
    assert len(asked) == 1
    before = made.epsilon
    assert before is not None
    conformal.fit(made, epsilon=MUCH)
    conformal.fit(made.personal(0).as_run, epsilon=MUCH)
    assert made.epsilon == pytest.approx(before + 2 * MUCH)
    with pytest.raises(InputError, match="would spend"):
        conformal.fit(made, epsilon=MUCH)
    fb.save(made, tmp_path / "saved", network="linear")
    with pytest.raises(InputError, match="without an account"):
        spending(tmp_path / "saved")


@pytest.mark.parametrize("text", ["[", "{}x", json.dumps([{"what": "calibration", "epsilon": -1, "round": 1}]), "[1]"])
def test_an_account_that_can_t_be_read_is_not_taken_for_none(x: Experiment, tmp_path: Path, text: str) -> None:
    folder = trained(replace(x, rounds=1), tmp_path)
    (folder / releases.FILE).write_text(text)
    for act in (lambda: load(folder).epsilon, lambda: spending(folder), lambda: resume(folder)):
        with pytest.raises(InputError, match=r"releases\.json can't be read .*put it back from a copy"):
            act()
