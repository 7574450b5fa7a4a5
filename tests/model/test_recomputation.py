"""Activations that are computed again: the same gradients, and fewer bytes held between the passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import fedbayes as fb
from fedbayes.engine.compiled import Compiled, traced
from fedbayes.engine.steps import TRACED
from fedbayes.errors import InputError
from fedbayes.model.recomputation import mark_blocks, peak, recomputes, repeated
from fedbayes.training.fit import train
from fedbayes.training.prepare import prepare


class Block(nn.Module):
    """A residual block with dropout, operations in place and BatchNorm whose statistics move."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop, self.relu = nn.BatchNorm1d(width), nn.Dropout(0.2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.narrow(self.relu(self.wide(self.norm(x)))))
        out += x
        return out


class Deep(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, many: int = 3):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(block() for _ in range(many))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep().double()


def sites(rows: tuple[int, ...] = (8, 6)) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=draw).double(), torch.arange(n) % 3) for n in rows]


def held_at_most(f, *arguments) -> int:
    """Bytes that a call allocates at most, by PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        f(*arguments)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def stacked_step(clients: int = 3, blocks: int = 5):
    """A step of stacked clients on a chain of narrow blocks that are wide inside."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(blocks)))
    mark_blocks(net, True)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, weights, x).square().mean()

    def step(weights: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {n: weights[n] - 0.1 * g for n, g in grad(loss)(weights, x).items()}

    weights = {n: p.detach().expand(clients, *p.shape).clone() for n, p in net.named_parameters()}
    return vmap(step), weights, torch.randn(clients, 400, 4)


def test_less_is_held_and_nothing_changes():
    step, weights, x = stacked_step()
    plain, again = Compiled(step, kernels=False), Compiled(step, kernels=False, again=True)
    want = step(weights, x)
    for name, weight in again(weights, x).items():
        torch.testing.assert_close(weight, want[name])
        torch.testing.assert_close(weight, plain(weights, x)[name])
    most = held_at_most(plain, weights, x)
    assert held_at_most(again, weights, x) < 0.5 * most
    assert held_at_most(step, weights, x) >= most, "what is traced holds no more than what is not"


@pytest.mark.slow
def test_kernels_hold_less_too():
    step, weights, x = stacked_step(clients=2, blocks=3)
    again = Compiled(step, again=True)
    for name, weight in step(weights, x).items():
        torch.testing.assert_close(again(weights, x)[name], weight)
    assert held_at_most(again, weights, x) < 0.7 * held_at_most(Compiled(step, kernels=False), weights, x)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_step_will_hold_is_known_before_it_is_run(again):
    step, weights, x = stacked_step()
    names = list(weights)

    def flat(*tensors: Tensor) -> list[Tensor]:
        return tree_leaves(step(dict(zip(names, tensors)), tensors[-1]))

    inputs = [*weights.values(), x]
    graph = traced(flat, inputs, again=again)
    assert peak(graph.graph) == pytest.approx(held_at_most(graph, *inputs), rel=0.2)


def test_draws_of_pytorch_itself_are_not_drawn_twice():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x).tanh() * torch.rand(4)

    net = nn.Sequential(Noisy(), Noisy(), Noisy())
    mark_blocks(net, True)
    names, weights = zip(*((n, p.detach()) for n, p in net.named_parameters()))

    def flat(*tensors: Tensor) -> list[Tensor]:
        known = dict(zip(names, tensors))
        return tree_leaves(grad(lambda w: functional_call(net, w, tensors[-1]).square().sum())(known))

    graph = traced(flat, [*weights, torch.randn(5, 4)], again=True).graph
    called = [str(node.target) for node in graph.nodes]
    assert called.count("aten.rand.default") == 3
    assert called.count("aten.tanh.default") == 5  # the last block's is held


@pytest.mark.parametrize(
    ("method", "engine"), [("fedavg", "loop"), ("fedavg", "stacked"), ("feduab", "loop"), ("fedvi", "stacked")]
)
def test_training_ends_alike(method, engine):
    options = {"epochs": 1, "batch": 4} | ({} if method == "fedavg" else {"train_draws": 1, "test_draws": 1})
    runs = []
    for again in (False, True):
        made = fb.methods.method_named(method, options)
        task = prepare(deep(), sites(), method=made, rounds=1, engine=engine, compile="off", recompute=again)
        runs.append(train(task))
        assert not any(record.get("notes") for record in runs[-1].journal)
    if engine == "stacked":
        assert runs[1].task.engine.steps.mode == TRACED
    assert runs[1].task.choice.endswith("activations are recomputed") == (engine == "stacked")
    for part, q in runs[0].parts.items():
        torch.testing.assert_close(runs[1].parts[part].mean, q.mean, rtol=1e-10, atol=1e-12)


def test_blocks_are_found_or_named():
    net = deep()
    assert repeated(net) == [*net.blocks]
    mark_blocks(net, ["blocks.1", "blocks.2"])
    assert recomputes(net)
    assert "is_block" not in net.blocks[0].__dict__
    assert not repeated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), "a single layer is no block"
    wrapped = nn.ModuleList([deep(), deep()])
    assert repeated(wrapped) == [*wrapped], "the outermost"


def test_a_module_that_asks_for_it_gets_it():
    net = deep()
    assert not recomputes(prepare(net, sites(), method="fedavg", rounds=1).program.model.module)
    net.gradient_checkpointing = True
    assert recomputes(prepare(net, sites(), method="fedavg", rounds=1).program.model.module)
    assert not recomputes(net), "the user's own module is as it was"


@pytest.mark.parametrize(
    ("network", "recompute", "says"),
    [
        (nn.Linear(6, 3), True, "no list of blocks of one class"),
        (deep(), ["blocks.9"], r"no module matches 'blocks.9'; there are first, head, blocks"),
        (deep(), 3, "recompute must be true, false, or a list of patterns, not 3"),
    ],
)
def test_blocks_that_are_not_there_are_refused(network, recompute, says):
    with pytest.raises(InputError, match=says):
        prepare(network, sites(), method="fedavg", rounds=1, recompute=recompute)


def test_a_network_that_can_not_be_traced_is_trained_as_it_is(monkeypatch):
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("looks at values")

    monkeypatch.setattr("fedbayes.engine.compiled.make_fx", broken)
    run = fb.fit(deep(), sites(), method="fedavg", rounds=1, engine="stacked", recompute=True)
    assert run.journal[0]["notes"] == [
        "steps run eager instead of traced, so that nothing is recomputed: looks at values"
    ]
