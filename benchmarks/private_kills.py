"""Fifty SIGKILLs at random moments of a private run: is any round released under two noises, is the account exact?

A run is started in a process of its own, killed after a random time and started again, fifty times; then it goes to its
end. Meanwhile every version of the journal and of the checkpoints that can be got hold of is read, hundreds of times a
second. Of each round there must be one noisy sum, by the name that its line has (`release`), and one posterior; and the
account must have as many uses as there are rounds. Processes are forked from one that has trained for two rounds,
so that what they need is loaded once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import Figures

from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.runs import sealed
from fedbayes.runs.checkpoint import ROW
from fedbayes.runs.folder import resume, run
from fedbayes.runs.spending import spending

NOISE, MANY = 3.0, 100_000
PRIVATE = Experiment(
    data="digits",
    clients=30,
    cohort=12,
    network="mlp",
    method="pvi",
    options={"epochs": 1},
    rounds=MANY,
    evaluate_every=MANY,
    private="clients",
    noise_multiplier=NOISE,
    private_clip=0.5,
    engine="stacked",
    compile="off",
)


class Seen:
    """Everything that could be seen of each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.releases: dict[int, set[str]] = defaultdict(set)
        self.posteriors: dict[int, set[str]] = defaultdict(set)
        self.known: set[tuple[str, int]] = set()
        self.size = -1

    def look(self) -> None:
        """Take in what is there now."""
        journal = self.folder / "rounds.jsonl"
        with contextlib.suppress(OSError):
            if journal.stat().st_size != self.size:
                self.size = journal.stat().st_size
                for line in journal.read_text().splitlines():
                    with contextlib.suppress(ValueError):  # a line that is being written
                        self._add(json.loads(line))
        for path in self.folder.glob("checkpoints/round-*.safetensors"):
            with contextlib.suppress(ValueError, OSError):  # a file that has gone
                key = (path.name, path.stat().st_mtime_ns)
                if key not in self.known:
                    row = sealed.read(path, ROW)
                    self.known.add(key)
                    self._add(json.loads(row["line"]))
                    q = row["broadcast"]["model"]
                    digest = hashlib.blake2b(torch.cat([q.mean, q.scale]).numpy().data).hexdigest()
                    self.posteriors[row["round"]].add(digest)

    def _add(self, record: dict[str, object]) -> None:
        self.releases[int(str(record["round"]))].add(str(record["release"]))

    @property
    def twice(self) -> list[int]:
        """Rounds of which there was more than one."""
        return [n for n in self.releases if len(self.releases[n]) > 1 or len(self.posteriors[n]) > 1]


def begun(folder: Path) -> int:
    """A process that trains, by its number."""
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        run(PRIVATE, folder)
    os._exit(1)


def kill(folder: Path, seen: Seen, dice: random.Random) -> None:
    """Start it, and kill it at a random moment after its first new line, or before it."""
    pid, before, until = begun(folder), max(seen.releases, default=0), None
    early = dice.random() < 0.2
    latest = time.monotonic() + (dice.uniform(0, 3) if early else 60)
    while time.monotonic() < (latest if until is None else until):
        seen.look()
        if until is None and max(seen.releases, default=0) > before:
            until = time.monotonic() + dice.uniform(0, 0.5)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL, f"the run ended by itself with {code}"
    seen.look()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/private-kills.json"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures, dice = Figures(given.output, "cpu", given.commit), random.Random(0)
    with TemporaryDirectory() as home:
        run(replace(PRIVATE, rounds=2), Path(home) / "before")
        folder = Path(home) / "run"
        seen = Seen(folder)
        for number in range(given.kills):
            kill(folder, seen, dice)
            print(f"{number + 1} killed, {max(seen.releases, default=0)} rounds", flush=True)
        reached = max(seen.releases, default=0)
        (folder / "config.toml").write_text(to_toml(replace(PRIVATE, rounds=reached + 5)))
        resume(folder)
        seen.look()
        spent = spending(folder)[0]
        lines = (folder / "rounds.jsonl").read_text().splitlines()
    exact = epsilon_of((Spent(0.4, NOISE, len(lines)),), 1e-5)
    holds = not seen.twice and spent.uses == len(lines) == reached + 5 and abs(spent.epsilon - exact) < 1e-9
    figures.add(
        f"{given.kills} SIGKILLs",
        rounds=len(lines),
        checkpoints_seen=sum(map(len, seen.posteriors.values())),
        released_twice=len(seen.twice),
        account_uses=spent.uses,
        epsilon=spent.epsilon,
        epsilon_of_the_rounds=exact,
        holds=holds,
    )


if __name__ == "__main__":
    main()
