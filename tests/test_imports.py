"""What is loaded when: help waits for nothing heavy, training for torch alone."""

import subprocess
import sys

import pytest

HEAVY = {
    "matplotlib",
    "mlxtend",
    "numpy",
    "onnx",
    "pandas",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch",
    "torchvision",
    "transformers",
}
APART = {"flwr", "ray", "typer"}  # of the command line, or of other machines
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy"}

CASES = {
    "import fedbayes; dir(fedbayes); fedbayes.__version__": HEAVY | APART | COMPILERS,
    # The estimators are scikit-learn's own, and load it.
    "import fedbayes as fb; [getattr(fb, n) for n in fb.__all__ if 'Federated' not in n]": (HEAVY | APART | COMPILERS)
    - {"torch", "numpy", "safetensors"},
    "from fedbayes.cli import app; app(['--help'], standalone_mode=False)": HEAVY | COMPILERS | {"flwr", "ray"},
}


@pytest.mark.parametrize("code", CASES)
def test_nothing_is_loaded_that_is_not_needed(code):
    program = f"{code}\nimport sys; print('loaded:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not CASES[code] & set(done.stdout.rsplit("loaded:", 1)[1].split())
