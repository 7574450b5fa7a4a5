"""What methods are composed of: their setting, checked options, and the pieces that several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.clients.client import Client
from fedbayes.clients.langevin import COOLING, SCHEDULES, UPLOADS
from fedbayes.clients.point import point
from fedbayes.clients.schedules import WITHIN, scheduled
from fedbayes.clients.variational import KL_WEIGHTS
from fedbayes.errors import InputError, shown, unknown
from fedbayes.federation import NOISE, Program
from fedbayes.layout import matches
from fedbayes.model import Augment, Likelihood, Model
from fedbayes.networks.dropout import has_dropout
from fedbayes.networks.estimators import ESTIMATORS
from fedbayes.noise import Tape
from fedbayes.optimisers import OPTIMISERS, Optimiser
from fedbayes.posterior import Gaussian
from fedbayes.samplers import SAMPLERS
from fedbayes.server.distil import FITS
from fedbayes.server.rules import RULES


@dataclass(frozen=True)
class Setting:
    """What a method is built for: a network, a likelihood, a batch of inputs, and how inputs and targets are read."""

    network: nn.Module
    likelihood: Likelihood
    x: Tensor
    frozen: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] | None = None
    units: tuple[Tensor, Tensor] | None = None
    bfloat16: bool = False
    augment: Augment | None = None
    seed: int = 0
    rounds: int = 1
    y: Tensor | None = None  # a target
    most: int = 0  # rows of the largest client
    cohort: int = 1  # clients of a round


@dataclass(frozen=True)
class Method:
    """A named composition with its options; `build(setting)` binds it to a network."""

    name: str
    options: dict[str, Any]
    build: Callable[[Setting], Program] = field(compare=False, repr=False)


# Each option's requirement, in words and as a test; one table for all methods.
REQUIREMENTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("positive", lambda v: v > 0),
    "global_lr": ("positive", lambda v: v > 0),
    "epochs": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "batch": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "train_draws": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "test_draws": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "momentum": ("in [0, 1)", lambda v: 0 <= v < 1),
    "weight_decay": ("not negative", lambda v: v >= 0),
    "proximal": ("not negative", lambda v: v >= 0),
    "clip": ("not negative", lambda v: v >= 0),
    "adversarial": ("not negative", lambda v: v >= 0),
    "kl_weight": ("not negative", lambda v: v >= 0),
    "prior_scale": ("positive", lambda v: v > 0),
    "initial": ("positive", lambda v: v > 0),
    "division": ("positive", lambda v: v > 0),
    "damping": ("in (0, 1]", lambda v: 0 < v <= 1),
    "lr_decay": ("in (0, 1]", lambda v: 0 < v <= 1),
    "lr_drop": ("in (0, 1]", lambda v: 0 < v <= 1),
    "lr_drop_every": ("a whole number of epochs, at least 1", lambda v: isinstance(v, int) and v >= 1),
    "norm_passes": ("a whole number of passes", lambda v: isinstance(v, int) and v >= 0),
    "lr_silent": ("a whole number of rounds", lambda v: isinstance(v, int) and v >= 0),
    "student_lr": ("positive", lambda v: v > 0),
    "temperature": ("not negative", lambda v: v >= 0),
    "input_noise": ("not negative", lambda v: v >= 0),
    "burn_in": ("a whole number of epochs", lambda v: isinstance(v, int) and v >= 0),
    "thin": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "rank": ("a whole number of at least 2", lambda v: isinstance(v, int) and v >= 2),
    "swag_rounds": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "swag_every": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "swag_start": ("a share in [0, 1)", lambda v: 0 <= v < 1),
    "samples": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "shrinkage": ("not negative", lambda v: v >= 0),
    "burn_share": ("a share in [0, 1)", lambda v: 0 <= v < 1),
    "plain_rounds": ("a whole number of rounds", lambda v: isinstance(v, int) and v >= 0),
    "ensemble_draws": ("a whole number of draws", lambda v: isinstance(v, int) and v >= 0),
    "spread": ("positive", lambda v: v > 0),
    "sharpen": ("positive", lambda v: v > 0),
    "server_student_lr": ("positive", lambda v: v > 0),
    "server_weight_decay": ("not negative", lambda v: v >= 0),
    "server_epochs": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "server_batch": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "swa_start": ("a whole number of steps", lambda v: isinstance(v, int) and v >= 0),
    "swa_every": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "friction": ("in (0, 1]", lambda v: 0 < v <= 1),
    "memory": ("in [0, 1)", lambda v: 0 <= v < 1),
    "prior_precision": ("positive", lambda v: v > 0),
    "flow_length": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "flow_epochs": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "flow_batch": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "flow_draws": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "flow_lr": ("positive", lambda v: v > 0),
    "walk_epochs": ("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1),
    "walk_lr": ("positive", lambda v: v > 0),
    "server_lr": ("positive", lambda v: v > 0),
    "server_momentum": ("in [0, 1)", lambda v: 0 <= v < 1),
}


CHOICES: dict[str, Collection[str]] = {
    "estimator": ESTIMATORS,
    "kl": KL_WEIGHTS,
    "prior": {"broadcast": None, "fixed": None},
    "optimiser": OPTIMISERS,
    "server": OPTIMISERS,
    "rule": RULES,
    "lr_within": WITHIN,
    "student_lr_within": WITHIN,
    "fit": FITS,
    "covariance": ("diagonal", "low_rank"),
    "pooled": [name for name, rule in RULES.items() if Gaussian in rule.takes and not rule.needs_reference],
    "sampler": SAMPLERS,
    "cooling": COOLING,
    "schedule": SCHEDULES,
    "upload": UPLOADS,
    "predict": {"bootstrap": None, "monte_carlo": None, "closed": None},
    "noise": NOISE,
}


def check_options(options: Mapping[str, Any]) -> None:
    for name, value in [pair for row in options.items() for pair in _each(*row)]:
        if name in REQUIREMENTS:
            words, fine = REQUIREMENTS[name]
            number = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
            if not number or not fine(value):
                raise InputError(f"{name} must be {words}, not {shown(value)}")
        if name in CHOICES and isinstance(value, str) and value not in CHOICES[name]:
            raise unknown(name, value, CHOICES[name])


def _each(name: str, value: Any) -> list[tuple[str, Any]]:
    """An option as pairs of name and value: one, or one for each entry of a table of them by pattern."""
    return [(name, v) for v in value.values()] if isinstance(value, Mapping) else [(name, value)]


def model_of(setting: Setting, points: list[str] | None, name: str = "") -> Model:
    """The setting's network, in two parts where some weights are points; its parts under a name of their own."""
    parts = None if points is None else {"points": points, "model": ["*"]}
    return Model.of(
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


def point_client(setting: Setting, model: Model, options: Mapping[str, Any]) -> Client:
    """The point client that the options ask for."""
    check_batch(setting, model, options["batch"])
    client = point(
        model,
        optimiser=optimiser_named(options["optimiser"], options["momentum"]),
        epochs=options["epochs"],
        batch=options["batch"],
        pull=tuple(name for name in ("weight_decay", "proximal") if options.get(name)),
        clip=options["clip"] > 0,
        falling=options["lr_within"] == "falling",
        adversarial=options.get("adversarial", 0) > 0,
    )
    return in_schedule(client, options["lr_within"])


def in_schedule(client: Client, within: str) -> Client:
    """The client with a learning rate that follows a schedule of the table, where it does not know it itself."""
    return client if within in ("constant", "falling") else scheduled(client, within)


def is_linear(network: nn.Module) -> bool:
    layers = [layer for layer in network.modules() if not isinstance(layer, nn.Sequential | nn.Flatten)]
    return len(layers) == 1 and isinstance(layers[0], nn.Linear)


def check_points(setting: Setting, model: Model, points: tuple[str, ...]) -> None:
    names = [name for name, _ in setting.network.named_parameters()]
    for pattern in points:
        if not any(matches(name, [pattern]) for name in names):
            raise InputError(f"points: no weight matches {pattern!r}; the network has {', '.join(names[:8])}, ...")
    if "model" not in model.layouts:
        raise InputError("points: there is no weight left to be given a distribution; fedavg is the method of points")


def check_batch(setting: Setting, model: Model, batch: int) -> None:
    """BatchNorm can't train on one value a channel; find out now, and not in round 1."""
    if batch == 1 and model.static:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.train_output(model.weights(model.initial()), setting.x[:1], Tape(), None)
        except ValueError as error:
            raise InputError(f"batch: BatchNorm needs more than one row in a batch, not {batch} ({error})") from error


def check_dropout(setting: Setting, wanted: bool) -> None:
    """MC dropout of a network that drops nothing would be a point without a word of it."""
    if wanted and not has_dropout(setting.network):
        raise InputError(
            "mc_dropout: the network has no dropout; give it some by network_options = {dropout = 0.2}, "
            "or fedbayes.networks.dropout.with_dropout(network, 0.2)"
        )


def batch_like(x: Tensor, batch: int) -> Tensor:
    return x[:1].expand(batch, *x.shape[1:])


def optimiser_named(name: str, momentum: float) -> Optimiser:
    return OPTIMISERS[name](momentum) if name == "sgd" else OPTIMISERS[name]()


def server_optimiser(name: str | None, lr: float, momentum: float) -> tuple[Optimiser, float] | None:
    return None if name is None else (optimiser_named(name, momentum), lr)


def by_round(scalars: dict[str, float], decay: float, silent: int) -> Callable[[int], Mapping[str, float]]:
    return lambda number: {**scalars, "lr": scalars["lr"] * decay ** max(0, number - silent)}
