"""Four hospitals with heart disease: posteriors against pooled ones, and our best method against pooled regression.

`python benchmarks/hospitals.py choice exact splits sets --jobs 2` (needs FEDBAYES_DATA, or downloads). Rows and splits
are FLamby's: 740 patients, 13 columns, a third of each hospital for the test. Which of our candidates is best is chosen
on a fifth of the training rows of FLamby's split, drawn ten times; the test of `splits` was named before it was run: a
two-sided Wilcoxon signed-rank test of the differences to pooled logistic regression, over 100 random splits.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.stats import wilcoxon
from sklearn.linear_model import LogisticRegression
from torch import nn

import fedbayes as fb
from fedbayes.data import Clients, Dataset
from fedbayes.data.natural import heart_disease
from fedbayes.evaluate.calibration import Held
from fedbayes.files import write_atomically
from fedbayes.model.predictive import joined
from fedbayes.networks.papers import network_named
from fedbayes.papers.cells import commit
from fedbayes.papers.league_scores import in_sets

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "hospitals.json"
SPLITS, SPLITS_OF_SETS, INNER, SEEDS, BINS, SURE = 100, 30, 10, 5, 10, 0.9
LABELS = np.array(["healthy", "ill"], object)


def tables(data: Dataset, side: str) -> dict[str, dict[str, np.ndarray]]:
    """The rows of each hospital as a table of columns."""
    x, y, owner = (data.x, data.y, data.owner) if side == "train" else (data.test_x, data.test_y, data.test_owner)
    assert owner is not None
    columns = {name: x[:, j].double().numpy() for j, name in enumerate(data.columns)}
    whole = {**columns, "ill": LABELS[y.numpy()]}
    return {
        name: {column: values[(owner == k).numpy()] for column, values in whole.items()}
        for k, name in enumerate(data.owner_names)
    }


def hospitals(data: Dataset, site_effects: bool) -> Clients:
    """The documented way from tables to clients, with test tables of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that hospitals differ is known
        return fb.data.from_tables(
            tables(data, "train"), "ill", test=tables(data, "test"), site_effects=site_effects, thin="keep"
        )


# ---- what is compared: each gives the chance of disease on the test rows ----


def trained(network: str, data: Dataset, seed: int = 0) -> tuple[fb.Run, Clients]:
    """A linear model by `laplace`, whose prior is chosen by the evidence."""
    clients = hospitals(data, network != LINEAR)
    shape, sites = clients.data.seen_shape, {} if network == LINEAR else {"sites": len(data.owner_names)}
    options = {"slopes": False} if network == SHIFTS else {}
    net = network_named(LINEAR if network == LINEAR else "by_site", shape, 2, seed=seed, **sites, **options)
    return fb.fit(net, clients, method=fb.methods.laplace(), rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS), clients


def chances(data: Dataset, seed: int = 0) -> dict[str, np.ndarray]:
    """Chances of disease by each of ours: the three networks, and the mean of their predictions."""
    each = {}
    for network in (LINEAR, SHIFTS, SLOPES):
        run, clients = trained(network, data, seed)
        each[network] = run.predict(clients.data.test_x).probs[:, 1].double().numpy()
    return {**each, MEAN: np.mean(list(each.values()), 0)}


def pooled(data: Dataset) -> dict[str, np.ndarray]:
    """Scikit-learn's logistic regression, as it comes, on all rows in one place and the same columns."""
    each = {}
    for name, site_effects in ((POOLED, False), (POOLED_SITES, True)):
        clients = hospitals(data, site_effects)
        x, test_x = (clients.data.prepare(rows).numpy() for rows in (clients.data.x, clients.data.test_x))
        model = LogisticRegression(max_iter=2000).fit(x, clients.data.y.numpy())
        each[name] = model.predict_proba(test_x)[:, 1]
    return each


ROUNDS = 10
LINEAR, SHIFTS, SLOPES, MEAN = "linear", "by_site, shifts alone", "by_site", "mean of the three"
OURS = (LINEAR, SHIFTS, SLOPES, MEAN)
POOLED, POOLED_SITES = "pooled logistic regression", "pooled logistic regression, hospital as a column"


def scores(p: np.ndarray, y: np.ndarray, owner: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """NLL, ECE by ten bins of confidence, accuracy; mean NLL and coverage of 90 % sets by hospital."""
    own = np.where(y == 1, p, 1 - p).clip(1e-12)
    sure, hit = np.maximum(p, 1 - p), (p > 0.5) == y
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    ece = sum(abs(sure[place == b].sum() - hit[place == b].sum()) for b in range(BINS)) / len(y)
    covered = in_sets(torch.tensor(np.column_stack([1 - p, p])), torch.tensor(y), SURE).numpy()
    table = {"nll": float(-np.log(own).mean()), "ece": float(ece), "accuracy": float(hit.mean())}
    for k, name in enumerate(names):
        at = owner == k
        table |= {f"nll, {name}": float(-np.log(own[at]).mean()), f"coverage, {name}": float(covered[at].mean())}
    return table


def judged(p: Mapping[str, np.ndarray], data: Dataset) -> dict[str, dict[str, float]]:
    assert data.test_owner is not None
    truth = data.test_y.numpy(), data.test_owner.numpy(), data.owner_names
    return {name: scores(each, *truth) for name, each in p.items()}


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        score: {"mean": float(np.mean(values)), "std": float(np.std(values)), "runs": len(values)}
        for score in rows[0]
        if (values := [row[score] for row in rows])
    }


