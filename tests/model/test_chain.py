"""Chains of convolutions: the gradient by hand is autograd's, for every chain that is taken; no other is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import fedbayes as fb
from fedbayes.clients import point
from fedbayes.data import from_clients
from fedbayes.engine import choice
from fedbayes.engine.choice import quick_cpu
from fedbayes.methods import method_named
from fedbayes.model.chain import by_hand
from fedbayes.model.likelihood import Likelihood, bernoulli, categorical, mean_variance, normal
from fedbayes.model.model import Model
from fedbayes.model.tracing import traced
from fedbayes.training.rounds import fit

SCALE = 0.3


def made(*layers: nn.Module, shape: tuple[int, ...] = (2, 9, 8), out: int = 3) -> nn.Sequential:
    """A chain of these layers, flattened, with a hidden layer; in float64."""
    body = nn.Sequential(*layers)
    width = body(torch.zeros(1, *shape)).numel()
    return nn.Sequential(body, nn.Flatten(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, out, bias=False)).double()


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "one convolution": lambda: made(nn.Conv2d(2, 3, 3)),
    "pooled, twice": lambda: made(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 2), nn.ReLU(), nn.MaxPool2d(2)
    ),
    "no biases": lambda: made(nn.Conv2d(2, 5, 3, bias=False), nn.ReLU(), nn.Conv2d(5, 4, 2, bias=False), nn.Sigmoid()),
    "strides and padding": lambda: made(
        nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 2)), nn.Tanh(), nn.Conv2d(5, 6, 3, stride=2, padding=1)
    ),
    "pools that overlap and are padded": lambda: made(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d((2, 3), stride=(1, 2))
    ),
    "pool before the function": lambda: made(nn.Conv2d(2, 6, 3), nn.MaxPool2d(2), nn.Sigmoid(), nn.ReLU()),
    "dilation and groups": lambda: made(
        nn.Conv2d(2, 6, 3, dilation=2), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2, groups=2)
    ),
    "many channels first": lambda: made(
        nn.Conv2d(8, 3, 3), nn.ReLU(), nn.Conv2d(3, 6, 2), nn.ReLU(), nn.MaxPool2d(2), shape=(8, 9, 8)
    ),
}


def by_autograd(module: nn.Module, vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean NLL and its gradient, by PyTorch's own functions."""
    vector = vector.clone().requires_grad_()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    pieces = vector.split([s.numel() for s in shapes.values()])
    out = functional_call(module, {n: t.view(s) for (n, s), t in zip(shapes.items(), pieces)}, (x,))
    if y.is_floating_point():
        # The library keeps the logarithm of a fixed scale in float32.
        scale = torch.tensor(SCALE).log().double().exp()
        nll = -torch.distributions.Normal(out, scale).log_prob(y).sum(-1).mean()
    else:
        nll = F.cross_entropy(out, y)
    return nll.detach(), torch.autograd.grad(nll, vector)[0]


def batch(module: nn.Module, kind: str, shape: tuple[int, ...], rows: int = 6) -> tuple[Any, ...]:
    likelihood = normal(SCALE) if kind == "real" else categorical()
    model = Model.of(module, likelihood)
    gradient = by_hand(model)
    assert gradient is not None
    random = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *shape, generator=random, dtype=torch.float64)
    y = torch.randn(rows, 3, generator=random, dtype=torch.float64)
    return gradient, model.initial()["model"], x, y if kind == "real" else y.argmax(1)


def shape_of(chain: str) -> tuple[int, ...]:
    return (8, 9, 8) if chain == "many channels first" else (2, 9, 8)


