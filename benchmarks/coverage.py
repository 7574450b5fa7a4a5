"""How often sets hold the truth at each site, by way of calibrating: a simulation whose truth is known, and real sites.

`python benchmarks/coverage.py simulation private mnist heart landmine`; the last three need FEDBAYES_DATA, or download.
Writes docs/results/coverage.json and coverage.svg. Nothing is chosen by looking at the rows that judge.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import betabinom, binom
from torch import Tensor, nn

import fedbayes as fb
from fedbayes import scores as of
from fedbayes.evaluate import conformal, noised
from fedbayes.evaluate.binomial import exact_band
from fedbayes.evaluate.calibration import Held, held_out
from fedbayes.evaluate.conformal import THRESHOLDS, Gathered
from fedbayes.files import write_atomically
from fedbayes.papers.cells import commit

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "coverage.json"
CELLS = Path(
    os.environ.get("CELLS", Path(tempfile.gettempdir()) / "fedbayes-coverage-cells.json")
)  # a long simulation goes on where it stopped
LEVEL = 0.9
CLASSES = 10
MARGINS = torch.linspace(1.2, 4.5, CLASSES, dtype=torch.float64)  # how far a class lies from the others: hard to easy
WAYS = ("pooled", "quantiles", "by_class", "own", "blended", "unlabelled", "label_shift")
ALPHAS, SITES = (0.1, 0.3, 1.0, 10.0), (5, 20, 100, 1000)
TESTED = 100  # rows of each site that judge
JUDGED = 500  # sites of a setting, over as many federations as it takes


def rows_of(labels: Tensor, random: torch.Generator) -> Tensor:
    """Probabilities [n, C] of the best classifier under equal classes, for rows x ~ N(m_y e_y, I)."""
    x = torch.randn(len(labels), CLASSES, generator=random, dtype=torch.float64)
    x[torch.arange(len(labels)), labels] += MARGINS[labels]
    return (MARGINS * x - MARGINS**2 / 2).softmax(1)


def in_band(true: Tensor, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The chance [K] that of so many new rows of each site a share between `low` and `high` is held."""
    ends = [np.round(TESTED * end) for end in (low - 1 / TESTED, high)]
    least, most = (binom.cdf(end, TESTED, true.numpy()) for end in ends)
    return np.asarray(most - least)


