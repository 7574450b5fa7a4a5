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


def at_home(row: str, column: str, metric: str, form: str, key: str) -> Number:
    return Number("feduab-8", {"group": "CIFAR-10", "row": row, "column": column, "metric": metric}, form, key)


def told_apart(score: str, metric: str, form: str = "3", key: str = "ours") -> Number:
    return Number("pfedpf-1", {"row": f"FedAvg, {score}", "metric": metric}, form, key)


def resnet(row: str, metric: str, form: str, key: str = "ours") -> Number:
    table = "pfedpf-3" if "auroc" in metric else "pfedpf-2"
    return Number(table, {"row": row, "column": "CIFAR10", "metric": metric}, form, key)


def disagreeing(group: str, row: str, metric: str, form: str = "3") -> Number:
    return Number("admm", {"group": group, "row": row, "metric": metric}, form)


def noise(row: str, column: str, key: str = "ours") -> Number:
    return Number("pfedpf-3", {"row": row, "column": column, "metric": "NOISE auroc"}, "2", key)


def attacked(file: str, row: str, column: str, group: str = "FedUAB Dirichlet .3") -> Number:
    return Number(file, {"group": group, "row": row, "column": column, "metric": "accuracy"})


def bench(file: str, what: str, metric: str = "ratio") -> Number:
    return Number(f"bench-{file}", {"what": what}, "times", metric)


