"""Residual networks: sizes that others publish, shapes, and refusals."""

import pytest
import torch

from fedbayes.errors import InputError
from fedbayes.networks.papers import network_named


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("resnet", {"depth": 20}, 269_722),
        ("resnet", {"depth": 44}, 658_586),
        ("resnet", {"depth": 56}, 853_018),
        ("resnet18", {}, 11_173_962),
        ("resnet34", {}, 21_282_122),
    ],
)
def test_the_number_of_weights_is_the_published_one(name, options, weights):
    network = network_named(name, (3, 32, 32), 10, **options)
    assert sum(p.numel() for p in network.parameters()) == weights


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (4, 7, 9)])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shortcut", ["pad", "project"])
def test_any_channels_and_size(shape, norm, shortcut):
    network = network_named("resnet", shape, 3, depth=8, width=4, norm=norm, shortcut=shortcut)
    assert network(torch.rand(2, *shape)).shape == (2, 3)
    assert any(name.startswith("head.") for name, _ in network.named_parameters())
    assert bool(dict(network.named_buffers())) == (norm == "batch")


def test_a_block_whose_convolutions_are_zero_hands_its_input_on():
    network = network_named("resnet", (3, 8, 8), 3, depth=8, width=4).eval()
    first, second = network.blocks[0], network.blocks[1]
    with torch.no_grad():
        first.conv2.weight.zero_()
        second.conv2.weight.zero_()
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(first(x), x)
    halved = second(x)
    assert halved.shape == (2, 8, 4, 4)
    assert torch.equal(halved[:, 2:6], x[..., ::2, ::2])
    assert not halved[:, [0, 1, 6, 7]].any()


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((3, 8, 8), {"depth": 18}, "depth"),
        ((64,), {}, "images"),
        ((3, 8, 8), {"norm": "layer"}, "norm"),
        ((3, 8, 8), {"shortcut": "conv"}, "shortcut"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(shape, options, word):
    with pytest.raises(InputError, match=word):
        network_named("resnet", shape, 10, **options)
