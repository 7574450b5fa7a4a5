"""Layers in another order are the same function, and have the same gradients."""

import copy

import pytest
import torch
from torch import nn

from fedbayes.model import convolution
from fedbayes.model.interception import Interception
from fedbayes.model.likelihood import categorical
from fedbayes.model.model import Model
from fedbayes.model.order import DIRECT, Direct, Straight, straight
from fedbayes.noise import Tape


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
    other = straight(copy.deepcopy(net))
    assert [type(other), type(other[3])] == [Straight, Straight]
    for ours, plain in zip(slopes(other, x), slopes(net, x)):
        torch.testing.assert_close(ours, plain)
    assert list(other.state_dict()) == list(net.state_dict())
    assert [type(layer) for layer in other[:3]] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    for kind in (nn.ReLU, nn.MaxPool2d):
        monkeypatch.setattr(kind, "forward", lambda self, h, plain=kind.forward: called.append(self) or plain(self, h))
    with Interception({}):
        other(x)
    assert called == [other[2], other[1], other[3][2], other[3][1]]


def test_what_may_see_the_order_keeps_it():
    for between in ([nn.Tanh()], [nn.ReLU(), nn.Dropout2d()]):
        assert straight(network(*between))[3].order == list(range(len(between) + 2))
    hooked = network()
    hooked[1].register_forward_hook(lambda layer, inputs, output: None)
    assert straight(hooked).order == list(range(6))
    places = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    assert straight(places).order == [0, 1]
    watched = network()
    watched[0].register_full_backward_hook(lambda layer, inputs, outputs: None)
    assert [type(straight(watched)), type(watched[3])] == [nn.Sequential, Straight]


# Layers with settings of their own, on inputs [5, 4, 9, 8].
LAYERS = [
    nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2),
    nn.Conv2d(4, 3, 3, padding="same", bias=False),
    nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
    nn.MaxPool2d(3, (2, 1), 1, ceil_mode=True),
    nn.MaxPool2d(2, dilation=2),
    nn.Flatten(2, 3),
    nn.Linear(8, 3, bias=False),
    nn.Linear(8, 3),
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_what_a_layer_calls_is_called_directly_unless_somebody_looks(layer, monkeypatch):
    assert {type(layer) for layer in LAYERS} == {*DIRECT}
    net, x, called = nn.Sequential(layer), torch.randn(5, 4, 9, 8), []
    other = straight(copy.deepcopy(net))
    torch.testing.assert_close(other(x), net(x))
    kind, forward = type(layer), type(layer).forward
    monkeypatch.setattr(kind, "forward", lambda self, h: called.append(h) or forward(self, h))
    plain = getattr(layer, "padding_mode", "zeros") == "zeros"
    for times, looks in enumerate([lambda: other(x), lambda: torch.func.vmap(other)(x[None])]):
        looks()
        assert len(called) == times + (not plain)
    with Interception({}):
        other(x)
    other[0].register_forward_hook(lambda layer, inputs, output: called.append(output))
    other(x)
    assert len(called) == 4 + (not plain)


def test_a_forward_of_the_users_own_is_called():
    other, x = straight(nn.Sequential(nn.Tanh(), nn.ReLU(), nn.MaxPool2d(2))), torch.randn(5, 4, 9, 8)
    assert Direct.of(other) is not None
    other[0].forward = torch.neg
    assert Direct.of(other) is None
    torch.testing.assert_close(other(x), other[2](other[1](-x)))


def test_a_network_without_modules_is_that_of_functional_call():
    """Nested, a layer that is there twice, one without bias, and weights that the call is not given."""
    torch.manual_seed(0)
    twice = nn.Linear(6, 6)
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Sequential(twice, nn.Tanh(), twice), nn.Sigmoid())
    direct, x = Direct.of(straight(copy.deepcopy(net))), torch.randn(5, 4)
    given = {"0.weight": torch.randn(6, 4), "1.0.bias": torch.randn(6)}
    torch.testing.assert_close(direct({}, x), net(x))
    torch.testing.assert_close(direct(given, x), torch.func.functional_call(net, given, x))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_network_with_hooks_is_called_as_a_module(kind, place):
    net = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh()))
    assert Direct.of(straight(copy.deepcopy(net))) is not None
    getattr(net[place], f"register_{kind}_hook")(lambda *seen: None)
    assert Direct.of(straight(net)) is None


class Own(nn.Sequential):
    """A module with a forward of the user's own."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("plain", [True, False])
def test_nothing_is_intercepted_for_layers_that_are_called_directly(plain, monkeypatch):
    """On a CPU without oneDNN the first convolution is done our way in either network, by other ways to the same."""
    net, seen, products = network(nn.ReLU()), [], []
    whole, product = Interception.__torch_function__, convolution._product
    monkeypatch.setattr(
        Interception, "__torch_function__", lambda self, f, *rest: seen.append(f) or whole(self, f, *rest)
    )
    monkeypatch.setattr(convolution, "_product", lambda *given: products.append(given) or product(*given))
    made = Model.of(net if plain else Own(*net), categorical())
    assert (Direct.of(made.module) is not None) is plain
    x = torch.randn(6, 2, 14, 14).contiguous(memory_format=torch.channels_last)
    weights = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    with torch.backends.mkldnn.flags(enabled=False):
        out, _ = made.train_output(weights, x, Tape(torch.zeros(0)), None)
        still = made.output(weights, x)
    assert bool(seen) is not plain
    assert products
    for ours in (out, still):
        torch.testing.assert_close(ours, net(x))
