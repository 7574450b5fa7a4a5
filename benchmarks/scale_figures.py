"""Draw docs/results/scale.svg from bench-scale.json: seconds a round against what a federation has more of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent.parent / "docs/results"
# By what the rows of a panel begin with: its axis, and whether seconds grow with it.
PANELS = {
    "cohort": "clients a round",
    "weights": "weights (10 clients a round)",
    "population": "clients in all (100 a round, own state on disk)",
    "draws": "draws a step (10 clients a round)",
}


def points(rows: list[dict[str, Any]], panel: str) -> list[tuple[float, float]]:
    """What a panel shows: number and seconds a round."""
    if panel == "population":
        named = [r for r in rows if r["what"].startswith("population ") and "beginning" not in r["what"]]
        return [(float(r["what"].removeprefix("population ").replace(",", "")), r["seconds_a_round"]) for r in named]
    return [(r["x"], r["seconds"]) for r in rows if r["what"].startswith(f"{panel} ") and "x" in r]


def main() -> None:
    rows = json.loads((RESULTS / "bench-scale.json").read_text())["rows"]
    plt.rcParams.update(
        {"svg.hashsalt": "fedbayes", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
    for at, (panel, words) in zip(axes, PANELS.items()):
        x, y = zip(*sorted(points(rows, panel)))
        at.loglog(x, y, "o-", color="#3b6ea8", markersize=4)
        at.set_ylim(min(y) / 2, max(max(y) * 2, min(y) * 20))
        at.set_xlabel(words)
        at.grid(alpha=0.3, which="major")
    axes[0].set_ylabel("seconds a round")
    figure.savefig(RESULTS / "scale.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