def close(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", ["classes", "real"])
@pytest.mark.parametrize("chain", CHAINS)
def test_it_is_the_gradient_of_autograd(chain: str, kind: str, quick: bool) -> None:
    torch.manual_seed(0)
    module = CHAINS[chain]()
    gradient, vector, x, y = batch(module, kind, shape_of(chain))
    if quick:
        with quick_cpu():
            close(gradient(vector, x, y, None), by_autograd(module, vector, x, y))
    else:
        close(gradient(vector, x, y, None), by_autograd(module, vector, x, y))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_for_any_sizes(data: st.DataObject) -> None:
    def pick(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    channels, height, width = pick(1, 6), pick(7, 9), pick(7, 9)
    kernel, pool = (pick(1, 3), pick(1, 3)), (pick(1, 3), pick(1, 3))
    stride, padding = (pick(1, 2), pick(1, 2)), (pick(0, 2), pick(0, 2))
    torch.manual_seed(pick(0, 10**6))
    module = made(
        nn.Conv2d(channels, pick(1, 6), kernel, stride, padding, bias=pick(0, 1) == 1),
        nn.ReLU(),
        nn.MaxPool2d(pool, (pick(1, 3), pick(1, 3)), (pick(0, pool[0] // 2), pick(0, pool[1] // 2))),
        shape=(channels, height, width),
    )  # fmt: skip
    gradient, vector, x, y = batch(module, "classes", (channels, height, width), pick(1, 4))
    close(gradient(vector, x, y, None), by_autograd(module, vector, x, y))


@pytest.mark.parametrize("chain", CHAINS)
def test_rows_that_are_not_live_do_not_count(chain: str) -> None:
    torch.manual_seed(0)
    module = CHAINS[chain]()
    gradient, vector, x, y = batch(module, "classes", shape_of(chain))
    mask = torch.tensor([True, False, True, True, False, False])
    want = by_autograd(module, vector, x[mask], y[mask])
    x[1], x[4] = float("nan"), float("inf")
    close(gradient(vector, x, y, mask), want)
    nothing = gradient(vector, x, y, torch.zeros(6, dtype=torch.bool))
    close(nothing, (torch.zeros((), dtype=torch.float64), torch.zeros_like(vector)))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_among_equal_numbers_a_pool_takes_the_first(value: float, sign: float) -> None:
    torch.manual_seed(0)
    module = CHAINS["pooled, twice"]()
    gradient, vector, x, y = batch(module, "classes", (2, 9, 8))
    # Whole numbers, so that equal ones are equal in any order of summation; outputs of both signs.
    vector = (sign * 8 * vector).round() / 4
    x = torch.full_like(x, value)
    close(gradient(vector, x, y, None), by_autograd(module, vector, x, y))


def tied() -> nn.Module:
    module = made(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    module[0][2].weight = module[0][0].weight
    return module


def with_hook() -> nn.Module:
    module = CHAINS["one convolution"]()
    module[0][0].register_forward_hook(lambda layer, inputs, out: 2 * out)
    return module


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def one() -> nn.Sequential:
    return CHAINS["one convolution"]()


OTHERS: dict[str, Callable[[], Model]] = {
    "dropout": lambda: Model.of(made(nn.Conv2d(2, 3, 3), nn.Dropout()), categorical()),
    "BatchNorm": lambda: Model.of(made(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), categorical()),
    "mean of a window": lambda: Model.of(made(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2)), categorical()),
    "a pool of parts of a window": lambda: Model.of(
        made(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, ceil_mode=True)), categorical()
    ),
    "a pool with gaps": lambda: Model.of(made(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, dilation=2)), categorical()),
    "padded by itself": lambda: Model.of(
        made(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), categorical()
    ),
    "padding by name": lambda: Model.of(made(nn.Conv2d(2, 3, 3, padding="same")), categorical()),
    "a chain of linear maps": lambda: Model.of(made(), categorical()),
    "not flattened": lambda: Model.of(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(6, 3)), categorical()),
    "its own forward": lambda: Model.of(Own(*one()), categorical()),
    "a weight used twice": lambda: Model.of(tied(), categorical()),
    "a hook": lambda: Model.of(with_hook(), categorical()),
    "frozen weights": lambda: Model.of(one(), categorical(), frozen=["0.*"]),
    "two parts": lambda: Model.of(one(), categorical(), parts={"body": ["0.*"], "head": ["*"]}),
    "bfloat16": lambda: Model.of(one(), categorical(), bfloat16=True),
    "labels": lambda: Model.of(one(), bernoulli()),
    "a scale that is learned": lambda: Model.of(one(), normal(learn=True)),
    "mean and variance": lambda: Model.of(made(nn.Conv2d(2, 3, 3), out=2), mean_variance()),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_no_other_network_is_taken(other: str) -> None:
    assert by_hand(OTHERS[other]()) is None


SIZES = [3, 12, 7, 9]
OPTIONS = {
    "plain": ("fedavg", {}),
    "all at once": (
        "fedprox",
        {"momentum": 0.9, "weight_decay": 0.1, "proximal": 0.3, "clip": 0.2, "lr_within": "falling"},
    ),
}


def sites(kind: str) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = []
    for n in SIZES:
        y = torch.randn(n, 3, generator=random, dtype=torch.float64)
        x = torch.randn(n, 2, 9, 8, generator=random, dtype=torch.float64)
        pairs.append((x, y if kind == "real" else y.argmax(1)))
    return from_clients(pairs, test=pairs[0], kind=kind, classes=3)


def run(engine: str, kind: str, method: str, options: dict[str, Any], **rest: Any) -> Any:
    torch.manual_seed(3)
    likelihood: Likelihood | None = normal(SCALE) if kind == "real" else None
    chosen = method_named(method, {"batch": 5, "epochs": 2, **options})
    network = CHAINS["pooled, twice"]()
    return fit(
        network, sites(kind), method=chosen, rounds=2, seed=4, engine=engine, likelihood=likelihood, **rest
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["classes", "real"])
def test_a_run_by_hand_is_the_run_by_autograd(kind: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop engine and chunks of one go by hand, stacked clients by autograd."""
    stacked = run("stacked", kind, *OPTIONS[options], compile="off")

    def refuse(*args: Any) -> Any:
        raise AssertionError("autograd was asked")

    monkeypatch.setattr(point, "gradients", refuse)
    monkeypatch.setattr(choice, "TINY", 0)
    for engine in ("loop", "auto"):
        alone = run(engine, kind, *OPTIONS[options])
        assert engine == "loop" or alone.task.engine.chunk == 1
        torch.testing.assert_close(alone.posterior.mean, stacked.posterior.mean, rtol=1e-9, atol=1e-9)
        assert alone.journal[1]["train"] == pytest.approx(stacked.journal[1]["train"], rel=1e-6)


def test_inputs_are_augmented_as_for_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = run("loop", "classes", "fedavg", {}, augment="crop_flip")
    monkeypatch.setattr(point, "by_hand", lambda model: None)
    without = run("loop", "classes", "fedavg", {}, augment="crop_flip")
    torch.testing.assert_close(hand.posterior.mean, without.posterior.mean, rtol=1e-9, atol=1e-9)
    plain = run("loop", "classes", "fedavg", {})
    assert not torch.allclose(hand.posterior.mean, plain.posterior.mean)


def test_a_step_that_is_compiled_leaves_its_gradient_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = run("loop", "classes", "fedavg", {})

    def watched(model: Model) -> Any:
        gradient = by_hand(model)
        assert gradient is not None

        def own(*args: Any) -> Any:
            assert not traced()
            return gradient(*args)

        return own

    monkeypatch.setattr(point, "by_hand", watched)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)
    monkeypatch.setattr(choice, "TINY", 0)
    compiled = run("auto", "classes", "fedavg", {}, compile="on")
    assert compiled.task.engine.chunk == 1
    assert all("notes" not in record for record in compiled.journal)
    torch.testing.assert_close(compiled.posterior.mean, hand.posterior.mean, rtol=1e-9, atol=1e-9)
