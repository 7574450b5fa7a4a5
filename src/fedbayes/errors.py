"""Messages that name the quantity and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something that the user gave can't be used; the message is one line that says what and how to mend it."""


def unknown(what: str, name: object, known: Iterable[str]) -> InputError:
    """An error for a name that is not in a table, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {what} {name!r}: {hint}there are {', '.join(sorted(known))}")
