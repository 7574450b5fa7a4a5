"""What is copied into the buffers of a graph, and out of them."""

import torch

from fedbayes.engine.graphs import _copy, _fresh


def test_values_of_several_types_are_written_by_name_into_what_is_there() -> None:
    wide = torch.arange(4.0).expand(3, 4)  # a copy has memory of its own
    values = {
        "b": (torch.ones(2, 3), None, torch.arange(3)),
        "a": {"x": wide, "y": torch.empty(0)},
        "c": torch.tensor(2.0),
    }
    into = {
        "a": {"x": torch.zeros(3, 4), "y": torch.empty(0)},
        "b": (torch.zeros(2, 3, dtype=torch.float64), None, torch.zeros(3, dtype=torch.int64)),
        "c": torch.zeros(()),
    }
    places = {name: t.data_ptr() for name, t in into["a"].items()}
    _copy(into, values)
    assert torch.equal(into["a"]["x"], wide)
    assert into["a"]["x"].data_ptr() == places["x"]
    assert torch.equal(into["b"][0], torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(into["b"][2], torch.arange(3))
    assert float(into["c"]) == 2


def test_fresh_values_share_no_memory_with_those_they_are_copied_from() -> None:
    values = {"state": (torch.randn(3, 2), torch.arange(5)), "noise": [torch.randn(2, dtype=torch.float64)]}
    fresh = _fresh(values)
    values["state"][0].zero_()
    assert fresh["state"][0].abs().min() > 0
    assert torch.equal(fresh["state"][1], values["state"][1])
    assert torch.equal(fresh["noise"][0], values["noise"][0])
