"""Clients behind a post whose rounds do not wait: who is silent, late or gone costs the others nothing."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import InProcess
from test_federated import alone, same

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter
from fedbayes.runs import checkpoint, journal, sealed
from fedbayes.runs.folder import Watch


class Late(InProcess):
    """Answers of some clients come after so many looks at the post; None: never."""

    def __init__(self, experiment: Experiment, looks: dict[int, int | None], folder: Path | None = None) -> None:
        super().__init__(carried(experiment), folder)
        self.looks, self.due, self.now = looks, dict[str, int | None](), 0

    def push(self, kind, letters, seconds) -> dict[str, int]:
        ids = super().push(kind, letters, seconds)
        for key, node in ids.items():
            wait = self.looks.get(node - 100, 0) if kind == "train" else 0
            self.due[key] = None if wait is None else self.now + wait
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        self.now += 1
        return super().pull([key for key in ids if (due := self.due[key]) is not None and due < self.now])


@pytest.fixture
def buffered(tiny: Experiment) -> Experiment:
    return replace(
        tiny,
        clients=4,
        rounds=6,
        schedule="buffered",
        schedule_options={"buffer": 2},
        flower={"wait": 5, "timeout": 60},
    )


def federate(x: Experiment, folder: Path, post: InProcess, watch: Watch | None = None) -> fb.Run:
    return run(x, folder, post, watch)[x.method]


METHODS: dict[str, dict[str, object]] = {
    "feduab": {"test_draws": 2},
    "fedavg": {"server": "adam", "server_lr": 0.1},
    "pvi": {"damping": 0.3, "test_draws": 2},
    "bayes_admm": {"test_draws": 2},
    "scaffold": {"epochs": 1},
}


@pytest.mark.parametrize("method", METHODS)
def test_where_all_answer_at_once_it_is_the_synchronous_run(buffered: Experiment, tmp_path: Path, method: str) -> None:
    x = replace(buffered, method=method, rounds=2, schedule_options={"buffer": 4}, options=METHODS[method])
    far = federate(x, tmp_path / "far", Late(x, {}))
    near = alone(replace(x, schedule="synchronous", schedule_options={}, flower={}), tmp_path / "near")
    same(far, near)
    assert [record["staleness"]["most"] for record in far.journal] == [0, 0]


@pytest.mark.parametrize("method", ["feduab", "pvi"])
def test_who_is_silent_costs_the_others_nothing(buffered: Experiment, tmp_path: Path, method: str) -> None:
    post = Late(replace(buffered, method=method), {3: None})
    made = federate(replace(buffered, method=method), tmp_path, post)
    assert len(made.journal) == 6
    taken = [k for record in made.journal for k in record["took_part"]]
    assert 3 not in taken
    assert min(taken.count(k) for k in range(3)) >= 3
    assert [k for kind, k, _ in post.asked if kind == "train"].count(3) == 1  # its order is still on the way
    assert made.progress.state.flight.seats[0].client == 3


def test_who_is_late_is_counted_from_where_it_started(buffered: Experiment, tmp_path: Path) -> None:
    x = replace(buffered, method="pvi", rounds=8)
    made = federate(x, tmp_path, Late(x, {3: 5}))
    late = [record for record in made.journal if 3 in record["took_part"]]
    assert late
    assert late[0]["staleness"]["most"] > 0
    assert made.journal[-1]["clock"] >= late[0]["clock"] > 0


def test_who_does_not_answer_in_time_is_given_up_and_asked_again(buffered: Experiment, tmp_path: Path) -> None:
    x = replace(buffered, clients=3, rounds=5, flower={"wait": 5, "timeout": 0.02})
    post = Late(x, {2: None})
    made = federate(x, tmp_path, post)
    assert any("no reply within 0.02 s" in record["left_out"].get("2", "") for record in made.journal)
    assert [k for kind, k, _ in post.asked if kind == "train"].count(2) > 1


@pytest.mark.parametrize("word", [None, "error 3: node unavailable"])
def test_who_loses_its_connection_while_it_trains_is_no_offender(
    buffered: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    """Its card is gone when its order times out, or when Flower says so."""
    monkeypatch.setattr("fedbayes.flower.aloft.NODES", 0.0)

    class Gone(Late):
        def push(self, kind, letters, seconds) -> dict[str, int]:
            if kind == "train" and 102 in letters:
                self.there.remove(102)
            return super().push(kind, letters, seconds)

    limit = 60 if word else 0.02
    x = replace(buffered, clients=3, rounds=8, flower={"wait": 5, "timeout": limit, "max_offences": 1})
    post = Gone(x, {2: 2 if word else None})
    post.spoil = lambda kind, k, letter, answer: word if (kind, k) == ("train", 2) and word else answer
    made = federate(x, tmp_path, post)
    reasons = [record["left_out"]["2"] for record in made.journal if "2" in record["left_out"]]
    assert reasons == [word or "no reply within 0.02 s"]
    assert not any("put aside" in note for record in made.journal for note in record.get("notes", ()))


def test_a_killed_server_sends_what_was_on_its_way_again(buffered: Experiment, tmp_path: Path) -> None:
    x = replace(buffered, method="pvi", rounds=7)

    class Killed(BaseException):
        pass

    def die(at: int) -> Callable[[journal.Record], None]:
        def seen(record: journal.Record) -> None:
            if record["round"] == at:
                raise Killed

        return seen

    with pytest.raises(Killed):
        federate(x, tmp_path / "run", Late(x, {3: None}, tmp_path), Watch(round=die(3)))
    row = sealed.read(checkpoint.paths(tmp_path / "run")[-1], checkpoint.ROW)
    assert row["flight"]["seats"]["client"].tolist()[:1] == [3]
    post = Late(x, {}, tmp_path)
    made = federate(x, tmp_path / "run", post)
    (first, *_) = [letter for kind, k, letter in post.asked if (kind, k) == ("train", 3)]
    assert isinstance(first, Letter)
    assert first.head["round"] == 0  # its order, not a new one
    assert len(made.journal) == 7
    assert made.journal[3]["clock"] >= made.journal[2]["clock"]
    assert not any("lost its own state" in note for record in made.journal for note in record.get("notes", ()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"flower": {"secure": True}}, "secure: masks are agreed on by the clients of one round"),
        ({"flower": {"client_scores": True}}, "client_scores: scores on the clients' rows wait"),
        ({"personal_every": 1}, "personal_every: scores of personal models wait"),
        ({"method": "bpfed"}, "bpfed can't be|bpfed has no global model"),
        ({"delays": "lognormal"}, "delays: they are of a simulation"),
    ],
)
def test_what_would_wait_is_refused_by_name(buffered: Experiment, tmp_path: Path, wrong: dict, words: str) -> None:
    x = replace(buffered, **wrong)
    with pytest.raises(InputError, match=words):
        federate(x, tmp_path, Late(x, {}))
