"""How unfamiliar inputs are to a run, by every score at once. One convention: higher means more likely out.

The run's own predictor is used: a point, a Gaussian, an ensemble, MC dropout. With logits f_z and
probabilities p_z of draw z, `msp` and `entropy` are of mean_z p_z, `mutual_information` and `epistemic` of the p_z,
`max_logit` and `energy` the mean over draws of each draw's score, `odin` of mean_z f_z. `mahalanobis` is measured at
the posterior's mean; for an ensemble it is the mean over members, each with its own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes import scores as of
from fedbayes.errors import InputError, unknown
from fedbayes.model.inputs import as_it_is
from fedbayes.model.interception import Interception
from fedbayes.model.likelihood import Weights
from fedbayes.model.model import Model
from fedbayes.model.predictive import classifier_of, draw_weights, each_draw
from fedbayes.noise import seeded
from fedbayes.posterior.values import Draws, Parts, Point
from fedbayes.scores import Mahalanobis
from fedbayes.training.run import Run
from fedbayes.training.tested import check_whole

PASSES = 20
"""Dropout masks of the score `mc_dropout`."""

SCORES: dict[str, str] = {
    "msp": "1 - the largest probability",
    "max_logit": "- the largest logit",
    "energy": "- T log sum_c exp(logit_c / T)",
    "entropy": "entropy of the averaged prediction",
    "mutual_information": "what the draws disagree on",
    "epistemic": "variance between draws, summed over outputs",
    "odin": "1 - the largest tempered probability after a step towards it",
    "mahalanobis": "distance of the features to the nearest class",
    "mc_dropout": "1 - the largest probability, averaged over dropout masks",
}

# What a prediction must be for a score to mean something.
OF_KIND: dict[str, tuple[str, ...]] = {
    "classes": tuple(SCORES),
    "labels": ("max_logit", "entropy", "mutual_information", "epistemic", "mahalanobis"),
    "real": ("epistemic", "mahalanobis"),
    "survival": ("epistemic", "mahalanobis"),
}
BETWEEN_DRAWS = ("mutual_information", "epistemic")


class Distance(NamedTuple):
    """Statistics of penultimate features under each set of weights (one, or an ensemble's members)."""

    weights: list[dict[str, Tensor]]
    fits: list[Mahalanobis]


def scores(
    run: Run,
    x: Any,
    *,
    only: Iterable[str] | None = None,
    draws: int | None = None,
    seed: int | None = None,
    temperature: float = 1.0,
    distance: Distance | None = None,
) -> dict[str, Tensor]:
    """Scores [N] of inputs [N, ...], float64 on the CPU, in batches; `temperature` is the energy's.

    Inputs are what `run.predict` takes, tables too; bytes and floating numbers may stand for each other in a tensor.
    Without `only`, all that the run allows: one draw has nothing to disagree on, tokens can't be moved (ODIN),
    `mc_dropout` needs dropout layers that the predictor leaves off, `mahalanobis` a last linear layer. `distance`
    spares fitting its statistics anew. Costs draws * N forward passes, with ODIN twice more and a backward pass.
    """
    check_whole(run)
    task = run.task
    model = task.program.model.exact
    x = x if isinstance(x, Tensor) else run.stored(x)
    check_inputs(run, x)
    seed = task.seed if seed is None else seed
    able = names(run, x, draws)
    score_names = able if only is None else list(only)
    for name in score_names:
        if name not in able:
            raise unknown("score for this run", name, able)
    parts = {part: run.parts[part] for part in model.layouts}
    drawn = draw_weights(parts, _count(run, draws), seed, "predict")
    if "mahalanobis" in score_names and distance is None:
        try:
            distance = fit_distance(run)
        except InputError:
            if only is not None:
                raise
            score_names.remove("mahalanobis")
    masks = draw_weights(parts, PASSES, seed, "predict") if "mc_dropout" in score_names else {}
    batches: dict[str, list[Tensor]] = {name: [] for name in score_names}
    size = 1024 if task.device.type == "cpu" else 16384
    with torch.no_grad(), seeded(seed, "predict", "torch"):
        for start in range(0, len(x), size):
            rows = x[start : start + size].to(task.device)
            place = (seed, "predict", start)
            outputs = _outputs(model, parts, drawn, rows, place, task.program.prediction.dropout)
            batch = {
                name: score(outputs) for name, score in _of_outputs(model, temperature).items() if name in score_names
            }
            if "odin" in score_names:
                batch["odin"] = of.odin(_mean_logits(run, parts, drawn, place), model.inputs(rows))
            if "mahalanobis" in score_names and distance is not None:
                batch["mahalanobis"] = _distances(model, distance, rows)
            if "mc_dropout" in score_names:
                batch["mc_dropout"] = of.msp(_outputs(model, parts, masks, rows, place, True).softmax(-1).mean(0))
            for name in score_names:
                batches[name].append(batch[name].cpu())
    return {name: torch.cat(pieces) for name, pieces in batches.items()}


def as_seen(run: Run) -> Run:
    """The run for inputs that are already what its network sees, such as inputs far outside the range of bytes."""
    program = run.task.program
    return replace(run, task=replace(run.task, program=program._replace(model=program.model.as_seen)))


def fit_distance(run: Run) -> Distance:
    """Class means and the shared covariance of the features, from sums that each client makes of its training rows.

    Targets that are no classes are taken as one class.
    """
    if run.task.privacy is not None:
        raise InputError("mahalanobis: the run is private, and the sums of its training rows' features have no noise")
    model, clients = run.task.program.model.exact, run.task.clients
    data = clients.data
    classes = data.classes if data.kind == "classes" else 1
    weights = _centres({part: run.parts[part] for part in model.layouts})
    totals: list[dict[str, Tensor]] = [{} for _ in weights]
    with torch.no_grad():
        for k in range(len(clients)):
            for rows in clients.train_rows(k).split(4096):
                x = data.x[rows].to(run.task.device)
                y = (data.y[rows] if data.kind == "classes" else torch.zeros(len(rows)).long()).to(x.device)
                for z, vectors in enumerate(weights):
                    sums = of.mahalanobis_sums(features(model, vectors, x), y, classes)
                    totals[z] = {name: totals[z].get(name, 0) + value for name, value in sums.items()}
    try:
        return Distance(weights, [of.mahalanobis_fit(sums) for sums in totals])
    except ValueError as error:
        raise InputError(f"mahalanobis: {error}") from error


def features(model: Model, vectors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Penultimate features [N, D]: what the unmodified network hands to its last linear map."""
    seen: list[tuple[Tensor, Tensor]] = []

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = F.linear(input, weight, bias)
        seen.append((input, output))
        return output

    with Interception({F.linear: linear}):
        whole = model.output(model.weights(vectors), x)
    for input, output in reversed(seen):
        if output.shape == whole.shape:
            return input.flatten(1)
    raise InputError("mahalanobis: the network ends in no linear layer, so it has no penultimate features")


def check_inputs(run: Run, x: Tensor) -> None:
    """Refuse inputs that the run's network can't take; bytes and floating numbers may stand for each other."""
    data = run.task.clients.data
    if not len(x):
        raise InputError("x is empty: there is nothing to score")
    # One-hot categories and flags of missing values make what the network sees of a table wider than its rows.
    shape = data.seen_shape if run.task.program.model.prepare is as_it_is else data.shape
    if tuple(x.shape[1:]) != shape:
        raise InputError(
            f"x has inputs of shape {list(x.shape[1:])}, the run was trained on {list(shape)}: "
            "resize or convert them first, or take a set of that shape"
        )
    if (data.x.dtype == torch.int64) != (x.dtype == torch.int64):
        raise InputError(f"x is {x.dtype}, the run was trained on {data.x.dtype}: tokens and measurements don't mix")
    if not (x.is_floating_point() or x.dtype in (torch.uint8, torch.int64)):
        raise InputError(f"x is {x.dtype}: give bytes (uint8) or floating numbers as the training inputs were stored")
    if data.unusable(x):
        raise InputError("x holds values that are not finite: drop or fill them")


def names(run: Run, x: Tensor, draws: int | None = None) -> list[str]:
    """The scores that a run allows for such inputs, with so many draws."""
    program = run.task.program
    model = program.model
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.module.modules())
    lacking = [
        *(BETWEEN_DRAWS if _count(run, draws) == 1 else ()),
        *(() if x.is_floating_point() or x.dtype == torch.uint8 else ("odin",)),
        *(() if drops and not program.prediction.dropout else ("mc_dropout",)),
    ]
    return [name for name in OF_KIND[model.likelihood.kind] if name not in lacking]


def _count(run: Run, draws: int | None) -> int:
    """How many different draws there are: members of an ensemble, one for a point."""
    program = run.task.program
    parts = [run.parts[part] for part in program.model.layouts]
    members = [len(q.values) for q in parts if isinstance(q, Draws)]
    if members or (all(isinstance(q, Point) for q in parts) and not program.prediction.dropout):
        return members[0] if members else 1
    return program.prediction.draws if draws is None else draws


def _read(output: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    return (output,)


def _outputs(
    model: Model, parts: Parts, drawn: dict[str, Tensor], rows: Tensor, place: tuple[int | str, ...], dropout: bool
) -> Tensor:
    classifier = classifier_of(model, parts, rows)
    # Float64: in float32 a softmax of confident logits is 1 for half of all inputs, and ties are lost order.
    return each_draw(model, drawn, rows, _read, place, dropout=dropout, classifier=classifier)[0].double()


def _of_outputs(model: Model, temperature: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Scores of outputs [Z, n, C]."""
    kind = model.likelihood.kind
    if kind in ("real", "survival"):
        return {"epistemic": lambda f: f.var(0, correction=0).sum(-1)}
    if kind == "labels":
        return {
            "max_logit": lambda f: of.max_logit(f).mean(0),
            "entropy": lambda f: _label_entropy(f.sigmoid().mean(0)),
            "mutual_information": lambda f: (
                _label_entropy(f.sigmoid().mean(0)) - _label_entropy(f.sigmoid()).mean(0)
            ).clamp_min(0),
            "epistemic": lambda f: f.sigmoid().var(0, correction=0).sum(-1),
        }
    return {
        "msp": lambda f: of.msp(f.softmax(-1).mean(0)),
        "max_logit": lambda f: of.max_logit(f).mean(0),
        "energy": lambda f: of.energy(f, temperature).mean(0),
        "entropy": lambda f: of.entropy(f.softmax(-1).mean(0)),
        "mutual_information": lambda f: of.mutual_information(f.softmax(-1)),
        "epistemic": lambda f: of.epistemic_trace(f.softmax(-1)),
    }


def _label_entropy(probs: Tensor) -> Tensor:
    return (torch.special.entr(probs) + torch.special.entr(1 - probs)).sum(-1)


def _mean_logits(
    run: Run, parts: Parts, drawn: dict[str, Tensor], place: tuple[int | str, ...]
) -> Callable[[Tensor], Tensor]:
    task = as_seen(run).task
    return lambda x: _outputs(task.program.model.exact, parts, drawn, x, place, task.program.prediction.dropout).mean(0)


def _centres(parts: Parts) -> list[dict[str, Tensor]]:
    """The weights at which features are measured: the means, or every member of an ensemble."""
    members = [q.values.shape[0] for q in parts.values() if isinstance(q, Draws)]
    return [
        {part: q.values[z] if isinstance(q, Draws) else q.mean for part, q in parts.items()}
        for z in range(members[0] if members else 1)
    ]


def _distances(model: Model, distance: Distance, rows: Tensor) -> Tensor:
    distances = [of.mahalanobis(fit, features(model, w, rows)) for w, fit in zip(distance.weights, distance.fits)]
    return torch.stack(distances).mean(0)
