"""FedAvg by this library, with what it chooses by itself."""

from __future__ import annotations

import setting
import torch

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory


def main() -> None:
    given, laps = setting.read(), setting.Laps()
    pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(given.x, given.y)]
    test = (torch.from_numpy(given.test_x), torch.from_numpy(given.test_y))
    clients = fb.data.from_clients(pairs, test=test, kind="classes", classes=10)
    network = network_named("mlp", clients.data.shape, 10)
    with torch.no_grad():
        for own, value in zip(network.parameters(), given.torch_state().values(), strict=True):
            own.copy_(torch.from_numpy(value))
    method = fb.methods.method_named("fedavg", {"epochs": 1, "batch": given.batch, "lr": given.lr})
    task = prepare(network, clients, method=method, cohort=given.cohort, rounds=given.rounds, evaluate_every=1)
    for _, record in rounds(task, task.begin(), Memory()):
        laps.end(record["test"]["accuracy"])
    laps.tell("torch", threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
