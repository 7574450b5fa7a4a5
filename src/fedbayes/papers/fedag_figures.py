"""FedAG's figures: the cubic toy after 1, 3 and 5 rounds, and scores by round beside central methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data import load
from fedbayes.federation.program import FederationState
from fedbayes.methods import fedag
from fedbayes.model.predictive import Predictive
from fedbayes.papers import folds
from fedbayes.papers.cells import contents_of
from fedbayes.papers.drawing import save
from fedbayes.papers.fedag import TABLES, mean_and_error

SHOWN = (1, 3, 5)
INK = {"FedAG network": "#1b6ca8", "DE": "#b5482a", "VI": "#5b8c3e"}


def cubic_rounds(seed: int = 0) -> tuple[Any, dict[int, Predictive]]:
    """The toy (10 workers, 16 points each) and its predictions on [-6, 6] after the rounds that are shown."""
    data = load("cubic", seed=seed)
    tasks = folds.federations([data.as_seen()], fedag(), hidden=folds.hidden_units("cubic"), rounds=max(SHOWN), every=1)
    predictions: dict[int, Predictive] = {}

    def look(number: int, states: list[FederationState]) -> None:
        if number in SHOWN:
            predictions[number] = folds.predictions(tasks, states)[0]

    folds.train(tasks, look)
    return data, predictions


def cubic_figure(output: Path) -> list[Path]:
    """Figure 2: truth, data, predictive mean, and +- 3 standard deviations."""
    from matplotlib.figure import Figure

    data, predictions = cubic_rounds()
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    grid = data.test_x[:, 0].numpy()
    x, y = data.x[:, 0], data.target_scale.undo(data.y)[:, 0]
    axes = figure.subplots(1, len(SHOWN), sharey=True)
    for ax, (number, p) in zip(axes, predictions.items()):
        mean, scale = p.mean[:, 0].numpy(), p.total[:, 0].sqrt().numpy()
        ax.fill_between(grid, mean - 3 * scale, mean + 3 * scale, color="0.85", label="± 3 standard deviations")
        ax.plot(grid, grid**3, color=INK["FedAG network"], lw=1.5, label="truth, x³")
        ax.plot(grid, mean, color="black", lw=1.5, label="predictive mean")
        ax.scatter(x, y, s=8, color="#d9822b", zorder=3, label="training data")
        ax.set(title=f"after {number} round{'s' if number > 1 else ''}", xlabel="x", ylim=(-250, 250), xlim=(-6, 6))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("y")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return save(figure, output / "fedag-figure-2")


def by_round(name: str, rounds: int = folds.ROUNDS, count: int | None = None) -> list[list[folds.Scores]]:
    """Scores of FedAG's network after every round, for each fold."""
    data = folds.folds_of(name, count)
    tasks = folds.federations(data, fedag(), hidden=folds.hidden_units(name), rounds=rounds, every=1)
    rounds_scores: list[list[folds.Scores]] = []

    def look(number: int, states: list[FederationState]) -> None:
        predictions = folds.predictions(tasks, states)
        rounds_scores.append([folds.scores_of(one, p.mean, p.total) for one, p in zip(data, predictions)])

    folds.train(tasks, look)
    return rounds_scores


def central(output: Path, name: str, score: str) -> dict[str, tuple[float, float]]:
    """A score of the central methods on a set and its standard error, where their cells have run."""
    table = TABLES["fedag-2"]
    by_column = {cell.column: cell for cell in table.cells() if cell.row == name}
    contents = {column: contents_of(table, by_column[column], output, "paper") for column in ("DE", "VI") if by_column}
    return {c: (one["test"][score], one["error"]["test"][score]) for c, files in contents.items() for one in files}


def round_figure(output: Path, sets: Sequence[str] = ("yacht", "concrete"), count: int | None = None) -> list[Path]:
    """Figure 3: NLL and RMSE by round; DE and VI as lines with their standard errors, where their cells have run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(sets)), layout="constrained")
    grid = figure.subplots(len(sets), 2, squeeze=False)
    for line, name in zip(grid, sets):
        rounds = by_round(name, count=count)
        for ax, score in zip(line, ("nll", "rmse")):
            points = [mean_and_error([fold[score] for fold in scores]) for scores in rounds]
            across = np.arange(1, len(points) + 1)
            mean, error = np.array(points).T
            ax.fill_between(across, mean - error, mean + error, color=INK["FedAG network"], alpha=0.2, lw=0)
            ax.plot(across, mean, marker="o", color=INK["FedAG network"], label="FedAG")
            for column, (centre, width) in central(output, name, score).items():
                ax.axhspan(centre - width, centre + width, color=INK[column], alpha=0.15, lw=0)
                ax.axhline(centre, color=INK[column], lw=1.5, label=column)
            ax.set(title=name, xlabel="round", ylabel=score.upper(), xticks=across)
            ax.spines[["top", "right"]].set_visible(False)
        line[0].legend(frameon=False, fontsize=8)
    return save(figure, output / "fedag-figure-3")


FIGURES: dict[str, Callable[[Path], list[Path]]] = {"fedag-2": cubic_figure, "fedag-3": round_figure}
