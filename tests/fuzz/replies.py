"""Replies of one node, changed in every way that a record can be: refused with a reason, or counted; never an end."""

import copy
import io
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from harness import Verdict, where

HERE = Path(__file__).parent
SPOILT = 1  # the client whose replies are changed
KINDS = ("query", "train", "train", "train", "evaluate", "evaluate.refine")  # the letters, as often as they are tried
TINY = {"network": "flower_code:net", "clients": 3, "rounds": 2}
FEW = {"epochs": 1, "batch": 20}
WORLDS: dict[str, dict[str, Any]] = {
    "normals": {
        "data": "flower_code:site",
        "data_options": {"public": True},
        "method": "feduab",
        "options": {**FEW, "test_draws": 2},
    },
    "half": {"data": "flower_code:site", "method": "feduab", "options": {**FEW, "test_draws": 2}},
    "buffers": {
        "data": "flower_code:site",
        "data_options": {"public": True},
        "network": "flower_code:norm_net",
        "method": "fedavg",
        "options": FEW,
    },
    "own": {"data": "flower_code:site", "method": "pvi", "options": {**FEW, "test_draws": 2}},
    "factors": {
        "data": "flower_code:site",
        "method": "fedswag",
        "options": {**FEW, "test_draws": 2, "covariance": "low_rank", "rank": 2, "swag_rounds": 2},
    },
    "compared": {"data": "flower_code:site", "method": "fedavg", "options": {**FEW, "weighting": "discrepancy"}},
    "real": {"data": "flower_code:line", "method": "fedag", "options": {**FEW, "noise": "heldout"}},
}
CODINGS = {"half": {"dtype": "bfloat16", "delta": True}, "factors": {"delta": True}}
TEXTS = ("", "x", "0", "NaN", "\x1b[2J", "a\nround 9: all is well", "\u202e", "\ud800", "z" * 100_000, "1e400", "-1")
NUMBERS = (0, 1, -1, 2, 7, 20, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 10**18, 10**400)
REALS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e18, -1e18, 1e200, 1.7e308, float("nan"), float("inf"), float("-inf"))
TYPES = ("<f8", "<f4", "<f2", ">f8", "<i8", "<i4", "<u2", "<u8", "|b1", "<c16", "<U3", "|S4", "<M8[s]", "|V8")
HEADERS = ("<f8", "|O", "|V0", "<f16", "f8, f8", "[('a', '<f8')]", "x", "", "-" * 5000, "(" * 3000)
SHAPES = ("()", "(0,)", "(-1,)", "(39,)", "(1000000000000,)", f"({2**80},)", f"(0, {2**80})", "(True,)", "39", "None")

Head, Arrays = dict[str, Any], dict[str, Any]


class World(NamedTuple):
    """A federation of three clients in this process, its first round known with all of them and without one."""

    experiment: Any
    task: Any
    answers: dict[tuple[str, int, bytes], Any]  # what honest nodes say, once computed
    nodes: dict[tuple[str, int], Any]


class Result(NamedTuple):
    """One round: its record, and the posterior after it."""

    record: dict[str, Any]
    state: Any


@cache
def world(name: str, kind: str) -> World:
    """A federation in which letters of a kind are sent, and no others that would only take time."""
    sys.path[:0] = [path for path in (str(HERE.parent / "flower"), str(HERE)) if path not in sys.path]
    from fedbayes.experiments.build import build
    from fedbayes.experiments.experiment import experiment_of
    from fedbayes.flower.federated import carried

    flower = {"wait": 0.02, "timeout": 5.0, "client_scores": kind == "evaluate", **CODINGS.get(name, {})}
    personal = int(kind == "evaluate.refine")
    x = carried(experiment_of({**TINY, **WORLDS[name], "personal_every": personal, "flower": flower}))
    return World(x, build(x), {}, {})


def play(at: World, folder: Path, spoil: Callable[[str, int, Any], Any]) -> Result:
    """One round of a federation, in which `spoil(kind, client, letter)` may change an answer."""
    from in_process import InProcess

    from fedbayes.flower.federated import federated
    from fedbayes.training.run import Memory

    class Post(InProcess):
        def _answer(self, kind: str, node: int, letter: Any) -> Any:
            # A node answers the same letter in the same way; runs have names of their own.
            plain = {key: v for key, v in letter.head.items() if key != "run"}
            content = b"".join(a.tobytes() for a in letter.arrays.values())
            key = f"{kind} {sorted(plain.items())}", node, content
            if key not in at.answers:
                at.answers[key] = super()._answer(kind, node, letter)
            said = at.answers[key]
            return said._replace(head={**said.head, **{k: letter.head[k] for k in ("run",) if k in said.head}})

    post = Post(at.experiment, spoil=lambda kind, k, letter, answer: spoil(kind, k, answer))
    post.made = at.nodes
    carrier = federated(post)
    task = carrier.bind(at.experiment, at.task, folder)
    progress, record = next(iter(carrier.rounds(task, task.begin(), Memory(), lambda: None)))
    return Result(record, progress.state)


