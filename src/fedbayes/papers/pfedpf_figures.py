"""pFedPF's Theorem 2 as a figure: how sure personal models are of inputs that are scaled ever further away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedbayes.data import load, partition
from fedbayes.methods import fedavg_pf
from fedbayes.networks.papers import network_named
from fedbayes.papers.drawing import save
from fedbayes.papers.refinement import confidence, personal_runs
from fedbayes.training.fit import fit
from fedbayes.training.run import Run

SHOWN: dict[str, dict[str, Any]] = {
    "point": {"refine": "none"},
    "Laplace": {"refine": "laplace"},
    "flow": {"refine": "flow"},
}
INK = {"point": "#b5482a", "Laplace": "#5b8c3e", "flow": "#1b6ca8"}
SCALES = tuple(float(s) for s in torch.logspace(0, torch.tensor(2000.0).log10(), 12))


def digits_run(rounds: int = 30, clients: int = 10) -> Run:
    """FedAvg with pFedPF's local training on embedded digits, two main classes per client."""
    spread = partition.main_classes(2, 0.2)
    data = load("digits").split(spread, clients=clients, seed=0, test_per_client=30)
    network = network_named("mlp", data.data.shape, 10, seed=0)
    method = fedavg_pf(batch=16, test_draws=100)
    return fit(network, data, method=method, rounds=rounds, evaluate_every=rounds, seed=0)


def confidences(run: Run, scales: Sequence[float] = SCALES, **flow: Any) -> dict[str, list[float]]:
    """Mean confidence in the clients' scaled test rows, by refinement: one figure per scale. `flow`: its options."""
    data, curves = run.task.clients.data, {}
    for name, refinement in {**SHOWN, "flow": {**SHOWN["flow"], **flow}}.items():
        rows = [
            confidence(own, data.test_x[run.task.clients.test_rows(k)], scales)
            for k, own, _ in personal_runs(run.refined(**refinement))
        ]
        curves[name] = torch.stack(rows).mean(0).tolist()
    return curves


def confidence_figure(output: Path, curves: Mapping[str, Sequence[float]] | None = None) -> list[Path]:
    """Confidence against the scale of the inputs, for the point network, Laplace and the flow; with its numbers."""
    from matplotlib.figure import Figure

    curves = curves or confidences(digits_run())
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    ax = figure.subplots()
    for name, values in curves.items():
        ax.plot(SCALES, values, marker="o", ms=3, color=INK[name], label=name)
    ax.axhline(0.1, color="0.6", lw=1, ls=":")
    ax.set(xscale="log", xlabel="inputs times", ylabel="mean largest probability", ylim=(0, 1.02))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    stem = output / "pfedpf-confidence"
    paths = save(figure, stem)
    numbers = stem.with_suffix(".json")
    numbers.write_text(json.dumps({"scales": list(SCALES), **curves}) + "\n", encoding="utf-8")
    return [*paths, numbers]


FIGURES = {"pfedpf-confidence": confidence_figure}
