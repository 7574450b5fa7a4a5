"""Titles of scores and phrases that the terminal and the report share."""

from __future__ import annotations

# An arrow says which way is better; a score without one has a target instead.
TITLES = {
    "accuracy": "accuracy ↑",
    "exact_match": "exact match ↑",
    "concordance": "concordance ↑",
    "concordance_ipcw": "concordance (Uno) ↑",
    "auroc": "AUROC ↑",
    "aupr": "AUPR ↑",
    "nll": "NLL ↓",
    "brier": "Brier ↓",
    "ece": "ECE ↓",
    "mce": "MCE ↓",
    "rmse": "RMSE ↓",
    "crps": "CRPS ↓",
    "coverage50": "in 50 %",
    "coverage90": "in 90 %",
    "calibration": "calibration error ↓",
}


def best_of(score: str, values: list[float]) -> float | None:
    """The best of a score's values; None where no direction is better."""
    if "↑" in TITLES[score]:
        return max(values)
    return min(values) if "↓" in TITLES[score] else None


def beyond(rank: float) -> str:
    """How unusual an epistemic part is, in words."""
    return f"above {min(rank, 0.99):.0%} of the test set"
