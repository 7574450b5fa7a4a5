"""Predictions for new inputs from a run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.table import Table

from fedbayes.errors import InputError
from fedbayes.study.evaluation import prediction_arrays, save
from fedbayes.study.folders import Arrays
from fedbayes.study.run import load

SHOWN = 20


def predict_file(
    folder: Path, source: Path, output: Path | None, *, draws: int | None = None, device: str | None = None
) -> Arrays:
    """Predict the inputs of a .npy file with a run's posterior; with `output` the arrays are written as .npz."""
    try:
        x = np.load(source, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{source} can't be read as a .npy array ({error}); write it with numpy.save") from error
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub":
        raise InputError(f"{source} must hold one array of numbers; write it with numpy.save")
    run = load(folder, device=device)
    arrays = prediction_arrays(run.predict(torch.from_numpy(np.ascontiguousarray(x)), draws=draws))
    names = run.task.clients.data.class_names
    if names:
        arrays["class_names"] = np.array(names, dtype=str)
    if output is not None:
        save(output, arrays)
    return arrays


def prediction_table(arrays: Arrays) -> Table:
    """The first rows of a prediction for reading."""
    table = Table(box=box.SIMPLE_HEAD)
    classes = "probs" in arrays
    for title in (
        "row",
        "class" if classes else "mean",
        *(["probability"] if classes else []),
        "aleatoric",
        "epistemic",
    ):
        table.add_column(title, justify="right")
    centre = arrays["probs" if classes else "mean"]
    for i in range(min(len(centre), SHOWN)):
        parts = [f"{float(arrays[part][i].sum()):.4g}" for part in ("aleatoric", "epistemic")]
        if classes:
            c = int(centre[i].argmax())
            said = [str(arrays["class_names"][c]) if "class_names" in arrays else str(c), f"{centre[i, c]:.4f}"]
        else:
            said = [", ".join(f"{v:.4g}" for v in centre[i])]
        table.add_row(str(i), *said, *parts)
    if len(centre) > SHOWN:
        table.add_row("...", *[""] * (len(table.columns) - 1))
    return table