def whole_band(shares: Tensor, own: float, mixes: Tensor, everywhere: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ends [K] of the band that allows for the calibrating rows too: beta-binomial for as many as they are worth.

    The error of sum_c p(c) F_c(t) has two parts: of F_c by the rows of a class at all sites,
    sum_c p^2 F_c (1 - F_c) / n_c, and of p by the rows of the site, Var_p(F_c) / n. Scores of n rows of one kind would
    have F (1 - F) / n, and their coverage is Beta(r, n + 1 - r) with r = (n + 1) level (Vovk, 2012).
    """
    whole = (mixes * shares).sum(1)
    within = (mixes**2 * shares * (1 - shares) / everywhere.clamp_min(1)).sum(1)
    between = ((mixes * shares**2).sum(1) - whole**2).clamp_min(0) / own
    n = (LEVEL * (1 - LEVEL) / (within + between).clamp_min(1e-9)).numpy()
    r = (n + 1) * LEVEL
    return betabinom.ppf(0.025, TESTED, r, n + 1 - r) / TESTED, betabinom.isf(0.025, TESTED, r, n + 1 - r) / TESTED


def simulated(alpha: float, sites: int, calibrating: int, repeats: int) -> list[dict[str, Any]]:
    """One row per way: over all sites, the chance to be inside the exact band, true coverage, mean size."""
    random = torch.Generator().manual_seed(int(1000 * alpha) + sites + calibrating)
    draw = np.random.default_rng(int(1000 * alpha) + sites + calibrating)
    edges = of.PROBABILITY_EDGES
    # F_c of every class on its own edges, from rows that nobody calibrates by.
    many = 200_000 if repeats * sites > 100 else 2_000
    truth = torch.zeros(CLASSES, len(edges) + 1, dtype=torch.float64)
    for c in range(CLASSES):
        labels = torch.full((many,), c)
        values = of.label_scores(of.least_ambiguous_scores(rows_of(labels, random)), labels)
        truth[c] = of.histogram(values, edges).cumsum(0) / many
    found: dict[str, dict[str, list[float]]] = {
        w: {"inside": [], "inside_whole": [], "true": [], "size": []} for w in WAYS
    }
    low, high = exact_band(LEVEL, np.array([TESTED]))
    for _ in range(repeats):
        mixes = torch.from_numpy(draw.dirichlet(np.full(CLASSES, alpha), sites)).clamp_min(1e-12)
        labels = mixes.multinomial(calibrating, replacement=True, generator=random)
        probs = rows_of(labels.flatten(), random).reshape(sites, calibrating, CLASSES)
        own = [
            of.class_histograms(of.label_scores(of.least_ambiguous_scores(p), y), y, CLASSES, edges)
            for p, y in zip(probs, labels)
        ]
        g = Gathered(torch.stack(own).sum(0), own, edges)
        everywhere = g.counts.sum(1)
        labelled = torch.stack([of.mix_of_labels(n.sum(1), everywhere) for n in own])
        source = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)  # which the classifier was made for
        blind = torch.stack([of.mix_by_em(p, source) for p in probs])
        tested = mixes.multinomial(TESTED, replacement=True, generator=random)
        values = of.least_ambiguous_scores(rows_of(tested.flatten(), random)).reshape(sites, TESTED, CLASSES)
        for way in WAYS:
            thresholds, _ = THRESHOLDS[way](g, blind if way == "unlabelled" else labelled, LEVEL, None)
            sets = values <= thresholds[:, None]
            place = torch.searchsorted(edges, thresholds).clamp_max(len(edges))
            shares = truth.gather(1, place.mT).mT  # F_c at the site's threshold
            true = (mixes * shares).sum(1)
            found[way]["inside"] += in_band(true, low, high).tolist()
            found[way]["inside_whole"] += in_band(true, *whole_band(shares, calibrating, mixes, everywhere)).tolist()
            found[way]["true"] += true.tolist()
            found[way]["size"] += sets.double().sum(2).mean(1).tolist()
    rows = []
    for way, values_of in found.items():
        true = np.sort(values_of["true"])
        tenth = true[: max(1, len(true) // 10)]
        rows.append(
            {
                "what": f"alpha {alpha}, {sites} sites, {calibrating} rows each: {way}",
                **{"alpha": alpha, "sites": sites, "rows": calibrating, "way": way, "judged_sites": len(true)},
                "inside": float(np.mean(values_of["inside"])),
                "inside_whole": float(np.mean(values_of["inside_whole"])),
                "spread": float(np.std(true)),
                "worst_decile": float(tenth.mean()),
                "mean": float(true.mean()),
                "size": float(np.mean(values_of["size"])),
            }
        )
    return rows


def simulation(small: bool, only: str | None = None) -> list[dict[str, Any]]:
    """The cells of the simulation that the file of results does not hold yet, each written when it is done."""
    rows = [] if small or not CELLS.is_file() else json.loads(CELLS.read_text())
    for calibrating in (200,) if small else (5000, 1000, 200):
        for alpha in (0.3,) if small else ALPHAS:
            for sites in (5,) if small else SITES:
                if only is not None and only != f"{alpha:g},{sites},{calibrating}":
                    continue
                if any((r["alpha"], r["sites"], r["rows"]) == (alpha, sites, calibrating) for r in rows):
                    continue
                repeats = 1 if small else max(1, JUDGED // sites)
                rows += simulated(alpha, sites, calibrating, repeats)
                if not small:
                    write_atomically(CELLS, json.dumps(rows))
                print(
                    rows[-1]["what"], {k: round(rows[-1][k], 3) for k in ("inside", "worst_decile", "size")}, flush=True
                )
    return rows


def private(small: bool) -> list[dict[str, Any]]:
    """What noise in the sites' histograms costs: sets by label shift in the simulation, by epsilon and sites."""
    rows = []
    for sites, calibrating in ((5, 200),) if small else ((20, 1000), (100, 1000), (1000, 200)):
        random, draw = torch.Generator().manual_seed(sites), np.random.default_rng(sites)
        mixes = torch.from_numpy(draw.dirichlet(np.ones(CLASSES), sites)).clamp_min(1e-12)
        labels = mixes.multinomial(calibrating, replacement=True, generator=random)
        values = of.label_scores(of.least_ambiguous_scores(rows_of(labels.flatten(), random)), labels.flatten())
        tested = mixes.multinomial(200, replacement=True, generator=random)
        scores = of.least_ambiguous_scores(rows_of(tested.flatten(), random)).reshape(sites, 200, CLASSES)
        for epsilon in (None, 16.0, 4.0, 1.0):
            edges = of.PROBABILITY_EDGES if epsilon is None else noised.coarse(of.PROBABILITY_EDGES)
            own = [
                of.class_histograms(v, y, CLASSES, edges) for v, y in zip(values.reshape(labels.shape).unbind(), labels)
            ]
            gathered, source = Gathered(torch.stack(own).sum(0), own, edges), noised.source_of(0)
            mix = torch.stack([of.mix_of_labels(n.sum(1), gathered.counts.sum(1)) for n in own])
            if epsilon is not None:
                gathered, mix = conformal.noised_sums(gathered, epsilon, source)
            thresholds, _ = THRESHOLDS["label_shift"](gathered, mix, LEVEL, None)
            sets = scores <= thresholds[:, None]
            covered = sets.gather(2, tested[..., None])[..., 0].double().mean(1).sort().values
            rows.append(
                {
                    "what": f"{sites} sites, {calibrating} rows each, epsilon {epsilon or 'infinite'}",
                    **{"sites": sites, "rows": calibrating, "epsilon": epsilon},
                    "mean": float(covered.mean()),
                    "worst_decile": float(covered[: max(1, sites // 10)].mean()),
                    "size": float(sets.double().sum(2).mean()),
                }
            )
            print(rows[-1], flush=True)
    return rows


def of_mix(run: fb.Run, made: conformal.Calibrated, held: Held) -> np.ndarray:
    """Coverage of each site by its mix of labels over all judging rows: of sites that are dealt from one set, exact."""
    rows = torch.cat(held.judge_sites).unique()
    p, y = held.judge.at(rows).cpu(), held.judge_y[rows]
    own = of.label_scores(made.class_scores(p), y)
    mix = run.task.clients.label_counts().double()
    mix /= mix.sum(1, keepdim=True)
    hits = (own[None] <= made.thresholds[:, y]).double()  # [K, N]
    by_class = torch.stack([hits[:, y == c].mean(1) for c in range(mix.shape[1])], 1)
    return (mix * by_class).sum(1).numpy()


def judged(
    run: fb.Run, name: str, splits: int, ways: tuple[str, ...], score: str, dealt: bool = False
) -> list[dict[str, Any]]:
    """Coverage by site, averaged over splits of the held-out rows into those that calibrate and those that judge.

    Where sites were `dealt` from one set also by their mix over all judging rows: of 50 sites with 200 rows each, the
    worst would have .85 by chance.
    """
    p = held_out(run).p
    rows = []
    for way in ways:
        hits, sizes, counts, mixed = [], [], [], []
        for split in range(splits):
            held = held_out(run, seed=split, p=p)
            made = conformal.fit(run, LEVEL, way=way, score=score, held=held)
            mixed += [of_mix(run, made, held)] if dealt else []
            hits.append(made.judged["hits"])
            counts.append(made.judged["rows"])
            sizes.append(made.judged["size"])
        covered = np.sum(hits, 0) / np.maximum(np.sum(counts, 0), 1)
        mean = float(np.nanmean(sizes))
        worst = int(covered.argmin())
        rows.append(
            {
                "what": f"{name}, {score}: {way}",
                **{"data": name, "score": score, "way": way, "splits": splits, "sites": len(covered)},
                "worst_site": float(covered[worst]),
                "worst": made.sites[worst],
                "worst_decile": float(np.sort(covered)[: max(1, len(covered) // 10)].mean()),
                "best_site": float(covered.max()),
                "mean": float(np.sum(hits) / np.sum(counts)),
                "size": mean,
                "worst_size": float(np.nanmean([s[worst] for s in sizes])),
            }
        )
        if dealt:
            mean_of = np.sort(np.mean(mixed, 0))
            rows[-1] |= {
                "worst_mix": float(mean_of[0]),
                "worst_decile_mix": float(mean_of[: len(mean_of) // 10].mean()),
            }
        shown = {k: round(v, 3) for k, v in rows[-1].items() if isinstance(v, float)}
        print(rows[-1]["what"], shown, flush=True)
    return rows


REAL = ("pooled", "quantiles", "by_class", "own", "label_shift", "unlabelled", "blended")


def mnist(small: bool) -> list[dict[str, Any]]:
    """Two labels a site."""
    torch.manual_seed(0)
    clients = fb.data.load("mnist").split(fb.partition.labels_per_client(2), clients=50, seed=0, test_per_client=200)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    method = fb.methods.feduab(draws=5, lr=0.05, epochs=1, batch=50)
    run = fb.fit(net, clients, method=method, rounds=1 if small else 30, cohort=10, evaluate_every=30)
    print("mnist", run.scores(), flush=True)
    return judged(run, "mnist, two labels a site", 1 if small else 20, REAL, "least_ambiguous", dealt=True)


def heart(small: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    clients = fb.data.load("heart-disease").sites()
    net = nn.Sequential(nn.Linear(clients.data.seen_shape[0], 16), nn.ReLU(), nn.Linear(16, 2))
    run = fb.fit(net, clients, method=fb.methods.feduab(draws=10, lr=0.05, epochs=1), rounds=1 if small else 40)
    print("heart", run.scores(), flush=True)
    return judged(run, "heart disease", 2 if small else 200, REAL, "least_ambiguous")


def landmine(small: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    clients = fb.data.load("landmine").sites()
    net = nn.Sequential(nn.Linear(clients.data.seen_shape[0], 16), nn.ReLU(), nn.Linear(16, 2))
    run = fb.fit(net, clients, method=fb.methods.feduab(draws=10, lr=0.05, epochs=1), rounds=1 if small else 40)
    print("landmine", run.scores(), flush=True)
    return judged(run, "landmine", 2 if small else 100, REAL, "least_ambiguous")


PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "simulation": simulation,
    "private": private,
    "mnist": mnist,
    "heart": heart,
    "landmine": landmine,
}


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Worst-decile coverage against mean size, one point per way and setting."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    looks = {
        "pooled": "x",
        "quantiles": "+",
        "by_class": "s",
        "own": "^",
        "blended": "P",
        "label_shift": "o",
        "unlabelled": "D",
    }
    fig, axes = plt.subplots(1, len(ALPHAS), figsize=(13, 3.6), sharey=True)
    shown = [row for row in rows if row.get("rows") == max((r.get("rows", 0) for r in rows), default=0)]
    for axis, alpha in zip(axes, ALPHAS):
        for way, mark in looks.items():
            own = [row for row in shown if row.get("alpha") == alpha and row["way"] == way]
            sizes = [12 + 14 * np.log10(row["sites"]) for row in own]
            axis.scatter(
                [r["size"] for r in own], [r["worst_decile"] for r in own], s=sizes, marker=mark, label=way, alpha=0.8
            )
        axis.axhline(LEVEL, color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=f"Dirichlet {alpha:g}", xlabel="classes in a set, mean")
    axes[0].set_ylabel("coverage of the worst tenth of sites")
    axes[-1].legend(fontsize=7, loc="lower right")
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cell", help="one cell of the simulation alone, as alpha,sites,rows; writes it to the output")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.cell:
        write_atomically(arguments.output, json.dumps(simulation(False, arguments.cell)))
        return
    before = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {"parts": {}}
    for part in arguments.parts or PARTS:
        started = time.perf_counter()
        rows = PARTS[part](arguments.small)
        before["parts"][part] = {
            **{"seconds": time.perf_counter() - started, "commit": commit(), "machine": platform.processor()},
            **{"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "level": LEVEL, "rows": rows},
        }
        before["rows"] = [row for made in before["parts"].values() for row in made["rows"]]
        kept = {"parts": before["parts"]} if arguments.output == RESULTS else before
        write_atomically(arguments.output, json.dumps(kept, indent=1) + "\n")
    if "simulation" in before["parts"] and arguments.output == RESULTS:
        figure(before["parts"]["simulation"]["rows"], RESULTS.with_suffix(".svg"))


if __name__ == "__main__":
    main()
