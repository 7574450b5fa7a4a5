"""All scores of finished runs with their errors, into files: `scores.json`, and `ood.npz` where asked.

`error` is the Monte Carlo error: the standard deviation of a score over repeated predictions, each with draws of its
own; the value is the first one's, which is what `run.predict` gives. A point or an ensemble has none. `sampling` is the
error of having so few test rows: the standard deviation over resamples of the rows (Efron, 1979).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes import scores as of
from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.evaluate import calibration as calibrate
from fedbayes.evaluate.ood import BETWEEN_DRAWS
from fedbayes.evaluate.outside import score_outside
from fedbayes.evaluate.repeated import REPEATS, draw_seeds, figure
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.own_code import naming
from fedbayes.files import FAULTS, text_of, write_atomically
from fedbayes.model.predictive import Predictive, predictive
from fedbayes.runs.evaluation import save, targets
from fedbayes.runs.folder import load
from fedbayes.runs.home import experiment_in
from fedbayes.runs.records import runs_in
from fedbayes.runs.scored import scored_clients
from fedbayes.training.private import check_public
from fedbayes.training.run import Run
from fedbayes.training.tested import AS_RUN, check_whole

FILE = "scores.json"
LONGEST = 1 << 28  # bytes of it
OOD_FILE = "ood.npz"
RESAMPLES = 50  # of the test rows
ABOUT = ("data", "rows", "rounds", "draws", "repeats")

Scores = dict[str, Any]


def evaluate(
    folder: str | Path,
    *,
    ood: Sequence[str] = (),
    draws: int | None = None,
    repeats: int = REPEATS,
    device: str | None = None,
    network: nn.Module | None = None,
    clients: Clients | None = None,
) -> dict[str, Scores]:
    """Score the run of a folder, or each method's of a comparison, and write the files beside its checkpoints."""
    if repeats < 1 or (draws is not None and draws < 1):
        raise InputError(f"draws and repeats must be at least 1, not {draws} and {repeats}")
    if clients is None:
        clients = scored_clients(folder) or clients_of(experiment_in(folder))
    scores_by_run = {}
    for files in runs_in(folder):
        run = load(files.folder, network=network, clients=clients, device=device)
        with naming(files.name):
            check_whole(run, f"{AS_RUN}, or --by site")
            check_public(run.task.privacy, "scores", mend="")
            # Outside sets first: an unknown name fails before anything is scored.
            tables, arrays = score_outside(run, ood, draws=draws, repeats=repeats) if ood else (None, {})
            scores = score_run(run, draws=draws, repeats=repeats)
        scores["ood"] = tables or _earlier(files.folder, scores)
        if tables:
            meta = {"method": files.name, **{key: scores[key] for key in ABOUT}, "ood": tables}
            save(files.folder / OOD_FILE, {**arrays, "meta": json.dumps(_plain(meta))})
        write_atomically(files.folder / FILE, json.dumps(_plain(scores), indent=1, allow_nan=False))
        scores_by_run[files.name] = scores
    if not scores_by_run:
        raise InputError(f"{folder} has no trained method yet; run `fedbayes resume {folder}`")
    return scores_by_run


def score_run(run: Run, *, draws: int | None = None, repeats: int = REPEATS) -> Scores:
    """Scores of the whole test set, each with its errors, and what calibration makes of them."""
    check_public(run.task.privacy, "scores", mend="")
    data = run.task.clients.data
    if not len(data.test_x):
        raise InputError(f"{data.name} has no test rows to score")
    y = targets(data, data.test_y)
    count = run.task.program.prediction.draws if draws is None else draws
    seeds = draw_seeds(run, repeats)
    first = _predicted(run, data.test_x, count, seeds[0])
    each = [_scores(first, y), *(_scores(_predicted(run, data.test_x, count, seed), y) for seed in seeds[1:])]
    sampling = sampling_errors(first, y, run.task.seed)
    scores: Scores = {
        "data": data.name,
        "rows": len(y),
        "rounds": run.progress.state.round,
        "draws": count if len(seeds) > 1 else 1,
        "repeats": len(seeds),
        "scores": {name: {**figure([s[name] for s in each]), "sampling": sampling[name]} for name in each[0]},
    }
    if data.kind in ("classes", "real"):
        held = calibrate.held_out(run, draws=draws)
        if held.suffices:
            scores["calibrated_by"] = held.source
            if data.kind == "classes":
                scores["temperature"] = temperature_scores(run, held)
            scores["conformal"] = conformal_scores(run, held)
    check_laws(scores)
    return scores


def sampling_errors(p: Predictive, y: Tensor, seed: int, resamples: int = RESAMPLES) -> dict[str, float | None]:
    """The standard deviation of each score over resamples of the rows; None where one has no value in some of them."""
    random = np.random.default_rng(seed)
    drawn = [torch.from_numpy(random.integers(0, len(y), len(y))) for _ in range(resamples)]
    each = [_scores(p.at(rows), y[rows]) for rows in drawn]
    values = {name: [s.get(name) for s in each] for name in _scores(p, y)}
    return {name: None if None in v else float(np.std(np.array(v, float), ddof=1)) for name, v in values.items()}


