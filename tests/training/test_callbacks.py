"""Callbacks after each round: what they see, how they stop a run, and tables of a run."""

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, from_toml, to_toml
from fedbayes.runs import journal
from fedbayes.runs.folder import resume, run

X = torch.linspace(-1, 1, 40).reshape(20, 2)
Y = (X[:, 0] > 0).long()
CLIENTS = fb.data.from_clients([(X[::2], Y[::2]), (X[1::2], Y[1::2])], test=(X, Y))

NETWORK = nn.Linear(2, 2)


def fitted(**options):
    return fb.fit(NETWORK, CLIENTS, method=fb.methods.feduab(draws=2), **{"rounds": 4, **options})


def test_a_callback_sees_each_round_as_it_is_kept():
    seen = []

    def look(run, record):
        assert run.journal[-1] is record
        seen.append((record["round"], run.scores()["nll"]))
        record["mine"] = {"double": 2.0 * record["round"]}

    plain, watched = fitted(), fitted(on_round=look)
    assert [n for n, _ in seen] == [1, 2, 3, 4]
    assert seen[-1][1] == watched.scores()["nll"]
    assert watched.journal[2]["mine"] == {"double": 6.0}
    assert torch.equal(plain.posterior.mean, watched.posterior.mean)


@pytest.mark.parametrize(
    ("answer", "why"), [(True, "stop asked for it"), (np.True_, "stop asked for it"), ("cold enough", "cold enough")]
)
def test_a_callback_stops_the_run(answer, why):
    def stop(run, record):
        return answer if record["round"] == 2 else np.False_

    short = fitted(on_round=[stop, lambda run, record: None])
    assert len(short.journal) == 2
    assert short.journal[-1]["stopped"] == why
    assert torch.equal(short.posterior.mean, fitted(rounds=2).posterior.mean)


def test_wrong_callbacks_are_named():
    with pytest.raises(InputError, match=r"on_round must be a function \(run, record\), not a str"):
        fitted(on_round=["print"])
    with pytest.raises(InputError, match=r"on_round must be a function \(run, record\), not a int"):
        fitted(on_round=5)
    with pytest.raises(InputError, match="gave a float; give None, or a reason to stop"):
        fitted(on_round=lambda run, record: 0.5)


def test_an_experiment_names_its_callbacks_and_a_stopped_run_stays_stopped(tmp_path, monkeypatch):
    (tmp_path / "calls_of_mine.py").write_text(
        "def third(run, record):\n    return 'three are enough' if record['round'] == 3 else None\n"
        "def broken(run, record):\n    raise KeyError('gone')\n"
    )
    monkeypatch.chdir(tmp_path)
    common = {"network": "linear", "clients": 4, "cohort": 2, "rounds": 5, "options": {"epochs": 1}}
    experiment = Experiment(**common, on_round=("calls_of_mine:third",))
    assert from_toml(to_toml(experiment)) == experiment
    run(experiment, tmp_path / "run")
    assert [r.get("stopped") for r in journal.read(tmp_path / "run")] == [None, None, "three are enough"]
    assert len(resume(tmp_path / "run")["feduab"].journal) == 3
    with pytest.raises(InputError, match=r"on_round calls_of_mine:broken failed in .*line 4"):
        run(Experiment(**common, on_round=("calls_of_mine:broken",)), tmp_path / "other")


def test_tables_hold_the_journal_the_scores_and_the_predictions():
    made = fitted()
    rounds = made.to_columns()
    assert rounds["round"] == [1, 2, 3, 4]
    assert rounds["test.nll"] == [r["test"]["nll"] for r in made.journal]
    scores = made.to_columns("scores")
    at = [i for i, row in enumerate(zip(scores["site"], scores["score"])) if row == ("all", "accuracy")]
    assert scores["value"][at[0]] == pytest.approx(made.scores()["accuracy"])
    p, table = made.predict(X), made.to_columns("predictions")
    assert table["p_1"] == p.probs[:, 1].tolist()
    assert table["target"] == [str(int(y)) for y in Y]
    assert table["epistemic"] == p.epistemic.sum(-1).tolist()
    assert {len(column) for column in table.values()} == {20}
    with pytest.raises(InputError, match="unknown table 'rounds'"):
        made.to_columns("rounds")


def test_a_data_frame_where_a_library_is_installed():
    library = pytest.importorskip("pandas", reason="needs pandas")
    frame = fitted().to_frame()
    assert isinstance(frame, library.DataFrame)
    assert frame["round"].tolist() == [1, 2, 3, 4]


def test_without_a_library_the_columns_are_offered(monkeypatch):
    import sys

    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"needs pandas or polars.*run\.to_columns"):
        fitted(rounds=1).to_frame()
