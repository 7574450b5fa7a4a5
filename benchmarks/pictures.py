"""Draw the pictures of the concepts page from real posteriors: docs/pictures/*.svg. Seconds on one core.

python benchmarks/pictures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedbayes as fb

OUT = Path(__file__).parents[1] / "docs" / "pictures"
INK = ("#2f6db5", "#c8553d", "#4b8b3b")
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "fedbayes", "axes.spines.top": False, "axes.spines.right": False})


def save(name: str) -> None:
    plt.tight_layout()
    plt.savefig(OUT / f"{name}.svg", metadata={"Date": None}, transparent=False)
    plt.close()


class Bumps(nn.Module):
    """Fixed features: 25 bumps along the line, so that a weight belongs to a place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-3.5, 3.5, 25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (-((x - self.centres) ** 2) / (2 * 0.3**2)).exp()


def density(q: fb.Gaussian, x: np.ndarray) -> np.ndarray:
    mean, scale = float(q.mean), float(q.scale)
    return np.exp(-0.5 * ((x - mean) / scale) ** 2) / scale / np.sqrt(2 * np.pi)


def pooling() -> None:
    """Three clients' posteriors of one weight, and what three rules make of them."""
    clients = [fb.Gaussian(torch.tensor([m]), torch.tensor([s])) for m, s in ((-1.0, 0.8), (0.5, 0.4), (1.2, 1.0))]
    x = np.linspace(-4, 4, 600)
    _, axes = plt.subplots(1, 4, figsize=(11, 2.7), sharey=True)
    for q, ink in zip(clients, INK):
        axes[0].plot(x, density(q, x), color=ink)
    axes[0].set_title("three clients")
    for axis, rule, title in zip(
        axes[1:], ("nwa", "log_pool", "conflation"), ("average the numbers", "log-linear pool", "product")
    ):
        pooled = fb.pool(rule, clients)
        for q in clients:
            axis.plot(x, density(q, x), color="#bbbbbb", lw=1)
        axis.plot(x, density(pooled, x), color="black", lw=2)
        axis.set_title(f"{title} ({rule})")
    for axis in axes:
        axis.set_yticks([])
        axis.set_xlabel("one weight")
    save("pooling")


def two_kinds() -> None:
    """Regression with a gap: noise of the data everywhere, ignorance where nobody has data."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(-2, -0.6, 60), random.uniform(0.8, 2, 60)]).astype(np.float32)
    y = (np.sin(2 * x) + 0.2 * random.normal(size=len(x))).astype(np.float32)
    sites = [(x[i::3, None], y[i::3]) for i in range(3)]
    clients = fb.data.from_clients(sites, kind="real")
    network = nn.Sequential(Bumps(), nn.Linear(25, 1))
    method = fb.methods.pvi(
        epochs=20, lr=0.03, optimiser="adam", batch=64, damping=0.5, prior_scale=0.7, test_draws=500
    )
    run = fb.fit(network, clients, method=method, rounds=12, evaluate_every=12, likelihood=fb_likelihood())
    grid = torch.linspace(-3, 3, 200)[:, None]
    p = run.predict(grid)
    mean, line = p.mean[:, 0].numpy(), grid[:, 0].numpy()
    total, epistemic = p.total[:, 0].sqrt().numpy(), p.epistemic[:, 0].sqrt().numpy()
    plt.figure(figsize=(7.5, 3.4))
    plt.fill_between(line, mean - 2 * total, mean + 2 * total, color="#dbe7f5", label="with the noise of the data")
    plt.fill_between(line, mean - 2 * epistemic, mean + 2 * epistemic, color="#8db4dd", label="what is not known")
    plt.plot(line, mean, color="black")
    for (own_x, own_y), ink in zip(sites, INK):
        plt.plot(own_x[:, 0], own_y, ".", color=ink, ms=5)
    plt.legend(frameon=False, loc="upper left", fontsize=9)
    plt.xlabel("input; each colour is one client's rows")
    save("two-kinds")


def fb_likelihood() -> object:
    """Normal noise that is learned."""
    from fedbayes.model.likelihood import LIKELIHOODS

    return LIKELIHOODS["real"](learn=True)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    pooling()
    two_kinds()
