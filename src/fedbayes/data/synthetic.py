"""Synthetic data: the cubic toy, and inputs that no network has been trained on."""

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.dataset import Dataset
from fedbayes.data.own import from_arrays
from fedbayes.data.preparation import AS_STORED


def cubic(*, points: int = 160, seed: int = 0, standardise: bool = True) -> Dataset:
    """y = x^3 + N(0, 9) with x uniform on [-4, 4]; the test part is an even grid of 241 on [-6, 6] (FedAG, fig. 2)."""
    rng = np.random.default_rng(seed)
    x, grid = rng.uniform(-4, 4, (points, 1)), np.linspace(-6, 6, 241)[:, None]
    y, test_y = (v**3 + rng.normal(0, 3, v.shape) for v in (x, grid))
    return from_arrays(x, y, grid, test_y, kind="real", name="cubic", standardise=standardise)


def uniform_noise(*, shape: tuple[int, ...] = (1, 28, 28), points: int = 2000, seed: int = 0) -> Dataset:
    """Inputs uniform on [0, 1], all for the test (pFedPF's NOISE)."""
    return _test_only("uniform-noise", np.random.default_rng(seed).random((points, *shape), np.float32))


def gaussian_noise(*, shape: tuple[int, ...] = (1, 28, 28), points: int = 2000, seed: int = 0) -> Dataset:
    """Inputs from N(0, 1), all for the test."""
    return _test_only("gaussian-noise", np.random.default_rng(seed).standard_normal((points, *shape), np.float32))


def scaled(data: Dataset, delta: float, *, points: int | None = 2000) -> Dataset:
    """The training inputs as the network sees them, times delta, all for the test: far away in their own direction."""
    seen, y = data.prepare(data.x[:points]), data.y[:points]
    if not isinstance(seen, Tensor):
        raise ValueError(f"{data.name} has rows of several tensors, which cannot be scaled")
    far = delta * seen
    if not far.is_floating_point():
        raise ValueError(f"{data.name} holds tokens, which cannot be scaled")
    far = far.float()
    far_name = f"{data.name} x {delta:g}"
    return Dataset(far_name, far[:0], y[:0], far, y, data.kind, data.classes, AS_STORED, data.class_names)


def _test_only(name: str, x: np.ndarray) -> Dataset:
    inputs, labels = torch.from_numpy(x), torch.zeros(len(x)).long()
    return Dataset(name, inputs[:0], labels[:0], inputs, labels, "classes", 1)
