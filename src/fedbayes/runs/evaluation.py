"""A finished run's predictions of its test set, as plain arrays in one file, so that a report needs no torch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data import Dataset
from fedbayes.engine.clock import FILES, share
from fedbayes.files import write_atomically
from fedbayes.model.predictive import Predictive, joined
from fedbayes.runs.numbers import extremes
from fedbayes.scores import SUMS
from fedbayes.training.personal import personal_predictions
from fedbayes.training.run import Run, predict_with

FILE = "evaluation.npz"
THUMBNAILS = 300
EXTREMES = 12  # of each kind


def write(folder: Path, run: Run) -> None:
    """Write `evaluation.npz`: predictions and their parts, labels, thumbnails, and each client's scores and labels."""
    data = run.task.clients.data
    arrays: dict[str, Any] = {"kind": data.kind, "class_names": np.array(data.class_names, dtype=str)}
    arrays |= client_arrays(run)
    p, at, homes = predictions(run)
    if len(at):
        y = targets(data, data.test_y[at])
        arrays |= {"labels": y.numpy(), **prediction_arrays(p), **score_arrays(p, y, homes)}
        rows = thumbnail_rows(arrays)
        pictures = thumbnails(data, data.test_x[at[rows]])
        if pictures is not None:
            arrays |= {"thumbnails": pictures, "thumbnail_rows": rows}
    save(folder / FILE, arrays)


def predictions(run: Run) -> tuple[Any, Tensor, list[Tensor]]:
    """A run's predictions of test rows, which rows they are, and which of them are whose.

    The whole test set; without a global model each client's own rows, as its personal model sees them.
    """
    clients = run.task.clients
    if run.task.program.prediction.whole:
        at = torch.arange(len(clients.data.test_x))
        p = predict_with(run.task, run.parts, clients.data.test_x) if len(at) else None
        return p, at, [clients.test_rows(k) for k in range(len(clients))]
    here = run.task.elsewhere is None  # else personal models stay with the clients
    by_client = {k: (rows, p) for _, k, rows, p in personal_predictions([run.home])} if here else {}
    if not by_client:
        return None, torch.zeros(0, dtype=torch.int64), []
    pieces = [p for _, p in by_client.values()]
    starts = torch.tensor([0, *(len(rows) for rows, _ in by_client.values())]).cumsum(0).tolist()
    places = {k: torch.arange(a, b) for k, a, b in zip(by_client, starts, starts[1:])}
    empty = torch.zeros(0, dtype=torch.int64)
    return (
        joined(pieces),
        torch.cat([rows for rows, _ in by_client.values()]),
        [places.get(k, empty) for k in range(len(clients))],
    )


def thumbnail_rows(arrays: Mapping[str, Any]) -> np.ndarray:
    """The test rows that a report may want to picture: some of all, and those at the ends of a classification."""
    rows = [np.linspace(0, len(arrays["labels"]) - 1, THUMBNAILS).astype(int)]
    if str(arrays["kind"]) == "classes":
        rows += extremes(dict(arrays), EXTREMES).values()
    return np.unique(np.concatenate(rows))


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as one .npz file, whole or not at all."""
    with share(FILES):
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        write_atomically(path, file.getvalue())


def prediction_arrays(p: Predictive) -> dict[str, np.ndarray]:
    """A predictive distribution as arrays: probabilities or means, the parts of its uncertainty."""
    centre = {"real": "mean", "survival": "survival"}.get(p.kind, "probs")
    arrays = {centre: p.mean, "aleatoric": p.aleatoric, "epistemic": p.epistemic}
    if p.low is not None and p.high is not None:
        arrays |= {"low": p.low, "high": p.high, "times": torch.tensor(p.times)}
    if p.kind in ("classes", "labels"):
        arrays |= {
            "entropy": p.entropy,
            "expected_entropy": p.expected_entropy,
            "mutual_information": p.mutual_information,
        }
    return {name: t.cpu().numpy() for name, t in arrays.items()}


def targets(data: Dataset, y: Tensor) -> Tensor:
    """Targets in the units in which they came."""
    return y if data.target_scale is None else data.target_scale.undo(y)


def score_arrays(p: Predictive, y: Tensor, homes: list[Tensor]) -> dict[str, np.ndarray]:
    """Scores of the whole test set, and of each client's own test rows [clients, scores] (nan where it has none)."""
    p, scores_of = p.cpu(), SUMS[p.kind][1]

    def scores(at: Tensor) -> dict[str, float]:
        return scores_of(p.at(at).sums(y[at]))

    whole = scores(torch.arange(len(y)))
    each = [(scores(rows) if len(rows) else {}) for rows in homes]
    return {
        "score_names": np.array(list(whole)),
        "scores": np.array(list(whole.values())),
        "client_scores": np.array([[own.get(name, np.nan) for name in whole] for own in each]),
    }


def client_arrays(run: Run) -> dict[str, np.ndarray]:
    """How many rows each client trains on, and how many of each label."""
    clients = run.task.clients
    arrays = {"client_sizes": clients.sizes.numpy()}
    if clients.names:
        arrays["client_names"] = np.array(clients.names, dtype=str)
    if clients.data.kind in ("classes", "labels"):
        arrays["label_counts"] = clients.label_counts().numpy()
    return arrays


def thumbnails(data: Dataset, x: Tensor) -> np.ndarray | None:
    """Images as bytes [N, H, W] or [N, H, W, 3]; None where inputs are no images."""
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        return None
    if x.dtype != torch.uint8:
        low, high = float(data.x.min()), float(data.x.max())
        x = ((x.float() - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    pictures = x.permute(0, 2, 3, 1).numpy()
    return pictures[..., 0] if x.shape[1] == 1 else pictures