# ---- the parts ----


def choice(jobs: int) -> dict[str, Any]:
    """Mean NLL of all candidates on a fifth of the training rows of FLamby's split, drawn ten times."""
    rows = []
    for inner in range(INNER):
        data = heart_disease(standardise="none", inner=inner)  # its test rows are not read
        rows.append(judged({**chances(data), **pooled(data)}, data))
    nll = {name: float(np.mean([row[name]["nll"] for row in rows])) for name in rows[0]}
    return {"NLL": nll, "chosen": min(OURS, key=nll.__getitem__)}


def one_split(split: int) -> dict[str, dict[str, float]]:
    """Scores of a random split."""
    torch.set_num_threads(1)
    data = heart_disease(standardise="none", split=split)
    return judged({**chances(data), **pooled(data)}, data)


def splits(jobs: int) -> dict[str, Any]:
    """FLamby's split with 5 seeds, and 100 random ones with paired tests against pooled logistic regression."""
    given = heart_disease(standardise="none")
    seeds = [judged(chances(given, seed), given) for seed in range(SEEDS)]
    flamby = {name: summary([row[name] for row in seeds]) for name in OURS}
    flamby |= {name: summary([row]) for name, row in judged(pooled(given), given).items()}  # these draw nothing
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = list(pool.map(one_split, range(SPLITS)))
    return {
        "FLamby's split": flamby,
        "random splits": {name: summary([row[name] for row in rows]) for name in rows[0]},
        "differences": {
            f"{name}, less {base}": {
                score: _paired([row[name][score] for row in rows], [row[base][score] for row in rows])
                for score in ("nll", "ece", "accuracy")
            }
            for base in (POOLED, POOLED_SITES)
            for name in OURS
        },
    }


FOLDS, WAYS = 5, ("own", "blended", "label_shift", "pooled")


def covered(split: int) -> dict[str, dict[str, float]]:
    """Coverage and size of 90 % sets at each hospital: of the likeliest classes, and conformal ones in several ways.

    Conformal thresholds are from training rows: each row is predicted by a model that was trained on the other folds.
    """
    torch.set_num_threads(1)
    data = heart_disease(standardise="none", split=split)
    run, clients = trained(SLOPES, data)
    assert data.owner is not None
    fold = torch.zeros(len(data.y), dtype=torch.int64)
    for k in range(data.owners):
        own = (data.owner == k).nonzero().flatten()
        fold[own[torch.randperm(len(own), generator=torch.Generator().manual_seed(split))]] = torch.arange(len(own))
    fold = fold % FOLDS
    pieces, order = [], []
    for f in range(FOLDS):
        at = fold == f
        held = {"test_x": data.x[at], "test_y": data.y[at], "test_owner": data.owner[at]}
        other = replace(data, x=data.x[~at], y=data.y[~at], owner=data.owner[~at], **held)
        of_fold, folded = trained(SLOPES, other)
        pieces.append(of_fold.predict(folded.data.test_x).cpu())
        order.append(at.nonzero().flatten())
    rows = torch.cat(order)
    p, y, owner = joined(pieces), data.y[rows], data.owner[rows]
    homes = [(owner == k).nonzero().flatten() for k in range(data.owners)]
    tested = run.predict(clients.data.test_x).cpu()
    test_homes = [(data.test_owner == k).nonzero().flatten() for k in range(data.owners)]
    seen = Held(p, y, homes, tested, data.test_y, test_homes, "training rows, by folds")
    table: dict[str, dict[str, float]] = {"likeliest": {}}
    promises = {way: fb.conformal.fit(run, SURE, way=way, held=seen) for way in WAYS}
    for k, name in enumerate(data.owner_names):
        at = test_homes[k]
        truth, probs = data.test_y[at], tested.probs[at]
        alone = probs.max(1).values >= SURE
        table["likeliest"] |= {
            f"coverage, {name}": float(in_sets(probs, truth, SURE).double().mean()),
            f"size, {name}": float((2.0 - alone.double()).mean()),
        }
        for way, promise in promises.items():
            sets = promise.sets(tested.at(at), site=name)
            hit = sets.gather(1, truth[:, None]).double().mean()
            table.setdefault(way, {})
            table[way] |= {f"coverage, {name}": float(hit), f"size, {name}": float(sets.double().sum(1).mean())}
    return table


