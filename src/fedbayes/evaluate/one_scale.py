"""One scale for all adapters, fitted after a training of points: what a posterior that is learned must be better than.

Training-free Bayesian adapters (Shi et al., 2024) put a normal of one width around trained weights and choose the width
by rows alone. Here it is the width of the lowest NLL on the rows that clients held out: a sum over clients for each
width, so that no row leaves its site.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from fedbayes.errors import InputError
from fedbayes.posterior.values import Gaussian
from fedbayes.training.run import Run, scores_on

WIDTHS = tuple(float(w) for w in torch.logspace(-4, 0, 17))
NONE = 1e-12  # of weights that are left as they are: as good as none


class OneScale(NamedTuple):
    """The run that predicts by the posterior, the width, and the NLL of the held-out rows for each width tried."""

    run: Run
    width: float
    tried: dict[float, float]


def one_scale(
    run: Run, *, patterns: tuple[str, ...] = ("*lora_B",), draws: int = 20, widths: tuple[float, ...] = WIDTHS
) -> OneScale:
    """N(w, width^2) around the trained weights that match, with the width of the lowest NLL on held-out rows."""
    task = run.task
    if not len(task.validation):
        raise InputError("one_scale: no rows are held out to choose the width by; train with validation=0.1")
    q = run.parts["model"]
    layout = task.program.model.layouts["model"]
    chosen = layout.where(*patterns).to(q.mean.device)
    if not bool(chosen.any()):
        raise InputError(f"one_scale: no weight matches {', '.join(patterns)}; there are {', '.join(layout.names[:5])}")
    x, y = task.clients.data.x[task.validation], task.clients.data.y[task.validation]

    def wide(width: float) -> Run:
        scale = torch.where(chosen, width, NONE).to(q.mean)
        state = run.progress.state
        state = state._replace(broadcast={**state.broadcast, "model": Gaussian(q.mean, scale, layout)})
        program = task.program._replace(prediction=task.program.prediction._replace(draws=draws))
        return Run(replace(task, program=program), run.progress._replace(state=state, best=None), run.journal)

    tried = {w: scores_on(task, wide(w).progress.state, x, y, "validation", draws)["nll"] for w in widths}
    best = min(tried, key=lambda w: tried[w])
    return OneScale(wide(best), best, tried)
