"""Convolutions of many networks by kernels of our own are those of PyTorch, and have their gradients."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

import fedbayes as fb
from fedbayes.engine.compiled import Compiled
from fedbayes.engine.steps import Steps, stacked_step
from fedbayes.engine.work import Work
from fedbayes.model import convolution, interception, stacked_convolution
from fedbayes.model.estimators import flipout, local
from fedbayes.model.stacked_convolution import convolution as stacked
from fedbayes.networks.papers import network_named
from fedbayes.noise import Tape
from fedbayes.training.fit import fit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # slow, but the same kernels
# channels, outputs, kernel, stride, padding, image
SHAPES = {
    "first": (3, 5, (3, 3), (1, 1), (0, 0), (9, 8)),
    "stride": (16, 20, (3, 3), (2, 2), (1, 1), (8, 9)),
    "wide": (4, 70, (1, 1), (2, 1), (0, 0), (7, 6)),
    "odd": (3, 4, (5, 2), (1, 2), (2, 0), (9, 9)),
    "many positions": (16, 16, (3, 3), (1, 1), (1, 1), (40, 40)),
    "many channels": (128, 128, (1, 1), (1, 1), (0, 0), (6, 6)),
    "48 channels": (48, 20, (3, 3), (1, 1), (1, 1), (5, 6)),
    "whole rows": (16, 16, (3, 3), (1, 1), (1, 1), (8, 8)),
    "strided rows": (32, 32, (3, 3), (2, 2), (1, 1), (16, 16)),
    "part of a row": (3, 16, (3, 3), (1, 1), (1, 1), (4, 64)),
    "tall": (4, 4, (33, 1), (1, 1), (3, 0), (33, 5)),
}


def slopes(way: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """Values, and gradients by both tensors, of several networks."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return way(x, w).sin().sum()

    return (vmap(way)(*given), *vmap(grad(loss, argnums=(0, 1)))(*given))


