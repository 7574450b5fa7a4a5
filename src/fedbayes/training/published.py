"""A trained model as a folder to hand on: its posterior as safetensors, what it takes and gives as JSON, and a card.

Nothing in it is code and nothing is unpickled. Rows stay where they were: of the data it holds shapes, names of
classes, and for tables how columns are coded, without which nobody could predict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_safetensors
from torch import Tensor, nn

from fedbayes.data import Clients, Dataset, Prepare
from fedbayes.data.coding import coding_of
from fedbayes.data.fields import Fields
from fedbayes.data.preparation import AS_STORED, Preparation, Scale, Standardise
from fedbayes.data.ragged import Ragged
from fedbayes.data.site_tables import without_rows
from fedbayes.errors import InputError
from fedbayes.federation.round import predicting
from fedbayes.files import reading, size_of, text_of, write_atomically
from fedbayes.model.likelihood import LIKELIHOODS, Likelihood
from fedbayes.posterior import values
from fedbayes.posterior.values import Parts, check
from fedbayes.training.card import card
from fedbayes.training.rebuilt import RUNS, Told, rebuilt
from fedbayes.training.task import Progress, Task
from fedbayes.training.tested import Finished, predict_with
from fedbayes.version import __version__

POSTERIOR, FROZEN, ABOUT, CARD = "posterior.safetensors", "frozen.safetensors", "fedbayes.json", "README.md"
FORMAT = 1
LONGEST = 16 << 20  # bytes of the JSON file: codings list categories
WIDEST = 1 << 28  # numbers of one row
DTYPES = {name: getattr(torch, name) for name in ("uint8", "int32", "int64", "float16", "float32", "float64", "bool")}
MEND = "is it a model that fedbayes has written?"


def write(run: Finished, folder: Path, title: str, network: str | None = None) -> list[Path]:
    """Write a run's model and card; gives the files. `network` is a name of the library's own, for who loads it."""
    paths = write_model(run, folder, network)
    write_atomically(folder / CARD, card(run, title, network))
    return [*paths, folder / CARD]


def write_model(run: Finished, folder: Path, network: str | None = None) -> list[Path]:
    """Write what a run predicts with, held to predict as the run does; gives the files."""
    task = run.task
    if not task.program.prediction.whole:
        raise InputError("this method has no global model; hand on one client's: run.personal(client).as_run")
    parts = {part: values.map_tensors(q, lambda t: t.detach().cpu()) for part, q in run.parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    values.save(folder / POSTERIOR, parts)
    frozen = {
        name: t.cpu().contiguous().clone() for held in task.program.model.frozen.values() for name, t in held.items()
    }
    if frozen:
        write_atomically(folder / FROZEN, pack_safetensors(frozen))
    write_atomically(folder / ABOUT, json.dumps(_about(run, network), indent=1, ensure_ascii=False) + "\n")
    _try(run, folder, network)
    return [folder / name for name in (POSTERIOR, *([FROZEN] if frozen else []), ABOUT)]


def _try(run: Finished, folder: Path, network: str | None) -> None:
    """Hold what was written to predict as the run does, so that nobody loads a model that says something else."""
    x = run.task.clients.data.x[:8].cpu()
    again, progress = read(folder, network or run.module())
    told = (run.task, run.parts), (again, predicting(again.program, progress.state))
    ours, theirs = (predict_with(task, parts, x.to(task.device)).cpu() for task, parts in told)
    if not (_alike(ours.mean, theirs.mean) and _alike(ours.aleatoric, theirs.aleatoric)):
        raise InputError(
            "what was written does not predict as the run does: a likelihood or preparation of your own can't be "
            "handed on as data; use `fedbayes export`"
        )


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    least = 1e-5 * float(ours.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=least)


def _about(run: Finished, network: str | None) -> dict[str, Any]:
    data, program = run.task.clients.data, run.task.program
    scale = data.target_scale
    return {
        "format": FORMAT,
        "fedbayes": __version__,
        "method": run.task.method,
        "round": run.progress.state.round,
        "seed": run.task.seed,
        "network": network,
        "parts": {part: list(layout.names) for part, layout in program.model.trainable.items()},
        "likelihood": program.model.likelihood.named,
        "runs": {name: getattr(program.model, name) for name in RUNS},
        "prediction": {name: getattr(program.prediction, name) for name in PREDICTION},
        "data": {
            "name": data.name,
            "kind": data.kind,
            "classes": data.classes,
            "class_names": list(data.class_names),
            "shape": list(data.shape),
            "dtype": _name(data.x.dtype),
            "columns": list(data.columns),
            "times": list(data.times),
            "target_scale": None if scale is None else [scale.mean.tolist(), scale.std.tolist()],
            "prepare": _preparation(data.prepare) if data.coding is None else None,
            "coding": None if data.coding is None else data.coding.as_table(),
        },
    }


PREDICTION = {"part": str, "draws": int, "dropout": bool, "closed": bool, "noise": str}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _preparation(prepare: Preparation) -> dict[str, Any]:
    match prepare:
        case Prepare():
            return {"kind": "channels", "mean": list(prepare.mean), "std": list(prepare.std)}
        case Standardise():
            return {"kind": "columns", "mean": prepare.mean.tolist(), "std": prepare.std.tolist()}
        case Fields():
            shapes, dtypes = [list(shape) for shape in prepare.shapes], [_name(dtype) for dtype in prepare.dtypes]
            return {"kind": "fields", "names": list(prepare.names), "shapes": shapes, "dtypes": dtypes}
        case _:
            raise InputError(
                f"a {type(prepare).__name__} of your own can't be handed on as data; use `fedbayes export`"
            )


def read(
    folder: Path,
    network: nn.Module | str | None = None,
    device: str = "cpu",
    *,
    name: str | None = None,
    clients: Clients | None = None,
) -> tuple[Task, Progress]:
    """The model of a folder, to predict with, and to score on the rows of `clients`; it has none of its own.

    `name` is what errors call it, where it has another name than its folder.
    """
    path = folder / ABOUT
    with reading(path, MEND):
        about = json.loads(text_of(path, LONGEST))
        if about["format"] != FORMAT:
            raise InputError(f"{path} has format {about['format']!r}, this version reads {FORMAT}; update fedbayes")
        typical = _clients(about["data"])
        told = _told(about, folder)
        network = network if network is not None else about["network"]
    if network is None:
        raise InputError(
            f"{name or folder.name}: give the network that was trained, fb.load(..., network=module): no code is kept"
        )
    if isinstance(network, str) and ":" in network:
        raise InputError(f"{path} names a network of somebody's own code; give it as network=module")
    clients = typical if clients is None else _fitting(clients, typical)
    return rebuilt(told, network, clients, _parts(folder / POSTERIOR), device)


def _told(about: Mapping[str, Any], folder: Path) -> Told:
    runs = about.get("runs", RUNS)
    return Told(
        method=str(about["method"]),
        round=int(about["round"]),
        seed=int(about["seed"]),
        cuts={str(part): [str(n) for n in names] for part, names in about["parts"].items()},
        prediction={name: kind(about["prediction"][name]) for name, kind in PREDICTION.items()},
        likelihood=_likelihood(about.get("likelihood"), about["data"]["kind"]),
        runs={name: bool(runs[name]) for name in RUNS},
        frozen=folder / FROZEN if (folder / FROZEN).is_file() else None,
        mend=MEND,
    )


def _likelihood(named: Any, kind: str) -> Likelihood | None:
    """The library's own by name and options; None: as the targets ask for, which earlier versions took for all."""
    if named is None:
        return None
    name, options = named
    made = LIKELIHOODS[name](**options)
    if made.kind != kind:
        raise ValueError(f"a likelihood of {made.kind} beside targets of {kind}")
    return made


