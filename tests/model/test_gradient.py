"""Gradients by named weights are those by vectors."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedbayes.model.gradient import gradients, weight_gradients
from fedbayes.model.likelihood import categorical
from fedbayes.model.model import Model
from fedbayes.noise import Tape


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 2), nn.Flatten(), nn.Linear(20, 3)]
    return Model.of(nn.Sequential(*body).double(), categorical(), parts={"head": ("5.*",), "model": ("*",)})


@pytest.mark.parametrize("onednn", [False, True])
def test_gradients_by_weights_are_those_by_vectors_and_those_of_stacked_clients(model, onednn):
    x, y = torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.randint(3, (4,))

    def loss(weights):
        output, _ = model.train_output(weights, x, Tape(torch.zeros(0)), None)
        nll = model.nll(output, y, None, weights)
        return nll, {"nll": nll}

    def by_vectors(vectors):
        return gradients(lambda v: loss(model.weights(v)), vectors)

    vectors = model.initial()
    with torch.backends.mkldnn.flags(enabled=onednn):
        ours, told = weight_gradients(loss, model, vectors)
        plain, _ = by_vectors(vectors)
        stacked, _ = vmap(by_vectors)({part: v[None] for part, v in vectors.items()})
    assert not told["nll"].requires_grad
    for part in vectors:
        torch.testing.assert_close(ours[part], plain[part], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours[part], stacked[part][0], rtol=1e-10, atol=1e-12)


def test_weights_that_a_loss_does_not_read_have_gradients_of_zero(model):
    vectors = model.initial()
    slopes, _ = weight_gradients(lambda weights: (weights["5.bias"].square().sum(), ()), model, vectors)
    assert slopes["model"].shape == vectors["model"].shape
    assert not slopes["model"].any()
    assert torch.equal(slopes["head"], torch.cat([torch.zeros(60).double(), 2 * vectors["head"][60:]]))


def test_a_loss_that_reads_no_weight_is_refused(model):
    with pytest.raises(RuntimeError, match="does not require grad"):
        weight_gradients(lambda weights: (torch.zeros(()), ()), model, model.initial())
