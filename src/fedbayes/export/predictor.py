"""What is exported as modules: one draw of the weights, and all draws together with what they say."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.model.call import arguments_of, fill, tensor_in
from fedbayes.model.model import Model


class Member(nn.Module):
    """One draw of the weights as a plain module: inputs as they are stored in, mean and variance of the target out."""

    def __init__(self, model: Model, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        frozen = {name for weights in model.frozen.values() for name in weights}
        held = {id(p): p for name, p in model.still.named_parameters() if name in frozen}  # one body for all members
        self.network = copy.deepcopy(model.still, held)
        fill(self.network, weights)
        for name, t in weights.items():
            if name.startswith("likelihood."):
                self.register_buffer(name.replace(".", "_"), t.clone())
        self.taken = [name for name in weights if name.startswith("likelihood.")]
        self.model = (model,)  # in a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model[0]
        args, names = arguments_of(model.inputs(x))
        output = tensor_in(self.network(*args, **names)).to(model.dtype)
        return model.moments(output, {name: getattr(self, name.replace(".", "_")) for name in self.taken})


def summary(
    means: Tensor, variances: Tensor, kind: str, units: tuple[Tensor, Tensor] | None, noise: Tensor | None
) -> dict[str, Tensor]:
    """What the draws [Z, N, C] say together; aleatoric and epistemic variances add up to the total.

    `noise` [2, C]: the observation noise that was estimated, and a factor on the draws' disagreement.
    """
    mean = means.mean(0)
    aleatoric, epistemic = variances.mean(0), (means - mean).square().mean(0)
    if kind == "real":
        if noise is not None:
            aleatoric, epistemic = noise[0].expand_as(mean), noise[1] * epistemic
        if units is not None:
            mean, aleatoric, epistemic = (
                mean * units[1] + units[0],
                aleatoric * units[1] ** 2,
                epistemic * units[1] ** 2,
            )
        return {"mean": mean, "aleatoric": aleatoric, "epistemic": epistemic}
    if kind == "survival":
        ranked, last, ends = means.sort(0).values, means.shape[0] - 1, []
        for place in (0.05 * last, 0.95 * last):  # 90 % of the draws lie between them
            below = int(place)
            ends.append(ranked[below] + (place - below) * (ranked[min(below + 1, last)] - ranked[below]))
        parts = {"aleatoric": aleatoric, "epistemic": epistemic}
        return {"survival": mean, "low": ends[0], "high": ends[1], **parts}

    def entropy(p: Tensor) -> Tensor:
        own = -p * p.clamp(min=1e-38).log()
        other = (1 - p) * (1 - p).clamp(min=1e-38).log() if kind == "labels" else torch.zeros_like(p)
        return (own - other).sum(-1)

    total, expected = entropy(mean), entropy(means).mean(0)
    return {
        "probs": mean,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "entropy": total,
        "mutual_information": (total - expected).clamp(min=0),
    }


class Predictor(nn.Module):
    """Members together: inputs [N, ...] in, a dict of arrays out."""

    def __init__(
        self, members: list[Member], kind: str, units: tuple[Tensor, Tensor] | None, noise: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("noise", noise)
        self.members = nn.ModuleList(members)
        self.kind = kind
        self.has_units = units is not None
        if units is not None:
            self.register_buffer("shift", torch.as_tensor(units[0]))
            self.register_buffer("spread", torch.as_tensor(units[1]))

    @property
    def outputs(self) -> list[str]:
        """The names of what it gives."""
        nothing = torch.zeros(1, 1, 1)
        return list(summary(nothing, nothing, self.kind, None, None))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = [member(x) for member in self.members]
        units: Any = (self.shift, self.spread) if self.has_units else None
        noise: Any = self.noise
        means, variances = (torch.stack(values) for values in zip(*outputs))
        return summary(means, variances, self.kind, units, noise)
