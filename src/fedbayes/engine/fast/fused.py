"""Steps on chains of linear maps as a few kernels for all clients: products, noise, KL and update in one.

Under local reparameterisation a layer is  x m + b + sqrt(x^2 s^2 + s_b^2) * noise.  A step reads means and scales of
all clients twice and writes them once, six passes in all, and keeps nothing else of their size; a natural-gradient step
(IVON) has its running mean of gradients beside them, and points have means alone; of points that are draws of the
weights the gradient is all that is made. Rows are the batch, once for each draw. Written in Triton, for a GPU; equal to
the client's own step up to rounding, on the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients import ivon
from fedbayes.clients.client import Batch, Info, Learner, falling_rate
from fedbayes.clients.variational import KL_WEIGHTS
from fedbayes.engine.fast.forms import Bayes

TILE = 64  # inputs of a layer that a program takes at once
NARROW = 32  # of those whose weights it moves: both fit in registers, so that more programs run at once
WIDEST = 128  # outputs of a layer, and rows of a batch, that fit in a program's registers
PROGRAMS = 400  # about as many keep a large GPU busy


def available() -> bool:
    """Whether Triton is there to make the kernels, and products may be TF32's: in float32 compiled steps are faster."""
    if torch.get_float32_matmul_precision() == "highest":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def fits(form: Bayes, batch: int) -> bool:
    """Whether rows and outputs fit in a program's registers."""
    return form.draws * batch <= WIDEST and all(outputs <= WIDEST for _, outputs, _ in form.layers)


class Place(NamedTuple):
    """Where a layer's numbers are: its weights and its bias in the vector, its normals on the tape."""

    inputs: int
    outputs: int
    bias: bool
    weight_at: int
    noise_at: int
    splits: int  # programs that share the inputs of a client's layer

    @property
    def bias_at(self) -> int:
        return self.weight_at + self.inputs * self.outputs


