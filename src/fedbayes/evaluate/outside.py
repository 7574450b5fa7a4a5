"""Inputs from elsewhere, by name, and how well each score of a run tells them from its test set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes import scores as of
from fedbayes.data import Dataset, Prepare
from fedbayes.data import load as load_data
from fedbayes.errors import InputError
from fedbayes.evaluate import ood
from fedbayes.evaluate.repeated import REPEATS, draw_seeds, figure
from fedbayes.experiments.own_code import imported, naming
from fedbayes.runs.evaluation import thumbnails
from fedbayes.training.run import Run

NOISE = ("uniform-noise", "gaussian-noise")
MOST = 10_000
RESAMPLES = 5
THUMBNAILS = 12
RANKINGS: dict[str, Callable[[Tensor, Tensor], float]] = {"auroc": of.auroc, "aupr": of.aupr, "fpr95": of.fpr95}

# Scores that the posterior's draws don't touch: measured once, without a Monte Carlo error over draws.
DRAWLESS = ("mahalanobis", "mc_dropout")

ScoresBySet = dict[str, dict[str, Tensor]]


class Outside(NamedTuple):
    """Inputs that a run was not trained on, and the run that takes them as they are."""

    name: str
    x: Tensor
    run: Run


def outside(name: str, run: Run, *, most: int = MOST) -> Outside:
    """A set of the catalogue or of the user's own code (`package.module:object`), at most `most` of its test rows.

    `NAME@FACTOR` is the set as the network sees it, times a factor; `train` are the run's own training inputs, so that
    `train@2000` is far away in their own direction. Noise takes the shape of the run's inputs, and stands for
    standardised columns where the run has such.
    """
    base, sign, text = name.partition("@")
    if base == "train" and not sign:
        raise InputError("ood train: a run's own training inputs are inside; scale them, such as train@2000")
    if base == "train" and run.task.privacy is not None:
        raise InputError(f"ood {name}: the run is private, and its training inputs are not shown; take another set")
    with naming(f"ood {name}"):
        data, factor = run.task.clients.data, float(text) if sign else 1.0
        if base in NOISE and not isinstance(data.prepare, Prepare):
            x = thinned(load_data(base, shape=data.seen_shape).test_x, most)
            return Outside(name, factor * x, ood.as_seen(run))
        x = thinned(data.x if base == "train" else _inputs(base, run), most)
        ood.check_inputs(run, x)
        if not sign:
            return Outside(name, x, run)
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise InputError(f"{base} holds tokens, which can't be scaled")
        return Outside(name, factor * run.task.program.model.inputs(x), ood.as_seen(run))


def thinned(x: Tensor, most: int) -> Tensor:
    """At most `most` rows, evenly spaced."""
    return x if len(x) <= most else x[torch.linspace(0, len(x) - 1, most).long()]


def _inputs(name: str, run: Run) -> Tensor:
    data = run.task.clients.data
    if name in NOISE:
        return load_data(name, shape=data.shape).test_x
    source = imported(name, "ood") if ":" in name else load_data(name)
    source = source() if callable(source) else source
    if isinstance(source, Tensor):
        return source
    if not isinstance(source, Dataset):
        raise InputError(f"{name} gave a {type(source).__name__}; it must give a Dataset or a tensor of inputs")
    return source.test_x if len(source.test_x) else source.x


def score_outside(
    run: Run, names: Iterable[str], *, draws: int | None = None, repeats: int = REPEATS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """AUROC, AUPR and FPR95 of every score for every set, and the arrays behind them.

    Means over resamples of equally many inside and outside inputs (FedPPD), each half the smaller side: the spread of
    half samples is about the standard error of the whole. Arrays are `inside/SCORE`, `outside/SET/SCORE`, `thumbs/SET`.
    """
    data = run.task.clients.data
    sets = [outside(name, run) for name in dict.fromkeys(names)]
    places = [Outside("", thinned(data.test_x, MOST), run), *sets]
    distance, notes = None, []
    try:
        distance = ood.fit_distance(run)
    except InputError as error:
        notes.append(f"{error}; left out")
    each: list[ScoresBySet] = []
    for seed in draw_seeds(run, repeats):
        each.append({p.name: _scores(p, draws, seed, distance, each[0][p.name] if each else {}) for p in places})
    tables = {place.name: _rank(each, place.name) for place in sets}
    arrays = {f"inside/{score}": v.float().numpy() for score, v in each[0][""].items()}
    for place in sets:
        arrays |= {f"outside/{place.name}/{score}": v.float().numpy() for score, v in each[0][place.name].items()}
        shown = thinned(place.x, THUMBNAILS)
        pictures = thumbnails(replace(data, x=shown), shown)
        if pictures is not None:
            arrays[f"thumbs/{place.name}"] = pictures
    return {"tables": tables, "resamples": RESAMPLES, "notes": notes}, arrays


def _scores(
    place: Outside, draws: int | None, seed: int, distance: ood.Distance | None, before: dict[str, Tensor]
) -> dict[str, Tensor]:
    only = [name for name in before if name not in DRAWLESS] if before else None
    if only is None and distance is None:
        only = [name for name in ood.names(place.run, place.x, draws) if name != "mahalanobis"]
    return {**before, **ood.scores(place.run, place.x, only=only, draws=draws, seed=seed, distance=distance)}


def _rank(each: list[ScoresBySet], place: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for score in each[0][place]:
        pairs = [(scores[""][score], scores[place][score]) for scores in each]
        number = max(1, min(map(len, pairs[0])) // 2)
        table[score] = {}
        for metric, rank in RANKINGS.items():
            resamples = [of.resampled(rank, *pair, RESAMPLES, number=number) for pair in pairs]
            summary = figure([one.mean for one in resamples]) | ({"error": None} if score in DRAWLESS else {})
            table[score][metric] = {**summary, "spread": resamples[0].spread}
        _check(table[score])
    return table


def _check(row: Mapping[str, Mapping[str, float]]) -> None:
    """Check an AUROC and an FPR95 against what any ROC obeys; a pair that breaks it is a bug of this library."""
    area, passed = row["auroc"]["value"], row["fpr95"]["value"]
    if not 0.95 * (1 - passed) - 1e-9 <= area <= 1 - 0.05 * passed + 1e-9:
        raise RuntimeError(f"no ROC has an AUROC of {area} and an FPR95 of {passed}")
