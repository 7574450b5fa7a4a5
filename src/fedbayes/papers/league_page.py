"""The page of the league: its scores as columns, mean ranks, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING

from fedbayes.papers.layout import Row, Texts
from fedbayes.papers.league_scores import WORST_NLL
from fedbayes.papers.ranks import Ranks, ranks_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIVEN = "as given"  # the split that a federation came with
LOCAL, POOLED = "local", "pooled"  # the bounds, which have no rank
METRICS = {
    **{name: f"measured.{name}" for name in ("nll", "ece", "auroc", "concordance", "brier", "calibration", "accuracy")},
    **{"worst_nll": "measured.worst_nll", "worst_coverage": "measured.worst_coverage"},
    **{"seconds": "seconds", "bytes_up": "bytes_up"},
}
TITLES = {
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "auroc": "AUROC ↑",
    "concordance": "concordance ↑",
    "brier": "Brier ↓",
    "calibration": "calibration error ↓",
    "accuracy": "accuracy ↑",
    "worst_nll": "NLL, worst site ↓",
    "worst_coverage": "90 % sets, worst site",
    "seconds": "seconds",
    "bytes_up": "bytes a round",
}
RANKED = {"nll": False, "worst_nll": False}


def texts(row: Row) -> Texts:
    """Seconds and bytes as whole numbers, scores with three digits."""
    value, error = row["ours"], row["error"]
    if row["column"] in (TITLES["seconds"], TITLES["bytes_up"]):
        return Texts(f"{value:,.0f}" if value >= 10 else f"{value:.1f}", "", "", "")
    return Texts(f"{value:.3f}", "" if error is None else f"{error:.3f}", "", "")


def by_metric(rows: Sequence[Row]) -> list[Row]:
    """Rows with metrics as columns, one block per federation and split, the best NLL first."""
    blocks: dict[str, list[Row]] = {}
    for row in rows:
        block = row["group"] if row["column"] == GIVEN else f"{row['group']}, {row['column']}"
        blocks.setdefault(block, []).append({**row, "group": block, "column": TITLES[row["metric"]]})
    shown: list[Row] = []
    for block in blocks.values():
        order = {row["row"]: row["ours"] for row in block if row["metric"] == "nll"}
        metrics = list(METRICS)
        block.sort(key=lambda row: (order.get(row["row"], WORST_NLL), metrics.index(row["metric"])))
        # What a cell was made with otherwise is said once, and not at each of its scores.
        shown += [
            {**row, "metric": "by NLL", "otherwise": row.get("otherwise", "") if row["metric"] == "nll" else ""}
            for row in block
        ]
    return shown


def ranks(rows: Sequence[Row], metric: str) -> Ranks | None:
    """Ranks of the methods that are in all federations and splits; None where there are not two."""
    blocks: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["metric"] == metric and row["row"] not in (LOCAL, POOLED):
            blocks.setdefault((row["group"], row["column"]), {})[row["row"]] = row["ours"]
    if not blocks or len(set.intersection(*map(set, blocks.values()))) < 2:
        return None
    return ranks_of(list(blocks.values()), higher=RANKED[metric])


def findings(rows: Sequence[Row]) -> list[str]:
    """Mean ranks over all federations and splits, and the difference that is needed to tell two methods apart."""
    lines = []
    for metric in RANKED:
        found = ranks(rows, metric)
        if found is None:
            continue
        places = ", ".join(f"{name} {rank:.1f}" for name, rank in found.mean.items())
        over = "one federation" if found.blocks == 1 else f"{found.blocks} federations and splits"
        test = "" if isnan(found.p_value) else f"; Friedman's p = {found.p_value:.2g}"
        lines.append(
            f"Mean rank by {TITLES[metric].rstrip(' ↓↑')} over {over}: {places}. "
            f"Ranks that differ by less than {found.critical:.1f} can't be told apart (Nemenyi, 5 %){test}."
        )
    return lines


def picture(rows: Sequence[Row]) -> Figure | None:
    """Mean ranks by NLL, the best on top; methods whose bars overlap with the first one's can't be told from it."""
    from matplotlib.figure import Figure

    found = ranks(rows, "nll")
    if found is None:
        return None
    figure = Figure(figsize=(6.4, 1 + 0.24 * len(found.mean)), layout="constrained")
    axes = figure.subplots()
    places, half = range(len(found.mean)), found.critical / 2
    axes.errorbar(list(found.mean.values()), places, xerr=half, fmt="o", ms=4, lw=1.2, color="#1b6ca8")
    best = next(iter(found.mean.values()))
    axes.axvspan(best - half, best + half, color="#1b6ca8", alpha=0.08, lw=0)
    axes.set(yticks=places, xlabel="mean rank by NLL; bars: half the critical difference to either side")
    axes.set_yticklabels(list(found.mean))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


LEGEND = (
    "Means over seeds ± standard errors. Every method has four tries for its learning rate, on a fifth of the training "
    "rows, and equally many passes over the rows. Local: each site alone, judged on its own test rows; pooled: all "
    "rows in one place. Methods with personal models are judged by these, each on its site's test rows. Seconds are "
    "those of training, of all seeds together; bytes are one round's uploads."
)
