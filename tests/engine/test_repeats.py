"""A step that repeats itself is compiled in parts, which together are the step."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedbayes.engine import compiler, repeats, several
from fedbayes.engine.compiled import Compiled, traced


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stacked_step(blocks, width=4):
    """A gradient step of three clients, on a network of these blocks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, width), *blocks, nn.Linear(width, 2)).double()
    weights = {name: torch.stack([w.detach() + 0.1 * k for k in range(3)]) for name, w in net.named_parameters()}
    scale = torch.linspace(1, 2, 2, dtype=torch.float64)  # a constant of the graph

    def one(weights, x):
        def loss(w):
            return (scale * functional_call(net, w, x) ** 2).sum()

        return {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grad(loss)(weights).values())}

    return vmap(one), weights, torch.randn(3, 5, 3, dtype=torch.float64)


def calls_of(step, weights, x):
    given = list(weights.values())
    graph = traced(lambda *t: list(step(dict(zip(weights, t)), x).values()), given, again=False)
    return graph, repeats.cut(graph, given)


def test_equal_blocks_are_one_part_forward_and_one_backward():
    step, weights, x = stacked_step([Block(4) for _ in range(6)])
    graph, parts = calls_of(step, weights, x)
    times = [sum(call.part == number for call in parts.calls) for number in range(len(parts.parts))]
    assert sorted(times)[-2:] == [6, 6]
    whole = graph(*weights.values())
    joined = parts.run([part.graph for part in parts.parts])(*weights.values())
    for a, b in zip(whole, joined, strict=True):
        torch.testing.assert_close(a, b)


def test_a_part_is_given_its_values_as_they_lay_in_the_trace():
    step, weights, x = stacked_step([Block(4) for _ in range(6)])
    graph, parts = calls_of(step, weights, x)

    def elsewhere(part):
        def run(*given):
            assert [t.stride() for t in given] == [stride for _, stride, *_ in part.shapes]
            return [t.mT.contiguous().mT if t.dim() > 1 else t for t in part.graph(*given)]

        return run

    for a, b in zip(graph(*weights.values()), parts.run([elsewhere(p) for p in parts.parts])(*weights.values())):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("before", [8, 7])
def test_the_compiler_is_told_of_weights_that_begin_at_no_good_place(before):
    def step(vector):
        _, *weights = vector.split([before, *[4] * 8])
        x = vector[:1]
        for w in weights:
            x = (x * w).cos().sin().exp().tanh().sin().cos().exp().sum(0, keepdim=True)
        return [x]

    vector = torch.linspace(0, 1, before + 32)
    parts = repeats.cut(traced(step, [vector], again=False), [vector])
    block = next(part for part in parts.parts if len(part.shapes) == 2)
    assert [offset for *_, offset in block.shapes] == [0, int(before == 7)]
    for shape in block.shapes:
        value = compiler._empty(*shape)
        assert (value.shape, value.stride(), value.dtype, value.device, value.storage_offset()) == shape


def test_a_step_stays_whole_where_it_is_not_known_what_cuts_cost(monkeypatch):
    given = stacked_step([Block(4) for _ in range(6)])
    monkeypatch.setattr(repeats, "LEAST", {})
    assert calls_of(*given)[1] is None


def test_values_are_dropped_after_their_last_reader_and_not_before():
    _, parts = calls_of(*stacked_step([Block(4) for _ in range(6)]))
    outputs = {out.name for out in parts.outputs}
    for number, call in enumerate(parts.calls):
        later = {name for other in parts.calls[number + 1 :] for name in other.takes} | outputs
        assert set(call.over) == {*call.takes, *call.gives} - later - {*parts.inputs, *parts.constants}


def test_the_same_operations_on_values_of_other_places_stay_whole():
    def step(x, y):
        for k in range(6):
            x = ((x * (x if k % 2 else y)).cos().sin().exp().tanh().sin() + y).cos().exp().tanh()
        return [x]

    inputs = [torch.ones(3), torch.ones(3)]
    assert repeats.cut(traced(step, inputs, again=False), inputs) is None


@pytest.mark.parametrize(
    "blocks", [[Block(4)], [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU()]], ids=["one block", "no two alike"]
)
def test_what_does_not_repeat_itself_stays_whole(blocks):
    assert calls_of(*stacked_step(blocks))[1] is None


def test_blocks_may_write_in_place_to_values_of_their_own_and_from_before():
    """As BatchNorm does to its statistics."""

    def step(x, buffers):
        moved = [statistics.clone() for statistics in buffers.split(3)]
        for k in range(9):
            value = (x * 2).cos().sin().exp().tanh().sin().cos().exp()
            value[:1].add_(1.5)  # a view
            moved[k].copy_(moved[k] + 0.1 * (value - moved[k]))
            x = x + value
        return [x, torch.cat(moved)]

    inputs = [torch.linspace(0, 1, 3), torch.linspace(1, 2, 27)]
    parts = repeats.cut(traced(step, inputs, again=False), inputs)
    for ours, whole in zip(parts.run([part.graph for part in parts.parts])(*inputs), step(*inputs)):
        torch.testing.assert_close(ours, whole)


