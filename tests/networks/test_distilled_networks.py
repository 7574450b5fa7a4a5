"""FedPPD's networks have the shapes and sizes of the supplement's tables."""

import pytest
import torch
from torch import nn

from fedbayes.networks.papers import network_named

TABLE = {
    "fedppd_mnist": ((1, 28, 28), 10, 21_840),
    "fedppd_mnist_student": ((1, 28, 28), 10, 85_670),
    "fedppd_femnist": ((1, 28, 28), 52, 190_004),
    "fedppd_femnist_student": ((1, 28, 28), 52, 1_300 + 125_100 + 500_200 + 2_881_600 + 288_180 + 9_412),
    "fedppd_cifar": ((3, 32, 32), 10, 62_006),
    "fedppd_cifar_student": ((3, 32, 32), 10, 144_474),
}


@pytest.mark.parametrize("name", TABLE)
def test_sizes_and_outputs(name):
    shape, outputs, size = TABLE[name]
    net = network_named(name, shape, outputs, seed=1)
    assert net(torch.zeros(2, *shape)).shape == (2, outputs)
    assert sum(p.numel() for p in net.parameters()) == size
    kinds = [type(layer) for layer in net]
    assert kinds.count(nn.Dropout2d) == {"mnist": 1, "femnist": 1, "cifar": 0}[name.split("_")[1]] + (
        name == "fedppd_femnist_student"
    )


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="too small"):
        network_named("fedppd_mnist", (1, 8, 8), 10)
    with pytest.raises(ValueError, match="needs images"):
        network_named("fedppd_cifar", (64,), 10)
