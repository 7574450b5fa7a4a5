"""The first convolution done our way is the one that PyTorch does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbayes.convolution import first_convolution
from fedbayes.engine.choice import quick_cpu
from fedbayes.model import Model, categorical
from fedbayes.noise import Tape


def test_values_and_gradients_are_those_of_conv2d() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 9, 7, generator=random, dtype=torch.float64)
    for bias in (None, torch.randn(5, generator=random, dtype=torch.float64)):
        weight = torch.randn(5, 3, 3, 2, generator=random, dtype=torch.float64)
        needed = [t.requires_grad_() for t in (weight, bias) if t is not None]
        ours, theirs = first_convolution(x, weight, bias, (1, 1), (0, 0), (1, 1), 1), F.conv2d(x, weight, bias)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        d = torch.randn(theirs.shape, generator=random, dtype=torch.float64)
        for a, b in zip(torch.autograd.grad(ours, needed, d), torch.autograd.grad(theirs, needed, d), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


OTHERS = [
    (3, {"stride": 2}),
    (3, {"padding": 1}),
    (3, {"padding": "same"}),
    (3, {"dilation": 2}),
    (3, {"groups": 3}),
    (8, {}),
]


@pytest.mark.parametrize(("channels", "options"), OTHERS)
def test_any_other_convolution_is_left_as_it_is(channels: int, options: dict[str, object]) -> None:
    x = torch.randn(2, channels, 8, 8)
    layer = nn.Conv2d(channels, 6, 3, **options)
    arguments = (layer.stride, layer.padding, layer.dilation, layer.groups)
    assert torch.equal(first_convolution(x, layer.weight, layer.bias, *arguments), layer(x))
    named = dict(zip(("stride", "padding", "dilation", "groups"), arguments, strict=True))
    assert torch.equal(first_convolution(x, layer.weight, layer.bias, **named), layer(x))


def test_an_input_that_needs_a_gradient_gets_one() -> None:
    x, weight = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3)
    (ours,) = torch.autograd.grad(first_convolution(x, weight).sum(), x)
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight).sum(), x)
    assert torch.equal(ours, theirs)


def test_a_model_trains_the_same_with_and_without_it() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten())
    model = Model.of(network.double(), categorical())
    x, weights = torch.rand(5, 3, 8, 8), model.weights(model.initial())
    torch.testing.assert_close(model.train_output(weights, x, Tape(), None)[0], network(x.double()))
    with quick_cpu():
        torch.testing.assert_close(model.train_output(weights, x, Tape(), None)[0], network(x.double()))
