"""Published tables are built on demand: importing them builds no experiment and no cell, and reads no data."""

import pkgutil
import subprocess
import sys
import textwrap

import fedbayes.papers

MODULES = sorted(f"fedbayes.papers.{module.name}" for module in pkgutil.iter_modules(fedbayes.papers.__path__))
PROGRAM = textwrap.dedent("""
    import collections, importlib, sys
    import fedbayes as fb
    from fedbayes.experiments.experiment import Experiment

    counts = collections.Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def call(*given, **named):
            counts[owner.__name__] += 1
            return original(*given, **named)

        setattr(owner, name, call)

    count(Experiment, "__init__")
    count(fb.data.Dataset, "__init__")
    from fedbayes.papers.cells import Cell

    count(Cell, "__new__")
    for module in sys.argv[1:]:
        importlib.import_module(module)
        assert not counts, (module, counts)
    from fedbayes.papers.tables import TABLES

    assert all(table.title for table in TABLES.values()) and not counts
    cells = [table.cells() for table in TABLES.values()]
    fb.data.load("digits")
    print(counts["Experiment"], counts["Cell"], counts["Dataset"])
""")


def test_importing_every_module_builds_nothing():
    answer = subprocess.run([sys.executable, "-c", PROGRAM, *MODULES], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    experiments, cells, sets = map(int, answer.stdout.split())
    assert min(experiments, cells) > 300  # what is counted is counted once tables are built
    assert sets > 0


def test_the_walk_finds_every_paper():
    assert {f"fedbayes.papers.{name}" for name in ("aggregation", "fedag", "fedppd", "feduab", "pfedpf")} < set(MODULES)
