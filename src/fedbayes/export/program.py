"""A trained posterior as files that need no fedbayes: a torch.export program, and tensors with a plain PyTorch file."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_safetensors
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from fedbayes.data.fields import Fields
from fedbayes.errors import InputError, unknown
from fedbayes.export import sets
from fedbayes.export.plain import plain_file
from fedbayes.federation.kept import NOISE_PART
from fedbayes.files import new_folder, write_atomically
from fedbayes.model import peft
from fedbayes.model.adapted import is_adapted, merge
from fedbayes.model.call import arguments_of, fill, tensor_in
from fedbayes.model.model import Model
from fedbayes.model.predictive import draw_weights
from fedbayes.posterior.values import Gaussian
from fedbayes.training.run import Run
from fedbayes.training.tested import AS_RUN, check_whole

PROGRAM, TENSORS, PLAIN, CARD, ONNX = "model.pt2", "model.safetensors", "model.py", "model.json", "model.onnx"
WHAT = ("mean", "ensemble")
PEFT = "peft"
WITH_CLIENT = f"{AS_RUN}, or --client"


class Member(nn.Module):
    """One draw of the weights as a plain module: inputs as they are stored in, mean and variance of the target out."""

    def __init__(self, model: Model, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        frozen = {name for weights in model.frozen.values() for name in weights}
        held = {id(p): p for name, p in model.still.named_parameters() if name in frozen}  # one body for all members
        self.network = copy.deepcopy(model.still, held)
        fill(self.network, weights)
        for name, t in weights.items():
            if name.startswith("likelihood."):
                self.register_buffer(name.replace(".", "_"), t.clone())
        self.taken = [name for name in weights if name.startswith("likelihood.")]
        self.model = (model,)  # in a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model[0]
        args, names = arguments_of(model.inputs(x))
        output = tensor_in(self.network(*args, **names)).to(model.dtype)
        return model.moments(output, {name: getattr(self, name.replace(".", "_")) for name in self.taken})


def summary(
    means: Tensor, variances: Tensor, kind: str, units: tuple[Tensor, Tensor] | None, noise: Tensor | None
) -> dict[str, Tensor]:
    """What the draws [Z, N, C] say together; aleatoric and epistemic variances add up to the total.

    `noise` [2, C]: the observation noise that was estimated, and a factor on the draws' disagreement.
    """
    mean = means.mean(0)
    aleatoric, epistemic = variances.mean(0), (means - mean).square().mean(0)
    if kind == "real":
        if noise is not None:
            aleatoric, epistemic = noise[0].expand_as(mean), noise[1] * epistemic
        if units is not None:
            mean, aleatoric, epistemic = (
                mean * units[1] + units[0],
                aleatoric * units[1] ** 2,
                epistemic * units[1] ** 2,
            )
        return {"mean": mean, "aleatoric": aleatoric, "epistemic": epistemic}
    if kind == "survival":
        ranked, last, ends = means.sort(0).values, means.shape[0] - 1, []
        for place in (0.05 * last, 0.95 * last):  # 90 % of the draws lie between them
            below = int(place)
            ends.append(ranked[below] + (place - below) * (ranked[min(below + 1, last)] - ranked[below]))
        parts = {"aleatoric": aleatoric, "epistemic": epistemic}
        return {"survival": mean, "low": ends[0], "high": ends[1], **parts}

    def entropy(p: Tensor) -> Tensor:
        own = -p * p.clamp(min=1e-38).log()
        other = (1 - p) * (1 - p).clamp(min=1e-38).log() if kind == "labels" else torch.zeros_like(p)
        return (own - other).sum(-1)

    total, expected = entropy(mean), entropy(means).mean(0)
    return {
        "probs": mean,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "entropy": total,
        "mutual_information": (total - expected).clamp(min=0),
    }


class Predictor(nn.Module):
    """Members together: inputs [N, ...] in, a dict of arrays out."""

    def __init__(
        self, members: list[Member], kind: str, units: tuple[Tensor, Tensor] | None, noise: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("noise", noise)
        self.members = nn.ModuleList(members)
        self.kind = kind
        self.has_units = units is not None
        if units is not None:
            self.register_buffer("shift", torch.as_tensor(units[0]))
            self.register_buffer("spread", torch.as_tensor(units[1]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = [member(x) for member in self.members]
        units: Any = (self.shift, self.spread) if self.has_units else None
        noise: Any = self.noise
        means, variances = (torch.stack(values) for values in zip(*outputs))
        return summary(means, variances, self.kind, units, noise)


def export(
    run: Run, folder: str | Path, what: str = "ensemble", *, draws: int | None = None, onnx: bool = False
) -> list[Path]:
    """Write a run's mean, or an ensemble of draws, into a folder; gives the files.

    The draws are those of `run.predict`, so that an ensemble gives the same probabilities. Inputs are given as the data
    came: bytes, whole numbers, or numbers in their own units.
    """
    if onnx:
        _check_onnx()
    predictor = predictor_of(run, what, draws).eval()
    folder = new_folder(folder)
    x = _example(run)
    program = _program(predictor, x)
    torch.export.save(program, folder / PROGRAM)
    paths = [folder / PROGRAM]
    paths += _write_plain(folder, predictor, x)
    write_atomically(folder / CARD, json.dumps(_card(run, what, predictor, x), indent=1, ensure_ascii=False))
    paths.append(folder / CARD)
    if onnx:
        _write_onnx(program, folder / ONNX, list(predictor(x)))
        paths.append(folder / ONNX)
    for name in (TENSORS, PLAIN, ONNX, sets.TABLE, sets.CODE):  # of an export before, of another posterior
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
    """Two rows of zeros: two, so that the number of rows is not taken for a constant.

    None of a client's, for torch.export writes its example into the file.
    """
    data = run.task.clients.data
    return torch.zeros(2, *data.shape, dtype=data.x.dtype)


def _program(module: nn.Module, x: Tensor) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(module, (x,), dynamic_shapes=({0: Dim("rows")},), strict=False)
    except Exception as error:  # what can't be traced fails in many ways
        first = str(error).strip().splitlines()[0]
        raise InputError(f"torch.export can't trace this network ({type(error).__name__}: {first})") from error


def _write_plain(folder: Path, predictor: Predictor, x: Tensor) -> list[Path]:
    """The tensors of all members, stacked, and a Python file that computes with them."""
    members: list[Any] = list(predictor.members)
    one = _program(members[0], x)
    if any(node.op in ("get_attr", "call_module") for node in one.graph.nodes):
        return []  # control flow inside the network: the program has it, plain code would not
    tensors: dict[str, Tensor] = {}
    order: list[str | None] = []  # what `member` takes; None stands for the input
    for spec in one.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            order.append(None)
            continue
        target = str(spec.target)
        name = target.removeprefix("network.")
        each = [_tensor(member, one, target) for member in members]
        same = all(t.data_ptr() == each[0].data_ptr() for t in each)
        tensors[name] = each[0][None].clone() if same else torch.stack(each).contiguous()
        order.append(name)
    if predictor.has_units:
        tensors |= {".shift": predictor.shift.clone(), ".scale": predictor.spread.clone()}  # type: ignore[operator]
    if predictor.noise is not None:
        tensors[".noise"] = predictor.noise.clone()  # type: ignore[operator]
    write_atomically(folder / TENSORS, pack_safetensors(tensors))
    code = one.graph_module.graph.python_code("self").src
    text = plain_file(code, order, inspect.getsource(summary), predictor.kind, TENSORS)
    write_atomically(folder / PLAIN, text)
    return [folder / TENSORS, folder / PLAIN]


def _tensor(member: nn.Module, program: ExportedProgram, target: str) -> Tensor:
    own = {
        **dict(member.named_parameters(remove_duplicate=False)),
        **dict(member.named_buffers(remove_duplicate=False)),
    }
    return (own[target] if target in own else program.constants[target]).detach()


def _card(run: Run, what: str, predictor: Predictor, x: Tensor) -> dict[str, Any]:
    data = run.task.clients.data
    return {
        "what": what,
        "members": len(predictor.members),
        "data": data.name,
        "kind": data.kind,
        "input": {"shape": ["N", *data.shape], "type": _name(x.dtype), **_fields(data.prepare)},
        "outputs": list(predictor(x)),
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
