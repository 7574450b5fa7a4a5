"""The papers' networks, as plain modules built for the shape of an input and a number of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError, one_line, shown, unknown
from fedbayes.files import memory, size_text
from fedbayes.networks import distilled
from fedbayes.networks.resnet import resnet, resnet18, resnet34
from fedbayes.networks.wide import lenet, wide_resnet
from fedbayes.noise import seeded

Shape = Sequence[int]
LARGEST, DEEPEST = 10**7, 10**4  # channels or words of a layer; layers
COPIES = 4  # of the weights that training holds at least: theirs, a client's, a gradient, a sum


def linear(shape: Shape, outputs: int) -> nn.Module:
    """One linear map of the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))


def by_site(shape: Shape, outputs: int, sites: int = 0, slopes: bool = True) -> nn.Module:
    """A linear map, and for each site a deviation from it: the last `sites` columns of a row say whose it is.

    Without `slopes` a site's deviation is a shift alone.
    """
    if len(shape) != 1 or not 0 < sites < shape[0]:
        raise InputError(
            f"network by_site needs rows whose last columns are those of the sites, not shape {list(shape)} with "
            f"sites = {sites}; read the tables with site_effects=True"
        )
    return BySite(shape[0] - sites, sites, outputs, slopes)


class BySite(nn.Module):
    """common(z) + shift of the site + slope of the site times z, for a row z with the sites' columns behind it.

    Weights that are shared, shifts and slopes are tensors of their own, so that each may have a prior of its own.
    """

    def __init__(self, columns: int, sites: int, outputs: int, slopes: bool = True) -> None:
        super().__init__()
        self.sites = sites
        self.common = nn.Linear(columns, outputs)
        self.shift = nn.Linear(sites, outputs, bias=False)
        self.slope = nn.Linear(columns * sites, outputs, bias=False) if slopes else None
        for deviation in filter(None, (self.shift, self.slope)):
            nn.init.zeros_(deviation.weight)

    def forward(self, x: Tensor) -> Tensor:
        z, site = x[..., : -self.sites], x[..., -self.sites :]
        shifted: Tensor = self.common(z) + self.shift(site)
        if self.slope is None:
            return shifted
        products = (site[..., :, None] * z[..., None, :]).flatten(-2)
        return shifted + self.slope(products)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def mlp(
    shape: Shape, outputs: int, hidden: Sequence[int] = (50, 50), start: str = "torch", activation: str = "relu"
) -> nn.Module:
    """Fully connected, ReLU, sigmoid or tanh; 784-50-50-10 is FedUAB's for MNIST (42,310 weights)."""
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    sizes = [prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), ACTIVATIONS[activation]()]
    return _started(nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)), start, "mlp")


