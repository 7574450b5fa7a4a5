"""Layers in another order are the same function, and have the same gradients."""

import copy

import pytest
import torch
from torch import nn

from fedbayes.model.order import PoolsFirst, pools_first


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 5, 3), *between, nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), block, nn.Flatten(), nn.Linear(20, 3))


def slopes(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = net(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(net.parameters()))]


@pytest.mark.parametrize("inplace", [False, True])
def test_pools_are_called_before_relus_and_nothing_else_changes(inplace, monkeypatch):
    net, called = network(nn.ReLU(inplace)), []
    x = torch.randn(6, 2, 14, 14).round()  # with ties, and windows without a positive number
    other = pools_first(copy.deepcopy(net))
    assert [type(other), type(other[3])] == [PoolsFirst, PoolsFirst]
    for ours, plain in zip(slopes(other, x), slopes(net, x)):
        assert torch.equal(ours, plain)
    assert list(other.state_dict()) == list(net.state_dict())
    assert [type(layer) for layer in other[:3]] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    for kind in (nn.ReLU, nn.MaxPool2d):
        monkeypatch.setattr(kind, "forward", lambda self, h, plain=kind.forward: called.append(self) or plain(self, h))
    other(x)
    assert called == [other[2], other[1], other[3][2], other[3][1]]


def test_what_may_see_the_order_keeps_it():
    for between in ([nn.Tanh()], [nn.ReLU(), nn.Dropout2d()]):
        assert type(pools_first(network(*between))[3]) is nn.Sequential
    hooked = network()
    hooked[1].register_forward_hook(lambda layer, inputs, output: None)
    assert type(pools_first(hooked)) is nn.Sequential
    places = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    assert type(pools_first(places)) is nn.Sequential
