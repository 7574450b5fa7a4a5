"""A watch on every site, measured: false alarms on quiet streams, and rows until the alarm after a change.

`python benchmarks/watch.py quiet shift corruption hospital` (the last two need FEDBAYES_DATA, or download). Writes
docs/results/watch.json. Streams are stacked: every step bets on all of them at once, by the code of `fb.watch`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.evaluate import watch as watching
from fedbayes.evaluate.binomial import exact_interval
from fedbayes.files import write_atomically
from fedbayes.papers.cells import commit
from fedbayes.runs import martingale as bets
from fedbayes.runs.watched import SETTLED, Channel, State

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "watch.json"
ALPHA = 0.05
PIECE = 50


def first_alarm(reference: np.ndarray, stream: np.ndarray, random: np.random.Generator, limit: float) -> np.ndarray:
    """The row [S] at which the fortune of one score passes its limit first; one after the last where it does not."""
    ranks, fortune = bets.ranks_of(bets.bins_of(reference)), bets.begin(lead=reference.shape[:-1])
    found = np.full(len(reference), stream.shape[-1] + 1)
    for start in range(0, stream.shape[-1], PIECE):
        bins = bets.bins_of(stream[:, start : start + PIECE])
        ranks, p = bets.p_values(ranks, bins, random.random(bins.shape))
        odds = bets.beta_odds(p)
        for i in range(bins.shape[1]):
            fortune = bets.bet(fortune, odds[:, i])
            found = np.where((found > stream.shape[-1]) & (fortune.log >= limit), start + i + 1, found)
    return found


def quiet(small: bool) -> list[dict[str, Any]]:
    """Streams of which nothing changes, looked at after every row; references from 20 rows to 1000."""
    streams, length = (40, 200) if small else (2000, 10_000)
    rows = []
    for size in (20, 1000):
        random = np.random.default_rng(size)
        alarms = 0
        for _ in range(max(1, streams // 250)):
            many = min(250, streams)
            values = random.standard_normal((many, size + length))
            found = first_alarm(values[:, :size], values[:, size:], random, math.log(1 / ALPHA))
            alarms += int((found <= length).sum())
        low, high = exact_interval(np.array([alarms]), np.array([streams]))
        row = {"what": f"quiet, {size} reference rows", "streams": streams, "rows": length, "reference": size}
        row |= {"alarms": alarms, "rate": alarms / streams, "low": float(low[0]), "high": float(high[0])}
        row |= {"allowed": int(binom.ppf(0.975, streams, ALPHA)), "alpha": ALPHA}
        rows.append(row)
        print(row, flush=True)
    return rows


def shift(small: bool) -> list[dict[str, Any]]:
    """A level that moves by a standard deviation, after so many quiet rows, against a limit of five scores."""
    streams = 50 if small else 1000
    rows = []
    for size in (50, 200, 1000):
        for before in (0, 1000):
            for move in (0.5, 1.0, -1.0):
                random = np.random.default_rng(size + before)
                values = random.standard_normal((streams, size + before + 400))
                values[:, size + before :] += move
                found = first_alarm(values[:, :size], values[:, size:], random, math.log(5 / ALPHA)) - before
                delay = np.where(found > 0, found, 401)
                row = {"what": f"{move:+g} sd, {size} reference rows, {before} quiet", "streams": streams}
                row |= {"move": move, "reference": size, "quiet": before, "median": float(np.median(delay))}
                row |= {"within_200": float((delay <= 200).mean()), "within_100": float((delay <= 100).mean())}
                rows.append(row)
                print(row, flush=True)
    return rows


def _run(clients: fb.data.Clients, small: bool, rounds: int) -> fb.Run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(clients.data.seen_shape)), 100), nn.ReLU())
    net.append(nn.Linear(100, clients.data.classes))
    method = fb.methods.feduab(draws=10, lr=0.05, epochs=1, batch=50)
    return fb.fit(net, clients, method=method, rounds=1 if small else rounds, cohort=min(10, len(clients)))


def followed(
    run: fb.Run, reference: Tensor, pieces: list[tuple[Tensor, Tensor]], turns: int, size: int
) -> dict[str, Any]:
    """Watches on streams drawn from rows: first `size` quiet rows, then changed ones; delays and kinds of alarms."""
    chosen = watching.channels_of(run, None, True)
    data = run.task.clients.data
    (quiet_x, quiet_y), (x, y) = pieces
    seen = [
        watching.see(run, a, b.double(), chosen, 0)
        for a, b in ((data.test_x[reference], data.test_y[reference]), (quiet_x, quiet_y), (x, y))
    ]
    delays, kinds, early = [], [], 0
    for turn in range(turns):
        random = np.random.default_rng(turn)
        picks = [random.permutation(len(quiet_x))[:size], random.integers(0, len(x), 400)]
        made = []
        for name in chosen:
            groups, bins = watching._shape(run, name, data.classes)
            counts = bets.ranks_of(seen[0].bins[name], groups, seen[0].groups[name], bins).counts
            mix = bets.begin_mix(data.classes) if name == watching.MIX else None
            fortune = bets.begin(len(bets.RATES) if name == watching.MIX else len(bets.BETAS))
            made.append(Channel(name, watching.kind_of(name), counts, fortune, mix))
        state = State("bench", ALPHA, turn, len(reference), made)
        logs = []
        for channel in made:
            cells = np.concatenate([seen[1].bins[channel.name][picks[0]], seen[2].bins[channel.name][picks[1]]])
            group = np.concatenate([seen[1].groups[channel.name][picks[0]], seen[2].groups[channel.name][picks[1]]])
            column = []
            for a in range(0, len(cells), watching.PIECE):
                b = slice(a, a + watching.PIECE)
                column += [log for log, _ in channel.add(cells[b], group[b], random.random(len(cells[b])))]
            logs.append(column)
        table = np.array(logs)
        over = np.flatnonzero((table >= state.limit).any(0))
        if not len(over):
            delays.append(401)
            continue
        row = int(over[0])
        early += row < size
        if row < size:
            continue
        delays.append(row - size + 1)
        kinds.append(state.kind(table[:, min(row + SETTLED, table.shape[1] - 1)].tolist()))
    d = np.array(delays)
    return {
        "streams": turns,
        "early": early,
        "median": float(np.median(d)) if len(d) else None,
        "within_200": float((d <= 200).mean()) if len(d) else None,
        "found": float((d <= 400).mean()) if len(d) else None,
        "kinds": {kind: kinds.count(kind) for kind in sorted({*kinds})},
    }


def _moved(x: Tensor, by: int) -> Tensor:
    return torch.roll(x, by, -1)


def corruption(small: bool) -> list[dict[str, Any]]:
    """MNIST at one site of mixed labels: six corruptions of its inputs, another mix of labels, noisy labels."""
    clients = fb.data.load("mnist").split(fb.partition.dirichlet(1.0), clients=10, seed=0, test_per_client=600)
    run = _run(clients, small, 30)
    data = clients.data
    own = clients.test_rows(0)
    reference, quiet_rows = own[: len(own) // 2], own[len(own) // 2 :]
    x, y = data.test_x[quiet_rows], data.test_y[quiet_rows]
    random = torch.Generator().manual_seed(0)
    f = x.float()
    noise = torch.randn(f.shape, generator=random)
    strength = {
        "noise": (f + 60 * noise).clamp(0, 255),
        "dark": 0.5 * f,
        "bright": (f + 60).clamp(0, 255),
        "blur": nn.functional.avg_pool2d(f, 5, 1, 2),
        "moved by 3": _moved(f, 3),
        "dead columns": f * (torch.arange(28) % 4 != 0),
    }
    changes = {name: (v.to(x.dtype), y.double()) for name, v in strength.items()}
    other = torch.cat([(data.test_y == c).nonzero()[:60, 0] for c in range(10)])
    changes["another mix of labels"] = (data.test_x[other], data.test_y[other].double())
    flipped = y.clone()
    flips = torch.rand(len(y), generator=random) < 0.3
    flipped[flips] = torch.randint(0, 10, (int(flips.sum()),), generator=random)
    changes["a third of labels wrong"] = (x, flipped.double())
    changes["nothing"] = (x, y.double())
    rows = []
    for name, change in changes.items():
        row = {"what": f"mnist: {name}", "reference": len(reference)}
        row |= followed(run, reference, [(x, y.double()), change], 3 if small else 100, 100)
        rows.append(row)
        print(row, flush=True)
    return rows


def hospital(small: bool) -> list[dict[str, Any]]:
    """Each hospital of heart disease left out in turn: its patients arrive where the others' were expected."""
    # Standardised over all: by each hospital's own patients, as for training, most of the difference would be gone.
    held = fb.data.load("heart-disease", standardise="pooled").sites()
    rows = []
    for k, name in enumerate(held.names):
        clients = held.without(k)
        run = _run(clients, small, 40)
        others = torch.cat([held.test_rows(j) for j in range(len(held)) if j != k])
        data = held.data
        scores = ("epistemic", "energy", "entropy", "mahalanobis")
        x, y = data.test_x[others], data.test_y[others]
        delays, kinds, early = [], [], 0
        for turn in range(2 if small else 30):
            random = np.random.default_rng(turn)
            order = random.permutation(len(others))
            half = len(order) // 2
            watcher = fb.watch(run, "newcomer", reference="none", scores=scores)
            watcher.state.seed = turn
            watcher.update(x[order[:half]], y[order[:half]].double())
            quiet_rows = order[half:]
            watcher.update(x[quiet_rows], y[quiet_rows].double())
            start = watcher.state.rows
            early += watcher.alarm is not None
            if watcher.alarm is not None:
                continue
            new = torch.from_numpy(random.permutation(len(clients.data.test_x)))[:300]
            alarm = watcher.update(clients.data.test_x[new], clients.data.test_y[new].double())
            delays.append(401 if alarm is None else alarm.row - start)
            kinds += [] if alarm is None else [alarm.kind]
        d = np.array(delays)
        row = {"what": f"heart disease: {name} left out", "streams": len(d) + early, "early": early}
        row |= {"reference": len(others), "new_rows": min(300, len(clients.data.test_x))}
        row |= {
            "median": float(np.median(d)),
            "found": float((d <= 400).mean()),
            "within_200": float((d <= 200).mean()),
        }
        row["kinds"] = {kind: kinds.count(kind) for kind in sorted({*kinds})}
        rows.append(row)
        print(row, flush=True)
    return rows


PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "quiet": quiet,
    "shift": shift,
    "corruption": corruption,
    "hospital": hospital,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {"parts": {}}
    for part in arguments.parts or PARTS:
        started = time.perf_counter()
        rows = PARTS[part](arguments.small)
        table["parts"][part] = {
            **{"seconds": time.perf_counter() - started, "commit": commit(), "machine": platform.processor()},
            **{"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "rows": rows},
        }
        if arguments.output != RESULTS:
            table["rows"] = [row for made in table["parts"].values() for row in made["rows"]]
        write_atomically(arguments.output, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
