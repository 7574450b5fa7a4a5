"""Pools of clients side by side on a GPU: PyTorch's in values and gradients, and nothing is added to places."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedbayes.model import interception, pools

SHAPES = {"odd": ((4, 3, 13, 15), 2), "threes": ((2, 3, 9, 10), 3), "oblong": ((2, 2, 4, 6), (2, 3))}
OTHERS: dict[str, dict[str, Any]] = {
    "overlapping": {"kernel_size": 3, "stride": 2},
    "padded": {"kernel_size": 2, "padding": 1},
    "to the end": {"kernel_size": 2, "ceil_mode": True},
    "apart": {"kernel_size": 2, "dilation": 2, "stride": 2},
    "large": {"kernel_size": 4},
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "side_by_side", lambda x: True)


def images(shape: tuple[int, ...]) -> Tensor:
    """Of three clients, with many equal numbers in a window."""
    return torch.randint(4, (3, *shape), generator=torch.Generator().manual_seed(0)).double()


def slopes(pool: Any, x: Tensor, **options: Any) -> Tensor:
    """The gradient of a function of what is pooled, by client."""

    def loss(one: Tensor) -> Tensor:
        out = pool(one, **options)
        return (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape)).sum()

    return vmap(grad(loss))(x)


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_pytorchs_of_equal_numbers_too(name: str) -> None:
    shape, size = SHAPES[name]
    x = images(shape)
    assert torch.equal(pools.max_pool2d(x[0], size), F.max_pool2d(x[0], size))
    ours, theirs = (slopes(pool, x, kernel_size=size) for pool in (pools.max_pool2d, F.max_pool2d))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OTHERS)
def test_windows_that_are_not_side_by_side_are_pytorchs_own(name: str) -> None:
    x = images((2, 3, 9, 9))
    assert torch.equal(pools.max_pool2d(x[0], **OTHERS[name]), F.max_pool2d(x[0], **OTHERS[name]))
    traced = make_fx(lambda t: pools.max_pool2d(t, **OTHERS[name]))(x[0])
    assert "max_pool2d_with_indices" in str(traced.code)


def test_what_is_no_number_comes_through() -> None:
    x = images((1, 1, 4, 4))[0]
    x[0, 0, 0, 1] = torch.nan
    torch.testing.assert_close(pools.max_pool2d(x, 2), F.max_pool2d(x, 2), equal_nan=True)


def test_a_network_calls_it_and_its_trace_adds_to_no_places() -> None:
    layer = torch.nn.MaxPool2d(2)
    handlers = {F.max_pool2d: pools.max_pool2d}

    def loss(x: Tensor) -> Tensor:
        with interception.Interception(handlers):
            return layer(x).sin().sum()

    traced = make_fx(vmap(grad(loss)), tracing_mode="fake")(images((2, 3, 6, 6)))
    met = {str(node.target) for node in traced.graph.nodes}
    assert not [name for name in met if "max_pool" in name or "scatter" in name]


@pytest.mark.parametrize("size", [1, (1, 1), 2, (None, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_an_adaptive_mean_is_pytorchs(size: Any, last: bool) -> None:
    x = images((5, 6, 4, 4)) + 0.25
    x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if last else x
    assert torch.equal(pools.adaptive_avg_pool2d(x[0], size), F.adaptive_avg_pool2d(x[0], size))
    ours, theirs = (slopes(pool, x, output_size=size) for pool in (pools.adaptive_avg_pool2d, F.adaptive_avg_pool2d))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", [F.adaptive_avg_pool2d, F.max_pool2d], ids=lambda f: f.__name__)
def test_no_strides_are_changed_in_place_where_channels_lie_last(name: Any) -> None:
    layer = torch.nn.AdaptiveAvgPool2d(1) if name is F.adaptive_avg_pool2d else torch.nn.MaxPool2d(2)
    handlers = {name: getattr(pools, name.__name__)}

    def loss(x: Tensor) -> Tensor:
        with interception.Interception(handlers):
            return layer(x).flatten(1).sin().sum()

    x = images((5, 4, 4, 6)).permute(0, 1, 4, 2, 3)
    traced = make_fx(vmap(grad(loss)), tracing_mode="fake")(x)
    assert not [node for node in traced.graph.nodes if "as_strided" in str(node.target)]
