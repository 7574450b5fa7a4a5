"""The shape of a client: start, phases of steps, finish. Written for one client; engines run it for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts

State = Any  # nested tuples and dicts of tensors
Own = dict[str, Any]  # what a client keeps between rounds: named parts, or plain tensors


class Batch(NamedTuple):
    """Rows of a client's data, padded to full shape. mask [B] says which rows are live; None: all are."""

    x: Tensor
    y: Tensor
    mask: Tensor | None
    step: Tensor  # number of this step in its phase, from 0


class Info(NamedTuple):
    """What a client knows of its round."""

    broadcast: Parts
    options: Mapping[str, Tensor]  # scalar options as they stand this round (lr, kl_weight, ...)
    round: Tensor
    n: Tensor  # number of the client's training examples
    batches: tuple[Tensor, ...]  # steps in an epoch, for each phase
    constants: Mapping[str, Any] = {}  # of the run: frozen weights, where training starts


class Learner(NamedTuple):
    """The state of a client that descends gradients: trainable vectors, buffers, its optimiser's state, and sums of
    the training loss and of steps."""

    vectors: dict[str, Tensor]
    static: dict[str, Tensor]
    optimiser: Any
    loss: Tensor
    steps: Tensor


class Upload(NamedTuple):
    """What a client sends (parts), what it keeps (own), and numbers to report (metrics, averaged over clients)."""

    parts: Parts
    own: Own
    metrics: dict[str, Tensor]


Step = Callable[[State, Any, Tape, Info], State]  # of a Batch, or of a tuple of them where a phase reads several


class Phase(NamedTuple):
    """`epochs` passes over the client's data in shuffled batches; a step reads `batches` of them at once.

    `begin` is done once before the first step, and may change the shape of the state. Where a phase is `private`, each
    step has a sample of the rows, each with probability batch / rows on its own, and adds noise to their gradients.
    """

    step: Step
    epochs: int
    batch: int
    batches: int = 1
    begin: Callable[[State, Info], State] | None = None
    private: bool = False


class Client(NamedTuple):
    """The functions of one client. `first(broadcast)` gives the own state of a client that was never here before."""

    start: Callable[[Own, Info], State]
    phases: tuple[Phase, ...]
    finish: Callable[[State, Info], Upload]
    first: Callable[[Parts], Own] = lambda broadcast: {}


def only_if(live: Tensor, new: Any, old: Any) -> Any:
    """new where live, else old, for every tensor of a state: a step without live rows changes nothing."""
    if isinstance(new, Tensor):
        # What a step only carries needs no choice.
        return new if not torch.compiler.is_compiling() and new is old else torch.where(live, new, old)
    if isinstance(new, dict):  # by name: a step may have put them in another order
        return {name: only_if(live, value, old[name]) for name, value in new.items()}
    if isinstance(new, tuple):
        parts = [only_if(live, a, b) for a, b in zip(new, old, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    # Values such as posteriors: not tree_map of both, which compares their classes, and not every compiler can.
    leaves, structure = tree_flatten(new)
    return tree_unflatten([only_if(live, a, b) for a, b in zip(leaves, tree_leaves(old), strict=True)], structure)


def falling_rate(b: Batch, info: Info, epochs: int) -> Tensor:
    """A learning rate that falls linearly to 0 within the round: lr * (1 - step / steps)."""
    return info.options["lr"] * (1 - b.step / (epochs * info.batches[0]))
