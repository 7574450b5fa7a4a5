"""Layout: a network's tensors as one flat vector and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from fedbayes.posterior.layout import Layout, matches

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
layouts = st.lists(shapes, min_size=1, max_size=5).map(
    lambda found: Layout(tuple(f"layer{i}.weight" for i in range(len(found))), tuple(found))
)
leads = st.lists(st.integers(1, 3), max_size=2).map(tuple)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2, bias=False)


@settings(max_examples=50)
@given(layouts, leads)
def test_split_and_join_are_inverse_under_leading_axes(layout, lead):
    vector = torch.arange(layout.size * torch.Size(lead).numel(), dtype=torch.float64).reshape(*lead, layout.size)
    named = layout.split(vector)
    assert {n: tuple(t.shape) for n, t in named.items()} == {
        n: lead + s for n, s in zip(layout.names, layout.shapes, strict=True)
    }
    assert torch.equal(layout.join(named), vector)


@settings(max_examples=50)
@given(layouts)
def test_one_vector_is_cut_and_made_flat_as_by_split_and_join(layout):
    vector = torch.arange(layout.size, dtype=torch.float64)
    named, cut = layout.split(vector), layout.cut(vector)
    assert list(cut) == list(named)
    assert all(torch.equal(cut[n], named[n]) for n in named)
    # By name, and in the order of axes, however they lie in memory.
    turned = {n: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t for n, t in reversed(cut.items())}
    assert torch.equal(layout.flat(turned), vector)


@settings(max_examples=20)
@given(layouts, st.integers(1, 4))
def test_split_and_join_under_vmap_equal_those_of_the_stacked_vector(layout, count):
    vectors = torch.arange(count * layout.size, dtype=torch.float32).reshape(count, layout.size)
    mapped = vmap(layout.split)(vectors)
    assert all(torch.equal(mapped[n], t) for n, t in layout.split(vectors).items())
    assert torch.equal(vmap(layout.join)(mapped), vectors)


def test_entries_lie_in_the_order_of_the_modules_parameters():
    net = Net()
    layout = Layout.of(net)
    assert layout.size == 3 * 4 + 4 + 4 * 4 + 4 + 4 * 2
    assert torch.equal(layout.join(dict(net.named_parameters())), nn.utils.parameters_to_vector(net.parameters()))


def test_the_backward_of_split_reaches_every_entry_with_its_own_gradient():
    layout = Layout.of(Net())
    vector = torch.randn(layout.size, requires_grad=True)
    factors = torch.arange(1.0, 1 + layout.size)
    loss = sum((layout.split(factors)[n] * t).sum() for n, t in layout.split(vector).items())
    loss.backward()
    assert torch.equal(vector.grad, factors)


def test_join_ignores_names_that_the_layout_lacks():
    layout = Layout(("a",), ((2,),))
    assert torch.equal(layout.join({"b": torch.zeros(9), "a": torch.ones(2)}), torch.ones(2))


def test_an_empty_layout_joins_to_an_empty_vector():
    empty = Layout.of(Net()).select("nothing")
    assert empty.size == 0
    assert empty.join({}).shape == (0,)
    assert empty.where("*").shape == (0,)


def test_select_and_without_cut_the_entries_in_two_and_keep_their_order():
    layout = Layout.of(Net())
    assert layout.select("head.*").names == ("head.weight",)
    assert layout.without("head.*").names == ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias")
    assert layout.select("*.bias", "head.*").names == ("body.0.bias", "body.2.bias", "head.weight")
    assert layout.select("body.*").size + layout.select("head.*").size == layout.size


def test_where_marks_exactly_the_entries_that_a_selection_would_hold():
    layout = Layout.of(Net())
    vector = torch.arange(float(layout.size))
    mask = layout.where("*.bias")
    biases = {n: t for n, t in layout.split(vector).items() if n.endswith("bias")}
    assert torch.equal(vector[mask], layout.select("*.bias").join(biases))
    assert int(mask.sum()) == 8


def test_layers_group_names_by_the_module_that_owns_them():
    groups = Layout.of(Net()).layers()
    assert groups == [("body.0.weight", "body.0.bias"), ("body.2.weight", "body.2.bias"), ("head.weight",)]


def test_frozen_weights_are_in_no_layout():
    assert Layout.of(Net(), frozen=["body.*"]).names == ("head.weight",)


def test_tied_weights_are_held_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert Layout.of(net).names == ("0.weight", "0.bias", "1.bias")


def test_patterns_match_by_case():
    assert matches("Head.weight", ["Head.*"])
    assert not matches("Head.weight", ["head.*"])


@pytest.mark.parametrize(
    "other",
    [Layout(("a", "c"), ((2, 3), (4,))), Layout(("a", "b"), ((3, 2), (4,))), Layout(("b", "a"), ((4,), (2, 3)))],
    ids=["name", "shape", "order"],
)
def test_the_fingerprint_tells_names_shapes_and_order_apart(other):
    assert other.fingerprint != Layout(("a", "b"), ((2, 3), (4,))).fingerprint


def test_the_fingerprint_is_a_fixed_value_in_every_process_and_version():
    # Written down once: runs on disk and clients of other versions are recognised by it.
    assert Layout.of(nn.Linear(3, 2)).fingerprint == "a7c320307534fcdd"


def test_a_layout_survives_json():
    layout = Layout.of(Net())
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).fingerprint == layout.fingerprint


def test_a_vector_of_another_length_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match="has 7 entries, this layout 8"):
        Layout.of(nn.Linear(3, 2)).split(torch.zeros(7))


def test_missing_and_misshapen_tensors_are_refused_by_name():
    layout = Layout.of(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="'bias'"):
        layout.join({"weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\), the layout says \(2, 3\)"):
        layout.join({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
