"""A network with low-rank adapters (Hu et al., 2022) of which one factor is learned (FFA-LoRA; Sun et al., 2024).

The body is frozen and A is drawn once, so that outputs are linear in each layer's B: averaging, pooling and multiplying
posteriors over B are what they would be over B A. Averages of B and of A are not, for a mean of products is no product
of means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedbayes.errors import InputError
from fedbayes.model import peft
from fedbayes.model.adapted_layers import (
    EMBEDDING,
    GIVEN,
    A,
    AdaptedAttention,
    B,
    Kind,
    _add,
    give,
    kind_of,
    trained_dtype,
)
from fedbayes.model.adapters import Adapters
from fedbayes.model.classifier import last_layer
from fedbayes.model.model import DRAWN
from fedbayes.model.still_norm import hold_still, let_move
from fedbayes.noise import normals
from fedbayes.posterior.layout import matches

NESTED = "made_nested"  # of an encoder: whether it made nested tensors before it was adapted


def adapt(network: nn.Module, adapters: Adapters) -> nn.Module:
    """Give the network's layers adapters, in place: all that is trained are B and what `full` names."""
    file = None if adapters.path is None else peft.read(adapters.path)
    if file is not None:
        _load_whole(network, file.whole)
    full = (last_layer(network),) if adapters.full is None else adapters.full
    if adapters.full is None and file is not None:
        full = tuple(n for n, _ in network.named_parameters() if n in file.whole)
    weights = dict(network.named_parameters())
    _refuse_strays("full", full, weights)
    trained = {n for n, p in weights.items() if matches(n, full) and p.requires_grad}
    if file is not None:
        layers = _layers_of(network, file)
    else:
        layers = _layers(network, adapters, trained) if adapters.rank else {}
    if not layers and not trained:
        raise InputError("adapters: nothing is left to train; raise rank, or name weights in full")
    factors = {
        name: (_drawn(name, layer, kind, adapters), None) if file is None else (file.a[name], file.b[name])
        for name, (layer, kind) in layers.items()
    }
    return _given(network, layers, factors, trained, full, train_a=adapters.both)


def adapt_again(network: nn.Module, file: peft.Factors, trained: set[str], *, train_a: bool) -> nn.Module:
    """Give a network, in place, the adapters that another had, whose weights `trained` were trained beside them."""
    layers = _layers_of(network, file)
    factors = {name: (file.a[name], file.b[name]) for name in layers}
    return _given(network, layers, factors, trained, tuple(trained), train_a=train_a)


def _given(
    network: nn.Module,
    layers: Mapping[str, tuple[nn.Module, Kind]],
    factors: Mapping[str, tuple[Tensor, Tensor | None]],
    trained: set[str],
    full: tuple[str, ...],
    *,
    train_a: bool,
) -> nn.Module:
    """The network with its layers' A and B (None: zeros); all but these and what is trained stands still."""
    weights = dict(network.named_parameters())
    network.__dict__["held_dtypes"] = {name: weights[name].dtype for name in weights if name in trained}
    for name, weight in weights.items():
        if name in trained:
            weight.data = weight.data.to(trained_dtype(weight.dtype))
        weight.requires_grad_(name in trained)
    for name, layer in network.named_modules():
        if not any(matches(f"{name}.{key}".removeprefix("."), full) for key in (*layer._parameters, *layer._buffers)):
            hold_still(layer)
    for name, (layer, kind) in layers.items():
        a, b = factors[name]
        give(layer, kind, a, train_a=train_a)
        if b is not None:
            layer.get_parameter(B).data.copy_(b)
    for layer in network.modules():
        if isinstance(layer, nn.MultiheadAttention) and (hasattr(layer, B) or hasattr(layer.out_proj, B)):
            layer.__class__ = AdaptedAttention
            layer.register_forward_hook(_nothing)  # PyTorch's fast path of an encoder layer would read weights alone
        if isinstance(layer, nn.TransformerEncoder) and any(hasattr(inner, B) for inner in layer.modules()):
            # Under a mask of padding it would make nested tensors for that path, which no other takes.
            layer.__dict__[NESTED], layer.use_nested_tensor = layer.use_nested_tensor, False
    if len({p.dtype for p in network.parameters() if p.is_floating_point()}) > 1:
        for layer in network.modules():
            if any(p is not None and p.is_floating_point() for p in layer._parameters.values()):
                layer.register_forward_pre_hook(_in_own_precision, with_kwargs=True)
    return network


