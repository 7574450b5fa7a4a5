"""What the pages say of results can be read off the files of figures: each quoted number is filled in from its file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HOME = Path(__file__).parents[2]


@cache
def figures(name: str) -> Any:
    return json.loads((HOME / "docs/results" / f"{name}.json").read_text(encoding="utf-8"))


class Number(NamedTuple):
    """A figure of a file: the one row that has these values, and how it is written."""

    file: str
    where: dict[str, str]
    form: str = "points"  # of a percentage with one digit; or decimals: 2 or 3 digits, without the leading zero
    key: str = "ours"

    def text(self) -> str:
        content = figures(self.file)
        rows = content if isinstance(content, list) else content["rows"]
        (row,) = [row for row in rows if all(row[key] == value for key, value in self.where.items())]
        value = float(row[self.key])
        if self.form == "points":
            return f"{100 * value:.1f}"
        if self.form == "times":
            return f"{value:.0f}" if value > 100 else f"{value:.1f}"
        digits = int(self.form)
        return f"{value:.{digits}f}".removeprefix("0")


class Claim(NamedTuple):
    """A sentence of a page, with {} where it quotes a figure."""

    page: str
    sentence: str
    numbers: list[Number]


def ppd(table: str, row: str, metric: str, form: str = "points", key: str = "ours") -> Number:
    return Number(
        f"fedppd-{table}", {"group": "CIFAR-10", "row": row, "column": "non-IID", "metric": metric}, form, key
    )


def uab(
    column: str, metric: str, form: str, *, row: str = "FedUAB-5", group: str = "MNIST", key: str = "ours"
) -> Number:
    table = "feduab-6" if column.startswith("All") else "feduab-7"
    return Number(table, {"group": group, "row": row, "column": column, "metric": metric}, form, key)


def noise(row: str, column: str, key: str = "ours") -> Number:
    return Number("pfedpf-3", {"row": row, "column": column, "metric": "NOISE auroc"}, "2", key)


def attacked(file: str, row: str, column: str, group: str = "FedUAB Dirichlet .3") -> Number:
    return Number(file, {"group": group, "row": row, "column": column, "metric": "accuracy"})


def bench(file: str, what: str, metric: str = "ratio") -> Number:
    return Number(f"bench-{file}", {"what": what}, "times", metric)


SCENARIOS = [f"{size}-{split}" for size in ("All", "Small") for split in ("IID", "Dirichlet", "Only2")]
CLAIMS = [
    Claim("README.md", "| {} times as fast;", [bench("gpu", "FedUAB-1 MLP round: stacked, compile graph")]),
    Claim("README.md", "cores, compiled | {} times |", [bench("cpu-x86", "FedUAB-1 MLP: auto, compiled")]),
    Claim(
        "README.md",
        "against ours | {}, {} and {} times as long |",
        [bench("peers", f"{peer}, alone", "ratio_median") for peer in ("fedjax", "flower", "pfl")],
    ),
    Claim(
        "README.md",
        "| FedPPD on CIFAR-10, two main classes per client: accuracy, ECE | {} %, {} | {} %, {} |",
        [
            ppd("1", "FedPPD", "accuracy"),
            ppd("2", "FedPPD", "ece", "3"),
            ppd("1", "FedPPD", "accuracy", key="published"),
            ppd("2", "FedPPD", "ece", "3", "published"),
        ],
    ),
    Claim(
        "README.md",
        "| FedAvg there | {} %, {} | {} %, {} |",
        [
            ppd("1", "FedAvg", "accuracy"),
            ppd("2", "FedAvg", "ece", "3"),
            ppd("1", "FedAvg", "accuracy", key="published"),
            ppd("2", "FedAvg", "ece", "3", "published"),
        ],
    ),
    Claim(
        "README.md",
        "| FedUAB-5 on MNIST, 100 IID clients: accuracy | {} % | {} % |",
        [uab("All-IID", "accuracy", "points", key=key) for key in ("ours", "published")],
    ),
    Claim(
        "README.md",
        "AUROC of noise | {}, {} | {}, {} |",
        [noise(row, "MNIST", key) for key in ("ours", "published") for row in ("FedAvg", "FedAvg-pf")],
    ),
    Claim(
        "README.md",
        "| the same on Fashion-MNIST | {}, {} | {}, {} |",
        [noise(row, "FMNIST", key) for key in ("ours", "published") for row in ("FedAvg", "FedAvg-pf")],
    ),
    Claim(
        "README.md",
        "| FedPPD + Distill on CIFAR-10: accuracy | {} % | {} % |",
        [ppd("1", "FedPPD + Distill", "accuracy", key=key) for key in ("ours", "published")],
    ),
    Claim(
        "README.md",
        "50 rows of two classes per client: accuracy, one seed | {} % | {} % |",
        [uab("Small-Only2", "accuracy", "points", group="CIFAR-10", key=key) for key in ("ours", "published")],
    ),
    Claim(
        "docs/results/feduab.md",
        "| NLL, 5 draws | " + " | ".join(["{} / {}"] * 6) + " |",
        [uab(column, "nll", "3", key=key) for column in SCENARIOS for key in ("ours", "published")],
    ),
    Claim(
        "docs/results/feduab.md",
        "| NLL, 50 draws | " + " | ".join(["{}"] * 6) + " |",
        [uab(column, "nll_50", "3") for column in SCENARIOS],
    ),
    Claim(
        "docs/results/feduab.md",
        "| FedAvg's NLL, ours | " + " | ".join(["{}"] * 6) + " |",
        [uab(column, "nll", "3", row="FedAvg") for column in SCENARIOS],
    ),
    Claim(
        "docs/attacks.md",
        "has {} % under the large inner-product attack",
        [attacked("attacks-longer", "multi-Krum", "IPM 10")],
    ),
    Claim("docs/attacks.md", "mixed trimmed mean has {} %", [attacked("attacks-steady", "mixed trimmed mean", "none")]),
    Claim(
        "docs/attacks.md",
        "has {} % without attackers and falls to",
        [attacked("attacks-longer", "mixed trimmed mean", "none", "FedAvg Dirichlet .3")],
    ),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.sentence[:40])
def test_a_quoted_figure_is_that_of_its_file(claim: Claim) -> None:
    said = claim.sentence.format(*(number.text() for number in claim.numbers))
    page = " ".join((HOME / claim.page).read_text(encoding="utf-8").split())
    assert " ".join(said.split()) in page


def test_the_page_of_all_tables_is_that_of_the_kept_cells() -> None:
    counts = figures("index")["all"]
    line = "| **all** | " + " | ".join(map(str, counts.values())) + " |"
    assert line in (HOME / "docs/results/index.md").read_text(encoding="utf-8")
