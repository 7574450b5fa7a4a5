"""Estimators of E_q[loss] over an unmodified module: weight sampling, local reparameterisation, Flipout.

Local reparameterisation and Flipout take over the linear maps (Linear, Conv1d to 3d) whose weight is used nowhere else.
Every other weight (embedding, norm, attention projection, tied or reused) is sampled. All noise comes from one tape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedbayes.model.convolution import Kernels, Normal, conv2d, own_kernels_for
from fedbayes.model.interception import Handler
from fedbayes.model.likelihood import Weights
from fedbayes.model.model import Model
from fedbayes.noise import Tape

# Linear maps of their input, and the number of their spatial axes.
LINEAR_MAPS: dict[Any, int] = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}

Map = Callable[[Tensor, Tensor], Tensor]  # input, weight -> output without bias
Estimate = Callable[[Map, Tensor, Normal, Normal | None, Tape, int, Kernels | None], Tensor]


def local(
    apply: Map,
    x: Tensor,
    weight: Normal,
    bias: Normal | None,
    tape: Tape,
    spatial: int,
    kernels: Kernels | None = None,
) -> Tensor:
    """Kingma et al. (2015): the output's own normal, mean x*m + b and variance x^2 * s^2 + s_b^2.

    For a convolution this drops the correlation of the noise between positions.
    """
    if kernels is not None:
        return kernels.local(x, weight, bias, tape)
    if x.is_cuda and not spatial:
        # Small products are bound by their launches: both at once.
        inputs, weights = torch.stack([x, x * x]), torch.stack(weight)
        mean, variance = vmap(apply)(inputs, weights).unbind(0)
    else:
        mean, variance = apply(x, weight[0]), apply(x * x, weight[1])
    if bias is not None:
        mean, variance = mean + bias[0], variance + bias[1]
    # A tiny constant keeps the gradient of the root finite where all inputs are zero.
    return mean + (variance + 1e-16).sqrt() * tape(mean)


def flipout(
    apply: Map,
    x: Tensor,
    weight: Normal,
    bias: Normal | None,
    tape: Tape,
    spatial: int,
    kernels: Kernels | None = None,
) -> Tensor:
    """Wen et al. (2018): one perturbation per batch, its sign flipped per example by random signs on both sides."""
    before, shift = _signs(x, x.shape, tape, spatial), weight[1] * tape(weight[1])
    if kernels is not None:
        after = _signs(x, (len(x), len(shift), 1, 1), tape, spatial)
        out = kernels.flipped(x, weight[0], shift, before, after)
    else:
        out = apply(x, weight[0])
        out = out + _signs(out, out.shape, tape, spatial) * apply(x * before, shift)
    return out if bias is None else out + bias[0] + bias[1] * tape(bias[1])


def _signs(like: Tensor, shape: Sequence[int], tape: Tape, spatial: int) -> Tensor:
    """Random signs per example and channel, the same over positions."""
    several = [n if i < len(shape) - spatial else 1 for i, n in enumerate(shape)]
    return torch.where(tape(like, several) < 0, -1.0, 1.0).to(like.dtype)


ESTIMATORS: dict[str, Estimate | None] = {"weight": None, "local": local, "flipout": flipout}


class Plan(NamedTuple):
    """Which weights an estimator takes over in a network, and how many normals a forward pass reads."""

    estimate: Estimate | None
    taken: frozenset[str]
    normals: int
    stacks: bool = True  # whether vmap can take several draws at once; not so for recurrent layers


def plan(model: Model, part: str, x: Tensor, estimator: str) -> Plan:
    """Dry runs on a batch of the right shape, until every weight taken over meets one linear map and nothing else."""
    estimate = ESTIMATORS[estimator]
    weights = model.weights(model.initial())
    gaussian = model.layouts[part].names
    taken = frozenset(gaussian) if estimate else frozenset()
    while True:
        met = _meetings(model, weights, x, taken)
        fit = frozenset(name for name in taken if met.get(name) == ["linear"])
        if fit == taken:
            break
        taken = fit
    draft = Plan(estimate, taken, 0)
    tape = Tape()
    means = model.layouts[part].join(weights)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        forward(model, part, means, torch.ones_like(means), weights, x, tape, None, draft)
    return draft._replace(normals=tape.used, stacks=_stacks(model, part, means, weights, x, tape.used, draft))


def _stacks(model: Model, part: str, means: Tensor, weights: Weights, x: Tensor, count: int, estimation: Plan) -> bool:
    def one(noise: Tensor, others: Weights) -> Tensor:
        return forward(model, part, means, torch.ones_like(means), others, x, Tape(noise), None, estimation)[0]

    copies = {n: t.expand(2, *t.shape).clone() for n, t in weights.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            vmap(one, randomness="different")(means.new_zeros(2, count), copies)
    except (RuntimeError, ValueError):
        return False
    return True


ANSWERS = (bool, int, tuple, torch.dtype, torch.device, torch.layout)  # of a question about a tensor, as its shape


class _Meetings(TorchFunctionMode):
    """Notes, for each watched tensor, the kind of call that it takes part in.

    A question about it is none, and neither is what gives it back as it is, as where it lies as asked already.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.met: dict[str, list[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        asked = isinstance(out, ANSWERS) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(out))
        if asked or (args and out is args[0]):
            return out
        weight = args[1] if func in LINEAR_MAPS and len(args) > 1 else kwargs.get("weight")
        ours = func in LINEAR_MAPS and id(weight) in self.names
        for place, value in [*enumerate(args), *kwargs.items()]:
            for tensor in value if isinstance(value, list | tuple) else [value]:
                name = self.names.get(id(tensor))
                if name:
                    linear = ours and place in (1, 2, "weight", "bias")
                    self.met.setdefault(name, []).append("linear" if linear else "other")
        return out


def _meetings(model: Model, weights: Weights, x: Tensor, taken: frozenset[str]) -> dict[str, list[str]]:
    values = model.as_read({n: t.detach().clone() for n, t in weights.items()})
    watch = _Meetings({id(values[n]): n for n in taken})
    with torch.no_grad(), torch.random.fork_rng(devices=[]), watch:
        model.train_output(values, x, Tape(), None)
    return watch.met


def forward(
    model: Model,
    part: str,
    mean: Tensor,
    scale: Tensor | None,
    others: Weights,
    x: Tensor,
    tape: Tape,
    mask: Tensor | None,
    estimation: Plan,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output for one draw from N(mean, scale^2), with the weights used and the buffer vectors after it.

    Without a scale the weights are the mean, and nothing is taken over.
    `others` are the named tensors of the parts that are points, and of the buffers.
    """
    means = model.as_read(model.layouts[part].split(mean))
    drawn = frozenset() if scale is None else means.keys() - estimation.taken
    scales = model.layouts[part].split(scale) if drawn and scale is not None else {}
    weights = {n: m + scales[n] * tape(m) if n in drawn else m for n, m in means.items()}
    weights = {**{n: t for n, t in others.items() if n not in weights}, **weights}
    handlers: Mapping[Any, Handler] = {}
    if estimation.estimate is not None and scale is not None:
        # All variances at once: one square, and one in the backward pass, for all tensors.
        spread = scale.square() if estimation.estimate is local else scale
        spreads = model.as_read(model.layouts[part].split(spread))
        ours = [(weights[n], spreads[n]) for n in estimation.taken]
        handlers = {
            func: _linear(func, spatial, ours, estimation.estimate, tape, model.channels_last)
            for func, spatial in LINEAR_MAPS.items()
        }
    output, static = model.train_output(weights, x, tape, mask, handlers)
    return output, weights, static


def _linear(
    func: Any, spatial: int, ours: list[Normal], estimate: Estimate, tape: Tape, channels_last: bool
) -> Handler:
    images = func is F.conv2d and channels_last
    plain = conv2d if images else func

    def find(tensor: Tensor | None) -> Normal | None:
        # By identity: a table keyed by id would not survive compilation.
        return next((row for row in ours if row[0] is tensor), None)

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        row = find(weight)
        if row is None:
            return plain(input, weight, bias, *args, **kwargs)
        column = [-1] + [1] * spatial
        pair = find(bias)
        normal = None if pair is None else (pair[0].reshape(column), pair[1].reshape(column))
        kernels = own_kernels_for(input, *args, **kwargs) if images else None
        out = estimate(lambda x, w: plain(x, w, None, *args, **kwargs), input, row, normal, tape, spatial, kernels)
        return out if bias is None or pair is not None else out + bias.reshape(column)

    return call
