"""A step of a model before the first round: what its network can't do is found out once."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.model.call import shared_copy
from fedbayes.model.model import Model
from fedbayes.model.order import as_written
from fedbayes.noise import Tape, seeded


def tried(model: Model, x: Tensor, other: Tensor) -> Model:
    """The model as its network can be run on stored inputs, of which these are two rows [1, ...]."""
    rows = torch.cat([x, x])
    model = _in_its_layout(replace(model, writes=True), rows)
    return _with_folds(replace(model, writes=_writes(model, rows)), x, other)


def _in_its_layout(model: Model, x: Tensor) -> Model:
    """Without channels last where the network needs the usual layout, as for `view` behind a convolution."""
    if not model.convolves or _runs(model, x):
        return model
    module, still, dropping = (as_written(shared_copy(m)) for m in (model.module, model.still, model.dropping))
    usual = replace(model, channels_last=False, module=module, still=still, dropping=dropping)
    return usual if _runs(usual, x) else model


def _runs(model: Model, x: Tensor) -> bool:
    """Whether the network takes a batch, in training and in evaluation."""
    own, weights = _uncalled(model), model.weights(model.initial())
    try:
        with torch.no_grad(), seeded(0, "trial", device=x.device):
            own.train_output(weights, x, Tape(), None)
            own.output(weights, x)
    except RuntimeError:
        return False
    return True


def _writes(model: Model, x: Tensor) -> bool:
    """Whether a network writes into its inputs. Of its weights it is refused: they are views of what others read."""
    # As it lies: in a layout of ours the network would see a copy.
    own, before_it = replace(_uncalled(model), writes=False, channels_last=False), _state(x)
    weights = model.as_read({name: t.clone() for name, t in model.weights(model.initial()).items()})
    constants = {n: b for n, b in own.module.named_buffers() if n not in weights}
    trained = {n: weights[n] for layout in model.trainable.values() for n in layout.names}
    before = {n: _state(t) for n, t in (trained | constants).items()}
    try:
        with torch.no_grad(), seeded(0, "trial", device=x.device):
            own.train_output(weights, x, Tape(), None)
    except Exception:  # it is told by whoever runs the network next, with what was asked for
        return False
    changed = [n for n, t in (trained | constants).items() if _state(t) != before[n]]
    if changed and changed[0] in constants:
        raise InputError(f"network: forward changes {changed[0]}, which is not finite or complex; let it begin at 0")
    if changed:
        raise InputError(
            f"network: forward changes the weight {changed[0]} itself (as max_norm of an Embedding does); "
            "use a parametrization (torch.nn.utils.parametrize) for what must hold of it"
        )
    return _state(x) != before_it


def _with_folds(model: Model, x: Tensor, other: Tensor) -> Model:
    """With the calls of BatchNorm that see all rows anew for each place of a time axis, which was moved to the front.

    Which rows of BatchNorm's inputs differ with one row of the batch tells them from those that see row by row.
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.module.modules()):
        return model
    batches = torch.cat([x, other, x]), torch.cat([x, x, x])
    tiled = set()
    try:
        for number, (a, b) in enumerate(zip(*(_norms_inputs(model, rows) for rows in batches))):
            places, differs = len(a) // 3, ~torch.isclose(a, b).flatten(1).all(1)
            if places > 1 and not differs.reshape(3, places)[::2].any():
                continue
            if places > 1 and not differs.reshape(places, 3)[:, ::2].any():
                tiled.add(number)
    except Exception:
        return model
    return replace(model, tiled=frozenset(tiled))


def _norms_inputs(model: Model, x: Tensor) -> list[Tensor]:
    """The input of each call of BatchNorm in training, which lets all rows through as they are."""
    inputs = []

    def note(input: Tensor, *_: object, **__: object) -> Tensor:
        inputs.append(input)
        return input

    own = _uncalled(model)
    with torch.no_grad(), seeded(0, "trial", device=x.device):
        own.train_output(own.weights(own.initial()), x, Tape(), None, {F.batch_norm: note})
    return inputs


def _state(tensor: Tensor) -> tuple[int, int]:
    """Which changes when the tensor is written to, or given other memory."""
    return tensor._version, tensor.data_ptr()


def _uncalled(model: Model) -> Model:
    """The same by copies of its modules, which may remember what they saw."""
    return replace(model, module=shared_copy(model.module), still=shared_copy(model.still))
