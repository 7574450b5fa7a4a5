"""Replies on their way: who announces more than it sends, or joins more than it has sent, harms itself alone."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from flwr.app import Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower import fetching
from fedbayes.flower.federated import carried
from fedbayes.flower.fetching import WORDS
from fedbayes.flower.grid import GridPost, content_of
from fedbayes.flower.node import CALIBRATE, TRAIN
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter, Refused
from fedbayes.methods import METHODS
from fedbayes.posterior.values import flatten_parts


class Server:
    """What Flower's grid asks of its server: replies as objects, of which some may be held back."""

    def __init__(self, replies: dict[str, Letter], spoil: Callable[[str, object], None] = lambda key, m: None) -> None:
        self.replies, self.spoil = replies, spoil
        self.objects: dict[str, bytes] = {}
        self.held_back: set[str] = set()
        self.asked: list[str] = []

    def PullMessages(self, request):
        (key,) = request.message_ids
        if key not in self.replies:
            return PullAppMessagesResponse()
        about = Metadata(1, key, 7, 1, key, "", 0.0, 60.0, TRAIN)
        message = make_message(about, content=content_of(self.replies.pop(key)))
        self.spoil(key, message)
        message.metadata.__dict__["_message_id"] = message.object_id
        tree = get_object_tree(message)
        objects = get_all_nested_objects(message)
        self.objects |= {name: one.deflate() for name, one in objects.items()}
        if key == "held back":
            self.held_back.add(next(iter(objects)))
        proto = message_to_proto(remove_content_from_message(message))
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])

    def PullObject(self, request):
        self.asked.append(request.object_id)
        there = request.object_id not in self.held_back
        content = self.objects[request.object_id] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):
        return None


def post_of(server: Server, pause: float = 0.2) -> GridPost:
    grid = HttpGrid(token="t")
    grid._client, grid._run = server, SimpleNamespace(run_id=1)
    return GridPost(grid, pause=pause)


LETTER = Letter({"rows": 1}, {"model.mean": np.arange(5.0)})


def wait_for(post: GridPost, key: str) -> Answer:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for _, answer in post.pull([key]):
            return answer
    raise AssertionError(f"{key} never came")


def test_a_reply_that_is_held_back_keeps_no_other_waiting() -> None:
    server = Server(dict.fromkeys(("held back", "a", "b"), LETTER))
    server.replies["held back"] = Letter({}, {"model.mean": np.arange(7.0)})
    post = post_of(server)
    began = time.monotonic()
    assert [key for key, _ in post.pull(["held back", "a", "nothing yet", "b"])] == ["a", "b"]
    assert time.monotonic() - began < 5
    assert post.pull(["held back"]) == []
    server.held_back.clear()
    got = wait_for(post, "held back")  # a slow one is read when it is whole, and once
    assert isinstance(got, Letter)
    np.testing.assert_array_equal(got.arrays["model.mean"], np.arange(7.0))
    assert post.pull(["held back"]) == []
    assert len(server.asked) < 100


def test_what_is_held_back_for_ever_is_no_offence_and_leaves_no_thread() -> None:
    post = post_of(Server({"held back": LETTER}), pause=0.05)
    post.fetching.expect(["held back"], 5, until=time.monotonic() + 1.0)
    answer = wait_for(post, "held back")
    assert isinstance(answer, str)
    assert "has not come in time" in answer
    time.sleep(0.2)
    assert not any(thread.name == "fedbayes-fetch" for thread in threading.enumerate())


def test_a_piece_that_is_named_many_times_is_refused_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []
    monkeypatch.setattr("flwr.app.Array.inflate", lambda *given, **named: joined.append(given))

    def bomb(key: str, message) -> None:
        array = message.content.array_records["fedbayes.arrays"]["model.mean"]
        array.__dict__["_chunks"] = array.slice_array() * 300

    post = post_of(Server({"bomb": Letter({}, {"model.mean": np.zeros(1 << 17)})}, bomb))
    ((_, answer),) = post.pull(["bomb"])
    assert isinstance(answer, Refused)
    assert str(answer) == "its reply can't be read (it has 300 MiB, at most 16 MiB are expected)"
    assert not joined


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"model.mean": np.arange(600_000.0)}, "it has 4.578 MiB, at most 4 MiB are expected"),
        ({f"w{i}": np.array(float(i)) for i in range(300)}, "it is of 604 pieces, at most 512 are expected"),
    ],
)
def test_a_reply_may_not_be_far_larger_than_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, arrays: dict[str, np.ndarray], words: str
) -> None:
    monkeypatch.setattr(fetching, "SLACK", 0)
    post = post_of(Server({"m": Letter({}, arrays), "n": LETTER}))
    post.fetching.expect(["m", "n"], (4 << 20) // WORDS, until=time.monotonic() + 60)
    (_, large), (_, small) = post.pull(["m", "n"])
    assert isinstance(large, Refused)
    assert words in str(large)
    assert isinstance(small, Letter)


@pytest.mark.parametrize(("kind", "beside"), [(TRAIN, fetching.SLACK), (CALIBRATE, fetching.HISTOGRAM)])
def test_only_who_is_asked_for_a_histogram_may_send_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, beside: int
) -> None:
    monkeypatch.setattr("fedbayes.flower.grid.Message", lambda *given, **named: given)
    post = post_of(Server({}))
    post.grid.push_messages = lambda messages: ["m"]
    post.push(kind, {7: LETTER}, 60.0)
    assert post.fetching.bounds["m"].size == beside + 5 * WORDS


@pytest.mark.parametrize("method", METHODS)
def test_honest_uploads_are_well_below_the_bound(tiny: Experiment, method: str) -> None:
    """No more numbers than were sent; what a secure sum adds to them are a few words."""
    options = {"server_batch": 5} if method in ("fedbe", "fedppd_distill") else {}
    x = replace(tiny, method=method, options=options, partition_options={"server": 10})
    program = build(carried(x)).program
    sent = {part: program.initial[part] for part in program.pooling.rules}
    up, down = (
        sum(t.numel() for t in flatten_parts(parts)[0].values()) for parts in (program.pooling.uploaded(sent), sent)
    )
    assert 8 * up <= WORDS * down / 2


def test_a_failure_of_the_server_is_raised_where_replies_are_asked_for() -> None:
    server = Server({})
    server.PullMessages = lambda request: (_ for _ in ()).throw(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        post_of(server).pull(["m"])


def test_a_reply_that_never_comes_does_not_keep_the_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_fetching import *\n"
        "post = post_of(Server({'held back': LETTER}), pause=0.01)\n"
        "assert post.pull(['held back']) == []\n"
        "print('left', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["left"]), ended.stderr
