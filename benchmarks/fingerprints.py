"""Posteriors of one experiment per family as checksums: run it before and after a change that must change nothing.

    python benchmarks/fingerprints.py --output before.json
    python benchmarks/fingerprints.py --against before.json

Equal bits are promised for the same machine and the same versions only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fedbayes as fb

SEEDS = (0, 1)
SHORT = {"epochs": 1, "batch": 16}
PLAIN = {"optimiser": "sgd", "train_draws": 1}  # of variational clients as published: gradient steps on mean and rho
PLAIN_VI = {**PLAIN, "lr": 0.05, "lr_within": "constant", "kl": "constant", "kl_weight": 0.0001, "prior_scale": 1.0}
# One row per family: method, options, and what else `fit` is given.
EXPERIMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "points, server's Adam": ("fedavg", {**SHORT, "server": "adam", "server_lr": 0.05, "momentum": 0.5}, {}),
    "points, BatchNorm taken again": ("fedavg", {**SHORT, "norm_passes": 1}, {"network": "norm"}),
    "normal fitted to points": ("fedag", {**SHORT, "test_draws": 5}, {"data": "diabetes"}),
    "variational": ("feduab", {**SHORT, "draws": 2}, {"cohort": 4, "dropout": 0.2}),
    "variational, discrepancy": ("fedvi", {**SHORT, **PLAIN_VI, "rule": "wc", "weighting": "discrepancy"}, {}),
    "partitioned": ("pvi", {**SHORT, **PLAIN, "damping": 0.3}, {}),
    "natural gradients": ("fedvi", SHORT, {}),
    "bilevel": ("pfedbayes", {**SHORT, "draws": 2}, {"personal_every": 3}),
    "kept at home": ("bpfed", {**SHORT, "draws": 2}, {}),
    "refined by flows": ("fedper_pf", {**SHORT, "flow_epochs": 2, "hessian": "diag"}, {"personal_every": 3}),
    "Langevin, student": ("fedppd", {**SHORT, "temperature": 0.1}, {}),
    "SWAG, low rank": ("fedswag", {**SHORT, "covariance": "low_rank", "rank": 3, "swag_start": 0.0}, {}),
    "distilled at the server": ("fedbe", {**SHORT, "server_epochs": 1}, {"server": 128}),
}


def network(kind: str, inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(16)] if kind == "norm" else []
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), *middle, nn.Tanh(), nn.Linear(16, outputs))


def trained(name: str, seed: int, engine: str) -> fb.Run:
    method, options, extra = EXPERIMENTS[name]
    given = dict(extra)
    data = fb.data.load(given.pop("data", "digits"))
    kind, server = given.pop("network", "mlp"), given.pop("server", 0)
    spread = fb.partition.iid() if data.kind == "real" else fb.partition.dirichlet(0.5)
    clients = data.split(spread, clients=6, seed=seed)
    if server:
        given["server_data"] = data.test_x[:server]
    net = network(kind, data.x[0].numel(), data.classes, seed)
    made = getattr(fb.methods, method)(**options)
    return fb.fit(net, clients, method=made, rounds=3, seed=seed, engine=engine, compile="off", **given)


def checksum(run: fb.Run) -> str:
    """Of the parts that predict, of client 0's personal model, and of the scores in the journal."""
    digest = hashlib.sha256()
    for parts in (run.parts, run.personal(0).parts):
        for name in sorted(parts):
            for t in tree_leaves(parts[name]):
                digest.update(t.detach().contiguous().numpy().tobytes())
    kept = [{key: record.get(key) for key in ("train", "test", "personal", "left_out")} for record in run.journal]
    digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(given.against.read_text()) if given.against else {}
    sums = {}
    for name in EXPERIMENTS:
        for engine in ("loop", "stacked"):
            for seed in SEEDS:
                key = f"{name}, {engine}, seed {seed}"
                sums[key] = checksum(trained(name, seed, engine))
                word = (
                    "" if not before else "same" if before.get(key) == sums[key] else f"CHANGED, was {before.get(key)}"
                )
                print(f"{key:55} {sums[key]}  {word}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(sums, indent=1) + "\n")
    changed = [key for key in sums if before and before.get(key) != sums[key]]
    print(f"{len(sums)} posteriors, {len(changed)} changed" if before else f"{len(sums)} posteriors")
    if changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
