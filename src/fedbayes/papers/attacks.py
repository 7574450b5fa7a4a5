"""Methods under attack: rules and bounds against clients that lie, on MNIST, or on digits for a laptop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbayes.errors import InputError, NotFinite
from fedbayes.experiments.experiment import Experiment
from fedbayes.papers.cells import Cell, Table
from fedbayes.papers.drawing import heat_map, save, svg_of
from fedbayes.papers.layout import Layout, Row
from fedbayes.papers.seeds import SEEDS
from fedbayes.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "none"
PLAIN = "plain"
ONCE = "mixed trimmed mean without twins"
WORST_NLL = 99.0  # what is not finite, or worse, is written as this
SPREADS: dict[str, tuple[str, dict[str, Any]]] = {
    "Dirichlet .3": ("dirichlet_equal", {"alpha": 0.3}),
    "two labels": ("labels_per_client", {"k": 2}),
}
# Chosen on rows held out of training, without attackers. With momentum at the server a run comes farther in its rounds.
TRAINING: dict[str, Any] = {
    **{"epochs": 5, "batch": 50, "lr": 0.3},
    **{"server": "sgd", "server_lr": 0.5, "server_momentum": 0.8},
}
METHODS = {"FedAvg": "fedavg", "FedUAB": "feduab"}
CLIENTS, ROUNDS, BUCKETS = 100, 30, 50
# Attacks by column: their keys in an experiment. A fifth of the clients lies.
COLUMNS: dict[str, dict[str, Any]] = {
    NONE: {},
    "sign flip": {"attack": "sign_flip"},
    "noise": {"attack": "noise"},
    "label flip": {"attack": "label_flip"},
    "ALIE": {"attack": "alie"},
    "IPM .5": {"attack": "ipm"},
    "IPM 10": {"attack": "ipm", "attack_strength": 10.0},
    "mimic": {"attack": "mimic"},
    "overconfident": {"attack": "overconfident"},
    "certain": {"attack": "certain"},
    "underconfident": {"attack": "underconfident"},
    "10 times its rows": {"attack": "inflated_counts"},
    "IPM .5 apart": {"attack": "ipm_apart"},
    "mimic apart": {"attack": "mimic_apart"},
}
# Attacks by those who know the defence, that copies count once: told apart from the others.
ADAPTIVE = ("IPM .5 apart", "mimic apart")
OF_SCALES = ("certain", "underconfident")  # which points have not


class Defence(NamedTuple):
    """What the server does against lies: keys of an experiment, and options of its method."""

    keys: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


# Changes are clipped at the median size of the round before, precisions capped at ten times the broadcast's, rows at
# those that everybody has. The first round's clip is what half of the clients stayed below without attackers.
BOUNDED: dict[str, Any] = {"clip_quantile": 0.5, "cap_rows": 600}
FIRST = {"FedAvg": {"clip_change": 0.018}, "FedUAB": {"clip_change": 0.15, "cap_precision": 10.0}}
FIRST_SMALL = {"fedavg": 0.032, "feduab": 0.3}
ROBUST = {
    "median": "median",
    "trimmed mean": "trimmed_mean",
    "geometric median": "geometric_median",
    "multi-Krum": "multi_krum",
}
DEFENCES: dict[str, Defence] = {
    PLAIN: Defence(),
    "bounded": Defence(BOUNDED),
    **{name: Defence({}, {"rule": rule}) for name, rule in ROBUST.items()},
    "buckets median": Defence({}, {"rule": "median", "buckets": BUCKETS}),
    "buckets geometric median": Defence({}, {"rule": "geometric_median", "buckets": BUCKETS}),
    **{f"mixed {name}": Defence({}, {"rule": rule, "mixing": True}) for name, rule in ROBUST.items()},
    ONCE: Defence({}, {"rule": "trimmed_mean", "mixing": True, "twins": 0.02}),
    "bounded geometric median": Defence(BOUNDED, {"rule": "geometric_median"}),
    "bounded multi-Krum": Defence(BOUNDED, {"rule": "multi_krum"}),
}


def experiment_of(method: str, spread: str, defence: Defence, attack: Mapping[str, Any]) -> Experiment:
    """100 clients of 600 rows, all of them in every round."""
    partition, settings = SPREADS[spread]
    keys = {**defence.keys, **(FIRST[method] if defence.keys else {})}
    return Experiment(
        data="mnist",
        network="mlp",
        precision="tf32",
        partition=partition,
        partition_options=settings,
        clients=CLIENTS,
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
        method=METHODS[method],
        options={**TRAINING, **defence.options},
        **keys,
        **attack,
    )


def at_last(run: Run) -> dict[str, float]:
    """Scores of the last posterior; of a run that diverged, of the one that it ended with, or those of chance."""
    diverged = float(bool(run.journal) and "diverged" in run.journal[-1])
    try:
        scores = run.scores()
    except NotFinite:
        return {"accuracy": 1 / run.task.clients.data.classes, "nll": WORST_NLL, "diverged": 1.0}
    return {"accuracy": scores["accuracy"], "nll": min(scores["nll"], WORST_NLL), "diverged": diverged}


def cells() -> list[Cell[Experiment]]:
    """Every attack on every defence, of points and of posteriors, under both spreads."""
    return [
        Cell(row, column, experiment_of(method, spread, defence, attack), {}, at_last, f"{method} {spread}")
        for spread in SPREADS
        for method in METHODS
        for row, defence in DEFENCES.items()
        for column, attack in COLUMNS.items()
        if not (method == "FedAvg" and column in OF_SCALES)
    ]


def small(x: Experiment) -> Experiment:
    """20 clients on 8 x 8 digits, 15 rounds: minutes on two cores."""
    options = {**x.options, "batch": 24, "epochs": 3}
    if "buckets" in options:
        options["buckets"] = 10
    rows: dict[str, Any] = {} if x.cap_rows is None else {"cap_rows": 72, "clip_change": FIRST_SMALL[x.method]}
    return replace(
        x,
        data="digits",
        network_options={"hidden": [32]},
        precision="float32",
        clients=20,
        rounds=15,
        evaluate_every=15,
        options=options,
        **rows,
    )


def lasting(rounds: int, **server: float) -> Callable[[Experiment], Experiment]:
    """More rounds: an attack that only slows training down costs less then. `server`: other options of its step."""

    def longer(x: Experiment) -> Experiment:
        return replace(x, rounds=rounds, evaluate_every=rounds, options={**x.options, **server})

    return longer


SCALES: Mapping[str, Callable[[Experiment], Experiment]] = {
    "paper": lambda x: x,
    "small": small,
    "long": lasting(60),
    "longer": lasting(150),
    # Chosen on rows held out of training, under inner-product attacks.
    "steady": lasting(400, server_lr=1.0, server_momentum=0.0),
}
Figures = Mapping[tuple[str, str], Mapping[str, float]]  # (row, column) -> accuracy and NLL


def by_group(rows: Sequence[Row]) -> dict[str, dict[tuple[str, str], dict[str, float]]]:
    """The figures of each group by row and column."""
    groups: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        place = groups.setdefault(row["group"], {}).setdefault((row["row"], row["column"]), {})
        place[row["metric"]] = row["ours"]
    return groups


def findings(rows: Sequence[Row]) -> list[str]:
    """For each group: how plain pooling falls, the defence that loses least under its worst attack, and its price.

    A defence that was not tried under every attack is compared where it was.
    """
    lines = []
    for group, figures in by_group(rows).items():
        tried = [row for row, column in figures if column == NONE and _attacked(figures, row)]
        if PLAIN not in tried:
            continue
        lines.append(f"{group}: {_told(figures, PLAIN)}.")
        attacks = max(len(_attacked(figures, row)) for row in tried)
        defences = [row for row in tried if len(_attacked(figures, row)) == attacks]
        robust = [row for row in defences if row != PLAIN]
        if robust:
            best = max(robust, key=lambda row: min(f["accuracy"] for f in _attacked(figures, row).values()))
            cost = figures[PLAIN, NONE]["accuracy"] - figures[best, NONE]["accuracy"]
            price = f"without attackers it costs {100 * cost:.2f} points of accuracy" if cost > 0 else (
                f"without attackers it gains {abs(100 * cost):.2f} points of accuracy"
            )  # fmt: skip
            lines.append(f"{group}: the best under its worst attack is {_told(figures, best)}; {price}.")
        counts = ", ".join(f"{row} {_held(figures, row)}" for row in defences)
        lines.append(f"{group}: attacks, of {attacks}, that cost less than one point and .05 of NLL: {counts}.")
        several = [row for row in tried if row != PLAIN]
        if len(several) > 1:
            lines.append(f"{group}: with the best defence for each attack, {_each(figures, several)}.")
        for column in ADAPTIVE:
            met = [row for row in tried if (row, column) in figures]
            if met:
                lines.append(f"{group}: under {column}, whose senders know of twins, {_known(figures, met, column)}.")
    return [*lines, *missing(rows)]


def missing(rows: Sequence[Row]) -> list[str]:
    """Rows of the table that have not been run."""
    places = {(row["group"], row["row"]) for row in rows}
    lacking: dict[str, list[str]] = {}
    for cell in cells():
        if (cell.group, cell.row) not in places and cell.row not in lacking.setdefault(cell.group, []):
            lacking[cell.group].append(cell.row)
    begun = {group for group, _ in places}
    said = {group: f": {', '.join(names)}" if group in begun else "" for group, names in lacking.items() if names}
    return [f"{group}: not run{names}." for group, names in said.items()]


def _held(figures: Figures, row: str) -> int:
    """Under how many attacks a defence stays near what it is without attackers."""
    before = figures[row, NONE]
    after = _attacked(figures, row).values()
    return sum(before["accuracy"] - f["accuracy"] < 0.01 and f["nll"] - before["nll"] < 0.05 for f in after)


def _attacked(figures: Figures, row: str) -> dict[str, Mapping[str, float]]:
    """What is left of a defence by attack, but for those that know one of the defences."""
    known = (NONE, *ADAPTIVE)
    return {column: f for (name, column), f in figures.items() if name == row and column not in known}


def _known(figures: Figures, defences: Sequence[str], column: str) -> str:
    """What one attack leaves of the defence that it knows, and of the one that it leaves most of, in words."""
    left = {row: figures[row, column]["accuracy"] for row in defences}
    told = {row: left[row] for row in (ONCE, max(left, key=lambda row: left[row])) if row in left}
    losses = {row: 100 * (figures[row, NONE]["accuracy"] - f) for row, f in told.items()}
    return ", ".join(f"{row} has {100 * f:.2f} % ({losses[row]:.2f} points less)" for row, f in told.items())


def _each(figures: Figures, defences: Sequence[str]) -> str:
    """The attack that costs most where each meets the defence that loses least by it, in words."""
    losses: dict[str, tuple[float, float, str]] = {}
    for row in defences:
        before = figures[row, NONE]
        for column, f in _attacked(figures, row).items():
            loss = before["accuracy"] - f["accuracy"], f["nll"] - before["nll"], row
            losses[column] = min(losses.get(column, loss), loss)
    worst = max(losses, key=lambda column: losses[column][0])
    gap, more, row = losses[worst]
    far = max(losses, key=lambda column: losses[column][1])
    return (
        f"the worst is {worst}, {100 * gap:.2f} points less and {more:+.3f} of NLL under {row}; "
        f"the most of NLL is {losses[far][1]:+.3f}, by {far} under {losses[far][2]}"
    )


def _told(figures: Figures, row: str) -> str:
    """A defence in words: its scores without attackers, and under the attacks that hurt it most."""
    before, after = figures[row, NONE], _attacked(figures, row)
    worst = min(after, key=lambda column: after[column]["accuracy"])
    far = max(after, key=lambda column: after[column]["nll"])
    gap, more = before["accuracy"] - after[worst]["accuracy"], after[far]["nll"] - before["nll"]
    return (
        f"{row}, {100 * before['accuracy']:.2f} % and NLL {before['nll']:.3f} without attackers, "
        f"{100 * after[worst]['accuracy']:.2f} % under {worst} ({100 * gap:.2f} points less), "
        f"NLL {after[far]['nll']:.3f} under {far} ({more:+.3f})"
    )


def picture(rows: Sequence[Row]) -> Figure:
    """Accuracy of every place as colours, one map per group of which more than one column has been run."""
    accuracies = [row for row in rows if row["metric"] == "accuracy"]
    maps = {
        group: {(row["row"], row["column"]): row["ours"] for row in accuracies if row["group"] == group}
        for group in dict.fromkeys(row["group"] for row in accuracies)
    }
    several = {group: places for group, places in maps.items() if len({column for _, column in places}) > 1}
    return heat_map(several or maps, "accuracy", 100)


def drawing(rows: Sequence[Row]) -> str:
    """The same inside a page."""
    return svg_of(picture(rows))


def draw(output: Path, scale: str) -> list[Path]:
    """The heat map of a table that has been run, as files."""
    name = "attacks" if scale == "paper" else f"attacks-{scale}"
    path = output / f"{name}.json"
    if not path.is_file():
        raise InputError(f"there is no {path}; run fedbayes table attacks --scale {scale}")
    return save(
        picture(json.loads(path.read_text(encoding="utf-8"))), output / f"{name.replace('attacks', 'attacks-heat', 1)}"
    )


FIGURES = {"attacks": draw}


LEGEND = (
    "Scores on the test set at the last round, ± the standard error over seeds; rows are what the server does, columns "
    "what a fifth of the clients does. The server has momentum, if nothing else is said. A run that diverges ends "
    "there; where nothing that it predicts is finite, its accuracy is that of chance. NLL is at most 99."
)
KEPT = (
    *("table", "group", "row", "column", "metric", "ours", "error", "published"),
    *("rounds", "seeds", "seconds", "device", "commit", "date", "otherwise"),
)
TABLES: dict[str, Table[Experiment]] = {
    "attacks": Table(
        "Attacks and defences",
        cells,
        {"accuracy": "measured.accuracy", "nll": "measured.nll"},
        SCALES,
        "attacks",
        SEEDS,
        layout=Layout(legend=LEGEND, corner="server", keys=KEPT, findings=findings, drawing=drawing),
    )
}
