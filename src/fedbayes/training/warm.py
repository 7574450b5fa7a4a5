"""What training begins with where it does not begin at random: a run, a state dict, a safetensors file, posteriors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedbayes.clients.partitioned import FIRST
from fedbayes.errors import InputError, one_line
from fedbayes.federation.program import Program
from fedbayes.files import FAULTS, size_of
from fedbayes.model.adapted import is_adapted
from fedbayes.model.adapted_layers import B
from fedbayes.model.model import Model
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import FullGaussian, Gaussian, Parts, Point, Posterior
from fedbayes.training.modules import module_of
from fedbayes.training.task import initial_of


def begun_with(program: Program, init: Any, device: torch.device) -> Program:
    """The program that begins with it. Where the first broadcast is a prior, that stays: training starts elsewhere."""
    first = program.constants.get(FIRST)
    if first is None:
        return program._replace(initial=initial_of(program, starting_parts(program, init), device))
    part = program.prediction.part
    at = program._replace(initial={**program.initial, part: first})
    parts = initial_of(at, starting_parts(at, init), device)
    return program._replace(
        initial={**parts, part: program.initial[part]}, constants={**program.constants, FIRST: parts[part]}
    )


def starting_parts(program: Program, init: Any) -> Mapping[str, Posterior]:
    """Posteriors by part. Of a state dict, or a run of points, a Gaussian takes the means and keeps its own scales."""
    init = _given(init)
    if _is_run(init):
        return _of_run(program, init)
    return _of_tensors(program, init) if all(isinstance(value, Tensor) for value in init.values()) else init


def weights_at_home(program: Program, init: Any) -> dict[str, Tensor]:
    """The start by name, for a method whose clients keep weights: no broadcast brings them those. Empty: not needed."""
    if program.prediction.whole:
        return {}
    tensors = _given(init)
    if _is_run(tensors):
        theirs = tensors.broadcast
        if all(part in theirs and theirs[part].layout == q.layout for part, q in program.initial.items()):
            return {}  # of a run that shared the same
        tensors = _weights_of(tensors, program.model)
    if not all(isinstance(value, Tensor) for value in tensors.values()):
        return {}
    model = program.model
    whole: Parts = {part: Point(vector, model.layouts[part]) for part, vector in model.initial().items()}
    parts = _of_tensors(program._replace(initial=whole), tensors)
    return model.weights({part: q.mean for part, q in parts.items()})


def _given(init: Any) -> Any:
    """A run, or tensors or posteriors by name; checked."""
    if isinstance(init, str | Path):
        init = weights_in(Path(init))
    if _is_run(init):
        return init
    if not isinstance(init, Mapping):
        raise InputError(f"init is a {type(init).__name__}; give a run, a state dict, a .safetensors file, posteriors")
    if not init:
        raise InputError("init holds nothing; give a run, a state dict, posteriors by part, or leave it out")
    tensors = [isinstance(value, Tensor) for value in init.values()]
    if any(tensors) and not all(tensors):
        raise InputError("init holds tensors and other things; give a state dict, or posteriors by part")
    return init


def _is_run(init: Any) -> bool:
    return hasattr(init, "progress") and hasattr(init, "task")


def weights_in(path: Path, what: str = "init") -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name."""
    try:
        size_of(path)
        return load_file(path)
    except InputError:
        raise
    except (SafetensorError, *FAULTS) as error:
        raise InputError(f"{what}: {path} is no safetensors file that can be read ({one_line(error)})") from error


def _of_run(program: Program, run: Any) -> dict[str, Posterior]:
    """Parts of another run of the same network, which may be of another kind, or cut otherwise."""
    theirs = run.broadcast
    if any(q.layout != theirs[part].layout for part, q in program.initial.items() if part in theirs):
        return _of_tensors(program, _weights_of(run, program.model))
    _refuse_another_body(run, program.model)
    shared = {part: theirs[part] for part in program.initial if part in theirs}
    if not shared:
        raise InputError(f"init: that run has parts {', '.join(theirs)}, this method {', '.join(program.initial)}")
    return {part: _as_kind_of(program.initial[part], q) for part, q in shared.items()}