def _fitting(clients: Clients, typical: Clients) -> Clients:
    """Clients whose stored rows are the model's, which its network sees as those that it was trained on."""
    theirs, ours = typical.data, clients.data
    for what in ("shape", "kind", "classes", "columns"):
        if getattr(ours, what) != getattr(theirs, what):
            words = f"{getattr(ours, what)!r}, the model was trained with {getattr(theirs, what)!r}"
            raise InputError(f"clients: {what} of their rows is {words}; give clients of such rows")
    if ours.coding != theirs.coding:
        raise InputError("clients: their tables are coded otherwise than the model's; give the tables of then")
    if not _same_units(ours.target_scale, theirs.target_scale):
        raise InputError("clients: their targets are scaled otherwise than the model's; give the clients of then")
    return replace(clients, data=replace(ours, prepare=theirs.prepare))


def _same_units(ours: Scale | None, theirs: Scale | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return all(torch.allclose(a.float(), b.float(), rtol=1e-5) for a, b in zip(ours, theirs))


def _parts(path: Path) -> Parts:
    with reading(path, MEND):
        size_of(path)
        parts = values.load(path)
        for part, q in parts.items():
            check(q, f"{path.name}: part {part!r}")
        return parts


def _clients(about: Mapping[str, Any]) -> Clients:
    """Clients in name only: one row of zeros stands for the data."""
    if about["coding"] is not None:
        return without_rows(coding_of(about["coding"]))
    shape, classes, kind = tuple(int(n) for n in about["shape"]), int(about["classes"]), str(about["kind"])
    x = _zeros(shape, DTYPES[about["dtype"]])
    y = {"classes": torch.zeros(1, dtype=torch.int64), "survival": torch.ones(1, 2)}.get(kind, _zeros((classes,)))
    scale = about["target_scale"]
    data = Dataset(
        str(about["name"]),
        x,
        y,
        x[:0],
        y[:0],
        kind,
        classes,
        prepare=_prepared(about["prepare"]),
        class_names=tuple(map(str, about["class_names"])),
        target_scale=None if scale is None else Scale(*(torch.tensor(v, dtype=torch.float32) for v in scale)),
        columns=tuple(map(str, about["columns"])),
        times=tuple(map(float, about["times"])),
    )
    row = torch.zeros(1, dtype=torch.int64)
    return Clients(data, Ragged.of_lists([row]), Ragged.of_lists([row[:0]]), row[:0])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    if min(shape, default=1) < 1 or torch.Size(shape).numel() > WIDEST:
        raise ValueError(f"a row of shape {list(shape)}")
    return torch.zeros(1, *shape, dtype=dtype)


def _prepared(about: Mapping[str, Any] | None) -> Preparation:
    match (about or {}).get("kind"):
        case None:
            return AS_STORED
        case "channels":
            return Prepare(tuple(map(float, about["mean"])), tuple(map(float, about["std"])))  # type: ignore[index]
        case "columns":
            return Standardise(about["mean"], about["std"])  # type: ignore[index]
        case "fields":
            shapes = tuple(tuple(map(int, shape)) for shape in about["shapes"])  # type: ignore[index]
            return Fields(tuple(map(str, about["names"])), shapes, tuple(DTYPES[d] for d in about["dtypes"]))  # type: ignore[index]
        case other:
            raise ValueError(f"a preparation of kind {other!r}")
