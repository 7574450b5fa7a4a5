"""Letters of a secure sum that are wrong in every way we know: their sender is refused, the sum is the others'."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

import secure_federation as federation
from in_process import InProcess
from secure_federation import EVIL, Post

from fedbayes.experiments.experiment import Experiment
from fedbayes.flower import masks, secure_node
from fedbayes.flower.federated import carried, run
from fedbayes.flower.node import SECURE
from fedbayes.flower.post import Answer
from fedbayes.flower.promises import Evidence
from fedbayes.flower.wire import Letter
from fedbayes.posterior.values import check

pytestmark = pytest.mark.flower

KEYS, SHARES, MASKED, UNMASK = SECURE
Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of a reply's head, knowing that of client 0
HUGE = 10**400


def field(name: str, change: Any) -> Change:
    """Another value of a field: given, or a function of what it is and of what client 0 says."""
    return lambda head, other: {**head, name: change(head[name], other[name]) if callable(change) else change}


def without(name: str) -> Change:
    return lambda head, other: {key: value for key, value in head.items() if key != name}


HEADS: dict[str, dict[str, tuple[Change, str]]] = {
    KEYS: {
        "no key": (without("mask_key"), "refused"),
        "text": (field("mask_key", "key"), "refused"),
        "empty": (field("box_key", b""), "refused"),
        "no point": (field("mask_key", bytes(33)), "refused"),
        "large": (field("mask_key", bytes(1 << 20)), "refused"),
        "list": (field("box_key", [b"a"] * 33), "refused"),
        "copied": (field("mask_key", lambda own, other: other), "refused"),
        "copied with its proof": (
            lambda h, o: {**h, "mask_key": o["mask_key"], "mask_proof": o["mask_proof"]},
            "refused",
        ),
        "all copied": (lambda h, o: {**o, "client": h["client"]}, "refused"),
        "one for both": (
            lambda h, o: {**h, "box_key": h["mask_key"], "box_proof": h["mask_proof"]},
            "refused",
        ),
        "no proof": (without("box_proof"), "refused"),
        "false proof": (field("mask_proof", lambda own, other: own[:-1] + bytes([own[-1] ^ 1])), "refused"),
        "more beside": (lambda h, o: {**h, "more": [1, 2]}, "counted"),
    },
    SHARES: {
        "no boxes": (without("boxes"), "refused"),
        "text": (field("boxes", "abcd"), "refused"),
        "fewer": (field("boxes", lambda own, other: own[1:]), "refused"),
        "more": (field("boxes", lambda own, other: own + own), "refused"),
        "empty": (field("boxes", [b""] * 4), "refused"),
        "large": (field("boxes", lambda own, other: [bytes(1 << 20), *own[1:]]), "refused"),
        "numbers": (field("boxes", [1, 2, 3, 4]), "refused"),
        "random": (field("boxes", [bytes(200)] * 4), "refused"),
        "one for all": (field("boxes", lambda own, other: own[:1] * 4), "refused"),
        "copied": (field("boxes", lambda own, other: other), "refused"),
        "reversed": (field("boxes", lambda own, other: own[::-1]), "refused"),
        "one random": (field("boxes", lambda own, other: [bytes(200), *own[1:]]), "counted"),
        "two swapped": (field("boxes", lambda own, other: [own[1], own[0], *own[2:]]), "refused"),
        "no promise": (without("promise"), "refused"),
        "short promise": (field("promise", b"abc"), "refused"),
        "random promise": (field("promise", lambda own, other: bytes(len(own))), "refused"),
        "copied promise": (field("promise", lambda own, other: other), "refused"),
        # The shares are right, and not those of what it promised: it is found out when they are put together.
        "promise of another seed": (field("promise", lambda own, other: bytes(32) + own[32:]), "refused"),
    },
    MASKED: {
        "no figures": (without("figures"), "refused"),
        "figures as text": (field("figures", "kl"), "refused"),
        "other figures": (field("figures", ["kl", "lost"]), "refused"),
        "figures of escape codes": (field("figures", ["kl", "\x1b[31m"]), "refused"),
        "one twice": (field("figures", ["kl", "kl"]), "refused"),
        "many": (field("figures", [f"f{k}" for k in range(10**5)]), "refused"),
        "own as text": (field("own", "yes"), "refused"),
        "no lost": (without("lost"), "refused"),
        "bad as text": (field("bad", "all"), "refused"),
        "bad of strangers": (field("bad", [77]), "refused"),
        "bad beyond number": (field("bad", [HUGE]), "refused"),
        "complains of all": (field("bad", [0, 2, 3, 4]), "counted"),
    },
    UNMASK: {  # who is in the sum by now stays in it
        "no shares": (without("shares"), "counted"),
        "text": (field("shares", "abcd"), "counted"),
        "of others": (field("of", [7, 8, 9, 10, 11]), "counted"),
        "of one": (field("of", [0] * 5), "counted"),
        "fewer": (field("shares", lambda own, other: own[1:]), "counted"),
        "more": (field("shares", lambda own, other: own * 3), "counted"),
        "empty": (field("shares", [b""] * 5), "counted"),
        "copied": (field("shares", lambda own, other: other), "counted"),
        "one for all": (field("shares", lambda own, other: own[:1] * 5), "counted"),
        "cut": (field("shares", lambda own, other: [share[:-1] for share in own]), "counted"),
        "large": (field("shares", lambda own, other: [share * 9999 for share in own]), "counted"),
        "random": (field("shares", lambda own, other: [bytes(len(share)) for share in own]), "counted"),
        "reversed": (field("shares", lambda own, other: own[::-1]), "counted"),
    },
}
ROWS = [(kind, what) for kind, rows in HEADS.items() for what in rows]


def spoilt(post: Post, kind: str, change: Callable[[Letter, Letter], Answer]) -> Post:
    """The post, where the evil one's replies of a kind are changed; `change` knows what client 0 said."""

    def spoil(asked: str, k: int, letter: Letter, reply: Answer) -> Answer:
        if asked != kind or "refused" in reply.head:
            return reply
        return change(reply, post.said[asked, 0][-1])

    post.spoil = spoil
    return post


