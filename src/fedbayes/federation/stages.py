"""What a server does after pooling, as stages: each a state before the first round, and one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.client import Client
from fedbayes.clients.optimisers import Optimiser
from fedbayes.errors import InputError
from fedbayes.federation.pooling import ensemble_of, pooled
from fedbayes.federation.program import (
    AT_SERVER,
    SERVER,
    STATISTICS,
    Context,
    Order,
    Program,
    ServerData,
    Stage,
)
from fedbayes.federation.round import message_bytes
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.model.gradient import still
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Draws, Gaussian, Parts, Point

SERVER_STEP, DISTILLATION = "server step", "distillation"
# Targets [N, ...] of unlabelled inputs [N, ...], by the pooled parts, the cohort's ensemble, and noise of an address.
Targets = Callable[[Parts, Parts, Tensor, tuple[int | str, ...]], Tensor]


def server_step(optimiser: Optimiser, lr: float, part: str = "model") -> Stage:
    """Reddi et al. (2021): the pooled mean's move is the gradient of the server's optimiser; scales are pooled."""

    def init(parts: Parts) -> Any:
        return optimiser.init({"mean": parts[part].mean})

    def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
        old, q = context.order.broadcast[part].mean, parts[part]
        state, stepped = optimiser.update(state, {"mean": old}, {"mean": old - q.mean}, old.new_tensor(lr))
        mean = stepped["mean"]
        moved = Gaussian(mean, q.scale, q.layout) if isinstance(q, Gaussian) else Point(mean, q.layout)
        return {**parts, part: moved}, state, {}

    return Stage(SERVER_STEP, init, apply)


def statistics_again(program: Program, passes: int) -> Stage:
    """The cohort takes BatchNorm's statistics of the pooled network, in so many passes over its rows.

    Clients take the steps they have without gradients, at rate 0, and only the statistics are pooled.
    """
    again = _restating(program, passes)

    def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
        order = context.order._replace(broadcast=parts, options=again.options(context.order.round), purpose=STATISTICS)
        outcome = context.engine.run(again, order, context.own)
        cohort, shared = len(order.cohort), program.pooling.rules
        # The pooled network once more, and its statistics back.
        report: dict[str, float] = {
            "bytes_down": cohort * message_bytes({part: parts[part] for part in shared}),
            "bytes_up": cohort * message_bytes({part: parts[part] for part in again.pooling.rules}),
        }
        if not outcome.counted:
            return parts, state, report
        fresh, _ = pooled(again, order, outcome)
        return {**parts, **{part: fresh[part] for part in again.pooling.rules}}, state, report

    return Stage(STATISTICS, lambda parts: None, apply)


def _restating(program: Program, passes: int) -> Program:
    rules = {part: rule for part, rule in program.pooling.rules.items() if is_static(part)}
    if not rules:
        raise InputError("norm_passes: the network shares no statistics such as BatchNorm's; set it to 0")
    phases = tuple(phase._replace(step=still(phase.step), epochs=passes) for phase in program.client.phases)
    return program._replace(
        client=program.client._replace(phases=phases),
        pooling=program.pooling.beside(rules=rules, weighting=WEIGHTINGS["size"]),
        options=lambda number: {**program.options(number), "lr": 0.0},
        stages=(),
        prediction=program.prediction._replace(members=False, noise="likelihood"),
    )


def distillation(program: Program, client: Client, targets: Targets) -> Stage:
    """The server trains the pooled networks by `client` towards the cohort's ensemble, on unlabelled inputs of its own.

    Training that ends in weights that are not finite is thrown away.
    """
    alone = program._replace(client=client, pooling=program.pooling.beside(rules={}), stages=())

    def like(x: Tensor, seed: int) -> Tensor:
        two = {part: Draws(q.mean.expand(2, -1), q.layout) for part, q in program.initial.items()}
        shape = targets(program.initial, dict(two), x[:2], (seed, "shape")).shape[1:]
        return torch.zeros(len(x), *shape, dtype=program.initial[program.prediction.part].mean.dtype, device=x.device)

    def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
        engine, number = context.engine, context.order.round + 1
        data = engine.store.server
        assert data is not None
        members = ensemble_of(context.program, parts, context.outcome.uploads)
        # In place: a captured graph reads this very tensor.
        data.y.copy_(targets(parts, members, data.x, (engine.seed, number, SERVER)))
        order = Order(number, (SERVER,), (), parts, context.order.options, purpose=AT_SERVER)
        outcome = engine.run(alone, order, lambda client: None)
        return ({**parts, **outcome.uploads[0].parts} if outcome.uploads else parts), state, {}

    return Stage(DISTILLATION, lambda parts: None, apply, uploads=True, server=ServerData(client.phases[0].batch, like))
