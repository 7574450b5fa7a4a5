"""Code as a user would bring it to a federation: networks in float64, and sites that know their own rows alone."""

from math import prod

import torch
from torch import nn

from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.data import Dataset, from_arrays
from fedbayes.federation.program import Stage
from fedbayes.posterior.values import Point


def net(shape, outputs, width=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.Tanh(), nn.Linear(width, outputs)).double()


def norm_net(shape, outputs):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs)
    ).double()


def plane(rows: int = 60, test: int = 24) -> Dataset:
    """Three classes around three corners of a plane."""
    random = torch.Generator().manual_seed(3)
    y = torch.arange(rows + test) % 3
    x = torch.eye(3)[y][:, :2] * 2 + 0.7 * torch.randn(rows + test, 2, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="plane")


class Taker(nn.Module):
    """A network that takes two inputs by name, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 6).double(), nn.Linear(6, 3).double()

    def forward(self, place, weight):
        return {"logits": self.head(torch.tanh(self.first(place)) * weight), "weight": weight}


def taker(shape, outputs):
    return Taker()


def fields() -> Dataset:
    """The plane with a weight beside each place."""
    data = plane()
    x, test_x = ({"place": t, "weight": t.abs().sum(1, keepdim=True).long()} for t in (data.x, data.test_x))
    return from_arrays(x, data.y, test_x, data.test_y, name="fields")


def line(rows: int = 60, test: int = 24) -> Dataset:
    """A noisy line."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows + test, 2, generator=random)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(rows + test, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="line", standardise=True)


def site(client: int | None, *, public: bool = False) -> Dataset:
    """Client k has every third row from k on; the server has one example, and test rows where `public`."""
    data = plane()
    if client is None:
        tests = (data.test_x, data.test_y) if public else (None, None)
        return from_arrays(data.x[:1], data.y[:1], *tests, classes=3, name="plane")
    mine = slice(client, None, 3)
    return from_arrays(data.x[mine], data.y[mine], data.test_x[mine], data.test_y[mine], classes=3, name="plane")


def odd_site(client: int | None) -> Dataset:
    """A site whose rows have another shape than the server thinks."""
    if client is None:
        return site(None)
    return from_arrays(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), classes=3)


def line_site(client: int | None) -> Dataset:
    """Sites with real targets, in units that all share."""
    data, mine = line(), slice(0, 1) if client is None else slice(client, None, 3)
    return from_arrays(data.x[mine], data.y[mine], name="line")


def in_turn(labels, clients, rng):
    """Rows dealt like cards."""
    return [list(range(k, len(labels), clients)) for k in range(clients)]


def shrinking(factor=0.5):
    """Goes a part of the way to the pool, and counts its rounds."""

    def apply(context, state, parts):
        old, q = context.order.broadcast["model"].mean, parts["model"]
        return {**parts, "model": Point(old + factor * (q.mean - old), q.layout)}, state + 1, {}

    return Stage("shrinking", lambda parts: torch.zeros(()), apply)


def descent(model, *, epochs, batch):
    """Plain gradient descent from where the client was last."""

    def start(own, info):
        return (info.broadcast["model"].mean + own["last"]) / 2

    def step(w, b, tape, info):
        def loss(w):
            weights = model.weights({"model": w})
            return model.nll(model.output(weights, b.x), b.y, b.mask, weights)

        return w - info.options["lr"] * torch.func.grad(loss)(w)

    def finish(w, info):
        return Upload({"model": Point(w, model.layouts["model"])}, {"last": w}, {"length": w.norm()})

    return Client(start, (Phase(step, epochs, batch),), finish, lambda broadcast: {"last": broadcast["model"].mean})