def plain() -> Post:
    return Post(lambda kind, k, letter, reply: reply)


@pytest.mark.parametrize(("kind", "what"), ROWS)
def test_a_wrong_head_concerns_its_sender_alone(kind: str, what: str) -> None:
    change, expected = HEADS[kind][what]
    post = spoilt(plain(), kind, lambda reply, other: Letter(change(reply.head, other.head), reply.arrays))
    outcome, notes = federation.summed(post)
    assert federation.verdict(outcome) == expected
    if expected == "refused":
        assert outcome.left_out[EVIL].isprintable()
        assert len(outcome.left_out[EVIL]) <= 300
    if kind == UNMASK:
        assert any(note.startswith(f"client {EVIL} is in the sum, but: ") for note in notes)


ARRAYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no sum": lambda a: {name: v for name, v in a.items() if name != "sum"},
    "nothing": lambda a: {},
    "floats": lambda a: {**a, "sum": a["sum"].astype(float)},
    "signed": lambda a: {**a, "sum": a["sum"].view(np.int64)},
    "big end first": lambda a: {**a, "sum": a["sum"].astype(">u8")},
    "a column": lambda a: {**a, "sum": a["sum"][:, None]},
    "longer": lambda a: {**a, "sum": np.append(a["sum"], np.uint64(0))},
    "shorter": lambda a: {**a, "sum": a["sum"][1:]},
    "no shape": lambda a: {**a, "sum": a["sum"][0]},
    "empty": lambda a: {**a, "sum": a["sum"][:0]},
    "objects": lambda a: {**a, "sum": a["sum"].astype(object)},
    "a list": lambda a: {**a, "sum": a["sum"].tolist()},
    "one more": lambda a: {**a, "more": np.zeros(3)},
    **{
        f"clear: {name}": lambda a, value=value: {k: v if k == "sum" else value(v) for k, v in a.items()}
        for name, value in {
            "NaN": lambda v: v * np.nan,
            "infinite": lambda v: v + np.inf,
            "1e300": lambda v: v + 1e300,
            "text": lambda v: np.array("heavy"),
            "two": lambda v: np.append(v, v),
            "single": lambda v: v.astype(np.float32),
            "whole": lambda v: v.astype(np.int64),
        }.items()
    },
}


@pytest.mark.parametrize("what", ARRAYS)
def test_wrong_arrays_concern_their_sender_alone(what: str) -> None:
    post = spoilt(plain(), MASKED, lambda reply, other: Letter(reply.head, ARRAYS[what](reply.arrays)))
    outcome, _ = federation.summed(post)
    assert len(post.said[MASKED, 0][0].arrays) == 2  # one of them in the clear
    assert federation.verdict(outcome) == "refused"


