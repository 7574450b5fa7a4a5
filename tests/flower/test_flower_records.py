"""Letters as Flower's records, and a node's answers through the app that Flower calls."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.files import array_of
from fedbayes.flower.apps import client_app
from fedbayes.flower.federated import carried
from fedbayes.flower.grid import ARRAYS, HEAD, GridPost, answer_of, content_of, letter_of
from fedbayes.flower.node import QUERY, TRAIN
from fedbayes.flower.places import Who
from fedbayes.flower.wire import Coding, Letter, Refused, head_of, layouts_of, write

LETTER = Letter(
    {"round": 3, "own": True, "method": "feduab", "metric.loss": 0.25, "format": 1},
    {
        "model.mean": np.arange(5.0),
        "counters.mean": np.array([2**40]),
        "model.scale": np.ones(5, np.uint16),
        "count": np.array(7.0),
        "none": np.zeros((0, 2)),
        "turned": np.arange(6.0).reshape(2, 3).T,
    },
)


def message(content: RecordDict, kind: str = TRAIN) -> Message:
    about = Metadata(1, "m1", 1, 7, "", "", 0.0, 60.0, kind)
    return make_message(about, content=content)


def test_a_letter_comes_back_as_it_was() -> None:
    got = letter_of(content_of(LETTER))
    assert got.head == LETTER.head
    assert {key: type(v) for key, v in got.head.items()} == {key: type(v) for key, v in LETTER.head.items()}
    for name, a in LETTER.arrays.items():
        assert (got.arrays[name].dtype, got.arrays[name].shape) == (a.dtype, a.shape)
        np.testing.assert_array_equal(got.arrays[name], a)


def npy(descr: str, shape: str, content: bytes = b"") -> bytes:
    """Bytes in numpy's format whose header says what it likes."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def packed() -> bytes:
    file = io.BytesIO()
    np.savez(file, w=np.ones(5))
    return file.getvalue()


# What the one array of a reply may hold instead of an array.
PAYLOADS: dict[str, bytes] = {
    "objects": npy("|O", "(1,)", bytes(8)),
    "a cut header": b"\x93NUMPY\x01\x00v\x00{'descr': '|O'",
    "no array at all": b"nonsense",
    "nothing": b"",
    "an archive": packed(),
    "a pickle": b"\x80\x04K\x01.",
    "a shape of 1e12": npy("<f8", "(1000000000000,)", bytes(8)),
    "a shape of 2^80": npy("<f8", f"({2**80},)", bytes(8)),
    "an empty shape of 2^80": npy("<f8", f"(0, {2**80})"),
    "a negative shape": npy("<f8", "(-1,)"),
    "types of no size": npy("|V0", "(1000000000000,)"),
    "text of no size": npy("|S0", "(1000000000000,)"),
    "too long": npy("<f8", "(1,)", bytes(16)),
    "a header without end": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 9000,
    "a deep header": b"\x93NUMPY\x01\x00\x28\x23" + b"-" * 8999 + b"1",
    "another version": b"\x93NUMPY\x07\x00" + bytes(20),
}


def with_array(*about: object) -> RecordDict:
    return RecordDict({HEAD: ConfigRecord({}), ARRAYS: ArrayRecord({"w": Array(*about)})})


BROKEN = {
    "no head": RecordDict({ARRAYS: ArrayRecord({})}),
    "no arrays": RecordDict({HEAD: ConfigRecord({})}),
    "another format": with_array("float64", (1,), "pickle", b"\x80\x04K\x01."),
    **{what: with_array("float64", (1,), "numpy.ndarray", content) for what, content in PAYLOADS.items()},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_reply_that_is_no_letter_is_a_reason_and_no_failure(what: str) -> None:
    answer = answer_of(message(BROKEN[what]))
    assert isinstance(answer, Refused)
    assert "can't be read" in str(answer)


@pytest.mark.parametrize(
    "a", [np.zeros((0, 3)), np.ones((2, 3), order="F"), np.arange(4, dtype=np.uint16), np.ones(())]
)
def test_arrays_come_back_without_a_copy(a: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, a)
    got = array_of(file.getvalue())
    assert got.dtype == a.dtype
    np.testing.assert_array_equal(got, a)
    assert got.size == 0 or not got.flags.owndata


def test_an_error_is_the_reason_that_flower_gives() -> None:
    reply = make_message(Metadata(1, "m1", 1, 7, "", "", 0.0, 60.0, TRAIN), error=Error(4, "ValueError: no rows"))
    assert answer_of(reply) == "error 4: ValueError: no rows"


def test_an_error_can_forge_no_line_and_fill_no_journal() -> None:
    forged = "x\nround 9: client 0 left out\x1b[2J\x1b]0;title\x07\r" + "y" * 10_000_000
    reply = make_message(Metadata(1, "m1", 1, 7, "", "", 0.0, 60.0, TRAIN), error=Error(4, forged))
    answer = answer_of(reply)
    assert isinstance(answer, str)
    assert answer.isprintable()
    assert len(answer) <= 300
    assert answer.startswith("error 4: x round 9: client 0 left out yyy")


class FakeGrid:
    """Takes messages but one, and answers what it is told to."""

    def __init__(self) -> None:
        self.pushed: list[Message] = []

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, public_key=bytes([n]), name=f"client-{n - 7}") for n in (7, 8, 9)]

    def push_messages(self, messages: list[Message]) -> list[str | None]:
        self.pushed += messages
        return [None if m.metadata.dst_node_id == 8 else f"id{m.metadata.dst_node_id}" for m in messages]

    def pull_messages(self, ids: list[str]) -> list[Message]:
        (key,) = ids  # one at a time: a message that Flower can't take apart must not take others with it
        if key == "id7":
            raise ValueError("Unexpected set of children")
        reply = message(content_of(LETTER))
        reply.metadata.__dict__["_reply_to_message_id"] = "id7"  # what a reply says of itself is its sender's word
        return [reply] if key == "id9" else []


def test_a_message_that_is_not_taken_does_not_shift_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # who a message is from, which Flower sets in a run
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = FakeGrid()
    post = GridPost(grid)
    assert {n: who.registered for n, who in post.nodes().items()} == {7: 0, 8: 1, 9: 2}
    assert len({who.key for who in post.nodes().values()}) == 3
    assert {*GridPost(grid, keys=False).nodes().values()} == {Who()}
    assert post.push(TRAIN, dict.fromkeys((7, 8, 9), LETTER), 60.0) == {"id7": 7, "id9": 9}
    answers = dict(post.pull(["id7", "id8", "id9"]))
    assert answers.keys() == {"id7", "id9"}
    assert isinstance(answers["id9"], Letter)
    assert "Unexpected set of children" in str(answers["id7"])


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
