"""Letters as Flower's records, and a node's answers through the app that Flower calls."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.task_identity import TaskIdentity

from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.flower.apps import client_app
from fedbayes.flower.federated import carried
from fedbayes.flower.grid import ARRAYS, HEAD, GridPost, answer_of, content_of, letter_of
from fedbayes.flower.node import QUERY, TRAIN
from fedbayes.flower.wire import Coding, Letter, head_of, layouts_of, write

LETTER = Letter(
    {"round": 3, "own": True, "method": "feduab", "metric.loss": 0.25, "format": 1},
    {"model.mean": np.arange(5.0), "counters.mean": np.array([2**40]), "model.scale": np.ones(5, np.uint16)},
)


def message(content: RecordDict, kind: str = TRAIN) -> Message:
    about = Metadata(1, "m1", 1, 7, "", "", 0.0, 60.0, kind)
    return make_message(about, content=content)


def test_a_letter_comes_back_as_it_was() -> None:
    got = letter_of(content_of(LETTER))
    assert got.head == LETTER.head
    assert {key: type(v) for key, v in got.head.items()} == {key: type(v) for key, v in LETTER.head.items()}
    for name, a in LETTER.arrays.items():
        assert got.arrays[name].dtype == a.dtype
        np.testing.assert_array_equal(got.arrays[name], a)


BROKEN = {
    "no head": RecordDict({ARRAYS: ArrayRecord({})}),
    "no arrays": RecordDict({HEAD: ConfigRecord({})}),
    "a pickle": RecordDict(
        {
            HEAD: ConfigRecord({}),
            ARRAYS: ArrayRecord({"w": Array("float64", (1,), "pickle", b"\x80\x04K\x01.")}),
        }
    ),
    "objects": RecordDict(
        {
            HEAD: ConfigRecord({}),
            ARRAYS: ArrayRecord({"w": Array("object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'descr': '|O'")}),
        }
    ),
    "no array at all": RecordDict(
        {
            HEAD: ConfigRecord({}),
            ARRAYS: ArrayRecord({"w": Array("float64", (1,), "numpy.ndarray", b"nonsense")}),
        }
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_reply_that_is_no_letter_is_a_reason_and_no_failure(what: str) -> None:
    answer = answer_of(message(BROKEN[what]))
    assert isinstance(answer, str)
    assert "can't be read" in answer


def test_an_error_is_the_reason_that_flower_gives() -> None:
    reply = make_message(Metadata(1, "m1", 1, 7, "", "", 0.0, 60.0, TRAIN), error=Error(4, "ValueError: no rows"))
    assert answer_of(reply) == "error 4: ValueError: no rows"


class FakeGrid:
    """Takes messages but one, and answers what it is told to."""

    def __init__(self) -> None:
        self.pushed: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return [7, 8, 9]

    def push_messages(self, messages: list[Message]) -> list[str | None]:
        self.pushed += messages
        return [None if m.metadata.dst_node_id == 8 else f"id{m.metadata.dst_node_id}" for m in messages]

    def pull_messages(self, ids: list[str]) -> list[Message]:
        reply = message(content_of(LETTER))
        reply.metadata.__dict__["_reply_to_message_id"] = "id9"
        return [reply] if "id9" in ids else []


def test_a_message_that_is_not_taken_does_not_shift_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # who a message is from, which Flower sets in a run
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = FakeGrid()
    post = GridPost(grid)
    assert post.nodes() == [7, 8, 9]
    assert post.push(TRAIN, dict.fromkeys((7, 8, 9), LETTER), 60.0) == {"id7": 7, "id9": 9}
    ((key, answer),) = post.pull(["id7", "id9"])
    assert key == "id9"
    assert isinstance(answer, Letter)


@pytest.mark.parametrize("where", ["context", "folder"])
def test_the_app_answers_and_keeps_state_where_it_is_told(tiny: Experiment, tmp_path: Path, where: str) -> None:
    x = carried(replace(tiny, method="pvi"))
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(x))
    app = client_app(file)
    program = build(x).program
    head = {**head_of(x, layouts_of(program.initial)), "run": "r"}
    config = {"partition-id": 1, **({"state": str(tmp_path / "kept")} if where == "folder" else {})}
    context = Context(1, 7, config, RecordDict(), {"set": "", "output": "x"})

    card = letter_of(app(message(content_of(Letter(head, {})), QUERY), context).content)
    assert (card.head["client"], card.head["rows"]) == (1, 20)

    for number, counted in ((0, -1), (1, 0)):
        ask = {**head, "client": 1, "round": number, "counted": counted, "dtype": "held", "delta": False}
        letter = Letter(ask, write(program.initial, Coding()))
        reply = letter_of(app(message(content_of(letter)), context).content)
        assert (reply.head["own"], reply.head["lost"]) == (True, False)
    assert len(context.state.config_records) == (1 if where == "context" else 0)
    assert len(list(tmp_path.glob("kept/*"))) == (1 if where == "folder" else 0)

    wrong = letter_of(app(message(content_of(Letter({**head, "version": "0"}, {})), QUERY), context).content)
    assert "version is '0'" in wrong.head["refused"]


def test_a_node_without_a_number_says_how_to_give_it_one(tiny: Experiment, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(tiny))
    context = Context(1, 7, {}, RecordDict(), {})
    with pytest.raises(ValueError, match="partition-id=0"):
        client_app(file)(message(content_of(Letter({"method": "feduab"}, {})), QUERY), context)
