"""Keys and client numbers: a place stays with its key, the operator's name outranks it, a lost one is given back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process import InProcess, Spoil
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.places import FILE, RULES, Places, Who, release
from fedbayes.flower.post import Answer
from fedbayes.flower.settings import settings_of
from fedbayes.flower.wire import Letter, Refused
from fedbayes.runs import journal


@pytest.fixture
def places(tmp_path: Path) -> Places:
    kept = Places()
    kept.keep_in(tmp_path)
    return kept


def test_a_place_belongs_to_the_first_key_that_came(places: Places, tmp_path: Path) -> None:
    places.take(0, Who("a"))
    places.take(0, Who("a"))
    with pytest.raises(Refused, match="place of client 0 belongs to another key: fedbayes flower release RUN 0 frees"):
        places.take(0, Who("b"))
    with pytest.raises(Refused, match="its key belongs to client 0, not 1"):
        places.take(1, Who("a"))
    later = Places()  # the run is started again
    later.keep_in(tmp_path)
    with pytest.raises(Refused, match="belongs to another key"):
        later.take(0, Who("b"))


def test_the_operators_name_outranks_who_came_first(places: Places) -> None:
    places.take(0, Who("thief"))
    assert places.take(0, Who("right", "client-0")) == "client 0 has another key now, registered under its name"
    with pytest.raises(Refused, match="belongs to another key"):
        places.take(0, Who("thief"))
    with pytest.raises(Refused, match="it speaks for client 1, but is registered as client-0"):
        places.take(1, Who("right", "client-0"))


def test_only_names_count_where_the_operator_says_so(tmp_path: Path) -> None:
    places = Places("names")
    places.keep_in(tmp_path)
    places.take(2, Who("a", "client-2"))
    for name in ("", "client-", "client-x", "client-3 ", "Client-3"):
        with pytest.raises(Refused, match=r"flwr supernode register KEY\.pub --name client-3"):
            places.take(3, Who("b", name))


@pytest.mark.parametrize(("rule", "who"), [("free", [Who("a"), Who("b")]), ("keys", [Who(), Who()])])
def test_without_keys_there_is_nothing_to_bind(tmp_path: Path, rule: str, who: list[Who]) -> None:
    places = Places(rule)
    places.keep_in(tmp_path)
    for one in who:
        places.take(0, one)
    assert not (tmp_path / FILE).exists()


def test_the_folders_of_a_comparison_share_places(tmp_path: Path) -> None:
    places = Places()
    for method in ("fedavg", "pvi"):
        places.keep_in(tmp_path / method)
        places.take(0, Who("a"))
    places.take(1, Who("b"))
    assert [json.loads((tmp_path / m / FILE).read_text()) for m in ("fedavg", "pvi")] == [{"0": "a", "1": "b"}] * 2
    assert len(release(tmp_path, 0)) == 2
    places.take(0, Who("c"))


@pytest.mark.parametrize("text", ["", "[]", '{"0": 1}', '{"x": "a"}', "{" * 5000])
def test_a_damaged_file_is_named(places: Places, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError, match=r"places.json can't be read"):
        places.take(0, Who("a"))


def as_client_0(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
    assert isinstance(answer, Letter)
    return Letter({**answer.head, "client": 0}, answer.arrays) if k == 1 else answer


def federate(x: Experiment, folder: Path, post: InProcess) -> fb.Run:
    return run(x, folder, post)[x.method]


def test_another_registered_key_cant_take_a_client_that_is_gone(tiny: Experiment, tmp_path: Path) -> None:
    """Client 0's node goes offline; node 101, with a key of its own, says that it is client 0."""
    x = replace(tiny, rounds=3, data="flower_code:site")

    def until(number: int, others: Callable[..., Answer] = lambda kind, k, letter, answer: answer) -> Spoil:
        def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
            if letter.head.get("round") == number and kind == "train":
                raise KeyboardInterrupt
            return others(kind, k, letter, answer)

        return spoil

    with pytest.raises(KeyboardInterrupt):
        federate(x, tmp_path, InProcess(carried(x), spoil=until(1)))
    post = InProcess(carried(x), spoil=until(2, as_client_0))
    post.there.remove(100)
    with pytest.raises(KeyboardInterrupt):
        federate(x, tmp_path, post)
    record = journal.read(tmp_path)[1]
    assert set(record["left_out"]) == {"0", "1"}
    (note,) = [note for note in record["notes"] if "turned away" in note]
    assert note.startswith("node 101 was turned away: the place of client 0 belongs to another key")

    release(tmp_path, 0)  # the operator gives the place back, and it is the next node's
    post = InProcess(carried(x))
    post.who[100] = Who("a new key")
    assert federate(x, tmp_path, post).journal[2]["left_out"] == {}


