"""Pieces that several methods are composed of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbayes.clients.client import Client
from fedbayes.clients.schedules import scheduled
from fedbayes.errors import InputError
from fedbayes.methods.method import Setting
from fedbayes.model.model import Model
from fedbayes.model.trial import tried
from fedbayes.networks.dropout import has_dropout
from fedbayes.noise import Tape
from fedbayes.posterior.layout import matches


def model_of(setting: Setting, points: list[str] | None, name: str = "") -> Model:
    """The setting's network, in two parts where some weights are points; its parts under a name of their own."""
    parts = None if points is None else {"points": points, "model": ["*"]}
    model = Model.of(
        setting.network,
        setting.likelihood,
        parts=parts,
        frozen=setting.frozen,
        prepare=setting.prepare,
        units=setting.units,
        bfloat16=setting.bfloat16,
        augment=setting.augment,
        name=name,
    )
    return tried(model, setting.x[:1], (setting.x if setting.other is None else setting.other)[:1])


def in_schedule(client: Client, within: str) -> Client:
    """The client with a learning rate that follows a schedule of the table, where it does not know it itself."""
    return client if within in ("constant", "falling") else scheduled(client, within)


def is_linear(network: nn.Module) -> bool:
    layers = [layer for layer in network.modules() if not isinstance(layer, nn.Sequential | nn.Flatten)]
    # With frozen weights, as beside adapters, outputs are no linear map of what is trained alone.
    return len(layers) == 1 and isinstance(layers[0], nn.Linear) and all(p.requires_grad for p in network.parameters())


def check_points(setting: Setting, model: Model, points: tuple[str, ...]) -> None:
    names = [name for name, _ in setting.network.named_parameters()]
    for pattern in points:
        if not any(matches(name, [pattern]) for name in names):
            raise InputError(f"points: no weight matches {pattern!r}; the network has {', '.join(names[:8])}, ...")
    if "model" not in model.layouts:
        raise InputError("points: there is no weight left to be given a distribution; fedavg is the method of points")


def check_batch(setting: Setting, model: Model, batch: int) -> None:
    """BatchNorm can't train on one value per channel; find out now, and not in round 1."""
    if batch == 1 and model.static:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.train_output(model.weights(model.initial()), setting.x[:1], Tape(), None)
        except ValueError as error:
            raise InputError(f"batch: BatchNorm needs more than one row in a batch, not {batch} ({error})") from error


def check_dropout(setting: Setting, wanted: bool) -> None:
    """Refuse MC dropout for a network without dropout: it would silently be a point."""
    if wanted and not has_dropout(setting.network):
        raise InputError(
            "mc_dropout: the network has no dropout; give it some by network_options = {dropout = 0.2}, "
            "or fedbayes.networks.dropout.with_dropout(network, 0.2)"
        )


def row_normals(setting: Setting, model: Model) -> int:
    """How many normals the network reads for one row in training, by its dropout."""
    if model.static:
        raise InputError("private: BatchNorm mixes the rows of a batch; use GroupNorm or LayerNorm")
    tape = Tape()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.train_output(model.weights(model.initial()), setting.x[:1], tape, None)
    return tape.used


def batch_like(x: Tensor, batch: int) -> Tensor:
    return x[:1].expand(batch, *x.shape[1:])
