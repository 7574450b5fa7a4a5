"""Code as a user would bring it to an experiment: data, a network, and a method whose clients keep state."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from fedbayes.clients.client import Client
from fedbayes.data import Dataset, from_arrays, from_clients
from fedbayes.methods import Composed, Method, Setting, fedavg
from fedbayes.options import option, positive, record
from fedbayes.posterior.values import Point


def blobs(rows: int = 96, test: int = 30) -> Dataset:
    """Three classes around three corners of a plane."""
    random = torch.Generator().manual_seed(3)
    y = torch.arange(rows + test) % 3
    x = torch.eye(3)[y][:, :2] * 2 + 0.7 * torch.randn(rows + test, 2, generator=random)
    return from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], name="blobs")


def broken_blobs() -> Dataset:
    """The same with a hole in it."""
    data = blobs()
    x = data.x.clone()
    x[7, 1] = torch.nan
    return from_arrays(x, data.y, name="blobs")


def survivors(client: int | None = None, rows: int = 24) -> Dataset:
    """Survival at one of three sites, cut at times that all share; the server has one row."""
    random = torch.Generator().manual_seed(5 if client is None else client)
    n = 1 if client is None else rows + 8
    x = torch.randn(n, 2, generator=random)
    time = -torch.rand(n, generator=random).log() * torch.exp(-x[:, 0]) + 0.01
    event = (torch.rand(n, generator=random) < 0.7).float()
    y, cut = torch.stack([time, event], 1), 1 if client is None else rows
    return from_arrays(x[:cut], y[:cut], x[cut:], y[cut:], kind="survival", times=(0.3, 0.8, 2.0), name="survivors")


def at_home(rows: int = 20):
    """Two clients with data of their own."""
    data = blobs()
    return from_clients([(data.x[:rows], data.y[:rows]), (data.x[rows:], data.y[rows:])], (data.test_x, data.test_y))


def net(shape, outputs, width=6):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, outputs))


def norm_net():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@record
class momentum_at_home(Method):
    """FedAvg whose clients keep their last weights, and start between them and the broadcast."""

    name: ClassVar[str] = "momentum_at_home"
    lr: float = option("step size", positive, default=0.1, kind="scalar")
    blend: float = option("share of the broadcast in a start", default=0.5)
    server: str | None = option("optimiser at the server", default=None)

    def compose(self, setting: Setting):
        program = fedavg(lr=self.lr, epochs=2, batch=8, server=self.server).build(setting)
        client, blend = program.client, self.blend

        def start(own, info):
            state = client.start({}, info)
            vectors = {n: blend * v + (1 - blend) * own["last"].mean for n, v in state.vectors.items()}
            return state._replace(vectors=vectors), own["visits"]

        def step(state, batch, tape, info):
            return client.phases[0].step(state[0], batch, tape, info), state[1]

        def finish(state, info):
            upload = client.finish(state[0], info)
            return upload._replace(own={"last": Point(upload.parts["model"].mean), "visits": state[1] + 1})

        def first(broadcast):
            return {"last": Point(broadcast["model"].mean), "visits": torch.zeros((), dtype=torch.int64)}

        phase = client.phases[0]._replace(step=step)
        return program._replace(client=Client(start, (phase,), finish, first))


def diverging(*, largest: int = 15) -> Method:
    """FedAvg in which the clients with more rows than `largest` come to infinite weights."""

    def compose(setting: Setting):
        program = fedavg(lr=0.1, epochs=1, batch=8).build(setting)

        def finish(state, info):
            upload = program.client.finish(state, info)
            mean = torch.where(info.n > largest, torch.inf, upload.parts["model"].mean)
            return upload._replace(parts={"model": replace(upload.parts["model"], mean=mean)})

        return program._replace(client=program.client._replace(finish=finish))

    return Composed(program=compose)
