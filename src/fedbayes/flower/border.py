"""The border: a node's reply becomes a typed value inside one guard, or a refusal of that client with its reason.

Behind the guard nothing is checked again, and whatever a reply does to its parser concerns its sender alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedbayes.errors import InputError, one_line, printable, shown
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Coding, Head, Letter, Refused, check_head, read
from fedbayes.posterior.values import Parts, flatten_parts, scales
from fedbayes.scores import SUMS
from fedbayes.scores.additive import Sums

Value = TypeVar("Value")
LONGEST = 300  # characters of a reason
FIGURES = 32  # training figures that a client may report
LARGEST = 1e200  # of a sum, so that sums over clients are finite
WEIGHT = 1e15  # the largest entry of an upload: its square fits in float32
COUNT = 1e9  # what a counter may move in one round
VARIANCE = "running_var"  # the end of the name under which PyTorch's norms keep variances
METRIC = "metric."  # before the name of a training figure in a head
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,59}")
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)", re.DOTALL)


def clean(text: object) -> str:
    """Text of others as one line of bounded length, without escape codes and what no terminal shows."""
    words = printable(ESCAPES.sub("", str(text)[: 4 * LONGEST])).strip()
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


class Refusal(Exception):
    """What became of a reply that can't be used: whose it is, and why, in one clean line.

    An `offence` is a reply that is wrong; none at all, or a client's own word that it can't answer, is not.
    """

    def __init__(self, client: int, reason: object, *, offence: bool = True) -> None:
        self.client, self.reason, self.offence = client, clean(reason) or "no reason given", offence
        super().__init__(f"client {client}: {self.reason}")


class Unusable(InputError):
    """Most clients say that they can't train from the broadcast: it was spoilt under masks, or training diverged."""


class Absent(Refused):
    """There is no reply to read, or it says itself why it has no answer."""


def guarded(client: int, parse: Callable[..., Value], *given: Any) -> Value | Refusal:
    """What a parser makes of a client's reply; whatever goes wrong in it is a refusal of that client."""
    try:
        return parse(*given)
    except Refusal as refusal:
        return refusal
    except Refused as why:
        return Refusal(client, why, offence=not isinstance(why, Absent))
    except Exception as error:
        return Refusal(client, f"its reply can't be read ({one_line(error)})")


def opened(answer: Answer, expected: Mapping[str, Any]) -> Letter:
    """The letter of an answer, if it is one whose head says what is expected."""
    if isinstance(answer, Refused):
        raise answer
    if not isinstance(answer, Letter):
        raise Absent(answer)
    if "refused" in answer.head:
        raise Absent(answer.head["refused"])
    check_head(answer.head, expected)
    return answer


def whole(head: Head, name: str, least: int, most: int) -> int:
    """A whole number of a head, within bounds."""
    value = head.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Refused(f"{name} must be a whole number from {least} to {most}, not {_brief(value)}")
    return value


def truth(head: Head, name: str) -> bool:
    """A truth value of a head."""
    value = head.get(name)
    if type(value) is not bool:
        raise Refused(f"{name} must be true or false, not {_brief(value)}")
    return value


def block(head: Head, name: str, most: int) -> bytes:
    """Bytes of a head, not more than `most`."""
    value = head.get(name)
    if type(value) is not bytes or len(value) > most:
        raise Refused(f"{name} must be at most {most} bytes, not {_brief(value)}")
    return value


def listed(head: Head, name: str, kind: type[Value], most: int) -> list[Value]:
    """A list of a head, of one kind of values and not longer than `most`."""
    values = head.get(name)
    if type(values) is not list or len(values) > most or any(type(v) is not kind for v in values):
        raise Refused(f"{name} must be a list of at most {most} {kind.__name__} values, not {_brief(values)}")
    return values


def names(values: list[str], what: str = "training figure") -> tuple[str, ...]:
    """Names of training figures, or of something else: few, plain, each once."""
    for name in values:
        if type(name) is not str or not NAME.fullmatch(name):
            raise Refused(f"a {what} can't be named {_brief(name)}: use letters, digits, and . _ -")
    if len(values) > FIGURES or len({*values}) < len(values):
        raise Refused(f"it names {len(values)} {what}s; at most {FIGURES}, each once, can be reported")
    return tuple(values)


def _brief(value: object) -> str:
    """A value as a reason repeats it, without writing out all of a long one."""
    if isinstance(value, list | tuple | bytes | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)


class Card(NamedTuple):
    """What a node says of itself."""

    client: int
    rows: int
    test_rows: int


def card_of(answer: Answer, expected: Head, sizes: Sequence[tuple[int, int]], most: int) -> Card:
    """A node's card: a client of the experiment, with the rows that the server knows of, or bounded numbers.

    `sizes` are the training and test rows of each client; no training rows where the server does not know them.
    """
    head = opened(answer, expected).head
    client = head.get("client")
    if type(client) is int and client >= len(sizes):
        raise Refused(f"its client number {shown(client)} is not below {len(sizes)}: see its partition-id")
    tops = (len(sizes) - 1, most, most)
    card = Card(*(whole(head, name, 0, top) for name, top in zip(Card._fields, tops)))
    known = sizes[card.client]
    for name, value, own in zip(Card._fields[1:], card[1:], known):
        if known[0] and value != own:
            raise Refused(f"{name} is {value}, but client {card.client} has {own}: use the same data everywhere")
    return card


