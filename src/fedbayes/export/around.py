"""The export of a network that torch.export can't trace: a plain file that computes around the network it is given."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedbayes.data.fields import Fields
from fedbayes.errors import InputError
from fedbayes.export.plain import around_file
from fedbayes.export.trace import Function, function_of, program_of, stacked, tensor_of
from fedbayes.model.adapted import is_adapted, merge
from fedbayes.model.call import arguments_of
from fedbayes.model.model import Model
from fedbayes.model.parts import travels


class Inputs(nn.Module):
    """What a network sees of stored inputs, in the order of its arguments."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        args, names = arguments_of(self.model[0].inputs(x))
        return (*args, *names.values())


class Moments(nn.Module):
    """Mean and variance of the target, of a network's output."""

    def __init__(self, model: Model, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.names = (model,), dict[str, str]()
        for name, t in weights.items():
            self.names[name] = name.replace(".", "_")
            self.register_buffer(self.names[name], t)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model[0]
        return model.moments(x.to(model.dtype), {name: getattr(self, place) for name, place in self.names.items()})


def around(
    model: Model, networks: Sequence[nn.Module], own: Sequence[dict[str, Tensor]], x: Tensor, y: Tensor
) -> tuple[dict[str, Tensor], Any]:
    """The tensors of all members, and what gives the file's text: for inputs like x and outputs like y.

    `networks` have each member's weights, `own` those of its likelihood.
    """
    tensors: dict[str, Tensor] = {}
    plain = [merge(copy.deepcopy(network)) if is_adapted(network) else network for network in networks]
    each = [_tensors_of(network) for network in plain]
    for name in each[0]:
        tensors[name] = stacked([held[name] for held in each])
    before, inputs = _traced([Inputs(model)], x, "inputs", tensors)
    after, moments = _traced([Moments(model, weights) for weights in own], y, "moments", tensors)
    prepare: Any = model.prepare
    names = {"names": list(each[0]), "before": before, "after": after}
    named: dict[str, Any] = {**names, "fields": list(prepare.names) if isinstance(prepare, Fields) else []}

    def text(summary: str, kind: str, file: str) -> str:
        return around_file(inputs, moments, named, summary, kind, file)

    return tensors, text


def _tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name; masks and the like are the network's own constants."""
    weights = {name: p.detach() for name, p in network.named_parameters()}
    return weights | {name: b for name, b in network.named_buffers() if travels(b)}


def _traced(
    modules: Sequence[nn.Module], x: Tensor, name: str, tensors: dict[str, Tensor]
) -> tuple[list[str], Function]:
    """A function of each member's module, with its tensors added to `tensors`, and their names there."""
    program = program_of(modules[0], x, f"the {name} of this network")
    function = function_of(program, name)
    if function is None:
        raise InputError(f"the {name} of this network have control flow, which a plain file can't have")
    names = []
    for target in function.tensors.values():
        names.append(f".{name}.{target}")  # no weight's name begins with a dot
        tensors[names[-1]] = stacked([tensor_of(module, program, target) for module in modules])
    return names, function
