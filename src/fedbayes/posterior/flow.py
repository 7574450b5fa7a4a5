"""Normalising flows as values: chains of radial or planar steps, and the posterior that they make of a base.

Rezende and Mohamed (2015). A chain of both kinds is a flow over a flow: `Flowed(Flowed(base, radial), planar)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbayes.posterior.layout import Layout

BISECTIONS = 60  # halvings of the interval that a planar step's inverse lies in


@dataclass(frozen=True)
class Radial:
    """L steps  y = x + b (x - x0) / (a + |x - x0|)  with a = softplus(alpha), b = softplus(beta) - a > -a.

    centre [..., L, P]; alpha and beta [..., L]. Equal alpha and beta: b = 0, the identity.
    """

    centre: Tensor
    alpha: Tensor
    beta: Tensor

    @classmethod
    def identity(cls, centre: Tensor) -> Radial:
        """Steps that leave everything where it is, around centres [..., L, P]."""
        zero = centre.new_zeros(centre.shape[:-1])
        return cls(centre, zero, zero.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images of x [..., P], and the logarithm of the Jacobian's determinant [...].

        With h = 1 / (a + r), r = |x - x0|:  det = (1 + b h)^(P - 1) * (1 + a b h^2).
        """
        total = x.new_zeros(())
        for l in range(self.alpha.shape[-1]):
            centre, a, b = self._step(l)
            away = x - centre
            h = 1 / (a + torch.linalg.vector_norm(away, dim=-1))
            total = total + (x.shape[-1] - 1) * torch.log1p(b * h) + torch.log1p(a * b * h.square())
            x = x + (b * h)[..., None] * away
        return x, total

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` carries to y [..., P], and the forward map's log-determinant there.

        With R = |y - x0| the distance r = |x - x0| is the positive root of  r^2 + (a + b - R) r - a R = 0.
        """
        total = y.new_zeros(())
        for l in reversed(range(self.alpha.shape[-1])):
            centre, a, b = self._step(l)
            away = y - centre
            distance = torch.linalg.vector_norm(away, dim=-1)
            half = 0.5 * (distance - (a + b))
            root = (half.square() + a * distance).sqrt()
            # The root as a sum of positive terms on either side, or small distances would be lost in a difference.
            r = torch.where(half > 0, half + root, a * distance / (root - half).clamp(min=1e-30))
            h = 1 / (a + r)
            total = total + (y.shape[-1] - 1) * torch.log1p(b * h) + torch.log1p(a * b * h.square())
            y = centre + away / (1 + b * h)[..., None]
        return y, total

    def _step(self, l: int) -> tuple[Tensor, Tensor, Tensor]:
        a = F.softplus(self.alpha[..., l])
        return self.centre[..., l, :], a, F.softplus(self.beta[..., l]) - a


@dataclass(frozen=True)
class Planar:
    """L steps  y = x + u tanh(w.x + shift),  u moved along w until  w.u = softplus(w.v) - 1 > -1, so that it inverts.

    direction v and weight w [..., L, P]; shift [..., L]. The inverse is a scalar equation, solved by bisection.
    """

    direction: Tensor
    weight: Tensor
    shift: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images of x [..., P], and  log det = log(1 + w.u (1 - tanh^2))  [...]."""
        total = x.new_zeros(())
        for l in range(self.shift.shape[-1]):
            w, u, dot, shift = self._step(l)
            t = torch.tanh((x * w).sum(-1) + shift)
            total = total + torch.log1p(dot * (1 - t.square()))
            x = x + t[..., None] * u
        return x, total

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` carries to y [..., P], and the forward map's log-determinant there.

        s = w.x solves  s + w.u tanh(s + shift) = w.y,  whose left side grows with s.
        """
        total = y.new_zeros(())
        for l in reversed(range(self.shift.shape[-1])):
            w, u, dot, shift = self._step(l)
            t = torch.tanh(_solve((y * w).sum(-1), dot, shift) + shift)
            total = total + torch.log1p(dot * (1 - t.square()))
            y = y - t[..., None] * u
        return y, total

    def _step(self, l: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w, v = self.weight[..., l, :], self.direction[..., l, :]
        dot = (w * v).sum(-1)
        free = F.softplus(dot) - 1
        u = v + ((free - dot) / w.square().sum(-1).clamp(min=1e-30))[..., None] * w
        return w, u, free, self.shift[..., l]


def _solve(target: Tensor, dot: Tensor, shift: Tensor) -> Tensor:
    """s with s + dot * tanh(s + shift) = target; a last Newton step carries the gradient."""
    with torch.no_grad():
        low, high = target - dot.abs(), target + dot.abs()
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            above = middle + dot * torch.tanh(middle + shift) > target
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        s = (0.5 * (low + high)).detach()
    t = torch.tanh(s + shift)
    return s - (s + dot * t - target) / (1 + dot * (1 - t.square())).detach()


FLOWS: dict[str, type[Any]] = {"radial": Radial, "planar": Planar}


@dataclass(frozen=True)
class Flowed:
    """The base's draws carried by a flow: density p(x) / |det dT/dx| at T(x) (pFedPF eq. 14)."""

    base: Any
    flow: Any
    layout: Layout | None = None

    @property
    def mean(self) -> Tensor:
        """Where the base's mean is carried: a centre, not the expectation, which takes draws."""
        return self.flow.forward(self.base.mean)[0]

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors [draws, ..., P]."""
        return self.flow.forward(self.base.sample(draws, generator))[0]

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., P] stand for."""
        return self.flow.forward(self.base.at(noise))[0]

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights [..., P], by the flow's inverse."""
        x, log_det = self.flow.inverse(weights)
        return self.base.log_prob(x) - log_det

    def moments(self) -> tuple[Tensor, Tensor]:
        raise TypeError("a flow has no moments in closed form; take draws")

    def kl(self, prior: Any) -> Tensor:
        raise TypeError("a flow has no KL in closed form; average log_prob differences over draws")

    def naturals(self) -> tuple[Tensor, Tensor]:
        raise TypeError("a flow has no natural parameters; its base may")

    def named(self) -> dict[str, Any]:
        raise TypeError("a flow mixes all weights of its part; split draws of it with its layout")


for _kind in FLOWS.values():
    pytree.register_pytree_node(
        _kind,
        lambda flow: ([getattr(flow, name) for name in flow.__dataclass_fields__], type(flow)),
        lambda leaves, kind: kind(*leaves),
    )


def reverse_kl(q: Flowed, log_target: Any, noise: Tensor) -> Tensor:
    """KL(q || target) over draws given by normals [S, P], up to the target's constant (pFedPF eqs. 9, 10)."""
    x = q.base.at(noise)
    y, log_det = q.flow.forward(x)
    return (q.base.log_prob(x) - log_det - log_target(y)).mean()


def spread(centre: Tensor, steps: int, noise: Tensor) -> Tensor:
    """Centres [steps, P] around one, a unit distance away in the directions of normals [steps, P]."""
    return centre + noise.reshape(steps, -1) / math.sqrt(centre.shape[-1])