class Reply(NamedTuple):
    """A client's upload as it was read from its letter."""

    parts: Parts
    rows: int
    own: bool
    lost: bool
    metrics: dict[str, float]


class Form(NamedTuple):
    """What an upload must be: of which kinds and shapes, relative to which broadcast, of how many rows."""

    like: Parts
    coding: Coding
    sent: Parts
    rows: int


def reply_of(answer: Answer, expected: Head, form: Form) -> Reply:
    """A client's upload in the clear, of the rows that its card says."""
    letter = opened(answer, expected)
    rows = whole(letter.head, "rows", 1, 2**62)
    if rows != form.rows:
        raise Refused(f"rows is {rows}, but its card says {form.rows}: start its node again if its data have changed")
    own, lost, metrics = truth(letter.head, "own"), truth(letter.head, "lost"), figures(letter.head)
    parts = read(letter.arrays, form.like, form.coding, form.sent)
    _check_sizes(parts, form.sent)
    return Reply(parts, rows, own, lost, metrics)


def _check_sizes(parts: Parts, sent: Parts) -> None:
    """Refuse numbers with which nobody could go on."""
    for part, q in parts.items():
        for name, t in flatten_parts({part: q})[0].items():
            if t.is_floating_point() and bool((t.abs() > WEIGHT).any()):
                raise Refused(f"{name} holds numbers beyond {WEIGHT:g}: nothing could be trained or tested with them")
        scale = scales(q)
        if scale is not None and bool((scale < 1 / WEIGHT).any()):
            raise Refused(f"{part} has scales below {1 / WEIGHT:g}: nobody can be so sure")
        for name, t in (q.layout.split(q.mean) if q.layout else {}).items():
            if name.endswith(VARIANCE) and bool((t < 0).any()):
                raise Refused(f"{name} holds variances below 0")
        if not q.mean.is_floating_point():
            # By how far it goes, for a bound on where it is could be reached by one, and others not go on from there.
            grown = q.mean.double() - sent[part].mean.double()
            if bool((grown.abs() > COUNT).any()):
                raise Refused(f"{part} counts {float(grown.abs().max()):.3g} in one round, at most {COUNT:.3g} are")


def figures(head: Head) -> dict[str, float]:
    """The training figures of an upload. They may be infinite or NaN, as those of an honest client may."""
    given = {key.removeprefix(METRIC): value for key, value in head.items() if str(key).startswith(METRIC)}
    names([*given])
    for name, value in given.items():
        if type(value) is not float:
            raise Refused(f"its training figure {name} is {_brief(value)}, not a number")
    return given


class Scores(NamedTuple):
    """Sums of scores over a client's test rows."""

    sums: Sums


def scores_of(answer: Answer, expected: Head, kind: str, rows: int) -> Scores:
    """Sums over as many rows as the client's card says, each within the range that it can have."""
    arrays = opened(answer, expected).arrays
    like = sums_like(kind)
    if arrays.keys() != like.keys():
        raise Refused(f"its sums are not {', '.join(like)}")
    for name, t in like.items():
        a = arrays[name]
        if not isinstance(a, np.ndarray) or a.dtype != np.float64 or a.shape != tuple(t.shape):
            raise Refused(f"its sum {name!r} is of another type or shape")
        if not (np.abs(a) <= LARGEST).all():
            raise Refused(f"its sum {name!r} is not finite, or beyond {LARGEST:g}")
    if float(arrays["count"]) != rows:
        raise Refused(f"its scores are of {float(arrays['count']):g} rows, but its card says {rows}")
    for name, most in _ranges(kind, arrays).items():
        slack = 1e-6 * rows
        if (arrays[name] < -slack).any() or (arrays[name] > most + slack).any():
            raise Refused(f"its sum {name!r} can't be that of {rows} rows")
    return Scores({name: torch.from_numpy(a.copy()) for name, a in arrays.items()})


def sums_like(kind: str) -> Sums:
    """Sums of one row of one class, for their names and shapes."""
    row = torch.ones(1, 1)
    target = row[:, 0] * 0 if kind == "classes" else torch.ones(1, 2) if kind == "survival" else row
    return SUMS[kind][0](row, *([row] if kind == "real" else []), target)


def _ranges(kind: str, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The most that a sum can be; the least is 0, but for a normal's NLL, which has neither."""
    shares = ("correct", "exact_match", "inside50", "inside90")  # of rows, each at most 1
    bins = sums.get("bin_count")
    within = {"bin_confidence": bins, "bin_correct": bins}
    most = {name: sums["count"] if name in shares else within.get(name, math.inf) for name in sums}
    if kind == "classes":
        most["bin_count"] = sums["count"]
    return {name: top for name, top in most.items() if not (kind == "real" and name == "nll")}
