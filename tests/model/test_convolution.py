"""Convolutions by other ways are those of PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedbayes.model import convolution
from fedbayes.model.convolution import conv2d, replaced


@pytest.fixture
def without_onednn():
    with torch.backends.mkldnn.flags(enabled=False):
        yield


SETTINGS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)},
    {"padding": "same"},
    {"groups": 3},
]


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("most", [2**22, 0], ids=["one product", "too many patches"])
@pytest.mark.parametrize("settings", [*SETTINGS, {"stride": (2, 3), "padding": (0, 2)}], ids=str)
def test_a_first_convolution_in_training_is_the_convolution_and_has_its_gradients(
    settings, most, form, monkeypatch, without_onednn
):
    monkeypatch.setattr(convolution, "PATCHES", most)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 9, 8, generator=random, dtype=torch.float64).contiguous(memory_format=form)
    weight = torch.randn(6, 3 // settings.get("groups", 1), 3, 2, generator=random, dtype=torch.float64)
    bias = torch.randn(6, generator=random, dtype=torch.float64)

    def found(way):
        leaves = [t.clone().requires_grad_() for t in (weight, bias)]
        out = way(x, *leaves, **settings)
        assert way is F.conv2d or out.is_contiguous(memory_format=torch.channels_last)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    for ours, plain in zip(found(conv2d), found(F.conv2d)):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_first_convolution_of_more_rows_than_the_image_has_is_refused_as_pytorch_does(without_onednn):
    x = torch.randn(2, 1, 2, 9).contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="Kernel size"):
        conv2d(x, torch.randn(3, 1, 3, 3, requires_grad=True))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_few_channels_come_out_channels_last(form, without_onednn):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, 8, generator=random).contiguous(memory_format=form)
    weight, bias = torch.randn(4, 3, 3, 3, generator=random), torch.randn(4, generator=random)
    out = conv2d(x, weight, bias, padding=1)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, F.conv2d(x.contiguous(), weight, bias, padding=1))


@pytest.mark.parametrize("steps", [False, True], ids=["eager", "compiled"])
def test_the_first_convolution_in_training_is_a_product_unless_it_is_compiled(steps, monkeypatch, without_onednn):
    made = []
    whole = convolution._product
    monkeypatch.setattr(convolution, "_product", lambda *given: made.append(given) or whole(*given))
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(5, 3, 3, 3, requires_grad=True)
    with convolution.compiled(steps, stacked=False):
        out = conv2d(x, weight)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, weight))
    assert len(made) == (not steps)


def test_convolutions_are_pytorchs_own_where_onednn_runs_them():
    x = torch.randn(2, 3, 8, 8)
    with torch.backends.mkldnn.flags(enabled=True):
        assert replaced(x) == {}
    with torch.backends.mkldnn.flags(enabled=False):
        assert replaced(x) == {F.conv2d: conv2d}


@pytest.mark.parametrize("with_bias", [False, True])
def test_filters_of_one_by_one_of_several_clients_are_products(with_bias, monkeypatch):
    monkeypatch.setattr(convolution, "unfused", lambda x: True)
    random = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 4, 2, 6), (3, 7, 4, 1, 1), (3, 7))
    given = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes[: 2 + with_bias]]

    def slopes(way):
        def loss(*tensors):
            out = way(*tensors)
            return out.sin().sum(), out

        return vmap(grad(loss, argnums=tuple(range(len(given))), has_aux=True))(*given)

    (ours, out), (theirs, want) = slopes(conv2d), slopes(F.conv2d)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(ours, theirs)
