"""What the array files of a run folder must look like, so that tables and reports can count on it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]

# Kinds of numbers, and axes: the same letter is the same length in all arrays of a file, a star stands for any more.
EVALUATION = {
    "kind": ("U", ""),
    "class_names": ("U", "m"),
    "labels": ("iuf", "n*"),
    "probs": ("f", "nc"),
    "mean": ("f", "nc"),
    "survival": ("f", "nc"),
    "low": ("f", "nc"),
    "high": ("f", "nc"),
    "times": ("f", "c"),
    "aleatoric": ("f", "nc"),
    "epistemic": ("f", "nc"),
    "entropy": ("f", "n"),
    "expected_entropy": ("f", "n"),
    "mutual_information": ("f", "n"),
    "score_names": ("U", "s"),
    "scores": ("f", "s"),
    "client_scores": ("f", "ks"),
    "score_errors": ("f", "s"),
    "client_errors": ("f", "ks"),
    "uncertainty_names": ("U", "u"),
    "client_uncertainty": ("f", "ku"),
    "client_sizes": ("iu", "k"),
    "label_counts": ("iu", "kc"),
    "thumbnails": ("u", "t*"),
    "thumbnail_rows": ("iu", "t"),
}
SAMPLES = {
    "names": ("U", "i"),
    "images": ("u", "i*"),
    "labels": ("iu", "i"),
    "class_names": ("U", "c"),
    "methods": ("U", "m"),
}
SAMPLE = {"probs": ("f", "ic"), "aleatoric": ("f", "ic"), "epistemic": ("f", "ic"), "rank": ("f", "i")}
FINITE = (
    *("probs", "mean", "survival", "low", "high", "times", "aleatoric", "epistemic"),
    *("entropy", "expected_entropy", "mutual_information", "rank"),
)


TOGETHER = (
    ("thumbnails", "thumbnail_rows"),
    ("score_names", "scores"),
    ("uncertainty_names", "client_uncertainty"),
)
CENTRE = {"real": "mean", "survival": "survival"}  # by kind: what a prediction's array is called, else probs


def check_evaluation(arrays: Arrays) -> None:
    """Raise a ValueError unless arrays are those of `evaluation.npz`, or a part of them."""
    axes = _check(arrays, EVALUATION)
    kind = str(arrays.get("kind", "classes" if "probs" in arrays else "real"))
    if kind not in ("classes", "labels", "real", "survival"):
        raise ValueError(f"kind is {kind[:20]!r}")
    if axes.get("m") and axes.get("c", axes["m"]) != axes["m"]:
        raise ValueError(f"{axes['m']} class names for {axes['c']} classes")
    _check_pictures(arrays.get("thumbnails"))
    for a, b in (
        ("thumbnails", "thumbnail_rows"),
        ("score_names", "scores"),
        ("uncertainty_names", "client_uncertainty"),
    ):
        if (a in arrays) != (b in arrays):
            raise ValueError(f"{a} and {b} go together")
    if "labels" not in arrays:
        return
    labels, predicted = arrays["labels"], arrays.get(CENTRE.get(kind, "probs"))
    if predicted is None:
        return
    if kind == "classes":
        _check_within("labels", labels, 0, axes["c"])
    if kind == "survival" and "times" not in arrays:
        raise ValueError("survival and times go together")
    expected = {"classes": len(predicted), "survival": 2 * len(predicted)}.get(kind, predicted.size)
    if labels.size != expected:
        raise ValueError(f"labels are {list(labels.shape)} for predictions {list(predicted.shape)}")
    _check_within("thumbnail_rows", arrays.get("thumbnail_rows"), 0, axes["n"])


def check_samples(arrays: Arrays) -> None:
    """Raise a ValueError unless arrays are those of `samples.npz`."""
    wanted = dict(SAMPLES)
    methods = arrays.get("methods", np.zeros(0, str))
    for method in methods.ravel().tolist():
        wanted |= {f"{method}/{name}": rule for name, rule in SAMPLE.items()}
    for name in wanted:
        if name not in arrays:
            raise ValueError(f"it has no {name[:40]}")
    axes = _check(arrays, wanted)
    _check_within("labels", arrays["labels"], -1, axes["c"])
    _check_pictures(arrays["images"])


def check_outside(arrays: Arrays) -> None:
    """Raise a ValueError unless arrays are those of `ood.npz`."""
    for name, array in arrays.items():
        part = name.partition("/")[0]
        if part in ("inside", "outside") and (array.dtype.kind != "f" or array.ndim != 1):
            raise ValueError(f"{name[:40]} is {array.dtype} {list(array.shape)}")
        if part in ("inside", "outside") and (np.isnan(array).any() or not array.size):
            raise ValueError(f"{name[:40]} holds values that are no numbers")
        if part == "thumbs":
            _check_pictures(array)


CALIBRATION = {
    "sites": ("U", "k"),
    "thresholds": ("f", "kc"),
    "everywhere": ("f", "c"),
    "counts": ("f", "cb"),
    "edges": ("f", "e"),
    "mix": ("f", "kc"),
    "spread": ("f", "d"),
    "head": ("U", ""),
    "judged_rows": ("iuf", "k"),
    "judged_hits": ("iuf", "k"),
    "judged_size": ("f", "k"),
}


def check_calibration(arrays: Arrays) -> None:
    """Raise a ValueError unless arrays are those of `calibration.npz`."""
    for name in CALIBRATION:
        if name not in arrays and not name.startswith("judged"):
            raise ValueError(f"it has no {name}")
    axes = _check(arrays, CALIBRATION)
    if axes["b"] != axes["e"] + 1 or np.isnan(arrays["thresholds"]).any() or np.isnan(arrays["everywhere"]).any():
        raise ValueError("its thresholds do not fit its histograms")


CHECKS: dict[str, Callable[[Arrays], None]] = {
    "evaluation.npz": check_evaluation,
    "samples.npz": check_samples,
    "ood.npz": check_outside,
    "calibration.npz": check_calibration,
}


def _check(arrays: Arrays, wanted: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """Hold arrays against their kinds and axes; gives the lengths of the axes."""
    lengths: dict[str, int] = {}
    for name, (kinds, axes) in wanted.items():
        if name not in arrays:
            continue
        array = arrays[name]
        plain = axes.rstrip("*")
        right = array.ndim >= len(plain) if axes.endswith("*") else array.ndim == len(plain)
        fits = right and all(lengths.setdefault(a, n) == n for a, n in zip(plain, array.shape))
        if array.dtype.kind not in kinds or not fits:
            raise ValueError(f"{name[:40]} is {array.dtype} {list(array.shape)}, which does not fit the rest")
        if name.rpartition("/")[2] in FINITE and not np.isfinite(array).all():
            raise ValueError(f"{name[:40]} holds values that are not finite")
    return lengths


def _check_within(name: str, array: np.ndarray | None, low: int, high: int) -> None:
    if array is not None and array.size and not (low <= array.min() and array.max() < high):
        raise ValueError(f"{name} are not all in {low}..{high - 1}")


def _check_pictures(images: np.ndarray | None) -> None:
    """Grey or coloured bytes [N, H, W] or [N, H, W, 3]."""
    if images is None:
        return
    shape = images.shape[:3] if images.ndim == 4 and images.shape[3] == 3 else images.shape
    if images.dtype != np.uint8 or len(shape) != 3 or 0 in shape[1:]:
        raise ValueError(f"pictures are {images.dtype} {list(images.shape)}")
