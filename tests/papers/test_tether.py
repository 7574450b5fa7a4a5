"""FedProx as FedUAB's authors made it: its step against the slope of the written loss, and a table's cell of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.tether import tethered
from fedbayes.papers import feduab
from fedbayes.papers.cells import Cell, Request, Table
from fedbayes.papers.seeds import SEEDS
from fedbayes.papers.settings import otherwise


def test_clients_pay_for_their_distance_not_its_square() -> None:
    torch.manual_seed(0)
    x, y, network = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), nn.Linear(3, 2)
    method = fb.methods.fedavg(client=tethered, client_options={"strength": 0.3}, epochs=2, batch=6, lr=0.1)
    run = fb.fit(network, [(x, y)], method=method, rounds=1)
    first = [p.detach() for p in network.parameters()]
    weights = [p.clone().requires_grad_() for p in first]
    for number in range(2):  # one batch an epoch: the order of rows is nothing
        loss = nn.functional.cross_entropy(x @ weights[0].T + weights[1], y)
        if number:  # the first step begins where the broadcast is, and the distance has no slope there
            loss = loss + 0.3 * sum(((w - v).norm() for w, v in zip(weights, first)), torch.zeros(()))
        weights = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(weights, torch.autograd.grad(loss, weights))]
    torch.testing.assert_close(run.parts["model"].mean, torch.cat([w.detach().reshape(-1) for w in weights]))


def test_a_cell_keeps_the_name_of_its_client(tmp_path: Path) -> None:
    small = {"data": "digits", "network": "linear", "clients": 4, "cohort": 2, "rounds": 1, "evaluate_every": 1}
    x = replace(feduab.experiment_of("MNIST", "FedProx as made there", "Small-IID"), **small, partition_options={})
    cell = Cell("FedProx as made there", "IID", x)
    table = Table("Made up", lambda: [cell], {"accuracy": "test.accuracy"}, {"paper": lambda x: x}, "made", SEEDS)
    SEEDS.train(table, tmp_path, Request())
    (path,) = (tmp_path / "cells/paper").glob("*.json")
    content = json.loads(path.read_text())
    assert content["experiment"]["options"]["client"] == "fedbayes.clients.tether:tethered"
    assert otherwise(content, x) == ""
    assert "options.client" in otherwise(content, replace(x, options={}))
