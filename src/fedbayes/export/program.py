"""A trained posterior as files that need no fedbayes: a torch.export program, and tensors with a plain PyTorch file."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_safetensors
from torch import Tensor
from torch.export import ExportedProgram

from fedbayes.data.fields import Fields
from fedbayes.errors import InputError, unknown
from fedbayes.export import sets
from fedbayes.export.around import around
from fedbayes.export.plain import plain_file
from fedbayes.export.predictor import Member, Predictor, summary
from fedbayes.export.trace import Untraceable, function_of, program_of, stacked, tensor_of
from fedbayes.federation.kept import NOISE_PART
from fedbayes.files import new_folder, write_atomically
from fedbayes.model import peft
from fedbayes.model.adapted import is_adapted, merge
from fedbayes.model.call import fill
from fedbayes.model.model import Model
from fedbayes.model.predictive import draw_weights
from fedbayes.posterior.values import Gaussian
from fedbayes.training.run import Run
from fedbayes.training.tested import AS_RUN, check_whole

PROGRAM, TENSORS, PLAIN, CARD, ONNX = "model.pt2", "model.safetensors", "model.py", "model.json", "model.onnx"
WHAT = ("mean", "ensemble")
PEFT = "peft"
WITH_CLIENT = f"{AS_RUN}, or --client"


def export(
    run: Run, folder: str | Path, what: str = "ensemble", *, draws: int | None = None, onnx: bool = False
) -> list[Path]:
    """Write a run's mean, or an ensemble of draws, into a folder; gives the files.

    The draws are those of `run.predict`, so that an ensemble gives the same probabilities. Inputs are given as the data
    came: bytes, whole numbers, or numbers in their own units. Where torch.export can't trace the network, there is no
    program, and the plain file is given the network.
    """
    if onnx:
        _check_onnx()
    predictor = predictor_of(run, what, draws).eval()
    folder = new_folder(folder)
    x, paths, program = _example(run), [], None
    try:
        program = program_of(predictor, x)
        torch.export.save(program, folder / PROGRAM)
        paths = [folder / PROGRAM, *_write_plain(folder, predictor, x)]
    except Untraceable as error:
        if onnx:
            raise
        paths = _write_around(folder, predictor, run, x)
        warnings.warn(
            f"{folder} has no {PROGRAM}: {error}; {PLAIN} and {TENSORS} are written, to be used with the network that "
            "was trained: load(network)",
            UserWarning,
            stacklevel=2,
        )
    write_atomically(folder / CARD, json.dumps(_card(run, what, predictor, x), indent=1, ensure_ascii=False))
    paths.append(folder / CARD)
    if onnx and program is not None:
        _write_onnx(program, folder / ONNX, predictor.outputs)
        paths.append(folder / ONNX)
    for name in (PROGRAM, TENSORS, PLAIN, ONNX, sets.TABLE, sets.CODE):  # of an export before, of another posterior
        if folder / name not in paths:
            (folder / name).unlink(missing_ok=True)
    return paths


def export_adapters(run: Run, folder: str | Path) -> list[Path]:
    """Write the adapters at the posterior's mean in PEFT's format, and its scales beside them; gives the files."""
    check_whole(run, WITH_CLIENT)
    model = run.task.program.model
    if not is_adapted(model.module):
        raise InputError("this run trained no adapters; give it adapters = {rank = 8}, or export the whole network")
    network = copy.deepcopy(model.module).cpu()
    parts = {part: run.parts[part] for part in model.layouts}
    means = model.weights({part: q.mean.cpu() for part, q in parts.items()})
    fill(network, means)
    for name, weight in network.named_parameters():
        weight.requires_grad_(any(name in layout.names for layout in model.trainable.values()))
    gaussians = {part: q for part, q in parts.items() if isinstance(q, Gaussian)}
    scales = {n: t for part, q in gaussians.items() for n, t in model.layouts[part].split(q.scale.cpu()).items()}
    return peft.write(folder, network, scales)


def predictor_of(run: Run, what: str, draws: int | None = None) -> Predictor:
    """The mean of a posterior, or an ensemble of its draws, as one module on the CPU."""
    if what not in WHAT:
        raise unknown("part to export", what, WHAT)
    check_whole(run, WITH_CLIENT)
    program, data = run.task.program, run.task.clients.data
    still = copy.deepcopy(program.model.still).cpu()
    model = replace(program.model, prepare=data.prepare, still=still)  # on the CPU
    parts = {part: run.parts[part] for part in model.layouts}
    if what == "ensemble" and program.prediction.dropout:
        raise InputError("an ensemble of this run is dropout's, which has no weights of its own; export the mean")
    if what == "ensemble" and program.prediction.closed:
        raise InputError('predict = "closed" takes no draws; export the mean, or train with predict = "monte_carlo"')
    if what == "mean":
        vectors = {part: q.mean[None] for part, q in parts.items()}
    else:
        count = program.prediction.draws if draws is None else draws
        if count < 1:
            raise InputError(f"draws must be at least 1, not {count}")
        vectors = draw_weights(parts, count, run.task.seed, "predict")
        if all(torch.equal(v, v[:1].expand_as(v)) for v in vectors.values()):
            vectors = {part: v[:1] for part, v in vectors.items()}  # draws of a point are all the same
    number = next(iter(vectors.values())).shape[0]
    each = [{part: v[z].cpu() for part, v in vectors.items()} for z in range(number)]
    members = [Member(model, model.weights(own)) for own in each]
    if number == 1:
        merge(members[0].network)
    units = None if model.units is None else tuple(torch.as_tensor(u).cpu() for u in model.units)
    noise = run.parts[NOISE_PART].mean.reshape(2, -1).cpu() if NOISE_PART in run.parts else None
    return Predictor(members, model.likelihood.kind, units, noise)  # type: ignore[arg-type]


def _example(run: Run) -> Tensor:
    """Two rows of zeros: two, so that the number of rows is not taken for a constant. Programs keep their example."""
    data = run.task.clients.data
    return torch.zeros(2, *data.shape, dtype=data.x.dtype)


def _write_plain(folder: Path, predictor: Predictor, x: Tensor) -> list[Path]:
    """The tensors of all members, stacked, and a Python file that computes with them."""
    members: list[Any] = list(predictor.members)
    one = program_of(members[0], x)
    function = function_of(one, "member")
    if function is None:
        return []  # control flow inside the network: the program has it, plain code would not
    names = {target: target.removeprefix("network.") for target in function.tensors.values()}
    tensors = {name: stacked([tensor_of(member, one, target) for member in members]) for target, name in names.items()}
    text = plain_file(
        function,
        [names[target] for target in function.tensors.values()],
        inspect.getsource(summary),
        predictor.kind,
        TENSORS,
    )
    return _write(folder, predictor, tensors, text)


def _write_around(folder: Path, predictor: Predictor, run: Run, x: Tensor) -> list[Path]:
    """The tensors of all members, stacked, and a Python file that computes around the network that it is given."""
    members: list[Any] = list(predictor.members)
    model: Model = members[0].model[0]
    own = [{name: getattr(m, name.replace(".", "_")) for name in m.taken} for m in members]
    y = torch.zeros(2, run.task.clients.data.classes * model.likelihood.width, dtype=model.dtype)
    tensors, text = around(model, [m.network for m in members], own, x, y)
    return _write(folder, predictor, tensors, text(inspect.getsource(summary), predictor.kind, TENSORS))


def _write(folder: Path, predictor: Predictor, tensors: dict[str, Tensor], text: str) -> list[Path]:
    if predictor.has_units:
        tensors |= {".shift": predictor.shift.clone(), ".scale": predictor.spread.clone()}  # type: ignore[operator]
    if predictor.noise is not None:
        tensors[".noise"] = predictor.noise.clone()  # type: ignore[operator]
    write_atomically(folder / TENSORS, pack_safetensors(tensors))
    write_atomically(folder / PLAIN, text)
    return [folder / TENSORS, folder / PLAIN]


def _card(run: Run, what: str, predictor: Predictor, x: Tensor) -> dict[str, Any]:
    data = run.task.clients.data
    return {
        "what": what,
        "members": len(predictor.members),
        "data": data.name,
        "kind": data.kind,
        "input": {"shape": ["N", *data.shape], "type": _name(x.dtype), **_fields(data.prepare)},
        "outputs": predictor.outputs,
        "columns": list(data.columns),
        **({} if data.coding is None else {"coding": data.coding.as_table()}),
        "class_names": list(data.class_names),
        **({"times": list(run.task.program.model.likelihood.times)} if data.kind == "survival" else {}),
        "rounds": run.progress.state.round,
    }


def _fields(prepare: Any) -> dict[str, Any]:
    """Of rows of several tensors what lies side by side in a row, each flattened, in this order."""
    if not isinstance(prepare, Fields):
        return {}
    names = prepare.names or tuple(map(str, range(len(prepare.shapes))))
    rows = zip(names, prepare.shapes, prepare.dtypes)
    return {"fields": [{"name": name, "shape": list(shape), "type": _name(kind)} for name, shape, kind in rows]}


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _write_onnx(program: ExportedProgram, path: Path, outputs: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own old calls
        torch.onnx.export(program, (), path, dynamo=True, verbose=False, output_names=outputs)


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--onnx needs the package {error.name}, which is not installed; "
            "install it with: pip install 'fedbayes[onnx]'"
        ) from error
