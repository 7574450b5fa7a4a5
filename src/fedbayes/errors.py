"""Messages that name the quantity and the mend."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

LONGEST = 60  # characters of a value that a message repeats
MANY = 20  # names that are not all said where one of them is as near as
NEAR = 0.75


class InputError(ValueError):
    """Something that the user gave can't be used; the message is one line that says what and how to mend it."""


class Diverged(InputError):
    """No client of a round ended with finite weights, so training cannot go on."""


class NotFinite(ValueError):
    """Predictions that can't be scored: not all of them are numbers."""


def unknown(what: str, name: object, known: Iterable[str], mend: str = "") -> InputError:
    """An error for a name that is not in a table, with the nearest that is; `mend`: what else may be meant."""
    known = list(known)
    near, surely = (difflib.get_close_matches(str(name)[:LONGEST], known, 1, cutoff) for cutoff in (0.6, NEAR))
    hint = f"did you mean {near[0]!r}? " if near else ""
    names = f"it is one of {len(known)}" if surely and len(known) > MANY else f"there are {', '.join(sorted(known))}"
    return InputError(f"unknown {what} {shown(name)}: {hint}{mend}{names}")


def shown(value: object) -> str:
    """A value as a message repeats it: not longer than a part of a line."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value[:LONGEST]) if isinstance(value, str) else repr(value)
    except ValueError:  # a number of thousands of digits in it
        text = f"a {type(value).__name__} with a huge number"
    cut = len(text) > LONGEST or (isinstance(value, str) and len(value) > LONGEST)
    return f"{text[:LONGEST]}..." if cut else text


def printable(text: str) -> str:
    """Text as one line, with a mark for what no terminal shows."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def one_line(error: BaseException) -> str:
    """What an error says, in one line that can be printed; its kind where it says nothing."""
    text = printable(str(error)[:1000])[:200]
    plain = isinstance(error, ValueError | OSError)
    return text if text and plain else f"{type(error).__name__}: {text}" if text else type(error).__name__


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # what a system says when there is no room for a file


def disk_advice(error: OSError, again: str = "`fedbayes resume` goes on from the last checkpoint") -> str:
    """A failed file operation in one line: what is wrong, that nothing is lost, and what to do."""
    if error.errno not in FULL:
        return f"{one_line(error)}; what was written before is kept, and {again}"
    where = f" at {error.filename}" if error.filename else ""
    return f"the disk is full{where} ({os.strerror(error.errno)}): free some space; nothing is lost, and {again}"
