"""Predictions for new inputs from a run folder: files in, files out, flags for what was never seen."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from fedbayes.data.inputs import read_inputs
from fedbayes.errors import InputError
from fedbayes.evaluate.unseen import Flags, flagged
from fedbayes.export.sets import told_by
from fedbayes.files import write_atomically
from fedbayes.model.predictive import Predictive
from fedbayes.runs import calibrated
from fedbayes.runs.evaluation import prediction_arrays, save
from fedbayes.runs.folder import load
from fedbayes.runs.home import home_of
from fedbayes.runs.records import Arrays

SHOWN = 20


def predict_file(
    folder: Path,
    source: Path,
    output: Path | None = None,
    *,
    draws: int | None = None,
    device: str | None = None,
    ood: str | None = None,
    sets: bool = False,
    site: str | None = None,
) -> tuple[Arrays, Flags | None]:
    """Predict the inputs of a file with a run's posterior; `output` (.npz or .csv) takes all arrays.

    `ood` names what rows are flagged by: usual (distance and doubt), distance, entropy or epistemic. With `sets` what
    the run's calibration promises stands beside it, of a `site` or of all rows together.
    """
    if output is not None and output.suffix not in (".npz", ".csv"):
        raise InputError(f"output {output} must end in .npz or .csv")
    run = load(folder, device=device)
    promise = calibrated.read(home_of(folder), run) if sets else None
    if promise is not None and not told_by(run, "ensemble", draws):
        own = run.task.program.prediction.draws
        raise InputError(f"the promises are of the run's own {own} draws, not of {draws}: leave out --draws, or --sets")
    data = run.task.clients.data
    owner = None if promise is None or site is None else promise.sites[promise.number(site)]
    x = read_inputs(source, data, site=owner)
    p = run.predict(x, draws=draws)
    arrays = {"kind": np.array(p.kind), **prediction_arrays(p)}
    if data.class_names:
        arrays["class_names"] = np.array(data.class_names, dtype=str)
    flags = flagged(run, run.stored(x), p, ood, draws=draws) if ood else None
    if flags:
        arrays["ood"] = flags.outside
        arrays["ood_measure"] = np.array(list(flags.thresholds))
        arrays["ood_threshold"] = np.array(list(flags.thresholds.values()))
    if promise is not None:
        arrays |= promised(promise, p, site)
    if output is not None and output.suffix == ".csv":
        write_atomically(output, as_csv(arrays))
    elif output is not None:
        save(output, arrays)
    return arrays, flags


def promised(promise: calibrated.Calibrated, p: Predictive, site: str | None = None) -> Arrays:
    """What a calibration promises of each row: a set of classes, an interval's ends, or a time that is outlived."""
    if promise.kind == "classes":
        return {"set": promise.sets(p, site).numpy()}
    if promise.kind == "survival":
        return {"outlives": promise.lower(p, site).numpy()}
    low, high = promise.interval(p, site)
    return {"interval_low": low.numpy(), "interval_high": high.numpy()}


def _measure(arrays: Arrays, name: str) -> np.ndarray:
    values = arrays[name].astype(np.float64)
    return np.asarray(values.sum(-1) if values.ndim > 1 else values)