def cnn(shape: Shape, outputs: int, channels: int = 32, hidden: int = 64, start: str = "torch") -> nn.Module:
    """Three unpadded 3x3 convolutions with two 2x2 max-pools and a hidden layer: FedUAB's for CIFAR (52,874)."""
    if len(shape) != 3 or min(shape[1:]) < 18:
        raise InputError(f"network cnn needs images [C, H, W] of at least 18 x 18, not {list(shape)}; try mlp")
    height, width = (((n - 2) // 2 - 2) // 2 - 2 for n in shape[1:])
    network = nn.Sequential(
        nn.Conv2d(shape[0], channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
    return _started(network, start, "cnn")


def acar_cnn(shape: Shape, outputs: int, channels: int = 64) -> nn.Module:
    """Two unpadded 5x5 convolutions with 2x2 max-pools, hidden layers of 384 and 192: FedDyn's for CIFAR (797,962)."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise InputError(f"network acar_cnn needs images [C, H, W] of at least 16 x 16, not {list(shape)}; try mlp")
    height, width = (((n - 4) // 2 - 4) // 2 for n in shape[1:])
    return nn.Sequential(
        nn.Conv2d(shape[0], channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * height * width, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, outputs),
    )


class TextCNN(nn.Module):
    """Convolutions of several widths over embedded tokens, the maximum over time of each channel, one linear map."""

    def __init__(self, outputs: int, words: int, width: int, channels: int, spans: Sequence[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, channels, span) for span in spans)
        self.head = nn.Linear(channels * len(spans), outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        pooled = [F.leaky_relu(convolution(x)).amax(-1) for convolution in self.convolutions]
        return self.head(torch.cat(pooled, -1))


def text_cnn(
    shape: Shape,
    outputs: int,
    words: int = 50000,
    width: int = 16,
    channels: int = 10,
    spans: Sequence[int] = (2, 3, 4),
    start: str = "torch",
) -> nn.Module:
    """FedUAB's for news: embedding, convolutions of width 2, 3, 4, linear (801,780 weights with 50,000 words)."""
    return _started(TextCNN(outputs, words, width, channels, spans), start, "text_cnn")


def next_token(
    shape: Shape, outputs: int, words: int = 66, width: int = 8, hidden: int = 128, start: str = "torch"
) -> nn.Module:
    """Embedded tokens side by side and one hidden layer: what comes next (Bengio et al., 2003)."""
    layers = [nn.Embedding(words, width), nn.Flatten(), nn.Linear(prod(shape) * width, hidden), nn.ReLU()]
    return _started(nn.Sequential(*layers, nn.Linear(hidden, outputs)), start, "text_cnn")


# FedUAB's own start: weights uniform within these bounds, layer by layer, biases at .01.
BOUNDS: dict[str, tuple[float, ...]] = {
    "mlp": (0.25, 0.15, 0.10),
    "cnn": (0.20, 0.18, 0.15, 0.12, 0.10),
    "text_cnn": (0.50, 0.30, 0.30, 0.30, 0.10),
}


def _started(network: nn.Module, start: str, kind: str) -> nn.Module:
    """The network with PyTorch's first weights, or FedUAB's; layers beyond its own take the last bound."""
    if start not in ("torch", "feduab"):
        raise unknown("start", start, ("torch", "feduab"))
    if start == "feduab":
        layers = [layer for layer in network.modules() if isinstance(getattr(layer, "weight", None), Tensor)]
        for place, layer in enumerate(layers):
            bound = BOUNDS[kind][min(place, len(BOUNDS[kind]) - 1)]
            for name, weight in layer.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.constant_(weight, 0.01)
                else:
                    nn.init.uniform_(weight, -bound, bound)
    return network


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "by_site": by_site,
    "mlp": mlp,
    "cnn": cnn,
    "acar_cnn": acar_cnn,
    "text_cnn": text_cnn,
    "next_token": next_token,
    "resnet": resnet,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "fedppd_mnist": distilled.fedppd_mnist,
    "fedppd_mnist_student": distilled.fedppd_mnist_student,
    "fedppd_femnist": distilled.fedppd_femnist,
    "fedppd_femnist_student": distilled.fedppd_femnist_student,
    "fedppd_cifar": distilled.fedppd_cifar,
    "fedppd_cifar_student": distilled.fedppd_cifar_student,
    "lenet": lenet,
    "wide_resnet": wide_resnet,
}


def network_named(name: str, shape: Shape, outputs: int, *, seed: int = 0, **options: object) -> nn.Module:
    """A network of the table with weights that depend on the seed alone."""
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    options_known = NETWORKS[name].__code__.co_varnames[2 : NETWORKS[name].__code__.co_argcount]
    for option in options:
        if option not in options_known:
            raise unknown(f"option of network {name}", option, options_known)
    _check_size(name, shape, outputs, options)
    with seeded(seed, "network", name):
        return NETWORKS[name](shape, outputs, **options)


def _check_size(name: str, shape: Shape, outputs: int, options: Mapping[str, object]) -> None:
    """Build it without memory first: sizes that make no network, or one that does not fit, fail early."""
    for option, value in options.items():
        if any(isinstance(v, int) and v > LARGEST for v in (value if isinstance(value, list | tuple) else [value])):
            raise InputError(f"network {name}: {option} must be at most {LARGEST}, not {shown(value)}")
        if option == "depth" and isinstance(value, int) and value > DEEPEST:
            raise InputError(f"network {name}: depth must be at most {DEEPEST}, not {value}")
    try:
        with torch.device("meta"):
            network = NETWORKS[name](shape, outputs, **options)
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise InputError(f"network {name} can't be built with {dict(options)}: {one_line(error)}") from error
    size = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    if COPIES * size > memory():
        raise InputError(
            f"network {name} would have weights of {size_text(size)}, and training holds some {COPIES} times as much; "
            f"this machine has {size_text(memory())}: lower {', '.join(options) or 'the size of its inputs'}"
        )
