"""Published tables and figures made again from the kept cells, compared byte by byte: a change must change none.

    python benchmarks/pages.py                    # with those in docs/results
    python benchmarks/pages.py --output before    # keep what is made
    python benchmarks/pages.py --against before   # also pages in HTML, which docs/results has none of

Nothing is trained: figures that are no drawing of cells are left out, and so is SVG, whose PNG is compared.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import matplotlib

from fedbayes.papers.cells import Request
from fedbayes.papers.figures import FIGURES, draw
from fedbayes.papers.tables import TABLES, run_published

RESULTS = Path(__file__).parent.parent / "docs/results"
SCALES = ("paper", "short", "shorter", "small")
KINDS = (".json", ".md", ".html", ".png")
TRAINED = ("fedag-2", "fedag-3", "pfedpf-confidence")  # figures that train what they draw


def write_pages(output: Path) -> None:
    """Every table and figure that docs/results has, at each of its scales."""
    (output / "cells").symlink_to(RESULTS / "cells", target_is_directory=True)
    for scale in SCALES:
        end = "" if scale == "paper" else f"-{scale}"
        for name in TABLES:
            if (RESULTS / f"{name}{end}.json").is_file():
                run_published(name, output, Request(scale=scale), train=False)
        for name in FIGURES:
            stem = name.replace("-", "-figure-", 1)
            if name not in TRAINED and (RESULTS / f"{stem}{end}.png").is_file():
                draw(name, output, scale)


def outcomes_of(pages: Path, others: Path) -> dict[str, str]:
    """Each page made: the same in the other folder, changed, or not there."""
    outcomes = {}
    for path in sorted(path for path in pages.iterdir() if path.suffix in KINDS):
        other = others / path.name
        same = other.is_file() and path.read_bytes() == other.read_bytes()
        outcomes[path.name] = "same" if same else "changed" if other.is_file() else "not compared"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a new folder for what is made")
    parser.add_argument("--against", type=Path, default=RESULTS)
    given = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "pages"  # ids within a drawing are random otherwise
    with tempfile.TemporaryDirectory() as folder:
        output = given.output or Path(folder)
        output.mkdir(parents=True, exist_ok=True)
        write_pages(output)
        outcomes = outcomes_of(output, given.against)
    for name in (name for name, outcome in outcomes.items() if outcome == "changed"):
        print(f"{name}: changed")
    for kind in KINDS:
        words = [outcome for name, outcome in outcomes.items() if name.endswith(kind)]
        print(f"{kind:6} " + ", ".join(f"{words.count(word)} {word}" for word in ("same", "changed", "not compared")))
    if "changed" in outcomes.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
