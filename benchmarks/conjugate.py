"""Scales that are learned: conjugate regressions, where the mean-field posterior is known, from several first scales.

`python benchmarks/conjugate.py` writes docs/results/conjugate.json: for each method by its default settings and each
number of rows, over all of `initial`, the largest and the median |log ratio| of a scale to that of the best diagonal
Gaussian, and the largest distance of a mean in such scales. Default settings were chosen on the design `tuned`; those
of `blind` were run after the choice.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from measure import Figures
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.model.likelihood import normal
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory

METHODS = ("fedvi", "pvi", "bayes_admm", "fedivon")
INITIALS = (0.01, 0.1, 1.0)
MANY = 5000  # rows with which rounds are so long that fewer do


class Design(NamedTuple):
    """How the rows of a regression come about."""

    seed: int
    shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)  # of the rows, by client
    features: int = 5
    noise: float = 1.0
    common: float = 0.3  # what features share
    widest: float = 1.0  # scale of the last feature, of the first 1
    apart: float = 0.0  # how far clients' inputs are from one another

    def pairs(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of each client."""
        random = torch.Generator().manual_seed(self.seed)
        truth, pairs = torch.linspace(-1, 1, self.features)[:, None], []
        for share in self.shares:
            n = max(2, round(share * rows))
            x = torch.randn(n, self.features, generator=random) + self.common * torch.randn(n, 1, generator=random)
            x = (x + self.apart * torch.randn(1, self.features, generator=random)) * torch.linspace(
                1, self.widest, self.features
            )
            pairs.append((x, x @ truth + self.noise * torch.randn(n, 1, generator=random)))
        return pairs


DESIGNS: dict[str, dict[str, Design]] = {
    "tuned": {"plain": Design(1000)},
    "blind": {
        "another seed": Design(7001),
        "six clients of unequal size": Design(7002, shares=(0.35, 0.25, 0.15, 0.1, 0.1, 0.05)),
        "little noise, wide features": Design(7003, noise=0.3, widest=3.0),
        "correlated, clients apart": Design(7004, features=8, common=1.0, apart=0.7),
    },
}


def best(pairs: list[tuple[Tensor, Tensor]], noise: float, prior_scale: float) -> tuple[Tensor, Tensor]:
    """The best diagonal Gaussian: the exact mean, and the diagonal of the exact precision."""
    x, y = (torch.cat(t).double() for t in zip(*pairs))
    precision = torch.eye(x.shape[1], dtype=torch.float64) * prior_scale**-2 + x.T @ x / noise**2
    return torch.linalg.solve(precision, x.T @ y[:, 0] / noise**2), precision.diagonal().rsqrt()


def gaps(method: str, design: Design, rows: int, rounds: int) -> list[dict[str, float]]:
    """How far trained posteriors are from the best one, for each first scale; they are trained as one sweep."""
    pairs, made = design.pairs(rows), [fb.methods.method_named(method, {"initial": scale}) for scale in INITIALS]
    clients = from_clients(pairs, kind="real")
    torch.manual_seed(design.seed)
    network = nn.Linear(design.features, 1, bias=False)
    tasks = [
        prepare(
            network, clients, method=m, rounds=rounds, likelihood=normal(design.noise), seed=design.seed,
            evaluate_every=rounds, engine="stacked",
        )
        for m in made
    ]  # fmt: skip
    mean, scale = best(pairs, design.noise, made[0].prior_scale)  # type: ignore[attr-defined]
    for entries in rounds_together(tasks, [t.begin() for t in tasks], [Memory() for _ in tasks]):
        last = [entry[0].state.broadcast["model"] for entry in entries if entry is not None]
    found = []
    for q in last:
        off = (q.scale.double() / scale).log().abs()
        far = ((q.mean.double() - mean) / scale).abs()
        found.append({"largest": float(off.max()), "median": float(off.median()), "mean_off": float(far.max())})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--rows", type=int, action="append", help="20, 100, 600 and 5000 by default")
    parser.add_argument("--designs", choices=DESIGNS, action="append", help="both kinds by default")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("docs/results/conjugate.json"))
    parser.add_argument("--commit", help="of the code, where there is no repository")
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures(given.output, "cpu", given.commit, keep=True)
    designs = [(kind, name, d) for kind in given.designs or DESIGNS for name, d in DESIGNS[kind].items()]
    for rows in given.rows or (20, 600, 100, 5000):
        for kind, name, design in designs:
            for method in given.method or METHODS:
                # One draw per step is noisier: it is given twice the rounds, at about half the cost of each.
                rounds = given.rounds * (2 if method == "fedivon" else 1) // (1 if rows < MANY else 2)
                found = gaps(method, design, rows, rounds)
                worst = {key: max(one[key] for one in found) for key in found[0]}
                spread = max(one["largest"] for one in found) - min(one["largest"] for one in found)
                figures.add(f"{method}, {rows} rows, {kind}: {name}", **worst, spread=spread, rounds=rounds)


if __name__ == "__main__":
    main()
