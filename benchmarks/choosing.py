"""The table of docs/choosing.md, written from the league's file; `--check` says whether it is up to date."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/choosing.md"
LEAGUE = ROOT / "docs/results/league/league.json"
BEGIN, END = "<!-- league -->\n", "<!-- /league -->\n"
GROUPS = {"heart-disease": "heart disease", "tcga-brca": "TCGA-BRCA", "landmine": "landmine"}
GROUPS |= {"shakespeare": "Shakespeare"}
MORE = {"worst_nll": "worst hospital", "ece": "ECE", "worst_coverage": "90 % sets, worst", "seconds": "seconds"}
MORE |= {"bytes_up": "bytes a round"}
METHODS = ("fedavg", "fedlap", "fedag", "feduab", "pvi", "fedivon", "bayes_admm", "lg_fedavg", "fedper", "bpfed")
ROWS = {"local": "each site alone", "pooled": "all rows pooled"}
ROWS |= {name: f"`{name}`" for name in (*METHODS, "pfedbayes")}
Record = dict[str, Any]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = written(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page == text else "docs/choosing.md is not the league's: run python benchmarks/choosing.py")
    PAGE.write_text(page, encoding="utf-8")


def written(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(json.loads(LEAGUE.read_text(encoding="utf-8"))) + END + rest.split(END)[1]


def table(records: list[Record]) -> str:
    """NLL on four federations, and of the first what else a method brings and costs."""
    known = {(r["group"], r["row"], r["metric"]): r for r in records if r["column"] == "as given"}
    first = next(iter(GROUPS))
    head = [*(f"NLL, {name}" for name in GROUPS.values()), *(f"{GROUPS[first]}: {title}" for title in MORE.values())]
    lines = [f"| | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    wanted = [*((group, "nll") for group in GROUPS), *((first, metric) for metric in MORE)]
    best = {
        g: min(r["ours"] for (group, row, m), r in known.items() if (group, m) == (g, "nll") and row in ROWS)
        for g in GROUPS
    }
    for row, title in ROWS.items():
        cells = [
            cell(known.get((group, row, metric)), best[group] if metric == "nll" else None) for group, metric in wanted
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(record: Record | None, best: float | None) -> str:
    """A figure with its standard error, bold where it is the best."""
    if record is None or record["ours"] is None:
        return "–"
    if record["metric"] in ("seconds", "bytes_up"):
        return f"{record['ours']:,.1f}" if record["metric"] == "seconds" else f"{record['ours']:,.0f}"
    error = "" if record.get("error") is None else f" ± {record['error']:.3f}"
    return f"**{record['ours']:.3f}{error}**" if record["ours"] == best else f"{record['ours']:.3f}{error}"


if __name__ == "__main__":
    main()
