"""Where steps are CUDA graphs, so is what a round does once, before and after them: the answer stays the same."""

from typing import Any

import pytest
import torch
from test_engines import METHODS, one_round
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.engine import steps

FEW = [3, 9, 6]  # rows of a client: what stands around its steps does not depend on how many they are
aten = torch.ops.aten
# What waits for the host, or takes a number from it: a graph would replay the number of its capture, or none at all.
UNFIT = {aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default}


class Fit(TorchDispatchMode):
    """Nothing that a graph can't hold."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert op not in UNFIT, f"{op} can't be captured"
        return op(*args, **(kwargs or {}))


class Replayed:
    """A graph without a device: inputs are copied into memory that stays, and f runs on that alone."""

    made = 0

    def __init__(self, f: Any, inputs: Any) -> None:
        self.f, self.inputs = f, tree_map(torch.clone, inputs)
        Replayed.made += 1
        with Fit():
            f(self.inputs)

    def __call__(self, inputs: Any) -> Any:
        for mine, given in zip(tree_leaves(self.inputs), tree_leaves(inputs), strict=True):
            mine.copy_(given)
        return tree_map(torch.clone, self.f(self.inputs))


@pytest.mark.parametrize("method", METHODS)
def test_rounds_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rounds": 3, "evaluate_every": 10}
    plain = one_round("batchnorm, dropout", method, "stacked", FEW, **options)
    monkeypatch.setattr(steps.Steps, "captures", True)
    monkeypatch.setattr(steps, "Captured", Replayed)
    monkeypatch.setattr(Replayed, "made", 0)
    replayed = one_round("batchnorm, dropout", method, "stacked", FEW, **options)
    assert Replayed.made >= 3  # begin, end, and terms of the sum
    assert not any("graph" in note for record in replayed.journal for note in record.get("notes", ()))
    for part, q in plain.parts.items():
        for a, b in zip(tree_leaves(q), tree_leaves(replayed.parts[part]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
