"""Output for consoles that lack some characters (cp1252, ASCII): the nearest plain ones instead of an error."""

from __future__ import annotations

import codecs
import io

NAME = "fedbayes.plain"
NEAREST = {
    **{"█": "#", "·": ".", "–": "-", "—": "-", "−": "-", "…": "...", "±": "+-", "×": "x"},
    **{"→": "->", "↑": "^", "↓": "v", "≤": "<=", "≥": ">=", "━": "-", "─": "-", "│": "|", "╸": "-", "╺": "-"},
}


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(NEAREST.get(c, "?") for c in error.object[error.start : error.end])
    return text.encode("ascii", "replace").decode(), error.end


def make_safe(*streams: object) -> None:
    """Let text streams write what their encoding can't."""
    codecs.register_error(NAME, _nearest)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)