@cache
def known(name: str, kind: str, whole: bool) -> Result:
    """The round with all clients, or as it is where the answers of one to letters of a kind are refused."""
    from fedbayes.flower.wire import Refused

    def spoil(what: str, k: int, answer: Any) -> Any:
        return answer if whole or (what, k) != (kind, SPOILT) else Refused("no")

    with tempfile.TemporaryDirectory() as place:
        return play(world(name, kind), Path(place), spoil)


def bits(state: Any) -> dict[str, bytes]:
    from fedbayes.posterior.values import flatten_parts

    parts = {**state.broadcast, **state.kept.as_parts()}
    return {name: t.numpy().tobytes() for name, t in flatten_parts(parts)[0].items()}


def case(seed: int, folder: Path) -> Verdict:
    """One round with one changed reply."""
    rng = random.Random(seed)
    name, kind = rng.choice([*WORLDS]), rng.choice(KINDS)
    at = world(name, kind)
    with warnings.catch_warnings(), mock.patch("os.fsync"):  # nothing of a case outlives it
        warnings.simplefilter("ignore")
        honest, without = (known(name, kind, whole) for whole in (True, False))
        try:
            result = play(at, folder, lambda what, k, a: changed(a, rng) if (what, k) == (kind, SPOILT) else a)
        except Exception as error:
            return Verdict("traceback", where(error))
    return judged(kind, result, honest, without)


def judged(kind: str, result: Result, honest: Result, without: Result) -> Verdict:
    """The verdict: the others' round to the bit where the reply was refused; else a posterior that can go on."""
    from fedbayes.posterior.values import check
    from fedbayes.runs.journal import line_of

    record, who = result.record, {str(SPOILT)}
    words = [*record["left_out"].values(), *record.get("notes", [])]
    if bad := [text for text in words if not text.isprintable() or len(text) > 700]:
        return Verdict("words", f"{len(bad[0])} characters: {bad[0][:200]!r}")
    if set(record["left_out"]) - who:
        return Verdict("others", f"{record['left_out']}")
    line_of(record)  # it can be written
    for part, q in result.state.broadcast.items():
        check(q, part)
    refused = set(record["left_out"]) == who if kind in ("query", "train") else any("left out of" in w for w in words)
    reference = without if refused and kind in ("query", "train") else honest
    if (refused or kind.startswith("evaluate")) and bits(result.state) != bits(reference.state):
        return Verdict("sum", "the sum is not that of the others")
    if refused and kind.startswith("evaluate"):
        for key in ("test", "test_clients", "personal"):
            if record.get(key) != without.record.get(key):
                return Verdict("scores", f"{key} is not that of the others: {record.get(key)}")
    return Verdict("refused" if refused else "done", "")


def changed(letter: Any, rng: random.Random) -> Any:
    """An answer that was changed, as it comes through Flower's records."""
    from flwr.app import Error, Metadata
    from flwr.app.message import make_message

    from fedbayes.flower.grid import answer_of

    about = Metadata(1, "m", 1, 7, "", "", 0.0, 60.0, "train")
    if rng.random() < 0.03:
        return answer_of(make_message(about, error=Error(rng.randrange(9), rng.choice(TEXTS))))
    return answer_of(make_message(about, content=content(letter, rng)))


def content(letter: Any, rng: random.Random) -> Any:
    """Flower's records of a letter that was changed in one to three places."""
    from flwr.app import ConfigRecord, RecordDict

    from fedbayes.flower.grid import ARRAYS, HEAD

    head, arrays = dict(letter.head), {name: a.copy() for name, a in letter.arrays.items()}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((change_head, change_head, change_values, change_arrays))(head, arrays, rng)
    records = {HEAD: config(head), ARRAYS: payloads(arrays, rng)}
    if rng.random() < 0.03:
        del records[rng.choice([*records])]
    if rng.random() < 0.03:
        records[rng.choice((HEAD, ARRAYS, "more"))] = ConfigRecord({"x": 1})
    return RecordDict(records)


