"""A group of a network's weights as a function of its own: the classifier of cached features, or of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.model.interception import Interception
from fedbayes.model.model import Model
from fedbayes.posterior.layout import Layout, matches

HEAD = "head"  # as a pattern: the last layer that has weights, whatever its name
Vectors = Mapping[str, Any]  # of parts, and frozen weights by name


@dataclass(frozen=True, eq=False)
class Group:
    """Weights of one part of a network, found by pattern.

    Where they are those of the last linear map, what is seen of an input is its features, which do not depend on
    them: a pass over the data caches all that training or curvature of the group needs. Otherwise it is the input.
    """

    model: Model
    part: str
    layout: Layout
    places: Tensor  # of the group in the part's vector
    linear: bool  # the last linear map
    blank: Tensor  # [0, ...], shaped and typed as what is seen of inputs

    @property
    def bias(self) -> bool:
        return len(self.layout.names) == 2

    def of(self, vectors: Vectors) -> Tensor:
        """The group's weights [p] in the vectors of all parts."""
        return vectors[self.part].index_select(-1, self.places)

    def look(self, vectors: Vectors, x: Tensor) -> Tensor:
        """What the group sees of stored inputs, in evaluation mode."""
        if not self.linear:
            return x
        weights, inputs = self.model.weights(vectors), []
        ours = weights[self.layout.names[0]]

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is ours:
                inputs.append(input)
            return F.linear(input, weight, bias)

        with Interception({F.linear: linear}):
            self.model.output(weights, x)
        return inputs[-1].to(self.blank.dtype)

    def output(self, vector: Tensor, seen: Tensor, vectors: Vectors) -> Tensor:
        """The network's output [B, C] with the group's weights [p] in place of those in the vectors."""
        own = self.layout.split(vector)
        if self.linear:
            return F.linear(seen, *own.values())
        return self.model.output({**self.model.weights(vectors), **own}, seen)


def group_of(model: Model, network: nn.Module, patterns: tuple[str, ...], x: Tensor) -> Group:
    """The group whose names match; `x` is a batch of stored inputs for a dry run."""
    patterns = tuple(last_layer(network) if p == HEAD else p for p in patterns)
    parts = [part for part, layout in model.trainable.items() if layout.select(*patterns).names]
    if len(parts) != 1:
        problem = f"lie in the parts {', '.join(parts)}" if parts else "match no weight"
        raise InputError(f"classifier: {', '.join(patterns)} {problem}; give patterns of weights of one part")
    (part,) = parts
    layout = model.layouts[part].select(*patterns)
    places = model.layouts[part].where(*patterns).nonzero()[:, 0].to(x.device)
    group = Group(model, part, layout, places, _is_last(model, layout, x), x[:0])
    if not group.linear:
        return group
    features = _features(model, layout, x)
    return Group(model, part, layout, places, True, features[:0])


def last_layer(network: nn.Module) -> str:
    """The pattern of the last layer that has weights; `head` itself where a weight has that name."""
    names = [name for name, _ in network.named_parameters()]
    if any(matches(name, [HEAD]) for name in names):
        return HEAD
    owner = names[-1].rpartition(".")[0]
    return f"{owner}.*" if owner else "*"


def _features(model: Model, layout: Layout, x: Tensor) -> Tensor:
    blank = torch.zeros(0, dtype=model.dtype, device=x.device)
    with torch.no_grad():
        return Group(model, "", layout, torch.zeros(0), True, blank).look(model.initial(), x)


def _is_last(model: Model, layout: Layout, x: Tensor) -> bool:
    """Whether the layout is weight and bias of the linear map that gives the network's output, used only there."""
    shapes = [len(shape) for shape in layout.shapes]
    if shapes not in ([2], [2, 1]) or len({name.rpartition(".")[0] for name in layout.names}) > 1:
        return False
    weights = {n: t.clone() for n, t in model.weights(model.initial()).items()}
    ours, calls = weights[layout.names[0]], []

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = F.linear(input, weight, bias)
        calls.append((weight is ours and input.dim() == 2, output))
        return output

    with torch.no_grad(), Interception({F.linear: linear}):
        output = model.output(weights, x)
    uses = sum(mine for mine, _ in calls)
    return uses == 1 and calls[-1][0] and torch.equal(calls[-1][1].to(output.dtype), output)
