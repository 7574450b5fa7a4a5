"""The section on influence: who moved the model most, and who was bounded or refused."""

from __future__ import annotations

import math
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fedbayes.report.charts import line_chart
from fedbayes.report.learning import key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.training.influence import AMONG, OWNS, PRECISION, table_of

MOVERS = 8  # clients in a table
RUNS = 4  # with a table of their own
HELD = ("capped", "clipped", "twins")  # rounds in which a client was held so


class Moves(NamedTuple):
    """What one client did in a run."""

    client: str
    rounds: int  # that it contributed to
    changes: list[float]
    shares: list[float]
    capped: int  # rounds
    clipped: int
    twins: int  # rounds in which it counted as one with others
    refused: list[str]  # why, for each round

    @property
    def pull(self) -> float:
        """How far it moved the model, added over rounds: its change times its share."""
        return math.fsum(c * s for c, s in zip(self.changes, self.shares) if math.isfinite(c))


def influence(m: Material) -> Section | None:
    """Largest changes and shares by round, and by run the clients who moved the model most."""
    runs = [run for run in m.runs if any("influence" in record for record in run.files.records)]
    if not runs:
        return None
    body: list[Figure | Card | str] = []
    wanted = (
        ("share", "Largest share of a client", "share", "The share of a round that its heaviest client had."),
        ("change", "Largest change of a client", "rms, units of the broadcast", "How far the farthest client moved."),
    )
    for at, (name, title, label, caption) in enumerate(wanted):
        lines = [run.curve(*_largest(run, 1 - at)) for run in runs]
        chart = line_chart(title, [line for line in lines if len(line.y)], "round", label)
        if chart:
            body.append(Figure(f"influence-{name}", title, chart, caption))
    for run in runs[:RUNS]:
        body.append(_movers(run))
    if len(runs) > RUNS:
        body.append(f"<p>The first {RUNS} of {len(runs)} runs.</p>")
    lead = (
        "A change is the root mean square of what a client changed, in units of the broadcast's scale (of points: the "
        "change itself), before any bound. A share is of the pooled precision, or of the weight where the rule does "
        f"not weigh by precision, after it. Among {AMONG} clients or more, one above {OWNS:g} owns the round."
    )
    return Section("influence", "Who moved the model", lead, body)


def _largest(run: Shown, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and the largest value of a column of the clients' rows in each."""
    known = [
        (r["round"], r["influence"]["clients"]) for r in run.files.records if r.get("influence", {}).get("clients")
    ]
    rounds = np.array([number for number, _ in known], float)
    return rounds, np.array([max(row[column] for row in rows.values()) for _, rows in known], float)


def moves(records: list[dict[str, Any]]) -> list[Moves]:
    """The clients of a run, who moved the model most first."""
    by_client: dict[str, list[dict[str, Any]]] = {}
    for row in table_of(records):
        by_client.setdefault(row["client"], []).append(row)
    clients = []
    for name, rows in by_client.items():
        took = [row for row in rows if not row["refused"]]
        reasons = [row["refused"] for row in rows if row["refused"]]
        capped, clipped, twins = [sum(row[name] > 0 for row in took) for name in HELD]
        changes, shares = [row["change"] for row in took], [row["share"] for row in took]
        clients.append(Moves(name, len(took), changes, shares, capped, clipped, twins, reasons))
    return sorted(clients, key=lambda one: -one.pull)


def _movers(run: Shown) -> Card:
    """Those who moved the model most, and who was refused or had twins, with what was done about it."""
    records = run.files.records
    clients = moves(records)
    others = [one for one in clients[MOVERS:] if one.refused or one.twins]
    kinds = {r["influence"]["share_of"] for r in records if "share_of" in r.get("influence", {})}
    of = PRECISION if PRECISION in kinds else "weight"
    titles = ("rounds", "mean change", "largest", f"mean share of {of}", "largest", *HELD, "refused")
    head = "".join(f"<th scope=col>{escape(title)}</th>" for title in titles)
    rows = []
    for one in [*clients[:MOVERS], *others[:MOVERS]]:
        means = [f"{np.mean(v):.3g}" if v else "–" for v in (one.changes, one.shares)]
        tops = [f"{max(v):.3g}" if v else "–" for v in (one.changes, one.shares)]
        why = f"{len(one.refused)}: {one.refused[0][:60]}" if one.refused else ""
        held = (count or "" for count in (one.capped, one.clipped, one.twins))
        cells = (one.rounds, means[0], tops[0], means[1], tops[1], *held)
        text = "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="text">{escape(why)}</td>'
        rows.append(f"<tr><th scope=row>{escape(one.client)}</th>{text}</tr>")
    hidden = next((r["influence"]["hidden"] for r in records if "hidden" in r.get("influence", {})), "")
    note = f"<p>{escape(hidden)}.</p>" if hidden else ""
    shown = f'<div class="r{run.number}">{key(run)}{note}{table(head, rows, "client") if rows else ""}</div>'
    return Card(f"Who moved the model most: {run.name}", shown)
