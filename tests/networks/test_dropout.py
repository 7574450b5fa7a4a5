"""Dropout given to networks that have none: where it is, what it does, and that copies have their own."""

import copy

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.build import network_of
from fedbayes.experiments.experiment import Experiment
from fedbayes.networks.dropout import has_dropout, with_dropout
from fedbayes.networks.papers import network_named


def test_every_convolution_and_linear_map_of_a_resnet_is_followed_by_dropout():
    plain = network_named("resnet", (1, 8, 8), 3, depth=8, width=4)
    made = with_dropout(plain, 0.2)
    owners = [n.removesuffix(".dropout") for n, layer in made.named_modules() if isinstance(layer, nn.Dropout)]
    maps = [n for n, layer in plain.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert owners == maps
    assert len(maps) == 8
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert not has_dropout(plain)


def test_it_zeroes_that_share_of_outputs_and_scales_the_rest():
    layer = with_dropout(nn.Sequential(nn.Linear(1, 20_000)), 0.2)
    torch.manual_seed(0)
    x = torch.ones(1, 1)
    out, plain = layer(x), layer.eval()(x)
    kept = out != 0
    assert abs(float(kept.float().mean()) - 0.8) < 0.01
    torch.testing.assert_close(out[kept], plain[kept] / 0.8)
    assert torch.equal(plain, nn.functional.linear(x, layer[0].weight, layer[0].bias))


def test_a_copy_has_dropouts_of_its_own():
    made = with_dropout(nn.Sequential(nn.Linear(3, 50)), 0.5)
    twin = copy.deepcopy(made).eval()
    x = torch.ones(1, 3)
    assert (made(x) == 0).any()
    assert not (twin(x) == 0).any()


def test_the_layers_that_match_are_spared():
    made = with_dropout(network_named("resnet", (1, 8, 8), 3, depth=8, width=4), 0.2, but=["head"])
    assert not has_dropout(made.head)
    assert has_dropout(made.conv)


@pytest.mark.parametrize("rate", [0, 1, -0.1, True, "a"])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(InputError, match="dropout"):
        with_dropout(nn.Linear(1, 1), rate)


def test_a_pattern_that_meets_no_layer_is_refused():
    with pytest.raises(InputError, match="undropped"):
        with_dropout(nn.Linear(1, 1), 0.1, but=["body"])


def test_an_experiment_gives_any_network_dropout_with_the_same_weights():
    data = fb.data.load("digits")
    plain = Experiment(network_options={"hidden": [8]})
    dropped = Experiment(network_options={"hidden": [8], "dropout": 0.2})
    a, b = network_of(plain, data), network_of(dropped, data)
    assert has_dropout(b)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    with pytest.raises(InputError, match="undropped"):
        network_of(Experiment(network_options={"undropped": ["1"]}), data)


def test_mc_dropout_of_a_network_without_dropout_is_refused():
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=2)
    with pytest.raises(InputError, match="has no dropout"):
        fb.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), clients, method=fb.methods.fedavg(mc_dropout=True))
