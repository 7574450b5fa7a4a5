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
from fedbayes.model.predictive import Predictive
from fedbayes.runs.numbers import extremes, uncertainty
from fedbayes.scores.by_site import RESAMPLES, SiteScores, site_scores
from fedbayes.training.run import Run
from fedbayes.training.tested import predictions, rows_of

FILE = "evaluation.npz"
THUMBNAILS = 300
EXTREMES = 12  # of each kind
FEW = 64  # sites whose scores have errors


def write(folder: Path, run: Run) -> None:
    """Write `evaluation.npz`: predictions and their parts, labels, thumbnails, and each client's scores and labels."""
    data, privacy = run.task.clients.data, run.task.privacy
    arrays: dict[str, Any] = {"kind": data.kind, "class_names": np.array(data.class_names, dtype=str)}
    if privacy is not None and not privacy.public_test:  # what test rows look like, and who holds how many
        save(folder / FILE, arrays)
        return
    arrays |= client_arrays(run) if privacy is None else {}
    p, at, homes = predictions(run)
    homes = homes if privacy is None else []
    if p is not None:
        y = targets(data, data.test_y[at])
        scores = score_arrays(p, y, homes, bool(run.task.clients.names))
        arrays |= {"labels": y.numpy(), **prediction_arrays(p), **scores}
        arrays |= uncertainty_arrays(arrays, homes)
        rows = thumbnail_rows(arrays)
        pictures = thumbnails(data, data.test_x[at[rows]])
        if pictures is not None:
            arrays |= {"thumbnails": pictures, "thumbnail_rows": rows}
    save(folder / FILE, arrays)


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


def score_arrays(p: Predictive, y: Tensor, homes: list[Tensor], named: bool) -> dict[str, np.ndarray]:
    """Scores of the whole test set, and of each client's own test rows [clients, scores] (nan where it has none).

    Sites that have names have errors too, where they are few.
    """
    resamples = RESAMPLES if named and len(homes) <= FEW else 0
    scores = site_scores(p.kind, rows_of(p, y), homes, [str(k) for k in range(len(homes))], resamples=resamples)
    arrays = {
        "score_names": np.array(["count", *scores.names]),
        "scores": np.array([float(len(y)), *(figure.value for figure in scores.all.values())]),
        "client_scores": np.column_stack([_counts(scores), scores.values]),
    }
    if resamples:
        none = np.zeros(len(homes))
        arrays["score_errors"] = np.array([0.0, *(figure.error for figure in scores.all.values())])
        arrays["client_errors"] = np.column_stack([none, scores.errors])
    return arrays


def uncertainty_arrays(arrays: Mapping[str, Any], homes: list[Tensor]) -> dict[str, np.ndarray]:
    """Mean uncertainty over each client's own test rows [clients, parts] (nan where it has none)."""
    parts = {} if "survival" in arrays else uncertainty(dict(arrays))
    if not parts or not homes:
        return {}
    rows = np.column_stack(list(parts.values()))
    none = np.full(len(parts), np.nan)
    means = [rows[home.numpy()].mean(0) if len(home) else none for home in homes]
    return {"uncertainty_names": np.array(list(parts)), "client_uncertainty": np.array(means)}


def _counts(scores: SiteScores) -> np.ndarray:
    return np.array([float(rows) if rows else np.nan for rows in scores.rows])


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
