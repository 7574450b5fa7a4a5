"""Three inputs that show what uncertainty says: an easy one, a hard one, and one that is of no class at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data import Dataset
from fedbayes.runs.evaluation import prediction_arrays, thumbnails
from fedbayes.training.run import Run

FILE = "samples.npz"
NAMES = ("easy", "hard", "no class")
STRIPES = 8


def three(runs: Mapping[str, Run], main: str) -> dict[str, Any] | None:
    """Arrays for `samples.npz`: the same three images seen by every method; None unless it classifies images.

    Easy is the right prediction with the least entropy, hard the one with the largest expected entropy (what remains
    if the weights were known), both by the method `main`. `rank` is the share of the test set with less epistemic
    uncertainty.
    """
    data = runs[main].task.clients.data
    runs = {
        method: run for method, run in runs.items() if run.task.program.prediction.whole
    }  # personal models see only their own
    if main not in runs:
        return None
    if data.kind != "classes" or len(data.test_x) < 2 or thumbnails(data, data.test_x[:1]) is None:
        return None
    p = runs[main].predict(data.test_x)
    right = p.probs.argmax(-1).cpu() == data.test_y
    easy = int(torch.where(right, p.entropy.cpu(), torch.inf).argmin())
    hard = int(p.expected_entropy.cpu().argmax())
    x = torch.cat([data.test_x[[easy, hard]], no_class(data)])
    arrays: dict[str, Any] = {
        "names": np.array(NAMES),
        "images": thumbnails(data, x),
        "labels": np.array([int(data.test_y[easy]), int(data.test_y[hard]), -1]),
        "class_names": np.array(data.class_names or [str(c) for c in range(data.classes)], dtype=str),
        "methods": np.array(list(runs), dtype=str),
    }
    for method, run in runs.items():
        predicted = prediction_arrays(run.predict(x))
        usual = run.predict(data.test_x).epistemic.sum(-1).cpu().numpy()
        predicted["rank"] = (usual < predicted["epistemic"].sum(-1)[:, None]).mean(-1)
        arrays |= {f"{method}/{name}": a for name, a in predicted.items()}
    return arrays


def no_class(data: Dataset) -> Tensor:
    """A picture [1, C, H, W] of level stripes in the data's own range: no digit, no letter, no piece of clothing."""
    channels, height, width = data.shape
    low, high = float(data.x.min()), float(data.x.max())
    ink = (torch.arange(height) * STRIPES // height + 1) % 2
    return (low + ink * (high - low))[:, None].expand(1, channels, height, width).to(data.x.dtype)
