"""Fifty SIGKILLs at random moments of a private run: is any round released under two noises, is the account exact?

A run is started, killed after a random time and started again, fifty times; then it goes to its end. A watcher reads
every version of the journal and of the checkpoints that it can get hold of, a thousand times a second. Of each round
there must be one noisy sum, by the name that its line has (`release`), and one posterior; and the account must have as
many uses as there are rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import Figures

from fedbayes.privacy.accounting import Spent, epsilon_of
from fedbayes.runs import sealed
from fedbayes.runs.checkpoint import ROW
from fedbayes.runs.spending import spending

EXPERIMENT = """
data = "digits"
clients = 30
cohort = 12
network = "mlp"
method = "pvi"
options = {{ epochs = 1 }}
rounds = {rounds}
private = "clients"
noise_multiplier = 3.0
private_clip = 0.5
engine = "stacked"
"""


class Watcher(threading.Thread):
    """Everything that could be seen of each round, by where it was seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.lines, self.states, self.posteriors = defaultdict(set), defaultdict(set), defaultdict(set)
        self.ended = threading.Event()
        self.known: set[tuple[str, int]] = set()

    def run(self) -> None:
        while not self.ended.is_set():
            self.look()
            time.sleep(0.001)

    def look(self) -> None:
        journal = self.folder / "rounds.jsonl"
        for line in journal.read_text().splitlines() if journal.is_file() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            self.lines[record["round"]].add(record["release"])
        for path in self.folder.glob("checkpoints/round-*.safetensors"):
            try:
                key = (path.name, path.stat().st_ino)
                if key in self.known:
                    continue
                row = sealed.read(path, ROW)
            except (ValueError, OSError):
                continue
            self.known.add(key)
            self.states[row["round"]].add(json.loads(row["line"])["release"])
            q = row["broadcast"]["model"]
            self.posteriors[row["round"]].add(hashlib.blake2b(torch.cat([q.mean, q.scale]).numpy().data).hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/private-kills.json"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures, dice = Figures(given.output, "cpu", given.commit), random.Random(0)
    with TemporaryDirectory() as home:
        folder, config = Path(home) / "run", Path(home) / "x.toml"
        config.write_text(EXPERIMENT.format(rounds=given.rounds))
        command = [sys.executable, "-m", "fedbayes", "run", str(config), "--output", str(folder)]
        watcher = Watcher(folder)
        watcher.start()
        killed, within, before = 0, 0, 0
        while killed < given.kills:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            begun, until = time.monotonic(), None
            while process.poll() is None:
                rounds = max(watcher.lines, default=0)
                if until is None and rounds > before:  # it trains again: a random moment from here on
                    until = time.monotonic() + dice.uniform(0, 0.5)
                if (until is not None and time.monotonic() > until) or time.monotonic() - begun > 120:
                    break
                time.sleep(0.002)
            if process.poll() is not None:
                raise SystemExit(f"the run ended by itself: {process.stderr.read().decode()[-300:]}")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            watcher.look()
            killed, within, before = killed + 1, within + (until is not None), max(watcher.lines, default=0)
        reached = max(watcher.states)
        # To an end: the next rounds, with as many as were reached and five more.
        text = (folder / "config.toml").read_text().replace(f"rounds = {given.rounds}", f"rounds = {reached + 5}")
        (folder / "config.toml").write_text(text)
        subprocess.run([sys.executable, "-m", "fedbayes", "resume", str(folder)], check=True, stdout=subprocess.DEVNULL)
        watcher.look()
        watcher.ended.set()
        spent = spending(folder)[0]
        twice = [
            n
            for n in {*watcher.lines, *watcher.states}
            if len(watcher.lines[n] | watcher.states[n]) > 1 or len(watcher.posteriors[n]) > 1
        ]
        last = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        exact = epsilon_of((Spent(0.4, 3.0, len(last)),), 1e-5)
    figures.add(
        f"{given.kills} SIGKILLs",
        kills=killed,
        while_training=within,
        checkpoints_seen=sum(map(len, watcher.posteriors.values())),
        rounds=len(last),
        released_twice=len(twice),
        account_uses=spent.uses,
        epsilon=spent.epsilon,
        epsilon_of_the_rounds=exact,
        holds=not twice and spent.uses == len(last) and abs(spent.epsilon - exact) < 1e-9,
    )


if __name__ == "__main__":
    main()
