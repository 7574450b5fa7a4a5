"""The trained network as a plain module: what other code loads, goes on with or takes apart."""

from __future__ import annotations

import copy

from torch import nn

from fedbayes.errors import InputError
from fedbayes.model.adapted import merge
from fedbayes.model.call import fill
from fedbayes.model.order import as_written
from fedbayes.model.predictive import draw_weights
from fedbayes.posterior.values import Draws, Parts
from fedbayes.training.task import Task


def module_of(task: Task, parts: Parts, draw: int | None = None) -> nn.Module:
    """The network at the posterior's mean or at one of its draws, with its buffers, on the CPU; adapters are merged."""
    model = task.program.model
    if not task.program.prediction.whole and not any(part in parts for part in model.layouts):
        raise InputError("this method has no global model, only personal ones: use run.personal(client).module()")
    own = {part: parts[part] for part in model.layouts}
    members = next((len(q.values) for q in own.values() if isinstance(q, Draws)), None)
    if draw is None:
        vectors = {part: q.mean for part, q in own.items()}
    else:
        if draw < 0 or (members is not None and draw >= members):
            last = "" if members is None else f" to {members - 1}"
            raise InputError(f"draw must be a number from 0{last}, not {draw}")
        # As many as `predict` takes, so that these are the networks by which it predicts.
        drawn = draw_weights(own, max(draw + 1, task.program.prediction.draws), task.seed, "predict")
        vectors = {part: t[draw] for part, t in drawn.items()}
    network = as_written(copy.deepcopy(model.module).cpu())
    fill(network, model.weights(vectors))
    return merge(network).requires_grad_(True).eval()
