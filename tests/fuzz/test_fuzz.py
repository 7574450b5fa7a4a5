"""A short pass of the fuzzers; `make fuzz` makes the long one."""

import collections

import data_files
import experiment_files
import pytest
import run_folders
from harness import verdicts

# Seeds that met a fault once, beside the first ones.
PASSES = {
    "experiments": (experiment_files.case, None, [*range(6), 3139, 5205, 6799, 7685, 8432, 9024]),
    "data": (data_files.case, data_files.trained, [*range(8), 81, 192, 264, 338, 432, 6479]),
    "folders": (run_folders.case, run_folders.home, [*range(6), 671, 984]),
}


@pytest.mark.parametrize("name", PASSES)
def test_damaged_files_are_refused_in_one_line_or_do_no_harm(name):
    case, prepare, seeds = PASSES[name]
    counts: collections.Counter[str] = collections.Counter()
    failures = {}
    for seed, verdict in verdicts(case, seeds, prepare=prepare):
        counts[verdict.kind] += 1
        if not verdict.fine:
            failures[seed] = verdict
    assert not failures
    assert counts["done"] > 1  # else it only tries the first check
    assert counts["refused"] > 1
