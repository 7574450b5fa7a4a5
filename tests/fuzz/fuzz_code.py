"""Data and networks as a user would bring them, so small that a round costs a moment."""

from dataclasses import replace

import torch
from torch import nn

from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.data import Dataset, from_arrays, from_clients, from_csv, from_folder
from fedbayes.federation.program import Stage


def blobs(rows: int = 48, test: int = 12) -> Dataset:
    """Three classes around three corners of a plane."""
    random = torch.Generator().manual_seed(3)
    y = torch.arange(rows + test) % 3
    x = torch.eye(3)[y][:, :2] * 2 + 0.7 * torch.randn(rows + test, 2, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="blobs")


def slope() -> Dataset:
    """A regression on a line."""
    x = torch.linspace(-1, 1, 40)[:, None]
    return from_arrays(x[::2], 2 * x[::2], x[1::2], 2 * x[1::2], name="slope", standardise=True)


def pixels() -> Dataset:
    """Small images of two classes."""
    x = torch.arange(30 * 64).reshape(30, 1, 8, 8).remainder(251).to(torch.uint8)
    return from_arrays(x[:20], torch.arange(20) % 2, x[20:], torch.arange(10) % 2, name="pixels")


def homes():
    """Two clients with data of their own."""
    data = blobs()
    return from_clients([(data.x[:20], data.y[:20]), (data.x[20:], data.y[20:])], (data.test_x, data.test_y))


def net(shape, outputs, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, outputs))


def norm_net(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs))


def failing(*_, **__):
    raise ZeroDivisionError("of the user's own code")


class Odd:
    pass


def table(path: str, kind: str = "classes") -> Dataset:
    return from_csv(path, "target", kind=kind, owner="site")


def folder(path: str) -> Dataset:
    return from_folder(path)


def in_turn(labels, clients, rng):
    """Rows dealt like cards."""
    return [list(range(k, len(labels), clients)) for k in range(clients)]


def halving():
    """Goes half of the way to the pool."""

    def apply(context, state, parts):
        old = context.order.broadcast["model"].mean
        return {**parts, "model": replace(parts["model"], mean=(old + parts["model"].mean) / 2)}, state, {}

    return Stage("halving", lambda parts: None, apply)


def lazy(model, batch=4):
    """Sends back what it received."""

    def finish(state, info):
        return Upload({part: info.broadcast[part] for part in model.layouts}, {}, {})

    return Client(lambda own, info: info.n, (Phase(lambda state, b, tape, info: state, 1, batch),), finish)
