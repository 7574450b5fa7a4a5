"""The long pass: `make fuzz`, or `python tests/fuzz/long.py --experiments 20000 --folders 0 --replies 10000`."""

import argparse
import importlib.util
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import data_files
import experiment_files
import replies
import run_folders
import secure_replies
from harness import Case, Verdict, verdicts

NUMBERS = {"experiments": 20_000, "data": 5_000, "folders": 2_000, "replies": 10_000, "secure": 10_000}
KINDS: dict[str, tuple[Case, Callable[[], object] | None]] = {
    "experiments": (experiment_files.case, None),
    "data": (data_files.case, data_files.trained),
    "folders": (run_folders.case, run_folders.home),
    "replies": (replies.case, None),
    "secure": (secure_replies.case, None),
}
FLOWER = ("replies", "secure")  # what needs it
EVERY = 20.0  # seconds between two lines of progress


def sweep(name: str, seeds: range, workers: int) -> int:
    """Judge all seeds, print counts by outcome and the failing seeds; gives the number of failures."""
    case, prepare = KINDS[name]
    counts: Counter[str] = Counter()
    failures: dict[Verdict, list[int]] = defaultdict(list)
    began = said = time.monotonic()
    for seed, verdict in verdicts(case, seeds, workers, prepare):
        counts[verdict.kind] += 1
        if not verdict.fine:
            failures[verdict].append(seed)
            print(f"{name} {seed}: {verdict.kind}: {verdict.about}", flush=True)
        if time.monotonic() - said > EVERY:
            said = time.monotonic()
            print(f"{name}: {counts.total()} of {len(seeds)}, {dict(counts)}, {said - began:.0f} s", flush=True)
    print(f"{name}: {counts.total()} cases in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for verdict, where in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"  {len(where)} x {verdict.kind}: {verdict.about}  seeds {where[:5]}")
    return sum(map(len, failures.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=int(os.environ.get(f"FUZZ_{name.upper()}", number)))
    parser.add_argument("--first", type=int, default=0, help="the first seed, to go on where a pass was stopped")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    failed = 0
    for name in KINDS:
        if name in FLOWER and importlib.util.find_spec("flwr") is None:
            print(f'{name}: left out, for Flower is not installed: pip install "fedbayes[flower]"')
            continue
        if number := getattr(given, name):
            failed += sweep(name, range(given.first, given.first + number), given.workers)
    print(f"{failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
