"""A step of a model before the first round: what its network can't do is found out once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedbayes.model.call import shared_copy
from fedbayes.model.model import Model
from fedbayes.model.order import as_written
from fedbayes.noise import Tape, seeded


def tried(model: Model, x: Tensor) -> Model:
    """The model as its network can be run on stored inputs x of two rows."""
    return _in_its_layout(model, x)


def _in_its_layout(model: Model, x: Tensor) -> Model:
    """Without channels last where the network needs the usual layout, as for `view` behind a convolution."""
    if not model.convolves or _runs(model, x):
        return model
    module, still, dropping = (as_written(shared_copy(m)) for m in (model.module, model.still, model.dropping))
    usual = replace(model, channels_last=False, module=module, still=still, dropping=dropping)
    return usual if _runs(usual, x) else model


def _runs(model: Model, x: Tensor) -> bool:
    """Whether the network takes a batch, in training and in evaluation; of a copy, which may remember what it saw."""
    own = replace(model, module=shared_copy(model.module), still=shared_copy(model.still))
    weights = own.weights(own.initial())
    try:
        with torch.no_grad(), seeded(0, "trial", device=x.device):
            own.train_output(weights, x, Tape(), None)
            own.output(weights, x)
    except RuntimeError:
        return False
    return True