def temperature_scores(run: Run, held: calibrate.Held) -> dict[str, float]:
    """The temperature, and NLL, Brier and ECE of the judging rows before and after."""
    rows = _union(held.judge_sites)
    y, warmth = held.judge_y[rows], calibrate.temperature(run, held=held)
    judge = calibrate.rows_of(held.judge, rows)
    before, after = judge.probs.cpu(), calibrate.tempered(judge, warmth).cpu()
    table = {"temperature": warmth, "rows": float(len(rows))}
    for when, probs in (("before", before), ("after", after)):
        scores = of.classification_scores(of.classification_sums(probs, y))
        table |= {f"{name}_{when}": scores[name] for name in ("accuracy", "nll", "brier", "ece")}
    return table


def conformal_scores(run: Run, held: calibrate.Held, coverage: float = 0.9) -> dict[str, dict[str, float | None]]:
    """How often sets (or intervals) hold the truth: over all judging rows, for the worst class, by site; their size."""
    classes = held.p.kind == "classes"
    table: dict[str, dict[str, float | None]] = {}
    rows = _union(held.judge_sites)
    judge, y = calibrate.rows_of(held.judge, rows), held.judge_y[rows]
    for way in ("pooled", "by_class") if classes else ("pooled",):
        fitted = calibrate.conformal(run, coverage, by_class=way == "by_class", held=held)
        hit = calibrate.covered(fitted, judge, y).double()
        everywhere = calibrate.covered(fitted, held.judge, held.judge_y).double()
        sites = torch.stack([everywhere[own].mean() for own in held.judge_sites if len(own)])
        row: dict[str, float | None] = {
            "promised": coverage,
            "calibration_rows": float(fitted.rows),
            "judging_rows": float(len(rows)),
            "coverage": float(hit.mean()),
            "site_tenth": float(sites.quantile(0.1)),
            "site_least": float(sites.min()),
        }
        if classes:
            sizes = fitted.sets(judge).double().sum(1)
            row |= {"size": float(sizes.mean()), "empty": float((sizes == 0).double().mean())}
            row["class_least"] = min(float(hit[y == c].mean()) for c in y.unique())
        else:
            low, high = fitted.interval(judge)
            row["width"] = float((high - low).mean())
        table[way] = row
    return table


def check_laws(scores: Scores) -> None:
    """Check that every calibration error obeys ECE <= NLL + error; one that does not is a bug of this library."""
    values = {name: figure["value"] for name, figure in scores["scores"].items()}
    rows = [(values[name], values["nll"], values["accuracy"]) for name in ("ece", "classwise_ece") if "mce" in values]
    t = scores.get("temperature")
    rows += [(t[f"ece_{w}"], t[f"nll_{w}"], t[f"accuracy_{w}"]) for w in ("before", "after")] if t else []
    for gap, nll, accuracy in rows:
        if gap > nll + 1 - accuracy + 1e-9:
            raise RuntimeError(f"an ECE of {gap} can't exceed the NLL {nll} plus the error {1 - accuracy}")


def _predicted(run: Run, x: Tensor, draws: int, seed: int) -> Predictive:
    program = run.task.program
    x = x.to(run.task.device)
    dropout, closed = program.prediction.dropout, program.prediction.closed
    p = predictive(program.model, run.parts, x, draws=draws, seed=seed, dropout=dropout, closed=closed)
    return p.cpu()


def _scores(p: Predictive, y: Tensor) -> dict[str, float | None]:
    """Scores by name; None where one has no value, such as telling wrong from right when nothing is wrong."""
    table: dict[str, float | None] = dict(of.SUMS[p.kind][1](p.sums(y)))
    if p.kind == "survival":
        return table | _survival_scores(p, y, "concordance" in table)
    if p.kind == "real":
        if bool((p.total > 0).all()):
            table["sharpness"] = of.sharpness(p.mean, p.total.sqrt(), y)
        return table
    if p.kind == "labels":
        return table
    table["classwise_ece"] = of.classwise_ece(p.probs, y)
    right = p.probs.argmax(-1) == y
    parts = {"entropy": p.entropy, "aleatoric": p.aleatoric.sum(-1)}
    parts |= {"epistemic": p.epistemic.sum(-1), "mutual_information": p.mutual_information}
    mixed = not (bool(right.all()) or not bool(right.any()))
    for name, part in parts.items():
        silent = name in BETWEEN_DRAWS and not bool(p.epistemic.any())
        table[f"misclassification_{name}"] = None if silent or not mixed else of.misclassification_auroc(part, right)
        table[f"retention_{name}"] = None if silent else of.retention_area(part, right)
    return table


def _survival_scores(p: Predictive, y: Tensor, compares: bool) -> dict[str, float | None]:
    """Uno's concordance, where any two rows can be compared, and the calibration error at the middle of the times."""
    middle = len(p.times) // 2
    chances = p.survival[:, middle]
    return {
        "concordance_ipcw": of.concordance_ipcw(of.risk_of(p.survival), y) if compares else None,
        "calibration": of.survival_calibration(chances, y, p.times[middle], min(5, len(y))).error,
    }


def _union(sites: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(calibrate.distinct(sites)))


def _earlier(folder: Path, scores: Scores) -> Any:
    """The OOD tables of an earlier evaluation of the same posterior with as many draws."""
    try:
        before = json.loads(text_of(folder / FILE, LONGEST))
        same = all(before[key] == scores[key] for key in ("rounds", "draws"))
        return before["ood"] if same and _is_table(before["ood"]) else None
    except FAULTS:
        return None


def _is_table(tables: Any) -> bool:
    """Whether OOD tables are as `score_outside` gives them."""
    notes = tables["notes"]
    return isinstance(tables["tables"], dict) and isinstance(notes, list) and all(isinstance(n, str) for n in notes)


def _plain(value: Any) -> Any:
    """Values as JSON can hold them; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
