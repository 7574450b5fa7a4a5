"""FedPPD's experiments on sets that are not at hand, run on tiny files in those sets' formats."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_files as tiny
from test_file_formats import write_cifar_tar

from fedbayes.experiments.build import build
from fedbayes.papers.fedppd import experiment_of
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory


def _one_round(x, **changes):
    options = {**x.options, "epochs": 1, "batch": 8}
    if "server_batch" in options:
        options |= {"server_batch": 4, "server_epochs": 1, "ensemble_draws": 1}
    if "student" in options:
        options["student"] = x.network  # the large one is for a GPU
    task = build(replace(x, clients=2, rounds=1, options=options, **changes))
    ((_, record),) = rounds(task, task.begin(), Memory())
    return task, record


@pytest.mark.parametrize("row", ["FedAvg", "FedPPD + Distill"])
def test_femnist_by_writers_without_digits(home, row):
    users = {f"w{i}": (tiny.images(12, (784,), i), 10 + (np.arange(12) * 5 + i) % 52) for i in range(4)}
    tiny.write_leaf(home / "femnist/train/a.json", users)
    tiny.write_leaf(home / "femnist/test/a.json", {u: tuple(v[:3] for v in rows) for u, rows in users.items()})
    x = experiment_of("FEMNIST", row)
    assert x.partition == "natural"
    task, record = _one_round(x, partition_options={"owners_each": 2, "server": 6})
    assert task.clients.data.classes == 52
    assert 0 <= record["test"]["accuracy"] <= 1


def test_cifar100(home):
    y, coarse = np.arange(60).astype(np.uint8) % 100, tiny.labels(60, 20)
    raw = tiny.cifar_bytes(tiny.images(60, (3, 32, 32)), y, coarse)
    write_cifar_tar(home / "cifar100/cifar-100-binary.tar.gz", {"train.bin": raw, "test.bin": raw[: 3074 * 9]})
    x = experiment_of("CIFAR-100", "FedPPD")
    assert (x.network, x.options["student"]) == ("resnet18", "resnet34")
    # Small networks: what is tested is the way of the data.
    x = replace(x, network="fedppd_cifar", precision="float32")
    task, record = _one_round(x, partition="iid", partition_options={"volume": 20, "server": 10})
    assert task.clients.data.classes == 100
    assert np.isfinite(record["test"]["nll"])