def sets(jobs: int) -> dict[str, Any]:
    """Sets of `by_site` at each hospital over 30 random splits."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = list(pool.map(covered, range(SPLITS_OF_SETS)))
    return {way: summary([row[way] for row in rows]) for way in rows[0]}


def _paired(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    d = np.array(a) - np.array(b)
    return {
        "mean": float(d.mean()),
        "standard error": float(d.std(ddof=1) / np.sqrt(len(d))),
        "lower on": int((d < 0).sum()),
        "higher on": int((d > 0).sum()),
        "wilcoxon p": float(wilcoxon(d).pvalue),
    }


def exact(jobs: int) -> dict[str, Any]:
    """Posteriors of all training rows of FLamby's split: across hospitals, and in one place by other code."""
    width = 0.5
    clients = hospitals(heart_disease(standardise="none"), False)
    x = clients.data.prepare(clients.data.x).numpy()
    x, y = np.column_stack([x, np.ones(len(x))]), clients.data.y.numpy()
    columns = x.shape[1] - 1

    def in_order(vector: np.ndarray) -> np.ndarray:
        return np.column_stack([vector[: 2 * columns].reshape(2, columns), vector[2 * columns :]])

    q: Any = fb.fit("linear", clients, method=fb.methods.laplace(prior="fixed", prior_scale=width), rounds=8).posterior
    w, covariance = _newton(x, y, width)
    apart = np.array([in_order(row)[1] - in_order(row)[0] for row in np.eye(len(q.mean))]).T
    found = {"prior": width, "rows": len(y), "weights": len(q.mean)}
    found["laplace: largest difference of a mean"] = float(abs(apart @ q.mean.double().numpy() - w).max())
    spread = apart @ q.covariance.double().numpy() @ apart.T
    found["laplace: largest difference of a covariance"] = float(abs(spread - covariance).max())
    found["laplace: largest covariance"] = float(abs(covariance).max())
    network = nn.Linear(columns, 2)
    for weight in network.parameters():
        nn.init.zeros_(weight)
    method = fb.methods.pvi(
        **{"optimiser": "adam", "lr": 0.02, "epochs": 20, "batch": 256, "train_draws": 64, "damping": 0.3},
        **{"prior_scale": width, "lr_across": "cosine"},
    )
    run = fb.fit(network, clients, method=method, rounds=80, evaluate_every=80)
    mean, scale = _mean_field(x, y, width)
    p: Any = run.posterior
    found["pvi: largest difference of a mean"] = float(abs(in_order(p.mean.numpy()) - mean).max())
    found["pvi: largest difference of a scale"] = float(abs(in_order(p.scale.numpy()) - scale).max())
    found["pvi: smallest scale"] = float(scale.min())
    return found


def _newton(x: np.ndarray, y: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Maximum and inverse curvature of the posterior of w_1 - w_0, whose prior has twice the variance."""
    w, precision = np.zeros(x.shape[1]), 0.5 / width**2
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ w))
        bend = (x.T * (p * (1 - p))) @ x + precision * np.eye(len(w))
        w = w + np.linalg.solve(bend, x.T @ (y - p) - precision * w)
    return w, np.linalg.inv(bend)


def _mean_field(x: np.ndarray, y: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The factorised normal nearest to the posterior of both outputs' weights, by its fixed-point equations."""
    points, weights = hermegauss(60)
    weights = weights / weights.sum()
    mean, variance = np.zeros(x.shape[1]), np.full(x.shape[1], width**2)
    for _ in range(400):
        p = 1 / (1 + np.exp(-(2 * x @ mean)[:, None] - np.sqrt(2 * x**2 @ variance)[:, None] * points))
        curved = (p * (1 - p)) @ weights
        variance = 1 / (width**-2 + x.T**2 @ curved)
        bend = 2 * (x.T * curved) @ x + np.eye(len(mean)) / width**2
        mean = mean + 0.5 * np.linalg.solve(bend, x.T @ (y - p @ weights) - mean / width**2)
    return np.array([-mean, mean]), np.sqrt(np.array([variance, variance]))


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {"choice": choice, "exact": exact, "splits": splits, "sets": sets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file that figures are added to")
    asked = parser.parse_args()
    for name in asked.parts:
        start = time.perf_counter()
        figures = PARTS[name](asked.jobs)
        about = {
            "machine": f"{platform.machine()}, cpu",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "seconds": round(time.perf_counter() - start, 1),
        }
        kept = json.loads(asked.output.read_text()) if asked.output.is_file() else {}
        write_atomically(asked.output, json.dumps({**kept, name: {**about, **figures}}, indent=1) + "\n")
        print(name, json.dumps(figures)[:1500], flush=True)


if __name__ == "__main__":
    main()
