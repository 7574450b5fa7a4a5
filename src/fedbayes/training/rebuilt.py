"""A trained model put together from what a folder holds: to predict with. Its network is not run for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedbayes.clients.client import Client
from fedbayes.data import Clients, Dataset, Prepare
from fedbayes.engine.choice import carry_of
from fedbayes.engine.loop import Loop
from fedbayes.errors import InputError
from fedbayes.federation.kept import apart
from fedbayes.federation.program import FederationState, Pooling, Prediction, Program, Store
from fedbayes.federation.round import at_home
from fedbayes.federation.schedule import synchronous
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.files import reading
from fedbayes.methods import Setting
from fedbayes.model.adapted import adapt_again
from fedbayes.model.adapted_layers import A, B
from fedbayes.model.call import apart_from_graphs, plain_gradients
from fedbayes.model.likelihood import Likelihood
from fedbayes.model.model import Model
from fedbayes.model.parts import STATIC, is_static
from fedbayes.model.peft import Factors
from fedbayes.model.still_norm import hold_still
from fedbayes.posterior import values
from fedbayes.posterior.values import Parts
from fedbayes.training.checks import check_layers, device_named, try_network
from fedbayes.training.defaults import default_likelihood, network_for
from fedbayes.training.task import Federation, Progress, Task
from fedbayes.training.warm import weights_in

ALONE = "this model was loaded without its data: personal models and scores stay with those who have it"


class Told(NamedTuple):
    """What a folder says of a model beside its posterior.

    `runs` is how its network can be run, as training found out: whether it writes into its inputs, and takes channels
    last. Files of old do not say; then each is as it is for any network.
    """

    method: str
    round: int
    seed: int
    cuts: Mapping[str, list[str]]  # names of weights by part
    prediction: Mapping[str, Any]
    likelihood: Likelihood | None
    runs: Mapping[str, bool]
    frozen: Path | None  # a file of weights that were not trained
    mend: str  # what may be wrong with its files


RUNS = {"writes": True, "channels_last": False}


def rebuilt(told: Told, network: nn.Module | str, clients: Clients, parts: Parts, device: str) -> tuple[Task, Progress]:
    """The task and progress of a model, on a network that the reader gives."""
    where, data = device_named(device), clients.data
    likelihood = default_likelihood(data) if told.likelihood is None else told.likelihood
    model = _model(told, network, data, likelihood, parts, where)
    placed = {part: values.map_tensors(q, lambda t: t.to(where)) for part, q in parts.items()}
    broadcast, beside = apart(placed)
    prediction = Prediction(**told.prediction)
    pooling = Pooling({}, WEIGHTINGS["equal"])
    program = Program(model, NOBODY, broadcast, lambda number: {}, pooling, prediction=prediction)
    engine = Loop(Store(data.x, data.y, clients.train_rows), seed=told.seed)
    task = Task(
        program=program,
        home=at_home(program),
        clients=clients,
        validation=torch.zeros(0, dtype=torch.int64),
        engine=engine,
        carry=carry_of(engine),
        scheduler=synchronous(clients=len(clients), cohort=len(clients), seed=told.seed),
        choice="loaded to predict",
        precision="float32",
        rounds=max(told.round, 1),
        cohort=len(clients),
        seed=told.seed,
        patience=None,
        evaluate_every=1,
        device=where,
        elsewhere=_not_here,
        method=told.method,
    )
    return task, Progress(FederationState(told.round, broadcast, kept=beside))


def _nothing_to_train(*_: Any) -> Any:
    raise InputError(ALONE)


NOBODY = Client(_nothing_to_train, (), _nothing_to_train)


def _not_here(federation: Federation) -> Iterator[tuple[int, Any]]:
    raise InputError(ALONE)


def _adapt(network: nn.Module, told: Told, frozen: Mapping[str, Tensor], parts: Parts) -> None:
    """Give the network, in place, the adapters that were trained, if any were: their values come with all others."""
    learned = [layout for q in parts.values() if (layout := q.layout) is not None]
    shapes = {n: shape for layout in learned for n, shape in zip(layout.names, layout.shapes)}
    trained = {name for names in told.cuts.values() for name in names}
    own = dict(network.named_parameters())  # its author may have such names too
    given = {n: shape for n, shape in shapes.items() if n.rpartition(".")[2] == B and n not in own}
    b = {n.rpartition(".")[0]: torch.zeros(shape) for n, shape in given.items()}
    if not b:
        return
    places = {layer: f"{layer}.{A}".removeprefix(".") for layer in b}
    a = {layer: frozen[n] if n in frozen else torch.zeros(shapes[n]) for layer, n in places.items()}
    whole = {n for n in trained if n in own}
    adapt_again(network, Factors(a, b, {}), whole, train_a=not trained.isdisjoint(places.values()))


def _freeze(network: nn.Module, frozen: Mapping[str, Tensor]) -> None:
    """Write what was not trained into the network, in place; buffers among it stood still, and do so here."""
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, tensor in frozen.items():
        if name not in own or own[name].shape != tensor.shape:
            raise InputError(
                f"network: it has no {name} of shape {list(tensor.shape)}; give the network that was trained"
            )
        own[name].data.copy_(tensor)
    for name, layer in network.named_modules():
        if any(f"{name}.{key}".removeprefix(".") in frozen for key in layer._buffers):
            hold_still(layer)


def _model(
    told: Told, given: nn.Module | str, data: Dataset, likelihood: Likelihood, parts: Parts, where: torch.device
) -> Model:
    """The network cut into the parts of the file, held to be the one that these were made for."""
    network = apart_from_graphs(network_for(given, data, likelihood, told.seed))
    check_layers(network, ())
    plain_gradients(network)
    prepare: Callable[..., Any] = data.prepare if isinstance(data.prepare, Prepare) else data.prepare.on(where)
    if any(isinstance(layer, LazyModuleMixin) for layer in network.modules()):
        try_network(Setting(network, likelihood, data.x[:1], prepare=data.prepare), data)  # which gives it its weights
    if told.frozen is not None:
        with reading(told.frozen, told.mend):
            frozen = weights_in(told.frozen, "frozen weights")
            _adapt(network, told, frozen, parts)
        _freeze(network, frozen)
    trained = {name for names in told.cuts.values() for name in names}
    own = [name for name, _ in network.named_parameters()]
    if strange := [name for name in sorted(trained) if name not in own and not name.startswith("likelihood.")]:
        raise InputError(f"network: it has no weight {strange[0]!r}; give the network that was trained")
    for name, weight in network.named_parameters():
        weight.requires_grad_(name in trained)
    scale, part = data.target_scale, told.prediction["part"]
    try:
        model = Model.of(
            network.to(where),
            likelihood if likelihood.on is None else likelihood.on(where),
            parts=told.cuts,
            frozen=[name for name in own if name not in trained],
            prepare=prepare,
            units=None if scale is None else (scale.mean, scale.std),
            name=part if any(f"{part}.{kind}" in parts for kind in STATIC) else "",
        )
    except ValueError as error:
        raise InputError(f"network: it is not the one that was trained ({error})") from error
    for part, layout in model.layouts.items():
        if part not in parts and not is_static(part):
            raise InputError(f"network: the file has no part {part!r}; it is not the network that was trained")
        theirs = parts[part].layout if part in parts else None
        if theirs is not None and theirs.fingerprint != layout.fingerprint:
            names = (
                f"{len(layout.names)} tensors, {layout.size} weights; trained were {len(theirs.names)}, {theirs.size}"
            )
            raise InputError(f"network: part {part!r} has {names}; give the network that was trained")
    return replace(model, writes=told.runs["writes"], channels_last=told.runs["channels_last"])
