"""What a user hands over as a site, as arrays: pairs, torch data sets, rows with named columns, words as labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import unknown

Columns = tuple[str | tuple[str, ...], str]  # of inputs, one or several, and of targets
TARGETS = ("label", "labels", "target", "targets", "y")  # the column of targets where rows are mappings


def pair_of(site: Any, where: str, columns: Columns | None = None) -> tuple[Any, Any]:
    """A site's inputs and targets: from a pair (x, y), or from a data set of such pairs, read once.

    Rows that are mappings, such as those of Hugging Face's `datasets`, are read by the names of two columns.
    """
    if isinstance(site, tuple | list) and len(site) == 2:
        return site[0], site[1]
    if hasattr(site, "dataset") and hasattr(site, "batch_size"):
        raise ValueError(f"{where} is a loader of batches: give its data set, loader.dataset; batches are the method's")
    plain = isinstance(site, Tensor | np.ndarray | str | bytes | Mapping | tuple | list)
    if plain or not (hasattr(site, "__len__") and hasattr(site, "__getitem__")):
        raise ValueError(f"{where} is a {type(site).__name__}: give (x, y), or a torch data set with a length")
    return stacked(site, where, columns)


def stacked(items: Any, where: str, columns: Columns | None = None) -> tuple[Any, Any]:
    """The rows of a data set as two arrays; targets may be words."""
    rows = [items[i] for i in range(len(items))]
    if not rows:
        raise ValueError(f"{where} is empty: give it at least one (x, y)")
    if isinstance(rows[0], Mapping):
        names = columns or _columns(list(rows[0]), where)
        several = not isinstance(names[0], str)
        absent = [n for n in (*(names[0] if several else names[:1]), names[1]) if n not in rows[0]]
        if absent:
            raise unknown(f"column of {where}", absent[0], list(rows[0]))
        rows = [({n: row[n] for n in names[0]} if several else row[names[0]], row[names[1]]) for row in rows]
    try:
        x = _joined([row[0] for row in rows])
        targets = [row[1] for row in rows]
        if isinstance(targets[0], str):
            return x, np.array(targets)
        return x, torch.stack([torch.as_tensor(native(np.asarray(y))) for y in targets])
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"{where}: items must be (x, y) of one shape ({error}): give the set a transform") from error


def _joined(rows: list[Any]) -> Any:
    """Inputs of all rows; of rows that are mappings, those of each field."""
    if isinstance(rows[0], Mapping):
        return {name: _joined([row[name] for row in rows]) for name in rows[0]}
    return torch.stack(
        [row if isinstance(row, Tensor) else torch.from_numpy(native(np.array(_planes(row)))) for row in rows]
    )


def _planes(row: Any) -> Any:
    """A picture of Pillow's with its channels first, as networks take it; all else as it is."""
    if not hasattr(row, "getbands"):
        return row
    pixels = np.asarray(row)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def names_of_classes(site: Any, columns: Columns | None = None) -> tuple[str, ...]:
    """What a set of Hugging Face's `datasets` says that its classes are called; nothing where it says nothing."""
    features = getattr(site, "features", None)
    if not isinstance(features, Mapping):
        return ()
    target = columns[1] if columns else next((name for name in features if name in TARGETS), None)
    return tuple(map(str, getattr(features.get(target), "names", None) or ()))


def _columns(names: list[str], where: str) -> Columns:
    """Which column is x and which is y, where that is plain."""
    targets = [name for name in names if name in TARGETS]
    if len(names) == 2 and len(targets) == 1:
        return next(name for name in names if name != targets[0]), targets[0]
    raise ValueError(
        f"{where} has rows with {', '.join(names)}: say which are x and y, columns=('{names[0]}', 'label'); "
        "several are x as (('input_ids', 'attention_mask'), 'label')"
    )


def native(array: np.ndarray) -> np.ndarray:
    """The same numbers as PyTorch knows them: in this machine's byte order, and long doubles as doubles."""
    return array.astype(np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("="), copy=False)


def tensor_of(values: Any, where: str = "x") -> Tensor:
    """Numbers as a tensor of their own type."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, Mapping):
        raise ValueError(
            f"{where} is a mapping ({', '.join(map(str, values))}): a network here takes one tensor; "
            "put the arrays side by side into one, and take it apart in forward"
        )
    try:
        array = native(np.ascontiguousarray(values))
    except ValueError as error:
        raise ValueError(f"{where} has rows of several shapes ({error}): pad them to one") from error
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{where} holds {array.dtype.name} values, not numbers: for tables with texts use from_tables")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def numbered(targets: Sequence[Any], class_names: Sequence[str] = ()) -> tuple[list[Any], tuple[str, ...]]:
    """Targets of all sites with words as class numbers, and the words in their order: as given, or sorted."""
    arrays = [_words(y) for y in targets]
    if not any(array is not None for array in arrays):
        return list(targets), tuple(class_names)
    if not all(array is not None for array in arrays):
        raise ValueError("y holds words at some sites and numbers at others: give all the same")
    words = [array.tolist() for array in arrays if array is not None]
    names = list(class_names) or sorted({word for own in words for word in own})
    number = {name: c for c, name in enumerate(names)}
    strange = next((word for own in words for word in own if word not in number), None)
    if strange is not None:
        raise ValueError(f"y holds {strange!r}, which is none of the class_names ({', '.join(names[:8])})")
    return [np.array([number[word] for word in own], np.int64) for own in words], tuple(names)


def _words(y: Any) -> np.ndarray | None:
    """Targets that are words, one per row; None where they are something else."""
    if isinstance(y, Tensor) or y is None:
        return None
    array = np.asarray(y)
    wordy = array.dtype.kind == "U" or (array.dtype == object and all(isinstance(v, str) for v in array.flat))
    return array.astype(str) if wordy and array.ndim == 1 and array.size else None
