"""A student's one forward pass against Monte Carlo prediction: `python benchmarks/student.py [--device cuda]`.

Writes docs/results/bench-student.json: seconds for a test set by FedPPD's student, and by 20 draws of a normal over the
teacher's weights and over the student's, with the ratios to the one pass. Weights are random: only time is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import Figures, seconds

from fedbayes.model.likelihood import categorical
from fedbayes.model.model import Model
from fedbayes.model.predictive import predictive
from fedbayes.networks.papers import network_named
from fedbayes.posterior.values import Gaussian, Point

SETS = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}
DRAWS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-student.json"))
    given = parser.parse_args()
    figures = Figures(given.output, given.device)
    for name, shape in SETS.items():
        x = torch.rand(given.rows, *shape).to(given.device)
        taken = {}
        for role, suffix in (("teacher", ""), ("student", "_student")):
            module = network_named(f"fedppd_{name}{suffix}", shape, 10).to(given.device)
            model = Model.of(module, categorical())
            mean, layout = model.initial()["model"], model.layouts["model"]
            spread = {"model": Gaussian(mean, 0.01 + 0 * mean, layout)}
            taken[f"{role}_draws"] = _time(model, spread, x, given.device)
            if role == "student":
                taken["pass"] = _time(model, {"model": Point(mean, layout)}, x, given.device)
        figures.add(
            f"{name}: {given.rows} rows",
            student_s=taken["pass"],
            teacher_draws_s=taken["teacher_draws"],
            student_draws_s=taken["student_draws"],
            draws=DRAWS,
            ratio_to_teacher_draws=taken["teacher_draws"] / taken["pass"],
            ratio_to_own_draws=taken["student_draws"] / taken["pass"],
        )


def _time(model: Model, parts: dict[str, Point | Gaussian], x: torch.Tensor, device: str) -> float:
    predictive(model, parts, x[:1024], draws=DRAWS)  # type: ignore[arg-type]
    return seconds(lambda: predictive(model, parts, x, draws=DRAWS), device, times=3)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
