"""Data sets by name."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fedbayes.data import embedded
from fedbayes.data.dataset import Dataset

LOADERS: dict[str, Callable[..., Dataset]] = {
    "digits": embedded.digits,
    "diabetes": embedded.diabetes,
}


def load(name: str, **options: Any) -> Dataset:
    """A data set by its name in the catalogue."""
    if name not in LOADERS:
        near = get_close_matches(name, LOADERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(LOADERS)}"
        raise ValueError(f"no data set {name!r}: {hint}")
    return LOADERS[name](**options)