def test_blocks_with_their_own_place_in_one_vector_are_one_part():
    """As those that read normals from a tape, each its own."""

    def step(vector):
        x = vector[:4]
        for k in range(8):
            x = (x * vector[4 + 4 * k : 8 + 4 * k]).cos().sin().exp().tanh().sin().cos().exp()
        return [x]

    vector = torch.linspace(0, 1, 36)
    parts = repeats.cut(traced(step, [vector], again=False), [vector])
    assert max(sum(call.part == number for call in parts.calls) for number in range(len(parts.parts))) == 8
    torch.testing.assert_close(parts.run([part.graph for part in parts.parts])(vector), step(vector))


def computing(part):
    return sum(repeats._computes(node) for node in part.graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("blocks", [1, 6], ids=["no repeats", "repeats"])
@pytest.mark.parametrize("longest", [12, 40])
def test_a_long_step_is_cut_into_pieces_which_together_are_the_step(monkeypatch, blocks, longest):
    monkeypatch.setattr(repeats, "LONGEST", {"cpu": longest})
    step, weights, x = stacked_step([Block(4) for _ in range(blocks)])
    graph, parts = calls_of(step, weights, x)
    sizes = [computing(part) for part in parts.parts]
    assert 1 < max(sizes) <= 1.6 * longest  # a cut may be a quarter of a piece from its even place
    assert len(parts.parts) > sum(sizes) / longest / 1.6
    joined = parts.run([part.graph for part in parts.parts])(*weights.values())
    for a, b in zip(graph(*weights.values()), joined, strict=True):
        torch.testing.assert_close(a, b)


def test_a_short_step_stays_whole_where_long_ones_are_cut(monkeypatch):
    monkeypatch.setattr(repeats, "LONGEST", {"cpu": 400})
    assert calls_of(*stacked_step([Block(4)]))[1] is None


def test_a_long_step_is_cut_where_least_goes_across(monkeypatch):
    """Not where six times as many numbers do; what is read much later counts at no place."""

    def step(x):
        early = x.expand(9, 6).exp()
        for k in range(100):
            x = x.sum(0, keepdim=True).cos() if k == 40 else (x + early).mean(0) if k == 45 else x.sin()
        return [x]

    monkeypatch.setattr(repeats, "LONGEST", {"cpu": 60})
    monkeypatch.setattr(repeats, "LEAST", {"cpu": 2.0})  # equal stretches are no part of their own
    inputs = [torch.linspace(0, 1, 6)]
    parts = repeats.cut(traced(step, inputs, again=False), inputs)
    assert len(parts.calls) == 3  # views of inputs, and two pieces
    assert sorted(shape for shape, *_ in parts.parts[2].shapes) == [(1,), (9, 6)]
    torch.testing.assert_close(parts.run([part.graph for part in parts.parts])(*inputs), step(*inputs))


def test_what_gives_several_values_is_in_one_piece_with_their_readers(monkeypatch):
    def step(x):
        for _ in range(30):
            values, places = x.sort()
            x = values.cos() + places.to(x.dtype).flip(0).sum() / 10
        return [x]

    monkeypatch.setattr(repeats, "LONGEST", {"cpu": 20})
    monkeypatch.setattr(repeats, "LEAST", {"cpu": 2.0})  # no repeats: each place of a cut is chosen
    inputs = [torch.linspace(0, 1, 6)]
    parts = repeats.cut(traced(step, inputs, again=False), inputs)
    assert len(parts.calls) > 4
    torch.testing.assert_close(parts.run([part.graph for part in parts.parts])(*inputs), step(*inputs))


def test_views_of_inputs_are_a_part_of_their_own(monkeypatch):
    monkeypatch.setattr(repeats, "LONGEST", {"cpu": 40})
    _, parts = calls_of(*stacked_step([Block(4)]))
    first = parts.parts[parts.calls[0].part]
    assert not repeats.computes(first)
    assert all(repeats.computes(part) for part in parts.parts if part is not first)


def test_a_compiled_step_in_parts_is_the_step(monkeypatch):
    seen = []
    monkeypatch.setattr(several, "kernels", lambda graph, shapes, options: seen.append(shapes) or graph)
    step, weights, x = stacked_step([Block(4) for _ in range(6)])
    ours = Compiled(step)(weights, x)
    assert len(seen) > 2
    for name, value in step(weights, x).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)