def config(head: Head) -> Any:
    """A head as Flower's record, without what it would not take."""
    from flwr.app import ConfigRecord

    record = ConfigRecord({})
    for key, value in head.items():
        try:
            record[key] = value
        except TypeError:
            continue
    return record


def value(rng: random.Random) -> Any:
    """Something that a head may hold."""
    plain = rng.choice((TEXTS, NUMBERS, REALS, (True, False), (b"", b"\x00", b"x" * 10_000)))
    one = rng.choice(plain)
    return [one] * rng.choice((0, 1, 3, 1000)) if rng.random() < 0.2 else one


def change_head(head: Head, arrays: Arrays, rng: random.Random) -> None:
    """Another value under a name, a name that is missing, or one too many."""
    key = rng.choice([*head])
    way = rng.random()
    if way < 0.15:
        del head[key]
    elif way < 0.3:
        head[rng.choice(("refused", "metric.loss", "metric.", f"metric.{rng.choice(TEXTS)}", "x"))] = value(rng)
    elif way < 0.35:
        head |= {f"metric.{i}": 1.0 for i in range(rng.choice((1, 40)))}
    else:
        head[key] = value(rng)


def change_values(head: Head, arrays: Arrays, rng: random.Random) -> None:
    """Other numbers in an array."""
    if not arrays:
        return
    name = rng.choice([*arrays])
    a = arrays[name]
    if not isinstance(a, np.ndarray) or not a.size or a.dtype.kind not in "fiu":
        return
    spots = rng.sample(range(a.size), rng.choice((1, min(3, a.size), a.size)))
    way = rng.random()
    with np.errstate(all="ignore"):
        if way < 0.5:
            number = rng.choice(REALS) if a.dtype.kind == "f" else rng.choice(NUMBERS) % 2 ** (8 * a.itemsize - 1)
            a.reshape(-1)[spots] = np.array(number).astype(a.dtype)
        elif way < 0.8:
            a.reshape(-1)[spots] *= np.array(rng.choice((-1, 0, 2, 100))).astype(a.dtype)
        else:
            arrays[name] = np.frombuffer(bytearray(rng.randbytes(a.nbytes)), a.dtype).reshape(a.shape)


def change_arrays(head: Head, arrays: Arrays, rng: random.Random) -> None:
    """An array of another type, shape or name, one too many or too few."""
    if not arrays or rng.random() < 0.1:
        arrays[rng.choice(("more", "model.mean", rng.choice(TEXTS)))] = np.ones(rng.choice((0, 1, 39)))
        return
    name = rng.choice([*arrays])
    a = arrays[name]
    way = rng.random()
    if way < 0.15:
        del arrays[name]
    elif way < 0.3:
        arrays[rng.choice([*TEXTS, *arrays])] = arrays.pop(name)
    elif not isinstance(a, np.ndarray):
        return
    elif way < 0.6:
        arrays[name] = np.zeros(a.shape, rng.choice(TYPES))
    elif way < 0.8:
        arrays[name] = rng.choice((a[None], a.reshape(-1)[:-1], a.reshape(-1)[:0], np.repeat(a.reshape(-1), 2)))
    else:
        arrays[name] = rng.choice((a.T, np.asfortranarray(a), a.reshape(-1)[::-1]))


def payloads(arrays: Arrays, rng: random.Random) -> Any:
    """Arrays as Flower's record; the bytes of one may be damaged."""
    from flwr.app import Array, ArrayRecord

    spoilt = rng.choice([*arrays]) if arrays and rng.random() < 0.25 else None
    record = ArrayRecord({})
    for name, a in arrays.items():
        file = io.BytesIO()
        np.save(file, a)
        data, stype = file.getvalue(), "numpy.ndarray"
        if name == spoilt:
            data = damaged(data, rng)
            stype = rng.choice((stype, stype, stype, "pickle", "", "numpy.ndarray\n"))
        record[name] = Array(str(a.dtype), tuple(a.shape), stype, data)
    return record


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes in numpy's format, cut, changed, replaced, or under a header that says what it likes."""
    way = rng.random()
    if way < 0.2:
        return data[: rng.randrange(len(data))]
    if way < 0.4:
        at = rng.randrange(min(len(data), 160))
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if way < 0.5:
        file = io.BytesIO()
        np.savez(file, w=np.ones(39))
        return rng.choice((b"", b"\x80\x04K\x01.", file.getvalue(), rng.randbytes(200), data + b"x"))
    text = f"{{'descr': {rng.choice(HEADERS)!r}, 'fortran_order': False, 'shape': {rng.choice(SHAPES)}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + copy.copy(data[128:])
