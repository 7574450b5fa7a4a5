"""The eager, client-by-client loop that people write today: the denominator of every ratio. Plain PyTorch, no library.

Written with care, so that it is no slower than it need be: data are tensors on the device, batches are slices of a
permutation, nothing is copied to the host in a round.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BayesLinear(nn.Module):
    """A linear layer with normal weights and local reparameterisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(outputs, inputs).uniform_(-1, 1) / math.sqrt(inputs))
        self.rho = nn.Parameter(torch.full((outputs, inputs), -2.3))
        self.bias_mean = nn.Parameter(torch.zeros(outputs))
        self.bias_rho = nn.Parameter(torch.full((outputs,), -2.3))

    def forward(self, x: Tensor) -> Tensor:
        mean = F.linear(x, self.mean, self.bias_mean)
        variance = F.linear(x * x, F.softplus(self.rho) ** 2, F.softplus(self.bias_rho) ** 2)
        return mean + (variance + 1e-16).sqrt() * torch.randn_like(mean)


class BayesConv(nn.Module):
    """A convolution with normal weights and local reparameterisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(outputs, inputs, 3, 3).uniform_(-1, 1) / math.sqrt(9 * inputs))
        self.rho = nn.Parameter(torch.full((outputs, inputs, 3, 3), -2.3))
        self.bias_mean = nn.Parameter(torch.zeros(outputs))
        self.bias_rho = nn.Parameter(torch.full((outputs,), -2.3))

    def forward(self, x: Tensor) -> Tensor:
        mean = F.conv2d(x, self.mean, self.bias_mean)
        variance = F.conv2d(x * x, F.softplus(self.rho) ** 2, F.softplus(self.bias_rho) ** 2)
        return mean + (variance + 1e-16).sqrt() * torch.randn_like(mean)


def mlp(bayes: bool) -> nn.Module:
    layer = BayesLinear if bayes else nn.Linear
    return nn.Sequential(nn.Flatten(), layer(784, 50), nn.ReLU(), layer(50, 50), nn.ReLU(), layer(50, 10))


def cnn(bayes: bool) -> nn.Module:
    conv = BayesConv if bayes else (lambda i, o: nn.Conv2d(i, o, 3))
    layer = BayesLinear if bayes else nn.Linear
    body = [conv(3, 32), nn.ReLU(), nn.MaxPool2d(2), conv(32, 32), nn.ReLU(), nn.MaxPool2d(2), conv(32, 32), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), layer(512, 64), nn.ReLU(), layer(64, 10))


def kl(network: nn.Module, prior: list[Tensor]) -> Tensor:
    """Summed KL to the broadcast; parameters alternate (mean, rho)."""
    total = torch.zeros((), device=prior[0].device)
    values = list(network.parameters())
    for mean, rho, m0, s0 in zip(values[::2], values[1::2], prior[::2], prior[1::2]):
        scale = F.softplus(rho)
        total = total + (torch.log(s0 / scale) + (scale**2 + (mean - m0) ** 2) / (2 * s0**2) - 0.5).sum()
    return total


def train_client(network: nn.Module, x: Tensor, y: Tensor, *, batch: int, epochs: int, draws: int = 0) -> None:
    """One client's round in place: SGD on the NLL, for draws > 0 the mean over draws plus the weighted KL."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
    prior = [p.detach().clone() if i % 2 == 0 else F.softplus(p.detach()) for i, p in enumerate(network.parameters())]
    for _ in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        for start in range(0, len(x), batch):
            rows = order[start : start + batch]
            xb, yb = x[rows], y[rows]
            optimiser.zero_grad(set_to_none=True)
            loss = sum(F.cross_entropy(network(xb), yb) for _ in range(max(draws, 1))) / max(draws, 1)
            if draws:
                loss = loss + 1e-4 * kl(network, prior)
            loss.backward()
            optimiser.step()


def round_of(network: nn.Module, clients: list[tuple[Tensor, Tensor]], **options: int) -> nn.Module:
    """One round: every client from the same start, then the mean of the parameters."""
    trained = []
    for x, y in clients:
        own = copy.deepcopy(network)
        train_client(own, x, y, **options)
        trained.append(list(own.parameters()))
    with torch.no_grad():
        for place, p in enumerate(network.parameters()):
            p.copy_(torch.stack([values[place] for values in trained]).mean(0))
    return network