def test_a_node_registered_by_name_takes_its_place_from_who_sits_there(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=1, data="flower_code:site")
    post = InProcess(carried(x), spoil=as_client_0)
    post.there.reverse()  # node 101 is asked first
    post.who[100] = Who("key", "client-0")
    record = federate(x, tmp_path, post).journal[0]
    assert record["left_out"] == {"1": "no node was online"}
    assert json.loads((tmp_path / FILE).read_text())["0"] == "key"


def test_rows_that_the_server_knows_are_those_of_the_card(tiny: Experiment, tmp_path: Path) -> None:
    def more(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        assert isinstance(answer, Letter)
        return Letter({**answer.head, "rows": 10_000}, answer.arrays) if k == 1 else answer

    x = replace(tiny, rounds=1)
    record = federate(x, tmp_path, InProcess(carried(x), spoil=more)).journal[0]
    assert any("rows is 10000, but client 1 has 20: use the same data" in note for note in record["notes"])


def test_test_rows_that_the_server_knows_are_those_of_the_card(tiny: Experiment, tmp_path: Path) -> None:
    def more(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        assert isinstance(answer, Letter)
        return Letter({**answer.head, "test_rows": 10**9}, answer.arrays) if (kind, k) == ("query", 1) else answer

    x = replace(tiny, rounds=1, flower={**tiny.flower, "client_scores": True})
    record = federate(x, tmp_path, InProcess(carried(x), spoil=more)).journal[0]
    (note,) = [note for note in record["notes"] if "turned away" in note]
    assert re.search(r"test_rows is 1000000000, but client 1 has \d+: use the same data", note)


def liar(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
    """Client 1 says that it has a million test rows, and that all are predicted right."""
    assert isinstance(answer, Letter)
    if k == 1 and kind == "query":
        return Letter({**answer.head, "test_rows": 10**6}, answer.arrays)
    if k == 1 and kind.startswith("evaluate"):
        right = {name: np.zeros_like(a) for name, a in answer.arrays.items()}
        return Letter(answer.head, right | {name: np.array(1e6) for name in ("count", "correct")})
    return answer


def test_who_says_that_it_has_most_of_the_test_rows_is_named_and_stops_nobody(tiny: Experiment, tmp_path: Path) -> None:
    options = {"epochs": 1, "batch": 8}
    x = replace(tiny, data="flower_code:site", method="fedper", options=options, target_accuracy=0.99)
    honest = federate(x, tmp_path / "honest", InProcess(carried(x))).journal
    assert not any("test rows" in note for record in honest for note in record.get("notes", []))
    made = federate(x, tmp_path / "spoilt", InProcess(carried(x), spoil=liar)).journal
    assert len(made) == x.rounds
    for record in made:
        assert record["test"]["accuracy"] > 0.99
        assert "stopped" not in record
        for words in ("client 1 has 1000000 of the 1000016 test rows", "by the clients' own word: it stops nobody"):
            assert any(words in note for note in record["notes"]), record["notes"]


def test_rows_are_bounded_where_the_server_does_not_know_them(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=1, data="flower_code:site", flower={**tiny.flower, "max_rows": 19})
    with pytest.raises(InputError, match="0 clients answered"):
        federate(x, tmp_path, InProcess(carried(x)))


def test_a_place_is_freed_on_the_command_line(places: Places, tmp_path: Path) -> None:
    places.take(3, Who("a"))
    assert CliRunner().invoke(app, ["flower", "release", str(tmp_path), "3"]).exit_code == 0
    assert json.loads((tmp_path / FILE).read_text()) == {}
    with pytest.raises(InputError, match="no key has the place of client 3"):
        release(tmp_path, 3)


@pytest.mark.parametrize("table", [{"places": "key"}, {"max_rows": 0}, {"max_offences": -1}, {"max_offences": True}])
def test_the_settings_of_the_door_are_checked(table: dict[str, object]) -> None:
    assert settings_of({"places": [*RULES][1], "max_offences": 0}, cohort=3).max_offences == 0
    with pytest.raises(InputError, match=f"{next(iter(table))} must be|places"):
        settings_of(table, cohort=3)
