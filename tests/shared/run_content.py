"""All that a run folder holds, for comparing two of them bit for bit."""

from pathlib import Path

import torch

from fedbayes.runs import checkpoint, journal, sealed
from fedbayes.runs.own import Index, OwnFiles
from fedbayes.runs.records import arrays_in


def content(folder: Path) -> dict:
    row = sealed.read(checkpoint.paths(folder)[-1], checkpoint.ROW)
    index = Index(row.pop("own"))
    own = OwnFiles(folder / "own", torch.device("cpu"), index)
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in journal.read(folder)]
    return {
        "checkpoint": row,
        "own": {client: own.get(client) for client in index.clients},
        "journal": records,
        "evaluation": arrays_in(folder / "evaluation.npz"),
    }


def same(a, b) -> bool:
    """Whether two nestings of dicts, tensors and plain values are equal to the last bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if hasattr(a, "tobytes"):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b