@pytest.fixture(params=["small", "large"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tiles and layouts of little work, or of work that keeps a GPU busy."""
    if request.param == "large":
        monkeypatch.setattr(stacked_convolution, "BUSY", 1)
        monkeypatch.setattr(stacked_convolution, "TURNING", 1)


@pytest.mark.gpu
@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_convolutions(shape: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
    if (DEVICE, dtype) == ("cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter has no products of bfloat16")
    channels, outs, kernel, stride, padding, image = SHAPES[shape]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, channels, *image, generator=random).to(dtype)
    w = torch.randn(3, outs, channels, *kernel, generator=random).to(dtype) / 10
    found = slopes(lambda a, b: stacked(a, b, stride, padding), x.to(DEVICE), w.to(DEVICE))
    exact = slopes(lambda a, b: F.conv2d(a, b, None, stride, padding), x.double(), w.double())
    for ours, theirs in zip(found, exact):
        assert ours.dtype == dtype
        assert (ours.cpu().double() - theirs).norm() < (2e-3 if dtype == torch.float32 else 2e-2) * theirs.norm()


@pytest.mark.gpu
def test_several_draws_of_several_clients() -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 2, 3, 6, 6, generator=random), torch.randn(3, 5, 3, 3, 3, generator=random)

    def drawn(way: Callable[..., Tensor], device: str, dtype: torch.dtype) -> Tensor:
        def slope(shift: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return grad(lambda w: way(x + shift, w).square().sum())(w)

        shifts = torch.arange(2.0, device=device, dtype=dtype)
        return vmap(vmap(slope, (0, None, None)), (None, 0, 0))(shifts, x.to(device, dtype), w.to(device, dtype))

    ours = drawn(lambda a, b: stacked(a, b, (1, 1), (0, 0)), DEVICE, torch.float32).cpu().double()
    theirs = drawn(F.conv2d, "cpu", torch.float64)
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled steps of clients side by side, wherever this runs."""
    for module in (convolution, interception):
        monkeypatch.setattr(module, "side_by_side", lambda x: True)
    monkeypatch.setattr(stacked_convolution, "available", lambda: True)
    with convolution.compiled():
        yield


def estimated(estimate: Any, kernels: bool, shape: str) -> Callable[..., Any]:
    """Gradients of an estimator's output by means, scales and inputs, for several clients."""
    *_, stride, padding, _ = SHAPES[shape]

    def loss(m: Tensor, s: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        ours = convolution.own_kernels_for(x, stride, padding) if kernels else None
        apply = lambda x, w: F.conv2d(x, w, None, stride, padding)  # noqa: E731
        bias = m[:, :1, :1, 0], s[:, :1, :1, 0]
        return estimate(apply, x, (m, s), bias, Tape(noise), 2, ours).sin().sum()

    return vmap(grad(loss, argnums=(0, 1, 2)))


def normal_inputs(shape: str, device: str = "cpu") -> list[Tensor]:
    channels, outs, kernel, _, _, image = SHAPES[shape]
    random = torch.Generator().manual_seed(0)
    m, s = (torch.randn(3, outs, channels, *kernel, generator=random) / 10 for _ in range(2))
    x, noise = torch.randn(3, 2, channels, *image, generator=random), torch.randn(3, 60_000, generator=random)
    return [t.to(device) for t in (m, s.abs(), x, noise)]


@pytest.mark.gpu
@pytest.mark.usefixtures("as_on_a_gpu", "_size")
@pytest.mark.parametrize("estimate", [local, flipout])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_products_of_an_estimator_at_once(estimate: Any, shape: str) -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
    found = estimated(estimate, True, shape)(*normal_inputs(shape, DEVICE))
    exact = estimated(estimate, False, shape)(*(t.double() for t in normal_inputs(shape)))
    for ours, theirs in zip(found, exact):
        assert (ours.cpu().double() - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("estimate", [local, flipout])
def test_a_trace_has_one_operation_for_both_products(estimate: Any) -> None:
    traced = make_fx(estimated(estimate, True, "stride"), tracing_mode="fake")(*normal_inputs("stride"))
    met = Counter(str(node.target) for node in traced.graph.nodes)
    names = ("convolution", "convolution_input", "convolution_weight")
    assert [met[f"fedbayes.{name}.default"] for name in names] == [1, 1, 1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_batch_norm_after_a_stacked_convolution_is_plain_operations() -> None:
    # PyTorch's own copies its input with channels last on a GPU, which vmap can't take.
    handlers = {F.conv2d: convolution.conv2d, F.batch_norm: interception.batch_norm()}

    def loss(w: Tensor, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        with interception.Interception(handlers):
            return F.batch_norm(F.conv2d(x, w), mean, variance, training=True).sin().sum()

    given = torch.randn(3, 4, 3, 3, 3), torch.randn(3, 2, 3, 8, 8), torch.zeros(3, 4), torch.ones(3, 4)
    traced = make_fx(vmap(grad(loss)), tracing_mode="fake")(*given)
    met = [str(node.target) for node in traced.graph.nodes]
    assert "fedbayes.convolution.default" in met
    assert not [name for name in met if "batch_norm" in name]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("estimator", ["flipout", "local", "weight"])
def test_compiled_steps_by_the_kernels_are_the_eager_ones(
    estimator: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps: list[tuple[float, float]] = []
    whole, met = Steps._run, Counter[bool]()

    def watched(self: Steps, work: Work, state: Any) -> Any:
        plain = stacked_step(work.phase, work.together, work.table.live is not None)
        x, y, rows = work.store.x, work.store.y, work.table.rows.to(work.store.x.device)[0]
        batch = x[rows], y[rows], None, work.noise(0, 1)[0], torch.tensor(0, device=x.device), work.info
        theirs = plain(tree_map(torch.clone, state), *batch)
        with convolution.compiled():
            met[convolution.own_kernels_for(x[:1]) is not None] += 1
            ours = Compiled(plain)(tree_map(torch.clone, state), *batch)
        for a, b, old in zip(*map(tree_leaves, (ours.vectors, theirs.vectors, state.vectors)), strict=True):
            gaps.append((float((a - b).norm()), float((b - old).norm())))
        return whole(self, work, state)

    monkeypatch.setattr(Steps, "_run", watched)
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8, 3, 16, 16, generator=random), torch.randint(3, (8,), generator=random)) for _ in range(3)]
    data = fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=3)
    network = network_named("resnet", (3, 16, 16), 3, depth=8, width=16, seed=0)
    method = fb.methods.fedvi(estimator=estimator, optimiser="sgd", lr=0.1, epochs=1, batch=8, initial=0.1)
    fit(network, data, method=method, rounds=1, engine="stacked", compile="off", device=DEVICE, precision=precision)
    assert met[True]
    for away, moved in gaps:
        assert away < (0.02 if precision == "tf32" else 0.1) * moved
