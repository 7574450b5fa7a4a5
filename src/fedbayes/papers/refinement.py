"""Personal models of one trained run, refined in several ways: scores, inputs from elsewhere, far inputs, and cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedbayes.evaluate import ood
from fedbayes.evaluate.outside import RANKINGS, outside
from fedbayes.model.predictive import predictive
from fedbayes.posterior.values import Parts, Point
from fedbayes.scores import SUMS
from fedbayes.training.personal import personal_models
from fedbayes.training.run import Personal, Run

TIMES = 4  # so many inputs from elsewhere for each test row of a client, at most
FAR = 2000.0


def personal_runs(run: Run, clients: Sequence[int] | None = None) -> Iterator[tuple[int, Run, float]]:
    """For each client a run that predicts by its personal model, and the seconds of its cohort's making, by head."""
    indices = range(len(run.task.clients)) if clients is None else clients
    started = time.perf_counter()
    for cohort in personal_models([run.home], [indices]):
        seconds = (time.perf_counter() - started) / max(len(cohort[0]), 1)
        for k, parts in cohort[0]:
            yield k, Personal(run, parts).as_run, seconds
        started = time.perf_counter()


def personal_figures(
    run: Run, elsewhere: Mapping[str, str] | None = None, *, only: Iterable[str] = ("msp",), most: int | None = None
) -> dict[str, float]:
    """Scores of all personal models on their clients' test rows, by one pass over the clients.

    Accuracy, NLL and ECE are decoded from the sums over clients. For each set of `elsewhere` (label -> its name for
    `outside`) and each OOD score: AUROC, AUPR and FPR95 of the client's test rows against the set (`most` rows of it,
    at most four times as many), averaged over clients, as `LABEL auroc` for the largest probability and `SCORE LABEL
    auroc` for others. `far confidence` is the mean largest probability of the test rows scaled 2000 times, `seconds`
    what it took to make a client's model.
    """
    data, clients = run.task.clients.data, run.task.clients
    if most is None:
        most = TIMES * max(len(clients.test_rows(k)) for k in range(len(clients)))
    places = {label: outside(name, run, most=most) for label, name in (elsewhere or {}).items()}
    sums_of, scores_of = SUMS["classes"]
    sums: dict[str, Tensor] = {}
    ranks: list[dict[str, float]] = []
    latest: Run | None = None
    far: dict[str, dict[str, Tensor]] = {}  # scores of the sets from elsewhere by the latest model
    for k, own, seconds in personal_runs(run):
        rows = clients.test_rows(k)
        x, y = data.test_x[rows], data.test_y[rows].to(run.task.device)
        terms = sums_of(own.predict(x).probs, y)
        sums = {name: sums[name] + t if sums else t for name, t in terms.items()}
        inside = ood.scores(own, x, only=_able(own, x, list(only)))
        row = {"far confidence": float(confidence(own, x, [FAR])[0]), "seconds": seconds}
        if latest is None or not _alike(own.parts, latest.parts):
            latest = own
            for label, place in places.items():
                judge = own if place.run is run else ood.as_seen(own)
                far[label] = ood.scores(judge, place.x, only=list(inside))
        for label in places:
            row |= _ranks(label, inside, far[label])
        ranks.append(row)
    scores = {n: v for n, v in scores_of(sums).items() if n in ("accuracy", "nll", "ece", "brier")}
    return {**scores, **{name: sum(r[name] for r in ranks) / len(ranks) for name in ranks[0]}}


def _alike(a: Parts, b: Parts) -> bool:
    """Whether two models are the same points, as all clients' are who take the network as it was sent."""
    pairs = [(a[name], b[name]) for name in a]
    return all(isinstance(p, Point) and isinstance(q, Point) and torch.equal(p.mean, q.mean) for p, q in pairs)


def _able(run: Run, x: Tensor, only: list[str]) -> list[str]:
    """Those of the scores that the run allows: a point has no draws to disagree, MC dropout needs dropout."""
    allowed = ood.names(run, x)
    return [name for name in only if name in allowed]


def _ranks(label: str, inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        f"{'' if score == 'msp' else score + ' '}{label} {metric}": rank(inside[score], outside[score])
        for score in inside
        for metric, rank in RANKINGS.items()
    }


def confidence(run: Run, x: Tensor, scales: Iterable[float]) -> Tensor:
    """Mean largest probability of stored inputs, as the network sees them, times each scale (Theorem 2)."""
    task, far = run.task, ood.as_seen(run).task.program.model
    inputs = task.program.model.inputs(x.to(task.device))
    draws, seed = task.program.prediction.draws, task.seed
    predictions = [
        predictive(far, run.parts, s * inputs, draws=draws, seed=seed, dropout=task.program.prediction.dropout)
        for s in scales
    ]
    return torch.stack([p.probs.amax(-1).mean() for p in predictions]).cpu()


def under(
    run: Run, refinements: Mapping[str, Mapping[str, object]], elsewhere: Mapping[str, str], **options: Iterable[str]
) -> dict[str, float]:
    """Figures of one trained run under several refinements, each with a word before its names."""
    figures: dict[str, float] = {}
    for word, refinement in refinements.items():
        own = personal_figures(run.refined(**refinement), elsewhere, **options)  # type: ignore[arg-type]
        figures |= {f"{word} {name}".strip(): v for name, v in own.items()}
    return figures


def train_seconds(run: Run) -> float:
    """Seconds of a round for each of its clients, trained together: the median, without rounds that also evaluate."""
    plain = [r["seconds"] / max(r["cohort"], 1) for r in run.journal if not r.get("test") and not r.get("personal")]
    return statistics.median(plain or [r["seconds"] / max(r["cohort"], 1) for r in run.journal])


def outlying(records: Iterable[tuple[float, float]]) -> list[int]:
    """Which pairs (AUROC, FPR95) no ROC can have:  .95 (1 - FPR95) <= AUROC <= 1 - .05 FPR95."""
    return [
        place
        for place, (area, passed) in enumerate(records)
        if not 0.95 * (1 - passed) - 1e-9 <= area <= 1 - 0.05 * passed + 1e-9
    ]
