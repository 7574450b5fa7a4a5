"""A round of FedAvg here and in other libraries, each in an environment of its own: `make bench-peers`.

MNIST's setting: 100 clients of 600 rows each, 10 of them a round, MLP 784-50-50-10, batch 10, one epoch, and all test
rows after every round. All get the same rows and first weights in one file. A turn is a process of its own, whose first
round warms up; turns of ours and of the other library alternate, alone and beside a busy process. Times are compared
where the test accuracy after the last round is within a point of ours. What cannot be installed or run is left out with
a line that says why. The rows are MNIST's where FEDBAYES_DATA has them, else made up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from cpu import busy_neighbour
from measure import Figures, Others

import fedbayes as fb

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks/peers"
CLIENTS, COHORT, BATCH, LR = 100, 10, 10, 0.05
WIDTHS = (784, 50, 50, 10)
CLOSE = 0.01  # of accuracy; further apart, times are not compared


class Peer(NamedTuple):
    """A library: the script that runs it, and what pip installs for it. Without packages, this interpreter runs it."""

    script: Path
    packages: tuple[str, ...] = ()


OURS = Peer(SCRIPTS / "with_fedbayes.py")
PEERS = {
    # Versions of jax and its libraries that the last fedjax, of 2023, was seen to run with.
    "fedjax": Peer(
        SCRIPTS / "with_fedjax.py",
        ("fedjax==0.0.17", "jax==0.4.38", "jaxlib==0.4.38", "dm-haiku==0.0.13", "optax==0.2.4"),
    ),
    "flower": Peer(SCRIPTS / "with_flower.py", ("flwr[simulation]==1.41.0", "torch")),
    "pfl": Peer(SCRIPTS / "with_pfl.py", ("pfl[pytorch]==0.6.0", "torch")),
    "fluke": Peer(SCRIPTS / "with_fluke.py", ("fluke-fl==0.8.1", "torch")),
}


class LeftOut(Exception):
    """Why a library has no figures, in one line."""


def finished(words: list[str], limit: float, what: str, **rest: Any) -> str:
    """What a command wrote, or LeftOut with the last line of its complaint."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, **rest)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"{what}: not done after {limit:.0f} s") from None
    except OSError as error:
        raise LeftOut(f"{what}: {error.strerror}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise LeftOut(f"{what}: {lines[-1][:300] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def interpreter(name: str, peer: Peer, folder: Path, limit: float) -> str:
    """The Python of a peer's environment, which is made when its packages are not what was installed."""
    if not peer.packages:
        return sys.executable
    home = folder / name
    python, installed = home / "bin/python", home / ".installed"
    if not (installed.exists() and installed.read_text().split() == list(peer.packages)):
        print(f"{name}: installing {' '.join(peer.packages)}", flush=True)
        finished([sys.executable, "-m", "venv", str(home)], limit, "no environment")
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
        finished([*words, str(ROOT / "constraints.txt"), *peer.packages], limit, "not installed")
        installed.write_text("\n".join(peer.packages) + "\n")
    return str(python)


def turn(python: str, peer: Peer, data: Path, rounds: int, limit: float, what: str = "did not run") -> dict[str, Any]:
    """The line of figures of one process."""
    ours = {"PYTHONPATH": str(ROOT / "src")} if not peer.packages else {}
    # How threads wait is not said here: `make` says so for tests, which would slow down other libraries.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_WAIT_POLICY")} | ours
    told = finished([python, str(peer.script), str(data), str(rounds)], limit, what, env=env)
    lines = [text for text in told.splitlines() if text.startswith("{")]
    if not lines:
        raise LeftOut(f"{what}: it wrote no figures")
    line: dict[str, Any] = json.loads(lines[-1])
    if not np.isfinite(line["accuracy"]):
        raise LeftOut(f"{what}: its accuracy is not finite")
    return line


class Times(NamedTuple):
    """Turns of one library, together."""

    turns: list[dict[str, Any]]

    def all(self, key: str) -> list[float]:
        return [value for told in self.turns for value in told.get(key, [])]

    @property
    def accuracy(self) -> float:
        return float(np.mean([told["accuracy"] for told in self.turns]))

    def figures(self) -> dict[str, Any]:
        seconds, processor = self.all("seconds"), self.all("processor")
        more = {"processor": median(processor)} if processor else {}
        return {"best": min(seconds), "median": median(seconds), **more, "accuracy": self.accuracy}


def compare(figures: Figures, name: str, peer: Peer, data: Path, ours: Peer = OURS, **options: Any) -> None:
    """The rows of one library: alone, and beside a busy process; or one row that says why there are none."""
    rounds, turns, limit = options["rounds"], options["turns"], options["limit"]
    figures.rows[:] = [old for old in figures.rows if old["what"].split(",")[0] != name]
    try:
        python = interpreter(name, peer, options["folder"], options["install"])
        for state in ("alone", "beside a busy process"):
            both: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            with Others() as others, busy_neighbour() if state != "alone" else nullcontext():
                for _ in range(turns):
                    both[0].append(turn(sys.executable, ours, data, rounds, limit, "ours did not run"))
                    both[1].append(turn(python, peer, data, rounds, limit))
            figures.add(f"{name}, {state}", **row(*map(Times, both)), others_busy=others.share)
    except LeftOut as why:
        figures.add(name, left_out=str(why))


def row(ours: Times, theirs: Times) -> dict[str, Any]:
    """Both libraries' figures, and how many times as long theirs take, where they reach the same accuracy."""
    mine, other = ours.figures(), theirs.figures()
    found: dict[str, Any] = {**other, **{f"our_{key}": value for key, value in mine.items()}}
    if abs(other["accuracy"] - mine["accuracy"]) > CLOSE:
        words = f"accuracy {other['accuracy']:.3f} against {mine['accuracy']:.3f}: more than {CLOSE:.0%} apart"
        found["not_compared"] = words
    else:
        keys = ["best", "median", *(["processor"] if "processor" in other and "processor" in mine else [])]
        found |= {f"ratio_{key}": other[key] / mine[key] for key in keys}
    last = theirs.turns[-1]
    return found | {"threads": last["threads"], "versions": last["versions"]}


def mnist() -> tuple[dict[str, np.ndarray], str]:
    """Rows of MNIST in a fixed random order, or made-up ones."""
    if not os.environ.get("FEDBAYES_DATA"):
        return made_up(600, 10_000), "made up: FEDBAYES_DATA is not set"
    try:
        held = fb.data.load("mnist")
    except FileNotFoundError as error:
        return made_up(600, 10_000), f"made up: {str(error).splitlines()[0]}"
    order = np.random.default_rng(0).permutation(len(held.y))
    x, y = (np.asarray(values)[order] for values in (held.x, held.y))
    rows = {"x": x.reshape(CLIENTS, -1, WIDTHS[0]), "y": y.reshape(CLIENTS, -1)}
    test = {"test_x": np.asarray(held.test_x).reshape(-1, WIDTHS[0]), "test_y": np.asarray(held.test_y)}
    return rows | test, "MNIST"


def made_up(each: int, tests: int) -> dict[str, np.ndarray]:
    """Ten blurred shapes with noise, of MNIST's size: separable, but not in one round."""
    random = np.random.default_rng(0)
    shapes = random.random((10, 7, 7)).repeat(4, 1).repeat(4, 2).reshape(10, -1)
    y = random.integers(10, size=CLIENTS * each + tests)
    x = np.clip(shapes[y] * 160 + random.normal(0, 90, (len(y), WIDTHS[0])), 0, 255).astype(np.uint8)
    held = {"x": x[tests:].reshape(CLIENTS, each, -1), "y": y[tests:].reshape(CLIENTS, each)}
    return held | {"test_x": x[:tests], "test_y": y[:tests]}


def write(path: Path, rows: dict[str, np.ndarray]) -> Path:
    """The one file that all read: rows, first weights as PyTorch would draw them, and options."""
    random, weights = np.random.default_rng(1), {}
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        weights[f"weights{2 * i}"] = random.uniform(-(a**-0.5), a**-0.5, (a, b)).astype(np.float32)
        weights[f"weights{2 * i + 1}"] = random.uniform(-(a**-0.5), a**-0.5, b).astype(np.float32)
    labels = {key: rows[key].astype(np.int64) for key in ("y", "test_y")}
    np.savez(path, **{**rows, **labels, **weights}, cohort=COHORT, batch=BATCH, lr=LR)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/bench-peers.json")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=10, help="of a turn, its warm-up included")
    parser.add_argument("--turns", type=int, default=2, help="of each library, alone and beside a busy process")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a turn")
    parser.add_argument("--install", type=float, default=900, help="seconds of an installation")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="of the environments")
    options = vars(parser.parse_args())
    if options["rounds"] < 2:
        parser.error(f"--rounds must be at least 2, for the first one warms up; it is {options['rounds']}")
    figures = Figures(options.pop("output"), "cpu", keep=True)
    with tempfile.TemporaryDirectory() as place:
        rows, source = mnist()
        data = write(Path(place) / "setting.npz", rows)
        figures.add("setting", data=source, rounds=options["rounds"], turns=options["turns"], lr=LR)
        for name in options.pop("only"):
            compare(figures, name, PEERS[name], data, **options)


if __name__ == "__main__":
    main()
