"""What a federation did, as Prometheus reads it: a text file beside the journal, written anew after every round."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedbayes.files import write_atomically
from fedbayes.runs import journal

FILE = "metrics.prom"
CLIENTS = 1000  # that have rows of their own, at most: those that needed longest

# Reasons hold numbers and names, of which a label must have few: the first pattern that is found names it.
REASONS = (
    ("no reply", "silent"),
    ("no node was online", "offline"),
    ("could not be sent", "unsent"),
    ("put aside", "put aside"),
    ("^error ", "error"),
    ("not finite", "not finite"),
    ("shape|array|float|type", "arrays"),
    ("(version|format|method|experiment|layouts|run|round|client) is ", "mismatch"),
    ("own state", "state lost"),
)
HELP = {
    "round": ("gauge", "Rounds that are closed."),
    "rounds_planned": ("gauge", "Rounds of the experiment."),
    "last_round_timestamp_seconds": ("gauge", "When the last round was closed."),
    "round_seconds_total": ("counter", "Seconds of all rounds."),
    "phase_seconds_total": ("counter", "Seconds by what the server waited for; server: its own work."),
    "bytes_total": ("counter", "Bytes of arrays sent to clients (down) and received from them (up)."),
    "left_out_total": ("counter", "Clients left out of a round, by reason."),
    "client_rounds_total": ("counter", "Rounds that a client took part in."),
    "client_left_out_total": ("counter", "Rounds that a client was left out of."),
    "client_seconds": ("gauge", "Seconds that a client needed for its last round."),
    "score": ("gauge", "Scores of the last round that was evaluated."),
}


def reason(text: str) -> str:
    """A reason as one of few words.

    >>> reason("no reply within 600 s"), reason("round is 7, not 3: it answers another round")
    ('silent', 'mismatch')
    """
    return next((word for pattern, word in REASONS if re.search(pattern, text)), "refused")


class Metrics:
    """Totals over the rounds of a folder, those before a restart included."""

    def __init__(self, folder: Path, planned: int) -> None:
        self.folder, self.planned = folder, planned
        self.round = 0
        self.totals: Counter[tuple[str, str, str]] = Counter()
        self.last: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.closed = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a round in, and write the file."""
        if not self.round:
            for earlier in journal.read(self.folder)[: record["round"] - 1]:
                self._count(earlier)
        self._count(record)
        self.closed = time.time()
        with suppress(OSError):  # a full disk is for the journal to say
            write_atomically(self.folder / FILE, self.text())

    def _count(self, record: Mapping[str, Any]) -> None:
        self.round = record["round"]
        count = self.totals
        count["round_seconds_total", "", ""] += record.get("seconds", 0.0)
        for phase, seconds in record.get("phases", {}).items():
            count["phase_seconds_total", "phase", phase] += seconds
        for way in ("down", "up"):
            count["bytes_total", "direction", way] += record.get(f"bytes_{way}", 0)
        for client, why in record.get("left_out", {}).items():
            count["left_out_total", "reason", reason(why)] += 1
            count["client_left_out_total", "client", str(client)] += 1
        for client in record.get("took_part", ()):
            count["client_rounds_total", "client", str(client)] += 1
        self.last |= record.get("client_seconds", {})
        self.scores = record.get("test") or self.scores

    def text(self) -> str:
        """All figures in Prometheus's own format."""
        rows: dict[str, list[tuple[str, float]]] = {name: [] for name in HELP}
        rows["round"] = [("", self.round)]
        rows["rounds_planned"] = [("", self.planned)]
        rows["last_round_timestamp_seconds"] = [("", self.closed)]
        longest = sorted(self.last.items(), key=lambda row: -row[1])[:CLIENTS]
        shown = {client for client, _ in longest} if len(self.last) > CLIENTS else None
        for (name, label, value), total in sorted(self.totals.items()):
            if label != "client" or shown is None or value in shown:
                rows[name].append((_label(label, value), total))
        rows["client_seconds"] = [(_label("client", client), seconds) for client, seconds in sorted(longest)]
        rows["score"] = [(_label("name", name), value) for name, value in sorted(self.scores.items())]
        return "".join(_family(name, values) for name, values in rows.items() if values)


def _family(name: str, values: Iterable[tuple[str, float]]) -> str:
    kind, words = HELP[name]
    head = f"# HELP fedbayes_{name} {words}\n# TYPE fedbayes_{name} {kind}\n"
    return head + "".join(f"fedbayes_{name}{label} {_number(value)}\n" for label, value in values)


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))


def _label(name: str, value: str) -> str:
    if not name:
        return ""
    plain = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{plain}"}}'
