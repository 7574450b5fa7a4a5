"""What tables are to be trained on: the target and its kind, as the user says it or its values tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbayes.data.agreement import Labels, class_by_value
from fedbayes.data.coding import Agreed
from fedbayes.data.frames import SiteTable
from fedbayes.data.own import FEW_VALUES
from fedbayes.data.reading import Reading
from fedbayes.data.summary import Told, numbers_of, refuse_commas, refuse_words_among_numbers
from fedbayes.data.values import is_number
from fedbayes.errors import InputError, shown, unknown


def checked_target(target: Any, event: str | None, kind: str | None) -> str:
    """The column to predict, where it goes with the column of events and the kind."""
    if target is None and event is not None:
        raise InputError(f"target: event {event!r} says whether it was seen at a time; name the column of times")
    if target is None:
        raise InputError("target: name the column to predict")
    if not isinstance(target, str):
        raise InputError(
            f"target: tables have one column to predict, not {shown(target)}; for survival name that of times, and "
            'that of events beside it: target = "time", event = "event"'
        )
    if kind == "survival" and event is None:
        raise InputError(f'kind: survival needs a column of events beside the times in {target!r}: event = "event"')
    if event is not None and kind not in (None, "survival"):
        raise InputError(f"kind: a target with an event, {event!r}, is of survival, not {shown(kind)}; leave one out")
    if event is not None and not isinstance(event, str):
        raise InputError(f"event: it is one column, not {shown(event)}; name it")
    if event == target:
        raise InputError(
            f"event: {event!r} is the target, a time; name the column that says whether the event was seen"
        )
    return target


def told_of(
    tables: Sequence[SiteTable], read: Reading, kinds: Told | None, labels: Labels | None, kind: str | None, scale: str
) -> Agreed:
    """How columns and targets are to be coded, by options and by the values of the target."""
    known = {name for table in tables for name in table.columns}
    for column in kinds or {}:
        if column not in known:
            raise unknown("column in kinds", column, known)
    assert read.target is not None
    by_value, classes = class_by_value(labels)
    if read.event is not None:
        return Agreed(read.target, "survival", kinds or {}, None, (), read.missing, scale, read.event)
    kind = kind or ("classes" if classes else _target_kind(tables, read.target))
    if kind not in ("classes", "real"):
        raise InputError(f"kind must be classes or real, not {shown(kind)}")
    return Agreed(read.target, kind, kinds or {}, by_value, classes, read.missing, scale)


def _target_kind(tables: Sequence[SiteTable], target: str) -> str:
    """Words are classes, numbers real; few whole numbers may be either and are refused."""
    parts = [(table.columns[target], f"site {table.site}, target {target!r}") for table in tables]
    texts = {where: v.data.tolist() for v, where in parts if v.data.dtype == object}
    if not all(is_number(word) for words in texts.values() for word in words if word is not None):
        for where, words in texts.items():
            refuse_commas([word for word in words if word is not None], where, 'or say kind = "classes"')
            refuse_words_among_numbers(words, where, 'leave such rows out, or say kind = "classes"')
        return "classes"
    numbers = np.concatenate([numbers_of(values, "number", where) for values, where in parts])
    held = numbers[~np.isnan(numbers)]
    values = np.unique(held)
    few = 2 <= len(values) <= FEW_VALUES and len(held) > 2 * len(values)
    if few and (values == values.round()).all() and (len(values) == 2 or (np.diff(values) == 1).all()):
        raise InputError(
            f"target {target!r} holds the whole numbers {values[0]:g} {'and' if len(values) == 2 else 'to'} "
            f'{values[-1]:g}, which may be classes or measurements; say kind = "classes" or kind = "real" (in an '
            "experiment file under [data_options])"
        )
    return "real"