def places(form: Bayes, clients: int, batch: int) -> list[Place]:
    """The layers in the order of the vector and of the tape."""
    made, weight, noise = [], 0, 0
    for inputs, outputs, bias in form.layers:
        tiles = -(-inputs // TILE)
        splits = max(1, min(tiles, PROGRAMS // clients))
        made.append(Place(inputs, outputs, bias, weight, noise, splits))
        weight += inputs * outputs + outputs * bias
        noise += batch * outputs
    return made


def stepping(form: Bayes) -> Callable[..., Learner]:
    """One step of every client on batches [clients, 1, B, ...]. It changes the state's own memory."""

    def step(
        state: Learner, xs: Tensor, ys: Tensor, live: Tensor | None, noise: Tensor, at: Tensor, info: Info
    ) -> Learner:
        _run(form, state, _vectors(form, state.vectors), _batch(form, xs, ys, live, at), noise, info)
        return state

    return step


def slopes(form: Bayes) -> Callable[..., None]:
    """The gradient of every client at `weights` on such batches goes into `slope`; the state counts loss and steps."""

    def step(
        state: Learner, xs: Tensor, ys: Tensor, live: Tensor | None, noise: Tensor, at: Tensor, info: Info,
        weights: Tensor, slope: Tensor,
    ) -> None:  # fmt: skip
        _run(form, state, (weights, slope), _batch(form, xs, ys, live, at), noise, info)

    return step


def _batch(form: Bayes, xs: Tensor, ys: Tensor, live: Tensor | None, at: Tensor) -> Batch:
    """Rows [clients, B, inputs] as the first layer sees them."""
    clients, batch = xs.shape[0], xs.shape[2]
    x = form.inputs(xs.flatten(0, 2)).reshape(clients, batch, -1)
    if live is not None:
        x = x.masked_fill(~live[:, 0, :, None], 0)  # a padded row may hold anything, and 0 * inf is nan
    return Batch(x, ys[:, 0], None if live is None else live[:, 0], at)


def _run(form: Bayes, state: Learner, vectors: tuple[Tensor, Tensor], b: Batch, noise: Tensor, info: Info) -> None:
    """A step from these vectors; of draws of the weights the second is what their gradient is written to."""
    kernels, (mean, spread_of) = _kernels(), vectors
    (clients, batch, _), rows = b.x.shape, form.draws * b.x.shape[1]
    layers = places(form, clients, batch)
    x = b.x.contiguous()
    counts = None if b.mask is None else b.mask.sum(-1, dtype=torch.int32)
    weight, rate, numbers = _numbers(form, state, b, info)
    shape = {
        "K": clients, "P": mean.shape[1], "NORMALS": noise.shape[1] // form.draws, "R": rows, "B": batch,
        "ROWS": _padded(rows), "PRECISION": _precision(), "KIND": form.kind,
    }  # fmt: skip

    def empty(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=torch.float32, device=x.device)

    inputs: list[Tensor] = [x]
    slopes: list[Tensor] = []
    below: tuple[Tensor, Place] | None = None  # sums of the layer below, by split
    for layer in layers:
        sums = empty(1 if form.points else 2, layer.splits, clients, rows, layer.outputs)
        seen = x if below is None else empty(clients, rows, layer.inputs)
        slope = x if below is None else empty(clients, rows, layer.inputs)  # of an output in its variance
        under, place = (sums, layer) if below is None else below
        chunks = -(-layer.inputs // (TILE * layer.splits))
        kernels.forward[(clients, layer.splits)](
            mean, spread_of, numbers, x, under, noise, seen, slope, sums,
            layer.weight_at, place.bias_at, place.noise_at, noise.stride(0),
            IN=layer.inputs, OUT=layer.outputs, OUTS=_padded(layer.outputs), TILE=TILE, CHUNKS=chunks,
            SPLITS=layer.splits, BELOW=place.splits, FIRST=below is None, BIAS=place.bias,
            ACT="" if below is None else form.between[len(slopes) - 1], num_stages=2, **shape,
        )  # fmt: skip
        if below is not None:
            inputs.append(seen)
        slopes.append(slope)
        below = sums, layer
    assert below is not None
    last = layers[-1]
    down, spread = empty(clients, rows, last.outputs), empty(clients, rows, last.outputs)
    kernels.head[(clients,)](
        mean, spread_of, numbers, below[0], noise, b.y, counts, b.mask, down, spread, state.loss, state.steps,
        state.optimiser["count"] if form.newton else state.steps,
        last.bias_at, last.noise_at, noise.stride(0), form.scale or 1.0,
        OUT=last.outputs, OUTS=_padded(last.outputs), BELOW=last.splits, BIAS=last.bias, CLASSES=form.scale is None,
        MASKED=counts is not None, MORE=form.newton is not None, **shape,
    )  # fmt: skip
    velocity, prior = (spread_of, spread_of), (mean, mean)
    if form.prior:
        q: Any = info.broadcast["model"]
        prior = (q.mean, q.scale) if form.prior == "broadcast" else (mean, info.options["prior_scale"])
    if form.newton and not form.drawn:
        velocity = (state.optimiser["first"]["mean"], spread_of)
    elif form.momentum:
        velocity = _vectors(form, state.optimiser)
    for number in reversed(range(len(layers))):
        layer, first = layers[number], number == 0
        lower = (down, spread) if first else (empty(clients, rows, layer.inputs), empty(clients, rows, layer.inputs))
        kernels.backward[(clients, -(-layer.inputs // NARROW))](
            mean, spread_of, *velocity, *prior, inputs[number], slopes[number], down, spread, *lower, counts,
            weight, rate, numbers, layer.weight_at, layer.bias_at, weight.stride(0), rate.stride(0),
            prior[0].stride(0) if prior[0].dim() > 1 else 0, prior[1].stride(0) if prior[1].dim() > 1 else 0,
            IN=layer.inputs, OUT=layer.outputs, OUTS=_padded(layer.outputs), TILE=NARROW, FIRST=first,
            BIAS=layer.bias, ACT="" if first else form.between[number - 1], FIXED=form.prior != "broadcast",
            MOMENTUM=form.momentum, MOVES=not form.drawn,
            AVERAGE=form.newton is not None and form.newton.curvature == "average",
            IMPLICIT=form.newton is not None and form.newton.implicit, FARTHEST=ivon.FARTHEST, SAID=ivon.LEAST_SAID,
            MASKED=counts is not None, **shape,
        )  # fmt: skip
        down, spread = lower


def _vectors(form: Bayes, named: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Means, and what tells the scales; of points, which have none, the one vector that there is, twice."""
    if form.points:
        (only,) = named.values()
        return only, only
    return named["mean"], named["precision" if form.newton else "rho"]


def _numbers(form: Bayes, state: Learner, b: Batch, info: Info) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of the KL and the rate for each client, and the table [clients, 8] of what else IVON's step needs."""
    options = info.options
    if form.newton is None:
        rate = falling_rate(b, info, form.epochs) if form.falling else options["lr"]
        weight = KL_WEIGHTS[form.kl](b, info) if form.kl else rate
        return _by_client(weight), _by_client(rate), state.loss
    if form.drawn:  # a gradient needs none
        return state.loss, state.loss, state.loss
    table = numbers(form, state, b.step[None], None, info)[0][0]
    return table[:, 0], table[:, 1], table


def numbers(form: Bayes, state: Learner, at: Tensor, live: Tensor | None, info: Info) -> tuple[Tensor, Tensor]:
    """What several steps of IVON, of which `live` [steps, clients] are taken, are made with: tables of numbers, and
    what is added to the prior's precision, [steps, clients, ...], as the kernels have them."""
    options, newton = info.options, form.newton
    assert newton is not None
    steps, clients = len(at), len(state.steps)
    table = torch.empty(steps, clients, 9 if form.drawn else 8, dtype=torch.float32, device=at.device)
    begun = table.new_empty(steps, clients)
    weight = KL_WEIGHTS[form.kl](Batch(at, at, None, at[0]), info)  # the same in all steps of a round
    memory = options["beta2" if newton.remembers else "curvature_memory"]
    given = (weight, options["lr"], options["beta1"], memory, options["least_curvature"], options["prior_scale"])
    columns = [_by_client(value) for value in (*given, info.round, info.batches[0])]
    _kernels().numbers[(clients,)](
        table, begun, *columns, state.steps, at, live, *(column.stride(0) for column in columns), steps,
        K=clients, EPOCHS=form.epochs, FALLING=form.falling, REMEMBERS=newton.remembers,
        BEGINNING=ivon.BEGINNING, SINGLE=ivon.SINGLE, STEADY=ivon.STEADY, MASKED=live is not None, DRAWN=form.drawn,
    )  # fmt: skip
    return table, begun


def _padded(count: int) -> int:
    """The next power of two that a product of tiles takes."""
    return max(16, 1 << (count - 1).bit_length())


def _precision() -> str:
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _by_client(value: Tensor) -> Tensor:
    """A number for each client; of one for all, a step of 0 from one to the next."""
    return value.reshape(-1) if value.dim() else value.reshape(1).expand(2)


@cache
def _kernels() -> Any:
    from fedbayes.engine.fast import kernels

    return kernels