def _weights_of(run: Any, model: Model) -> dict[str, Tensor]:
    """A run's weights by name: where more is trained here, its whole network, adapters merged."""
    named = _named(run.broadcast)
    trained = {n for layout in model.trainable.values() for n in layout.names if not n.startswith("likelihood.")}
    if trained <= named.keys() or not run.task.program.prediction.whole:
        _refuse_another_body(run, model)
        return named
    if is_adapted(model.module):
        raise InputError(f"init: this network has adapters that are not those of that run; {LEARNED}")
    network = module_of(run.task, run.broadcast)
    whole = {n: t.detach() for n, t in [*network.named_parameters(), *network.named_buffers()]}
    return {n: t for n, t in named.items() if n.startswith("likelihood.")} | whole


LEARNED = "give what it learned as the network, fit(run.module(), ...), and leave init out"


def _refuse_another_body(run: Any, model: Model) -> None:
    """Refuse weights learned over other frozen ones than stand here: with those they would mean something else."""
    theirs = {n: t for weights in run.task.program.model.frozen.values() for n, t in weights.items()}
    for weights in model.frozen.values():
        for name, ours in weights.items():
            other = theirs.get(name)
            if other is None:
                continue
            if other.shape != ours.shape or not torch.allclose(ours.cpu(), other.to(ours).cpu(), rtol=1e-5):
                raise InputError(f"init: {name} is frozen, and was another in that run; {LEARNED}")


def _named(parts: Parts) -> dict[str, Tensor]:
    return {n: t for q in parts.values() if q.layout is not None for n, t in q.layout.split(q.mean).items()}


def _as_kind_of(ours: Posterior, theirs: Posterior) -> Posterior:
    same = ours.mean.shape == theirs.mean.shape
    if type(ours) is type(theirs) or not same or not isinstance(ours, Point | Gaussian | FullGaussian):
        return theirs  # checked where it is taken up
    return replace(ours, mean=theirs.mean.to(ours.mean))


def _of_tensors(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Posterior]:
    """Means from named tensors; what they lack or have too much is an error, but the likelihood's own parameters."""
    parts: dict[str, Posterior] = {}
    known: set[str] = {name for weights in program.model.frozen.values() for name in weights}
    tensors = _named_once(program, tensors)
    for part, layout in program.model.layouts.items():
        ours = program.initial[part]
        known |= set(layout.names)
        own = layout.split(ours.mean)
        lacking = [n for n in layout.names if n not in tensors and not n.startswith("likelihood.")]
        if lacking and not is_static(part):
            mend = (
                "load it into the network before, by load_state_dict" if lacking[0].endswith(B) else "is it another's?"
            )
            raise InputError(f"init: the state dict lacks {len(lacking)} weights, first {lacking[0]!r}; {mend}")
        named = {n: tensors.get(n, own[n]) for n in layout.names}
        for name, shape in zip(layout.names, layout.shapes):
            if tuple(named[name].shape) != shape:
                raise InputError(f"init: {name} has shape {list(named[name].shape)}, the network's is {list(shape)}")
            if not named[name].isfinite().all():
                raise InputError(f"init: {name} holds values that are not finite; give weights that did not diverge")
        parts[part] = _as_kind_of(ours, Point(layout.join({n: t.to(own[n]) for n, t in named.items()}), layout))
    if strange := [name for name in tensors if name not in known]:
        raise InputError(f"init: the network has no weight {strange[0]!r}; it has {', '.join(sorted(known)[:5])}, ...")
    frozen = [n for weights in program.model.frozen.values() for n in weights if n in tensors]
    for weights in program.model.frozen.values():
        for name in frozen:
            if name in weights and not torch.equal(weights[name].cpu(), tensors[name].to(weights[name]).cpu()):
                raise InputError(f"init: {name} is frozen; load it into the network before, by load_state_dict")
    return parts


def _named_once(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that have a part: of a tied weight under its first name, and without constants, such as masks."""
    module, first, kept = program.model.module, dict[int, str](), dict(tensors)
    travel = {name for part in program.model.static for name in program.model.layouts[part].names}
    for name, own in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        one = first.setdefault(id(own), name)
        if name not in tensors or (one == name and (isinstance(own, nn.Parameter) or name in travel)):
            continue
        value = kept.pop(name)
        same = kept.setdefault(one, value) if one != name else own.cpu()
        if not torch.equal(same, value.to(same)):
            what = f"{name} and {one} are one weight" if one != name else f"{name} is a constant of another value"
            raise InputError(f"init: {what} in the network; give weights of the same network")
    return kept