REPLIES: dict[str, Callable[[Letter, Letter], Answer | None]] = {
    "silence": lambda reply, other: None,
    "an error": lambda reply, other: "error 3: \x1b[2Jgone",
    "an empty letter": lambda reply, other: Letter({}, {}),
    "that of client 0": lambda reply, other: other,
    "another round": lambda reply, other: Letter({**reply.head, "round": 9}, reply.arrays),
    "another run": lambda reply, other: Letter({**reply.head, "run": "x"}, reply.arrays),
    "a refusal of 10 MB": lambda reply, other: Letter({"refused": "no\n" * 3_000_000}, {}),
    "a refusal that is a list": lambda reply, other: Letter({"refused": [1, 2]}, {}),
    "keys that are no words": lambda reply, other: Letter({**reply.head, 3: b"", "\x1b": HUGE}, reply.arrays),
}


@pytest.mark.parametrize("kind", SECURE)
@pytest.mark.parametrize("what", REPLIES)
def test_replies_that_are_none_concern_their_sender_alone(kind: str, what: str) -> None:
    outcome, _ = federation.summed(spoilt(plain(), kind, REPLIES[what]))
    fine = kind == UNMASK or what == "keys that are no words"
    assert federation.verdict(outcome) == ("counted" if fine else "refused")


@contextmanager
def dealing(kind: str, false: Callable[[int, list[bytes]], list[bytes]]) -> Iterator[None]:
    """The evil one deals other shares: `false` changes those of its seed (0) and of its key (1)."""
    if kind != SHARES:
        yield
        return
    real, calls = masks.create_shares, iter(range(2))
    masks.create_shares = lambda *given: false(next(calls), real(*given))
    try:
        yield
    finally:
        masks.create_shares = real


def garbled(share: bytes, k: int) -> bytes:
    return share[:4] + random.Random(k).randbytes(len(share) - 4)


DEALS: dict[str, tuple[Callable[[int, list[bytes]], list[bytes]], bool, str]] = {
    "a seed that is none": (lambda n, s: s if n else [garbled(x, k) for k, x in enumerate(s)], False, "refused"),
    "one share of the seed for all": (lambda n, s: s if n else s[:1] * len(s), False, "refused"),
    "a key that is none": (lambda n, s: [garbled(x, k) for k, x in enumerate(s)] if n else s, False, "counted"),
    "a key that is none, and is gone": (
        lambda n, s: [garbled(x, k) for k, x in enumerate(s)] if n else s,
        True,
        "refused",
    ),
    "two shares of the seed wrong": (
        lambda n, s: s if n else [garbled(s[0], 0), garbled(s[1], 1), *s[2:]],
        False,
        "refused",
    ),
    "shares that are too long": (lambda n, s: [x + b"more" for x in s], False, "refused"),
}


@pytest.mark.parametrize("what", DEALS)
def test_false_shares_concern_who_dealt_them(what: str) -> None:
    """They fit into their boxes and to their digests; when nodes see the proof, the sum of the others may pass."""
    false, gone, expected = DEALS[what]
    post = Post(
        lambda kind, k, letter, reply: None if gone and kind == MASKED else reply, lambda kind: dealing(kind, false)
    )
    outcome, _ = federation.summed(post)
    assert federation.verdict(outcome) == expected


def test_a_dealer_that_keeps_its_own_share_back_does_not_end_the_round() -> None:
    """Two boxes can't be opened, and the share that would make up for one of them is not given."""

    def spoil(kind: str, k: int, letter: Letter, reply: Letter) -> Letter:
        if kind == SHARES:
            return Letter({**reply.head, "boxes": [bytes(200), bytes(200), *reply.head["boxes"][2:]]}, {})
        return Letter({**reply.head, "of": []}, {}) if kind == UNMASK else reply

    outcome, _ = federation.summed(Post(spoil))
    assert federation.verdict(outcome) == "refused"


def test_the_letters_travel_as_flowers_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of bytes, empty ones and evidence too; each letter and reply goes through Flower's messages and back."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    from fedbayes.flower.grid import content_of, letter_of

    def carried(letter: Letter) -> Letter:
        block = recorddict_to_proto(content_of(letter)).SerializeToString()
        return letter_of(recorddict_from_proto(type(recorddict_to_proto(content_of(letter))).FromString(block)))

    real = federation.answer
    monkeypatch.setattr(
        federation, "answer", lambda node, kind, letter, kept: carried(real(node, kind, carried(letter), kept))
    )
    false, _, _ = DEALS["a seed that is none"]
    for under, expected in ((lambda kind: nullcontext(), "counted"), (lambda kind: dealing(kind, false), "refused")):
        outcome, _ = federation.summed(Post(lambda kind, k, letter, reply: reply, under))
        assert federation.verdict(outcome) == expected


RING: dict[str, tuple[Callable[[str], Any], Callable[[int, list[bytes]], list[bytes]] | None, str]] = {
    "all": (lambda kind: True, None, "counted"),
    "gone before its vector": (lambda kind: kind != MASKED, None, "refused"),
    "gone before its shares": (lambda kind: kind != SHARES, None, "refused"),
    "gone after its vector": (lambda kind: kind != UNMASK, None, "counted"),
    "false shares": (lambda kind: True, DEALS["a seed that is none"][0], "refused"),
}