SCENARIOS = [f"{size}-{split}" for size in ("All", "Small") for split in ("IID", "Dirichlet", "Only2")]
ALL, OWN = SCENARIOS[:3], SCENARIOS[1:3]  # the scenarios of all rows, and those with personal figures
LONG = ("FedAvg", "FedProx", "FedUAB-1")  # of 2000 rounds on CIFAR-10 with all rows
BOTH = ("ours", "published")
SCORES = {
    **{name: f"| {name} | {{}}, {{}} | {{}}, {{}} | {{}}, {{}} |" for name in ("MSP", "Energy", "Entropy", "Maxlogit")},
    "ODIN": "| ODIN | {}, {} | {}, {} | {}, {} |",
    "MCD": "| MC dropout | {}, {} | {}, {} | {}, {} |",
    "pf": "| `pf`, the printed flow | {}, {} | {}, {} | {}, {} |",
    "pf2": "| `pf2` | **{}**, **{}** | **{}**, **{}** | {}, **{}** |",
    "pf4": "| `pf4` | {}, {} | {}, {} | **{}**, {} |",
}
POINTS = ("FedAvg", "FedProx", "FedDyn", "SCAFFOLD", "FedLap")
DISAGREEING = (*POINTS, "FedLap-Cov", "PVI", "PVI by default", "FedUAB", "FedIVON", "Bayes-ADMM")
METRICS = ("accuracy", "nll", "auroc")
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
    *(
        Claim(
            "docs/results/feduab.md",
            f"| {row} | " + " | ".join(["{} {} / {} {}"] * len(columns)) + " |",
            [
                uab(column, metric, form, row=row, group="CIFAR-10", key=key)
                for column in columns
                for key in BOTH
                for metric, form in (("accuracy", "points"), ("nll", "3"))
            ],
        )
        for columns, rows in {(*ALL,): LONG, (*SCENARIOS[3:],): (*LONG, "FedUAB-2", "FedUAB-5")}.items()
        for row in rows
    ),
    *(
        Claim(
            "docs/results/feduab.md",
            f"| {row}, at home | | {{}} {{}} / {{}} {{}} | {{}} {{}} / {{}} {{}} |",
            [
                at_home(row, column, metric, form, key)
                for column in OWN
                for key in BOTH
                for metric, form in (("accuracy", "points"), ("nll", "3"))
            ],
        )
        for row in LONG
    ),
    Claim(
        "docs/results/feduab.md",
        "| FedUAB-1, 50 draws | " + " | ".join(["{} {}"] * 3) + " |",
        [
            uab(column, metric, form, row="FedUAB-1", group="CIFAR-10")
            for column in ALL
            for metric, form in (("accuracy_50", "points"), ("nll_50", "3"))
        ],
    ),
    Claim(
        "docs/results/feduab.md",
        "{}, {} and {} % where that has {}, {} and {}.",
        [uab(c, "ece", "points", row=row, group="CIFAR-10") for row in ("FedUAB-1", "FedAvg") for c in ALL],
    ),
    Claim(
        "docs/results/feduab.md",
        "({}, {} and {} against {}, {} and {})",
        [
            *(uab(column, "nll_50", "3", row="FedUAB-1", group="CIFAR-10") for column in ALL),
            *(uab(column, "nll", "3", row="FedAvg", group="CIFAR-10") for column in ALL),
        ],
    ),
    *(
        Claim(
            "docs/personal-posteriors.md",
            sentence,
            [told_apart(score, f"{far} {m}") for far in ("SVHN", "CIFAR100", "TEXTURE") for m in ("auroc", "fpr95")],
        )
        for score, sentence in SCORES.items()
    ),
    Claim(
        "docs/personal-posteriors.md",
        "on SVHN {} (`pf`) for {}, and {} to {} for the six scores' {} to {}.",
        [
            *(told_apart("pf", "SVHN fpr95", key=key) for key in BOTH),
            *(told_apart(score, "SVHN fpr95") for score in ("ODIN", "Energy")),
            *(told_apart(score, "SVHN fpr95", key="published") for score in ("ODIN", "MSP")),
        ],
    ),
    Claim(
        "docs/personal-posteriors.md",
        "| LG-FedAvg | " + " | ".join(["{}, {}, {}, {}"] * 5) + " |",
        [
            resnet(f"LG-FedAvg{flow}", metric, form)
            for metric, form in {"accuracy": "3", "nll": "2", "ece": "3", "NOISE auroc": "2", "SVHN auroc": "3"}.items()
            for flow in ("", "-pf", "-pf2", "-pf4")
        ],
    ),
    Claim(
        "docs/personal-posteriors.md",
        "| LG-FedAvg, in print | " + " | ".join(["{}, {}"] * 5) + " |",
        [
            resnet(f"LG-FedAvg{flow}", metric, form, "published")
            for metric, form in {"accuracy": "3", "nll": "2", "ece": "3", "NOISE auroc": "2", "SVHN auroc": "3"}.items()
            for flow in ("", "-pf")
        ],
    ),
    Claim(
        "docs/personal-posteriors.md",
        "`pf3` alone has a lower one, {} for {}.",
        [resnet(f"LG-FedAvg{flow}", "ece", "3") for flow in ("-pf3", "")],
    ),
    *(
        Claim(
            "docs/admm.md",
            f"| {row} | {{}} | {{}} | {{}} |",
            [disagreeing(group, row, metric, "points" if metric == "accuracy" else "3") for metric in METRICS],
        )
        for group in ("MNIST", "Fashion-MNIST", "CIFAR-10")
        for row in DISAGREEING
        if (group, row) != ("CIFAR-10", "PVI by default")
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


def test_what_a_page_counts_of_a_table_is_what_the_index_has() -> None:
    page = " ".join((HOME / "docs/personal-posteriors.md").read_text(encoding="utf-8").split())
    counts = figures("index")["tables"]["pfedpf-1"]
    aupr = [row for row in figures("pfedpf-1") if "aupr" in row["metric"] and row["published"] is not None]
    assert all(row["ours"] > row["published"] for row in aupr)
    assert f"All {len(aupr)} of ours are above print" in page
    others, better = counts["printed"] - len(aupr), counts["better"] - len(aupr)
    words = f"{better} are better, {counts['within noise']} within noise and {counts['worse']} worse."
    assert f"Of the {others} other figures {words}" in page


def test_the_long_rows_of_cifar_10_are_counted_as_the_index_has_them() -> None:
    rows = [
        row
        for row in figures("feduab-6") + figures("feduab-8")
        if (row["group"], row["column"][:3]) == ("CIFAR-10", "All") and row["row"] in LONG and row["published"]
    ]
    better = sum((row["ours"] >= row["published"]) == (row["metric"] == "accuracy") for row in rows)
    index = (HOME / "docs/results/index.md").read_text(encoding="utf-8")
    worse = sum(
        f"| {row['table']} | CIFAR-10 {row['row']} {row['column']} | {row['metric']} |" in index for row in rows
    )
    page = " ".join((HOME / "docs/results/feduab.md").read_text(encoding="utf-8").split())
    words = f"{better} are better, {len(rows) - better - worse} within noise, {worse} clearly worse"
    assert f"have {len(rows)} numbers: {words}" in page
