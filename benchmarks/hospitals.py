"""Four hospitals with heart disease: posteriors against pooled ones, and our best method against pooled regression.

`python benchmarks/hospitals.py choice exact splits` (needs FEDBAYES_DATA, or downloads). Rows and splits are
FLamby's: 740 patients, 13 columns, a third of each hospital for the test. What is called best was chosen by `choice`,
on a fifth of the training rows of FLamby's own split; the test of `splits` was named before it was run: a two-sided
Wilcoxon signed-rank test of the differences to pooled logistic regression, over 100 random splits.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
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
from fedbayes.files import write_atomically
from fedbayes.papers.cells import commit
from fedbayes.papers.league import in_sets

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "hospitals.json"
SPLITS, INNER, SEEDS, BINS, SURE = 100, 10, 5, 10, 0.9
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


def ours(network: str, method: Any, rounds: int) -> Callable[[Dataset, int], np.ndarray]:
    def chances(data: Dataset, seed: int) -> np.ndarray:
        clients = hospitals(data, network == "by_site")
        run = fb.fit(network, clients, method=method, rounds=rounds, seed=seed, evaluate_every=rounds)
        return run.predict(clients.data.test_x).probs[:, 1].double().numpy()

    return chances


def plain(data: Dataset, seed: int) -> np.ndarray:
    return _pooled(data, site_effects=False)


def with_sites(data: Dataset, seed: int) -> np.ndarray:
    return _pooled(data, site_effects=True)


def _pooled(data: Dataset, site_effects: bool) -> np.ndarray:
    """Scikit-learn's logistic regression, as it comes, on all rows in one place and the same columns."""
    clients = hospitals(data, site_effects)
    x, test_x = (clients.data.prepare(rows).numpy() for rows in (clients.data.x, clients.data.test_x))
    model = LogisticRegression(max_iter=2000).fit(x, clients.data.y.numpy())
    chances: np.ndarray = model.predict_proba(test_x)[:, 1]
    return chances


def laplace(**options: Any) -> Any:
    return fb.methods.laplace(**options)


BEST = "laplace, by_site, evidence"
POOLED, POOLED_SITES = "pooled logistic regression", "pooled logistic regression, hospital as a column"
COMPARED: dict[str, Callable[[Dataset, int], np.ndarray]] = {
    POOLED: plain,
    POOLED_SITES: with_sites,
    "laplace, linear, evidence": ours("linear", laplace(), 10),
    "laplace, by_site, fixed prior": ours("by_site", laplace(prior="fixed"), 6),
    BEST: ours("by_site", laplace(), 10),
}


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


def judged(name: str, data: Dataset, seed: int = 0) -> dict[str, float]:
    assert data.test_owner is not None
    p = COMPARED[name](data, seed)
    return scores(p, data.test_y.numpy(), data.test_owner.numpy(), data.owner_names)


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        score: {"mean": float(np.mean(values)), "std": float(np.std(values)), "runs": len(values)}
        for score in rows[0]
        if (values := [row[score] for row in rows])
    }


# ---- the parts ----


def choice() -> dict[str, Any]:
    """All candidates on a fifth of the training rows of FLamby's split, drawn anew 10 times; test rows are not read."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in COMPARED}
    for inner in range(INNER):
        data = heart_disease(standardise="none", inner=inner)
        for name in COMPARED:
            rows[name].append(judged(name, data))
    figures = {name: summary(each) for name, each in rows.items()}
    candidates = [name for name in COMPARED if name not in (POOLED, POOLED_SITES)]
    return {**figures, "least NLL": min(candidates, key=lambda name: figures[name]["nll"]["mean"])}


def splits() -> dict[str, Any]:
    """FLamby's split with 5 seeds, and 100 random ones with paired tests against pooled logistic regression."""
    given = heart_disease(standardise="none")
    figures: dict[str, Any] = {"FLamby's split": {}, "random splits": {}, "differences": {}}
    for name in COMPARED:
        seeds = range(SEEDS) if name not in (POOLED, POOLED_SITES) else (0,)  # these draw nothing
        figures["FLamby's split"][name] = summary([judged(name, given, seed) for seed in seeds])
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in COMPARED}
    for split in range(SPLITS):
        data = heart_disease(standardise="none", split=split)
        for name in COMPARED:
            rows[name].append(judged(name, data))
        if split % 10 == 9:
            print(split + 1, {n: round(float(np.mean([r["nll"] for r in rows[n]])), 4) for n in rows}, flush=True)
    figures["random splits"] = {name: summary(each) for name, each in rows.items()}
    for base in (POOLED, POOLED_SITES):
        for name in (BEST, "laplace, linear, evidence"):
            figures["differences"][f"{name}, less {base}"] = {
                score: _paired([r[score] for r in rows[name]], [r[score] for r in rows[base]])
                for score in ("nll", "ece", "accuracy")
            }
    return figures


def _paired(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    d = np.array(a) - np.array(b)
    return {
        "mean": float(d.mean()),
        "standard error": float(d.std(ddof=1) / np.sqrt(len(d))),
        "lower on": int((d < 0).sum()),
        "higher on": int((d > 0).sum()),
        "wilcoxon p": float(wilcoxon(d).pvalue),
    }


def exact() -> dict[str, Any]:
    """Posteriors of all training rows of FLamby's split: across hospitals, and in one place by other code."""
    width = 0.5
    clients = hospitals(heart_disease(standardise="none"), False)
    x = clients.data.prepare(clients.data.x).numpy()
    x, y = np.column_stack([x, np.ones(len(x))]), clients.data.y.numpy()
    columns = x.shape[1] - 1

    def in_order(vector: np.ndarray) -> np.ndarray:
        return np.column_stack([vector[: 2 * columns].reshape(2, columns), vector[2 * columns :]])

    q: Any = fb.fit("linear", clients, method=laplace(prior="fixed", prior_scale=width), rounds=8).posterior
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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"choice": choice, "exact": exact, "splits": splits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    for name in parser.parse_args().parts:
        start = time.perf_counter()
        figures = PARTS[name]()
        about = {
            "machine": f"{platform.machine()}, cpu",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "seconds": round(time.perf_counter() - start, 1),
        }
        kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        write_atomically(RESULTS, json.dumps({**kept, name: {**about, **figures}}, indent=1) + "\n")
        print(name, json.dumps(figures)[:1500], flush=True)


if __name__ == "__main__":
    main()
