"""What every script of this folder reads and writes: the setting as arrays, and its rounds as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import NamedTuple

import numpy as np


class Setting(NamedTuple):
    """The federation: rows of clients [clients, rows, inputs], test rows, the network's first weights, and options."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    weights: list[np.ndarray]  # [inputs, outputs], then [outputs], layer by layer
    cohort: int
    batch: int
    lr: float
    rounds: int

    def torch_state(self) -> dict[str, np.ndarray]:
        """The weights under the names of `nn.Sequential(Linear, ReLU, Linear, ...)`."""
        pairs = zip(self.weights[::2], self.weights[1::2])
        return {f"{2 * i}.{k}": v for i, (w, b) in enumerate(pairs) for k, v in (("weight", w.T.copy()), ("bias", b))}


def read() -> Setting:
    """From the .npz named on the command line, and the number of rounds beside it."""
    with np.load(sys.argv[1]) as held:
        weights = [held[key] for key in sorted(held) if key.startswith("weights")]
        x, test_x = (held[key].astype(np.float32) / 255 for key in ("x", "test_x"))
        cohort, batch, lr = int(held["cohort"]), int(held["batch"]), float(held["lr"])
        return Setting(x, held["y"], test_x, held["test_y"], weights, cohort, batch, lr, int(sys.argv[2]))


class Laps:
    """The moments at which rounds ended, their evaluation included; what comes before the first is warming up."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.accuracy = float("nan")

    def end(self, accuracy: float) -> None:
        self.accuracy = float(accuracy)
        self.ends.append((time.perf_counter(), time.process_time()))

    def tell(self, *packages: str, threads: int, processor: bool = True) -> None:
        """Print the line; `processor` seconds only where no other process does the work."""
        wall, worked = (list(np.diff(moments)) for moments in zip(*self.ends))
        line = {"seconds": wall, "accuracy": self.accuracy, "threads": threads}
        line |= {"processor": worked} if processor else {}
        print(json.dumps(line | {"versions": {name: version(name) for name in packages}}), flush=True)