@pytest.mark.parametrize("what", RING)
def test_on_a_ring_where_not_all_are_neighbours(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cohort of more than 65; here each of five has two neighbours, and the sum is the same to the bit."""
    answers, false, expected = RING[what]
    federation.whole(), federation.others()  # among all
    monkeypatch.setattr(masks, "NEIGHBOURS", 1)
    post = Post(
        lambda kind, k, letter, reply: reply if answers(kind) else None,
        lambda kind: nullcontext() if false is None else dealing(kind, false),
    )
    outcome, _ = federation.summed(post)
    assert federation.verdict(outcome) == expected
    assert {len(letter.head["near"]) for kind, _, letter in post.asked if kind == SHARES} == {2}


@pytest.mark.parametrize(("named", "why"), [(False, "would show client 1"), (True, "no evidence against client 1")])
def test_a_server_without_proof_gets_no_sum_of_the_others(named: bool, why: str) -> None:
    """A curious server says that client 1 dealt false shares: the nodes look at what client 1 promised them."""
    false, _, _ = DEALS["a seed that is none"]
    post = Post(lambda kind, k, letter, reply: reply, lambda kind: dealing(kind, false))
    federation.summed(post)
    (written,) = next(x.head["evidence"] for kind, _, x in post.asked if kind == UNMASK and x.head["evidence"])
    honest = plain()
    federation.summed(honest)
    asked = [(kind, letter) for kind, k, letter in honest.asked if k == 0 and kind in SECURE]
    evidence = Evidence.read(written)
    if named:
        evidence = evidence._replace(attempt=asked[0][1].head["attempt"])
    without = {"alive": [0, 2, 3, 4], "gone": [1], "evidence": [evidence.written()]}
    for kind, letter in asked:
        head = {**letter.head, "attempt": "1-curious", **(without if kind == UNMASK else {})}
        reply = federation.answer(federation.nodes()[0], kind, Letter(head, letter.arrays), honest.kept[0])
    assert why in reply.head["refused"]


@pytest.mark.parametrize("add", [2**61, -(2**61), 2**62, 2**63, 1])
def test_a_word_that_nobody_can_see_does_not_end_the_round(add: int) -> None:
    """Under masks a client may add what it likes: the round has a posterior or is skipped, and nothing else happens."""
    for word in range(0, 90, 7):

        def change(reply: Letter, other: Letter, word: int = word) -> Letter:
            vector = reply.arrays["sum"].copy()
            vector[word % len(vector) :][:1] += np.array([add % 2**64], np.uint64)
            return Letter(reply.head, {**reply.arrays, "sum": vector})

        outcome, notes = federation.summed(spoilt(plain(), MASKED, change))
        if not outcome.counted:
            assert "spoilt it under its masks" in "".join(notes)
            assert outcome.own == {}
        else:
            assert outcome.left_out == {}


@pytest.mark.parametrize("rule", ["nwa", "conflation"])
def test_a_sum_that_nobody_can_train_from_is_taken_back(tiny: Experiment, tmp_path: Path, rule: str) -> None:
    """A word of +2^61 in the first round, wherever it does the most harm: the run goes on from what was before."""
    x = replace(
        tiny,
        clients=5,
        rounds=4,
        options={**tiny.options, "rule": rule},
        flower={**tiny.flower, "secure": True},
    )
    taken_back = 0
    for word in (5, -1, -45):

        def add(kind: str, k: int, letter: Letter, reply: Answer, word: int = word) -> Answer:
            if kind != MASKED or k != EVIL or letter.head["round"] != 1:
                return reply
            vector = reply.arrays["sum"].copy()
            vector[word : word + 1 or None] += np.array([2**61], np.uint64)
            return Letter(reply.head, {**reply.arrays, "sum": vector})

        (made,) = run(x, tmp_path / f"{word}", InProcess(carried(x), spoil=add)).values()
        assert len(made.journal) == 4
        assert made.journal[-1]["took_part"] == [0, 1, 2, 3, 4]
        check(made.posterior)
        notes = "".join(note for record in made.journal for note in record.get("notes", []))
        taken_back += "round 2 was taken back" in notes
    assert taken_back


def test_figures_that_do_not_fit_are_no_reason_to_be_left_out() -> None:
    import torch

    for value in (float("nan"), float("inf"), -1e300, 3.0):
        assert abs(float(secure_node._within(torch.tensor(value)))) <= 2.0**24
