"""Code as a user would bring it to a federation: sites that know their own rows alone, networks in float64."""

import torch
from torch import nn

from fedbayes.data import Dataset, from_arrays, load


def net(shape, outputs, width=6):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(shape.numel() if hasattr(shape, "numel") else _size(shape), width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    ).double()


def norm_net(shape, outputs):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_size(shape), 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs)
    ).double()


def _size(shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def plane(rows: int = 60, test: int = 24) -> Dataset:
    """Three classes around three corners of a plane."""
    random = torch.Generator().manual_seed(3)
    y = torch.arange(rows + test) % 3
    x = torch.eye(3)[y][:, :2] * 2 + 0.7 * torch.randn(rows + test, 2, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="plane")


def line(rows: int = 60, test: int = 24) -> Dataset:
    """A noisy line."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows + test, 2, generator=random)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(rows + test, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="line", standardise=True)


def site(client: int | None, *, public_test: bool = False, fail_on: int | None = None) -> Dataset:
    """Client k has every third row from k on; the server has one example, and test rows where asked."""
    data = plane()
    if client is None:
        test = (data.test_x, data.test_y) if public_test else (None, None)
        return from_arrays(data.x[:1], data.y[:1], *test, classes=3, name="plane")
    if client == fail_on:
        raise RuntimeError("this machine has no such rows")
    at, tests = slice(client, None, 3), slice(client, None, 3)
    return from_arrays(data.x[at], data.y[at], data.test_x[tests], data.test_y[tests], classes=3, name="plane")


def digits() -> Dataset:
    return load("digits")
