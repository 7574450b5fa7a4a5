"""From a network, clients and a method to a task: everything is checked and bound before the first round."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.data import Clients, Dataset, Prepare, from_clients
from fedbayes.engine.choice import carry_of, choose, quick_cpu
from fedbayes.errors import InputError, shown, unknown
from fedbayes.federation.attacks import Attack
from fedbayes.federation.bounds import Bounds, with_bounds
from fedbayes.federation.buckets import check_streaming
from fedbayes.federation.cohorts import cohort_size
from fedbayes.federation.own_stages import with_stages
from fedbayes.federation.program import Stage, Store
from fedbayes.federation.round import at_home, gathering
from fedbayes.federation.schedule import poisson
from fedbayes.methods import METHODS, Method, Setting, method_named
from fedbayes.model.adapted import adapt
from fedbayes.model.adapters import Adapters
from fedbayes.model.call import apart_from_graphs, fill, plain_gradients
from fedbayes.model.likelihood import Likelihood, likelihood_for
from fedbayes.model.recomputation import mark_blocks, repeated
from fedbayes.options import options_of, record_of
from fedbayes.posterior.values import Posterior
from fedbayes.training.attacked import attacked
from fedbayes.training.checks import augmentation, check_layers, check_stopping, device_named, try_network
from fedbayes.training.defaults import (
    default_likelihood,
    default_method,
    default_rounds,
    network_for,
    with_class_weights,
)
from fedbayes.training.idle import idle_options
from fedbayes.training.private import Told, check_private, with_privacy
from fedbayes.training.scheduled import Scheduled, is_stale, scheduled
from fedbayes.training.server import server_store
from fedbayes.training.settings import CLIENTS, METHOD, ROWS, Bounding, Judging, Privacy, Scheduling, Training
from fedbayes.training.task import OnRound, Task, callbacks_of
from fedbayes.training.tested import Finished
from fedbayes.training.warm import begun_with, weights_at_home

P = ParamSpec("P")
R = TypeVar("R")


def naming_strays(train: Callable[P, R]) -> Callable[P, R]:
    """The function, with an error for unknown arguments that says where they belong."""
    known = list(inspect.signature(train).parameters)

    @functools.wraps(train)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in known:
                method = options.get("method") or METHOD
                raise _stray(name, method if isinstance(method, str) else getattr(method, "name", ""), known)
        return train(*args, **options)

    return checked


def _stray(name: str, method: str, known: list[str]) -> InputError:
    if method in METHODS and name in options_of(METHODS[method]):
        return InputError(
            f"{name} is an option of the method: give it there, method=fedbayes.methods.{method}({name}=...)"
        )
    return unknown("argument", name, known)


@naming_strays
def prepare(
    network: nn.Module | str,
    clients: Clients | Sequence[Any] | Mapping[str, Any],
    *,
    method: str | Method | None = None,
    rounds: int | None = None,
    cohort: int | float | None = None,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    compile: str = "auto",
    at_once: int | None = None,
    recompute: bool | str | Sequence[str] = False,
    precision: str = "float32",
    likelihood: Likelihood | str | None = None,
    frozen: tuple[str, ...] = (),
    adapters: Mapping[str, Any] | None = None,
    class_weights: str | Sequence[float] | np.ndarray | Tensor | None = None,
    augment: str | None = None,
    dropout: float = 0.0,
    schedule: str = "synchronous",
    schedule_options: Mapping[str, Any] | None = None,
    delays: str | None = None,
    delay_options: Mapping[str, Any] | None = None,
    attack: str | Attack | None = None,
    attackers: float | Sequence[int | str] | None = None,
    attack_strength: float | None = None,
    cap_precision: float | None = None,
    clip_change: float | None = None,
    clip_quantile: float | None = None,
    cap_rows: int | None = None,
    private: str | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    private_clip: float = 1.0,
    public_test: bool = False,
    private_scores: float | None = None,
    private_seed: int | None = None,
    validation: float = 0.0,
    patience: int | None = None,
    evaluate_every: int = 1,
    personal_every: int = 0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    monitor: str = "nll",
    stages: Sequence[Stage] = (),
    server_data: Any = None,
    init: Finished | Mapping[str, Posterior] | Mapping[str, Tensor] | str | Path | None = None,
    on_round: OnRound | Sequence[OnRound] = (),
) -> Task:
    """Check everything that can be checked before the first round, and bind the method to the network and the data.

    Arguments as in `fit`.
    """
    if not isinstance(clients, Clients):
        clients = from_clients(clients)
    if isinstance(recompute, Sequence):
        recompute = (recompute,) if isinstance(recompute, str) else tuple(recompute)
    if isinstance(class_weights, np.ndarray | Tensor):
        class_weights = class_weights.tolist()
    if isinstance(class_weights, Sequence) and not isinstance(class_weights, str):
        class_weights = tuple(class_weights)
    method = default_method(clients.data) if method is None else method
    rounds = default_rounds(clients.data) if rounds is None else rounds
    tables = (adapters, schedule_options, delay_options)
    adapters, schedule_options, delay_options = ({} if given is None else given for given in tables)
    arguments = locals()
    for group in (Training, Scheduling, Bounding, Privacy, Judging):
        group(**{name: arguments[name] for name in options_of(group)})
    if isinstance(method, str):
        method = method_named(method)
    if not isinstance(method, Method):
        raise InputError(f"method must be a name, or one with options such as fb.methods.pvi(), not {shown(method)}")
    if patience is not None and not validation:
        raise InputError("patience: early stopping needs a validation share too, such as validation=0.1")
    check_stopping(method, rounds, arguments if len(clients) > 1 else {})  # a server alone looks for where to begin
    if monitor == "accuracy" and clients.data.kind in ("real", "survival"):
        raise InputError(f"monitor: {clients.data.name} has {clients.data.kind} targets, no accuracy; use nll")
    if monitor != options_of(Judging)["monitor"].default and not validation:
        raise InputError("monitor: the best round is chosen on a validation share; set one, such as validation=0.1")
    size = cohort_size(cohort, len(clients))
    wanted = Privacy(**{name: arguments[name] for name in options_of(Privacy)})
    check_private(wanted, arguments)
    held, sizes = torch.zeros(0, dtype=torch.int64), None
    if validation:
        clients, rows = clients.holdout(validation, seed)
        held, sizes = torch.cat(rows), torch.tensor([len(own) for own in rows])
        if not len(held):
            raise InputError(f"validation: a share of {validation} leaves no client a row to hold out; raise it")
    where = device_named(device)
    data = clients.data
    scale = data.target_scale
    if not isinstance(likelihood, Likelihood):
        likelihood = default_likelihood(data) if likelihood is None else likelihood_for(data, likelihood)
    network = network_for(network, data, likelihood, seed)
    likelihood = with_class_weights(likelihood, class_weights, data, where)
    check_layers(network, frozen)
    network = apart_from_graphs(network)
    asks = plain_gradients(network)
    mark_blocks(network, recompute or (asks and bool(repeated(network))))
    if adapters:
        adapt(network, record_of(Adapters, adapters, "adapters"))
    setting = Setting(
        network.to(where),
        likelihood if likelihood.on is None else likelihood.on(where),
        data.x[:1].to(where),
        frozen,
        data.prepare if isinstance(data.prepare, Prepare) else data.prepare.on(where),
        None if scale is None else (scale.mean, scale.std),
        precision == "bf16",
        augmentation(augment, data),
        seed,
        rounds,
        data.y[:1].to(where),
        int(clients.sizes.max()),
        size,
        len(clients),
        is_stale(schedule, schedule_options, size),
        wanted.private == ROWS,
        data.x[-1:].to(where),
    )
    try_network(setting, data)
    bounds = Bounds(cap_precision or None, clip_change, clip_quantile, cap_rows)
    with quick_cpu():  # as in rounds: the network is tried
        program = with_stages(with_bounds(method.build(setting), bounds), stages)
        if init is not None and (begun := weights_at_home(program, init)):
            setting, init = replace(setting, network=copy.deepcopy(setting.network)), None
            fill(setting.network, begun)
            program = with_stages(with_bounds(method.build(setting), bounds), stages)
    if wanted.private_scores is not None and (data.kind != "classes" or not program.prediction.whole):
        raise InputError("private_scores: accuracy and NLL are of classes, and of a model that all share; leave it out")
    told = Told(rounds, evaluate_every)
    program, privacy = with_privacy(program, wanted, clients.sizes, size, told, cap_rows)
    if init is not None:
        program = begun_with(program, init, where)
    check_streaming(program)
    program, targets = attacked(program, clients, attack, attackers, attack_strength, seed)
    program, scheduler = scheduled(
        method.name, program, clients, Scheduled(size, seed, dropout, schedule, schedule_options, delays, delay_options)
    )
    if privacy is not None and privacy.level == CLIENTS:
        scheduler = poisson(clients=len(clients), rate=size / len(clients), random=privacy.random, dropout=dropout)
    server = server_store(program, clients, server_data, seed, where)
    if not program.prediction.whole and validation:
        raise InputError(f"validation: {method.name} has no global model to validate; set validation=0")
    x, y = _on_device(data, where)
    chosen, line = choose(
        program,
        Store(x, y if targets is None else targets.to(where), clients.train_rows, server),
        seed=seed if privacy is None else privacy.seed_of_steps(seed),
        engine=engine,
        compile=compile,
        chunk=at_once,
        rounds=rounds,
        size=int(clients.sizes.max()),
        cohorts=scheduler.cohort,
    )
    return Task(
        program=program,
        home=at_home(program),
        gather=gathering(program),
        clients=clients,
        validation=held,
        engine=chosen,
        carry=carry_of(chosen),
        scheduler=scheduler,
        choice=line,
        precision=precision,
        rounds=rounds,
        cohort=size,
        seed=seed,
        patience=patience,
        evaluate_every=evaluate_every,
        device=where,
        personal_every=personal_every,
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        monitor=monitor,
        method=method.name,
        optimiser=getattr(method, "optimiser", None),
        idle=idle_options(method, program, cap_rows, server_data),
        on_round=callbacks_of(on_round),
        validation_sizes=sizes,
        privacy=privacy,
    )


_PLACED: WeakKeyDictionary[Dataset, dict[torch.device, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def _on_device(data: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    """Training inputs and targets on a device, held there once for all runs on the same data."""
    placed = _PLACED.setdefault(data, {})
    if device not in placed:
        placed[device] = data.x.to(device), data.y.to(device)
    return placed[device]
