"""The border: what a node replies is a typed value or a refusal of that client, and nothing of it stays behind."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess, Spoil

import fedbayes as fb
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.border import LONGEST, Absent, Refusal, clean, guarded
from fedbayes.flower.federated import carried, run
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter, Refused

HUGE = 10**400
FORGED = "no rows\nround 9: all is well\x1b[2J\x1b]0;title\x07 \r\x9b31m" + "z" * 10_000_000


def test_a_reason_is_one_clean_line_of_bounded_length() -> None:
    words = clean(FORGED)
    assert words.isprintable()
    assert len(words) == LONGEST
    assert words.startswith("no rows round 9: all is well")
    assert "title" not in words
    assert clean("\u202eevil") == "?evil"  # no text that runs backwards


ERRORS = (TypeError, OverflowError, MemoryError, RecursionError, KeyError, RuntimeError, AssertionError)


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_parser_meets_is_a_refusal_of_that_client(error: type[Exception]) -> None:
    def parse(letter: object) -> None:
        raise error("first\nsecond")

    refusal = guarded(3, parse, "letter")
    assert isinstance(refusal, Refusal)
    assert (refusal.client, refusal.offence) == (3, True)
    assert "first" in refusal.reason
    assert refusal.reason.isprintable()


def test_no_reply_is_no_offence() -> None:
    def parse(why: Refused) -> None:
        raise why

    assert [guarded(1, parse, why).offence for why in (Absent("late"), Refused("wrong"))] == [False, True]


def with_head(**head: object) -> Callable[[Letter], Letter]:
    return lambda letter: Letter({**letter.head, **{k.replace("__", "."): v for k, v in head.items()}}, letter.arrays)


def with_arrays(**arrays: object) -> Callable[[Letter], Letter]:
    return lambda letter: Letter(letter.head, {**letter.arrays, **{k.replace("__", "."): a for k, a in arrays.items()}})


def without(name: str) -> Callable[[Letter], Letter]:
    return lambda letter: Letter({k: v for k, v in letter.head.items() if k != name}, letter.arrays)


# What client 1 may answer to a round; the journal names it, and the others' round is closed as if it were not there.
UPLOADS: dict[str, Callable[[Letter], Answer]] = {
    "a figure of text": with_head(metric__loss="low"),
    "a figure as a list": with_head(metric__loss=[1.0, 2.0]),
    "a figure as a whole number": with_head(metric__loss=1),
    "a figure of 10^400": with_head(metric__loss=HUGE),
    "a figure with a forged name": with_head(**{"metric.loss\x1b[2J\nround 9": 1.0}),
    "a thousand figures": with_head(**{f"metric.f{i}": 1.0 for i in range(1000)}),
    "2^63 rows": with_head(rows=2**63),
    "10^400 rows": with_head(rows=HUGE),
    "rows of 1e18": with_head(rows=10**18),
    "more rows than its card": with_head(rows=21),
    "fewer rows than its card": with_head(rows=1),
    "rows as a fraction": with_head(rows=20.0),
    "rows that are true": with_head(rows=True),
    "no rows": without("rows"),
    "own as a number": with_head(own=1),
    "lost as text": with_head(lost="yes"),
    "no word of what was lost": without("lost"),
    "a round of 10^400": with_head(round=HUGE),
    "a client as a list": with_head(client=[1]),
    "a head of bytes": with_head(layouts=b"\x00" * 1000),
    "an array of text": with_arrays(model__mean=np.array(["a"] * 39)),
    "an array of objects": with_arrays(model__mean=np.array([None] * 39)),
    "an array that is none": with_arrays(model__mean=[0.0] * 39),
    "an array that is nothing": with_arrays(model__mean=None),
    "an array too many": with_arrays(more=np.ones(3)),
    "an array of one number": with_arrays(model__mean=np.array(1.0)),
    "complex numbers": with_arrays(model__mean=np.ones(39, complex)),
    "numbers beyond all measure": with_arrays(model__mean=np.full(39, 1e16)),
    "scales of nothing": with_arrays(model__scale=np.full(39, 1e-100)),
    "scales beyond all measure": with_arrays(model__scale=np.full(39, 1e300)),
    "a forged refusal": lambda letter: Letter({"refused": FORGED}, {}),
    "a refusal that is a list": lambda letter: Letter({"refused": [FORGED] * 3}, {}),
    "a letter without anything": lambda letter: Letter({}, {}),
    "no letter": lambda letter: 7,  # type: ignore[arg-type, return-value]
}


def only(client: int, kind: str, change: Callable[[Letter], Answer | None]) -> Spoil:
    def spoil(what: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        assert isinstance(answer, Letter)
        return change(answer) if (what, k) == (kind, client) else answer

    return spoil


def federate(x: Experiment, folder: Path, spoil: Spoil | None = None, gone: int | None = None) -> fb.Run:
    post = InProcess(carried(x), spoil=spoil)
    if gone is not None:
        post.there.remove(100 + gone)
    return run(x, folder, post)[x.method]


def same_bits(a: fb.Run, b: fb.Run) -> None:
    ours, theirs = a.progress.state.broadcast, b.progress.state.broadcast
    assert ours.keys() == theirs.keys()
    for part in ours:
        for name in ("mean", "scale"):
            if hasattr(ours[part], name):
                assert torch.equal(getattr(ours[part], name), getattr(theirs[part], name)), (part, name)


@pytest.fixture
def small(tiny: Experiment) -> Experiment:
    return replace(tiny, rounds=1, data="flower_code:site")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fb.Run]:
    """The round without client 1, trained once for all attacks."""
    return {}


@pytest.mark.parametrize("what", UPLOADS)
def test_an_attack_on_a_round_leaves_the_sum_of_the_others(
    small: Experiment, tmp_path: Path, others: dict[str, fb.Run], what: str
) -> None:
    if "run" not in others:
        others["run"] = federate(small, tmp_path / "without", gone=1)
    spoilt = federate(small, tmp_path / "spoilt", only(1, "train", UPLOADS[what]))
    same_bits(spoilt, others["run"])
    ((client, reason),) = spoilt.journal[0]["left_out"].items()
    assert client == "1"
    assert reason.isprintable()
    assert len(reason) <= LONGEST
    assert spoilt.journal[0]["train"] == others["run"].journal[0]["train"]


# What client 1 may answer when it is asked for scores, its own or its personal model's.
SUMS: dict[str, Callable[[Letter], Answer]] = {
    "no rows": with_arrays(count=np.array(0.0)),
    "more rows than it has": with_arrays(count=np.array(1e18)),
    "a fraction of a row": with_arrays(count=np.array(7.5)),
    "text": with_arrays(nll=np.array("low")),
    "objects": with_arrays(nll=np.array(None)),
    "an array that is none": with_arrays(nll=1.0),
    "too many sums": with_arrays(more=np.array(1.0)),
    "too few sums": lambda letter: Letter(letter.head, {k: a for k, a in letter.arrays.items() if k != "brier"}),
    "another shape": with_arrays(bin_count=np.zeros(14)),
    "infinity": with_arrays(nll=np.array(np.inf)),
    "1e308": with_arrays(nll=np.array(1e308)),
    "more right than rows": with_arrays(correct=np.array(9.0)),
    "a negative number": with_arrays(correct=np.array(-1.0)),
    "bins of more rows": with_arrays(bin_count=np.full(15, 8.0), bin_confidence=np.full(15, 9.0)),
    "a forged refusal": lambda letter: Letter({"refused": FORGED}, {}),
    "another round": with_head(round=9),
}


@pytest.mark.parametrize("kind", ["evaluate", "evaluate.refine"])
@pytest.mark.parametrize("what", SUMS)
def test_an_attack_on_scores_leaves_those_of_the_others(
    small: Experiment, tmp_path: Path, others: dict[str, fb.Run], what: str, kind: str
) -> None:
    x = replace(small, personal_every=1)
    if kind not in others:
        others[kind] = federate(x, tmp_path / "without", only(1, kind, lambda letter: None))
    ours = federate(x, tmp_path / "spoilt", only(1, kind, SUMS[what])).journal[0]
    theirs = others[kind].journal[0]
    assert ours["test"] == theirs["test"]
    assert ours["personal"] == theirs["personal"]
    (note,) = [n for n in ours["notes"] if "left out of the scores" in n]
    assert note.startswith("client 1 ")
    assert note.isprintable()
    assert len(note) < 2 * LONGEST


CARDS: dict[str, Callable[[Letter], Answer]] = {
    "rows of 1e18": with_head(rows=10**18),
    "rows of 10^400": with_head(rows=HUGE),
    "test rows of text": with_head(test_rows="many"),
    "a client of 10^400": with_head(client=HUGE),
    "a client as a list": with_head(client=[0]),
    "no number": without("client"),
    "a forged refusal": lambda letter: Letter({"refused": FORGED}, {}),
    "an empty letter": lambda letter: Letter({}, {}),
}


@pytest.mark.parametrize("what", CARDS)
def test_an_attack_at_the_door_leaves_the_round_of_the_others(
    small: Experiment, tmp_path: Path, others: dict[str, fb.Run], what: str
) -> None:
    if "run" not in others:
        others["run"] = federate(small, tmp_path / "without", gone=1)
    spoilt = federate(small, tmp_path / "spoilt", only(1, "query", CARDS[what]))
    same_bits(spoilt, others["run"])
    (note,) = [n for n in spoilt.journal[0]["notes"] if "turned away" in n]
    assert note.startswith("node 101 ")
    assert note.isprintable()


def test_who_offends_again_and_again_is_put_aside_and_named(small: Experiment, tmp_path: Path) -> None:
    x = replace(small, rounds=4, flower={**small.flower, "max_offences": 2})
    far = federate(x, tmp_path / "far", only(1, "train", UPLOADS["a figure of text"]))
    reasons = [record["left_out"]["1"] for record in far.journal]
    assert "training figure loss" in reasons[1]
    assert [r.startswith("put aside after 2 replies that could not be used, the last: ") for r in reasons] == [
        *(False, False, True, True)
    ]
    notes = [note for record in far.journal for note in record.get("notes", []) if "put aside" in note]
    assert len(notes) == 1
    assert notes[0].startswith("client 1 was put aside after 2 replies")


@pytest.mark.parametrize("change", [lambda letter: None, lambda letter: Letter({"refused": "out of memory"}, {})])
def test_who_only_fails_is_asked_again(small: Experiment, tmp_path: Path, change: Callable[[Letter], None]) -> None:
    x = replace(small, rounds=3, flower={**small.flower, "max_offences": 1})
    far = federate(x, tmp_path, only(1, "train", change))
    assert not any("put aside" in record["left_out"]["1"] for record in far.journal)


def test_others_stand_in_for_who_was_put_aside(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, clients=4, cohort=2, rounds=6, flower={**tiny.flower, "max_offences": 1})
    far = federate(x, tmp_path, only(1, "train", UPLOADS["no rows"]))
    later = [r["left_out"]["1"] for r in far.journal if "put aside" in r["left_out"].get("1", "")]
    assert later
    assert all("stood in" in reason for reason in later)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_a_figure_that_is_not_finite_is_left_out_and_not_its_client(
    small: Experiment, tmp_path: Path, value: float
) -> None:
    honest = federate(small, tmp_path / "honest").journal[0]
    spoilt = federate(small, tmp_path / "spoilt", only(1, "train", with_head(metric__loss=value))).journal[0]
    assert spoilt["left_out"] == {}
    assert spoilt["train"]["kl"] == honest["train"]["kl"]
    assert 0 < spoilt["train"]["loss"] < 10
    assert any(note.startswith("client 1's training figure loss is") for note in spoilt["notes"])


@pytest.mark.parametrize("arrays", [{"buffers.mean": np.full(12, -1e3)}, {"counters.mean": np.array([2**62])}])
def test_buffers_with_which_nobody_could_go_on_are_refused(
    small: Experiment, tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    x = replace(small, method="fedavg", network="flower_code:norm_net", options={"epochs": 2, "batch": 8})
    far = federate(x, tmp_path / "far", only(1, "train", with_arrays(**arrays)))
    same_bits(far, federate(x, tmp_path / "without", gone=1))
    assert re.search("variances below 0|counts 4.61e.18 in one round", far.journal[0]["left_out"]["1"])


def test_a_figure_that_one_client_names_alone_is_not_reported(small: Experiment, tmp_path: Path) -> None:
    honest = federate(small, tmp_path / "honest").journal[0]
    spoilt = federate(small, tmp_path / "spoilt", only(1, "train", with_head(metric__accuracy=1.0))).journal[0]
    assert spoilt["train"] == honest["train"]


# Uploads that are posteriors, if strange ones: they are counted, and the run goes on.
STRANGE: dict[str, tuple[str, Callable[[Letter], Answer]]] = {
    "large weights": ("feduab", with_arrays(model__mean=np.full(39, 1e15))),
    "wide": ("feduab", with_arrays(model__scale=np.full(39, 1e15))),
    "large variances": ("fedavg", with_arrays(buffers__mean=np.full(12, 1e15))),
    "many batches": ("fedavg", with_arrays(counters__mean=np.array([10**9]))),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_posterior_does_not_end_the_run(small: Experiment, tmp_path: Path, what: str) -> None:
    method, change = STRANGE[what]
    network = "flower_code:norm_net" if method == "fedavg" else small.network
    options = {**small.options} if method != "fedavg" else {"epochs": 2, "batch": 8}
    x = replace(small, method=method, network=network, options=options, rounds=2, data_options={"public": True})
    once = iter([True])
    spoil = only(1, "train", lambda letter: change(letter) if next(once, False) else letter)
    far = federate(replace(x, flower={**x.flower, "client_scores": True}), tmp_path, spoil)
    assert len(far.journal) == 2
    assert far.journal[0]["left_out"] == {}
