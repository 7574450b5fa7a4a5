"""Checks before anything is trained: a device, an augmentation, the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.data import Dataset
from fedbayes.data.augment import AUGMENTATIONS
from fedbayes.errors import InputError
from fedbayes.methods import Method, Setting
from fedbayes.model.call import arguments_of, tensor_in
from fedbayes.model.inputs import in_precision_of
from fedbayes.model.model import Augment
from fedbayes.posterior.layout import matches


def augmentation(name: str | None, data: Dataset) -> Augment | None:
    """The augmentation of this name, for these data."""
    if name is None:
        return None
    if len(data.shape) != 3:
        raise InputError(f"augment: {name} is for images [C, H, W]; {data.name} has inputs {list(data.shape)}")
    return AUGMENTATIONS[name]


def device_named(name: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device {name!r} is not one that PyTorch knows; use cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return device


def check_stopping(method: Method, rounds: int, arguments: Mapping[str, Any]) -> None:
    """Refuse what may stop a run before the rounds in which its posterior is made."""
    for name in ("patience", "target_loss", "target_accuracy"):
        why = method.needs_last_rounds(rounds)
        if why and arguments.get(name) is not None:
            raise InputError(f"{name}: it may stop the run early, and {why}, or leave it out")


def check_layers(network: nn.Module, frozen: Iterable[str]) -> None:
    """Refuse, by their names, layers that can't be called with other weights than their own, or differentiated."""
    for name, layer in network.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            what = f"its layer {name} is" if name else "it is"
            raise InputError(f"network: {what} a ScriptModule, which keeps its own weights; give the plain module")
        own = {f"{name}.{key}".removeprefix("."): p for key, p in layer.named_parameters(recurse=False)}
        trained = {n: p for n, p in own.items() if p.requires_grad and not matches(n, frozen)}
        if trained and getattr(layer, "sparse", False) is True:
            raise InputError(
                f"network: the gradient of {next(iter(trained))} is sparse; make its layer with sparse=False"
            )
        if parts := [n for n, p in trained.items() if p.is_complex()]:
            raise InputError(
                f"network: the weight {parts[0]} is complex; hold it as real (torch.view_as_real), or freeze it"
            )


def try_network(setting: Setting, data: Dataset) -> None:
    """One batch through the network, so that a wrong shape is a clear message and not a failure in round 1."""
    assert setting.prepare is not None
    # Two rows of their own: a first layer may work in place.
    x = in_precision_of(setting.network, setting.prepare(setting.x.repeat(2, *[1] * (setting.x.dim() - 1))))
    modes = {layer: layer.training for layer in setting.network.modules()}
    try:
        with torch.no_grad():
            args, names = arguments_of(x)
            output = tensor_in(setting.network.eval()(*args, **names))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"the network can't take inputs of {_shapes(x)}: {first}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    needed = data.classes * setting.likelihood.width
    if not isinstance(output, Tensor):
        raise InputError(
            f"the network gives a {type(output).__name__}; {data.name} ({data.kind}) needs one tensor of [{needed}] "
            "for each input: named logits, or the first of a tuple; or put it into a module that gives it alone"
        )
    if tuple(output.shape) != (2, needed):
        raise InputError(
            f"the network gives {list(output.shape)[1:]} for each input; {data.name} ({data.kind}) needs [{needed}]"
            f"{_advice(tuple(output.shape[1:]), data)}"
        )


def _shapes(x: Any) -> str:
    """What a row is, in words."""
    if isinstance(x, Tensor):
        return f"shape {list(x.shape[1:])} ({x.dtype})"
    rows = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ", ".join(f"{name} {list(t.shape[1:])} ({t.dtype})" for name, t in rows)


def _advice(got: tuple[int, ...], data: Dataset) -> str:
    """What is likely meant where outputs have the wrong shape."""
    if data.kind != "classes":
        return ""
    lowest = int(data.y.min())
    if lowest > 0:
        return f": its labels run from {lowest} to {int(data.y.max())}; number the classes from 0"
    if got in ((), (1,)) and data.classes == 2:
        return ": one for each class; a single logit is for yes or no, which data of kind='labels' are"
    return ": one row of numbers for an input, not one for each of its places" if len(got) > 1 else ""
