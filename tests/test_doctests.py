"""The examples in docstrings are run as they stand."""

import doctest
import importlib
import pkgutil

import pytest

import fedbayes

# Reading the command line's module starts it; the study's own examples are run with its tests.
CORE = [
    name
    for _, name, package in pkgutil.walk_packages(fedbayes.__path__, "fedbayes.")
    if not package and not name.startswith(("fedbayes.__main__", "fedbayes.cli", "fedbayes.study", "fedbayes.data"))
]


WITH_FLOWER = [f"fedbayes.flower.{name}" for name in ("apps", "grid", "masks", "secure_node", "secure_sum")]


def test_the_walk_finds_the_core():
    assert {"fedbayes.layout", "fedbayes.server.rules", "fedbayes.training"} <= set(CORE)


@pytest.mark.parametrize("name", CORE)
def test_docstring_examples_hold(name):
    if name in WITH_FLOWER:
        pytest.importorskip("flwr", reason="needs Flower: make test-flower installs it")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", ["fedbayes.layout", "fedbayes.server.rules", "fedbayes.training"])
def test_the_entry_points_have_examples(name):
    assert doctest.testmod(importlib.import_module(name)).attempted > 0