def _in_own_precision(layer: nn.Module, args: Any, names: Any) -> Any:
    """A layer sees its inputs in the precision of its weights: a body in half precision, what is trained in float32."""
    weight = next(
        p for n, p in layer._parameters.items() if p is not None and p.is_floating_point() and n not in (A, B)
    )
    return tree_map(
        lambda v: v.to(weight.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, (args, names)
    )


def _layers(network: nn.Module, adapters: Adapters, trained: set[str]) -> dict[str, tuple[nn.Module, Kind]]:
    """The layers that the patterns name and that are not trained in full, with how each is adapted."""
    layers: dict[str, tuple[nn.Module, Kind]] = {}
    for name, layer in network.named_modules():
        if matches(name, adapters.patterns) and (kind := kind_of(name, layer)) is not None:
            if f"{name}.{kind.weight}".removeprefix(".") in trained:
                continue
            if hasattr(layer, A):
                raise InputError(f"adapters: layer {name} has a {A} already; give the network without adapters")
            layers[name] = layer, kind
    for pattern in adapters.patterns:
        if not any(matches(name, [pattern]) for name in layers):
            known = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
            raise InputError(
                f"adapters: no layer that can be adapted matches {pattern!r}; there are {', '.join(known[:8])}, ..."
            )
    return layers


def _layers_of(network: nn.Module, file: peft.Factors) -> dict[str, tuple[nn.Module, Kind]]:
    """The layers that a file has adapters of."""
    known, layers = dict(network.named_modules()), {}
    for name, a in file.a.items():
        kind = kind_of(name, known[name]) if name in known else None
        if kind is None or kind.shapes(known[name], len(a)) != (tuple(a.shape), tuple(file.b[name].shape)):
            raise InputError(f"adapters: the file has adapters of {name} for another network; give the one they are of")
        layers[name] = known[name], kind
    return layers


def _load_whole(network: nn.Module, whole: Mapping[str, Tensor]) -> None:
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, tensor in whole.items():
        if name not in own or own[name].shape != tensor.shape:
            raise InputError(f"adapters: the file has {name} for another network; give the one that it is of")
        own[name].data.copy_(tensor)


def _drawn(name: str, layer: nn.Module, kind: Kind, adapters: Adapters) -> Tensor:
    """A by its address: layers of one name and shape have the same on every machine. Its rank is at most the inputs.

    Entries are normals of variance scale^2 / rank, by which A^T A is scale^2 I on average (Johnson & Lindenstrauss,
    1984): a step in B moves the weights as far as a step of full fine-tuning would, on average, and N(0, s^2) over B is
    of the same width over the weights. One learning rate then suits adapters and what is trained in full.
    """
    inputs = math.prod(kind.shapes(layer, 1)[0])
    shape, _ = kind.shapes(layer, min(adapters.rank, inputs))
    layer.__dict__[DRAWN] = True
    values = normals(math.prod(shape), adapters.seed, "adapters", name).reshape(shape)
    if kind is EMBEDDING and layer.padding_idx is not None:
        values[:, layer.padding_idx] = 0  # type: ignore[index]
    return values * (adapters.scale / math.sqrt(len(values)))


def _nothing(layer: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that changes nothing."""


def is_adapted(network: nn.Module) -> bool:
    return any(True for _ in _adapted(network))


def _adapted(network: nn.Module) -> Iterator[tuple[str, Any, Kind]]:
    for name, layer in network.named_modules():
        if GIVEN in layer.__dict__:
            kind = kind_of(name, layer)
            assert kind is not None
            yield name, layer, kind


@torch.no_grad()
def merge(network: nn.Module) -> nn.Module:
    """The network as its author wrote it, in place: B A is added to the weights, and adapters are gone."""
    for _, layer, kind in list(_adapted(network)):
        weight = getattr(layer, kind.weight)
        change = kind.delta(layer, layer.lora_A, layer.lora_B)
        # A parameter of its own: one that is tied to another layer's would change that layer too.
        setattr(layer, kind.weight, nn.Parameter((weight.to(change.dtype) + change).to(weight.dtype)))
        del layer.lora_A, layer.lora_B
        layer.__dict__.pop(DRAWN, None)
        del layer.__dict__[GIVEN]
    for name, dtype in network.__dict__.pop("held_dtypes", {}).items():
        weight = network.get_parameter(name)
        weight.data = weight.data.to(dtype)
    for layer in network.modules():
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_add, _nothing, _in_own_precision)]:
                del hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
        if NESTED in layer.__dict__:
            layer.use_nested_tensor = layer.__dict__.pop(NESTED)
        if isinstance(layer, AdaptedAttention):
            layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        let_move(layer)
    return network


def _refuse_strays(what: str, patterns: tuple[str, ...], weights: Mapping[str, Tensor]) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in weights):
            raise InputError(
                f"adapters: {what}: no weight matches {pattern!r}; there are {', '.join(list(weights)[:8])}, ..."
            )
