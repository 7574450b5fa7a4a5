"""The examples in docstrings are run as they stand."""

import doctest
import importlib
import pkgutil

import pytest

import fedbayes

# Reading the command line's module starts it; examples of rooms that need files are run with their tests.
ELSEWHERE = ("__main__", "cli", "data", "evaluate", "experiments", "export", "papers", "runs")
CORE = [
    name
    for _, name, package in pkgutil.walk_packages(fedbayes.__path__, "fedbayes.")
    if not package and name.split(".")[1] not in ELSEWHERE
]


OF_FLOWER = ("flwr", "grpc", "cryptography", "httpx", "uvicorn", "starlette")  # what the extra `flower` brings


def test_the_walk_finds_the_core():
    assert {"fedbayes.posterior.layout", "fedbayes.federation.pool", "fedbayes.training.fit"} <= set(CORE)


@pytest.mark.parametrize("name", CORE)
def test_docstring_examples_hold(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.startswith("fedbayes.flower.") and str(error.name).split(".")[0] in OF_FLOWER:
            pytest.skip(f"needs Flower ({error.name} is missing): make test-flower installs it")
        if error.name == "triton":
            pytest.skip("needs Triton, which comes with PyTorch for CUDA")
        raise
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("name", ["fedbayes.posterior.layout", "fedbayes.federation.pool", "fedbayes.training.fit"])
def test_the_entry_points_have_examples(name):
    assert doctest.testmod(importlib.import_module(name)).attempted > 0