def as_csv(arrays: Arrays) -> str:
    """One line per row: the first choice, probabilities or means, traces of the parts, entropies, the flag.

    Where a row may have several labels, those above one half stand for the first choice.
    """
    centre = arrays[_centre(arrays)]
    columns: dict[str, list[object]] = {"row": list(range(len(centre)))}
    if "probs" in arrays:
        names = arrays["class_names"].tolist() if "class_names" in arrays else list(map(str, range(centre.shape[1])))
        if _several(arrays):
            columns["labels"] = ["|".join(names[c] for c in np.flatnonzero(row > 0.5)) for row in centre]
        else:
            columns["class"] = [names[c] for c in centre.argmax(-1)]
            columns["confidence"] = _plain(centre.max(-1))
        columns |= {f"p_{name}": _plain(centre[:, c]) for c, name in enumerate(names)}
    elif "survival" in arrays:
        parts = {"alive": centre, "low": arrays["low"], "high": arrays["high"]}
        for name, values in parts.items():
            columns |= {f"{name}_{t:g}": _plain(values[:, j]) for j, t in enumerate(arrays["times"].tolist())}
    else:
        columns |= {f"mean_{d}": _plain(centre[:, d]) for d in range(centre.shape[1])}
    for part in ("aleatoric", "epistemic", "entropy", "expected_entropy", "mutual_information"):
        if part in arrays:
            columns[part] = _plain(_measure(arrays, part))
    if "ood" in arrays:
        columns["ood"] = arrays["ood"].astype(int).tolist()
    if "set" in arrays:
        columns["set"] = ["|".join(names[c] for c in np.flatnonzero(row)) for row in arrays["set"]]
    if "outlives" in arrays:
        columns["outlives"] = _plain(arrays["outlives"])
    for end in ("interval_low", "interval_high"):
        if end in arrays:
            columns |= {f"{end}_{d}": _plain(arrays[end][:, d]) for d in range(arrays[end].shape[1])}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values()))
    return text.getvalue()


def _several(arrays: Arrays) -> bool:
    """Whether a row may have several labels, or none."""
    return "kind" in arrays and str(arrays["kind"]) == "labels"


def _centre(arrays: Arrays) -> str:
    """What the prediction itself is called."""
    return next(name for name in ("probs", "survival", "mean") if name in arrays)


def _plain(values: np.ndarray) -> list[object]:
    return [f"{v:.9g}" for v in values]


def prediction_table(arrays: Arrays) -> Table:
    """The first rows of a prediction for reading."""
    table = Table(box=box.SIMPLE_HEAD)
    several, marked = _several(arrays), "ood" in arrays
    classes = "probs" in arrays and not several
    what = "labels" if several else "class" if classes else "survival by time" if "survival" in arrays else "mean"
    titles = ["row", what, *(["probability"] if classes else []), "aleatoric", "epistemic"]
    held = next((name for name in ("set", "interval_low", "outlives") if name in arrays), None)
    if held:
        titles.append({"set": "set", "interval_low": "interval", "outlives": "outlives"}[held])
    for title in [*titles, *(["never seen"] if marked else [])]:
        table.add_column(title, justify="right")
    centre = arrays[_centre(arrays)]
    for i in range(min(len(centre), SHOWN)):
        parts = [f"{float(arrays[part][i].sum()):.4g}" for part in ("aleatoric", "epistemic")]
        if classes:
            c = int(centre[i].argmax())
            prediction = [_name(arrays, c), f"{centre[i, c]:.4f}"]
        elif several:
            likely = [f"{_name(arrays, c)} {centre[i, c]:.4f}" for c in np.flatnonzero(centre[i] > 0.5)]
            prediction = [", ".join(likely) or "none"]
        else:
            prediction = [", ".join(f"{v:.4g}" for v in centre[i])]
        if held:
            parts.append(_held(arrays, held, i))
        flag = [("yes" if arrays["ood"][i] else "")] if marked else []
        table.add_row(str(i), *map(escape, [*prediction, *parts, *flag]))
    if len(centre) > SHOWN:
        table.add_row("...", *[""] * (len(table.columns) - 1))
    return table


def _held(arrays: Arrays, held: str, i: int) -> str:
    """What is promised of one row, for reading."""
    if held == "outlives":
        return f"{arrays[held][i]:.4g}"
    if held == "interval_low":
        ends = zip(arrays[held][i], arrays["interval_high"][i])
        return ", ".join(f"{low:.4g} to {high:.4g}" for low, high in ends)
    return ", ".join(_name(arrays, c) for c in np.flatnonzero(arrays["set"][i]))


def _name(arrays: Arrays, c: int | np.integer) -> str:
    return str(arrays["class_names"][c]) if "class_names" in arrays else str(c)
