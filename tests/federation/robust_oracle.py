"""Makes robust_oracle.json: what byzfl's aggregators give for stacked vectors.

    pip download byzfl==0.0.11 --no-deps && unzip byzfl*.whl
    PYTHONPATH=. python tests/federation/robust_oracle.py

byzfl is no dependency, and its package imports more than its aggregators need: only their file is loaded.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np

VERSION = "0.0.11"
# Clients, weights, attackers among them. Attackers send far values.
CASES = [(5, 4, 1), (8, 6, 2), (11, 5, 3), (20, 3, 4), (7, 4, 0)]


def module(name: str):
    """A file of byzfl.aggregators without the rest of the package."""
    where = next(Path(p) / "byzfl" for p in sys.path if (Path(p) / "byzfl").is_dir())
    for above in ("byzfl", "byzfl.aggregators"):
        package = types.ModuleType(above)
        package.__path__ = [str(where.joinpath(*above.split(".")[1:]))]
        sys.modules[above] = package
    return importlib.import_module(f"byzfl.aggregators.{name}")


def case(clients: int, weights: int, attackers: int) -> dict:
    """Means and scales of clients, the last of which are far off."""
    random = np.random.default_rng(1000 * clients + weights)
    means, scales = random.normal(size=(clients, weights)), np.exp(random.normal(size=(clients, weights)) / 2 - 1)
    if attackers:
        means[-attackers:] = 50 + 5 * means[-attackers:]
        scales[-attackers:] *= 1e-2
    return {"attackers": attackers, "means": means, "scales": scales}


def figures(byzfl, means: np.ndarray, scales: np.ndarray, f: int) -> dict:
    """By name: the aggregate of points, and those of the vectors that stand for Gaussians."""
    both = np.concatenate([means, scales], 1)
    middle, unit = np.median(means, 0), np.exp(np.median(np.log(scales), 0))
    precisions = (unit / scales) ** 2
    naturals = np.concatenate([precisions, precisions * (means - middle) / unit], 1)
    weiszfeld = byzfl.GeometricMedian(nu=1e-9, T=20_000)
    return {
        "median": [byzfl.Median()(means), byzfl.Median()(np.concatenate([means, np.log(scales)], 1))],
        "trimmed_mean": [byzfl.TrMean(f)(means), byzfl.TrMean(f)(naturals)],
        "geometric_median": [weiszfeld(means), weiszfeld(both)],
        "multi_krum": [byzfl.MultiKrum(f)(means), byzfl.MultiKrum(f)(both)],
    }


def main() -> None:
    byzfl, mixing, rows = module("aggregators"), module("preaggregators").NNM, []
    for sizes in CASES:
        row = case(*sizes)
        means, scales, f = row["means"], row["scales"], row["attackers"]
        row |= figures(byzfl, means, scales, f)
        neighbours = mixing(f)(np.concatenate([means, scales], 1))
        # Points have other neighbours than the vectors that stand for Gaussians.
        of_points, of_both = figures(byzfl, mixing(f)(means), scales, f), np.split(neighbours, 2, 1)
        mixed = figures(byzfl, *of_both, f)
        row["mixed"] = {"means": of_both[0], "scales": of_both[1]}
        row["mixed"] |= {name: [of_points[name][0], mixed[name][1]] for name in mixed}
        rows.append(row)

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    table = {"byzfl": VERSION, "made by": "tests/federation/robust_oracle.py", "cases": plain(rows)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
