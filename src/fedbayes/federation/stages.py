"""What a server does after pooling, as stages: each a state before the first round, and one round."""

from __future__ import annotations

from typing import Any

from fedbayes.clients.optimisers import Optimiser
from fedbayes.federation.program import Context, Stage
from fedbayes.posterior.values import Gaussian, Parts, Point

SERVER_STEP = "server step"


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
