"""Clients side by side: the same bits however many work, and nothing of the process changed afterwards."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.engine import stacked
from fedbayes.engine.chunks import width
from fedbayes.engine.workers import AHEAD, share, side_by_side, threads
from fedbayes.methods import method_named
from fedbayes.model.call import of_this_thread
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory, Run


class Convolved(nn.Module):
    """A convolution, BatchNorm and dropout: all that a client could share with another by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


UNEQUAL = (3, 30, 7, 16, 11)


def sites(sizes: tuple[int, ...]) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 1, 4, 4, generator=random), torch.randint(3, (n,), generator=random)) for n in sizes]
    return from_clients(pairs, test=pairs[0], classes=3)


def run(
    method: str,
    cores: int,
    sizes: tuple[int, ...] = UNEQUAL,
    network: Callable[[], nn.Module] = Convolved,
    **options: Any,
) -> Run:
    torch.manual_seed(3)
    made = method_named(method, {"batch": 4, "epochs": 1})
    task = prepare(network(), sites(sizes), method=made, rounds=2, **options)
    last, journal, own = task.begin(), [], Memory()
    with threads(cores):
        for progress, record in rounds(task, last, own):
            last = progress
            journal.append(record)
    assert all("notes" not in record for record in journal)
    return Run(task, last, journal, own)


@pytest.mark.parametrize("method", ["fedavg", "feduab", "bpfed"])
def test_the_bits_do_not_depend_on_how_many_work(method: str) -> None:
    alone = run(method, 1)
    for cores in (2, 3):
        again = run(method, cores)
        for part, q in alone.progress.state.broadcast.items():
            assert torch.equal(q.mean, again.progress.state.broadcast[part].mean), (part, cores)
        assert alone.journal[1]["train"] == again.journal[1]["train"]


class Attentive(nn.Module):
    """Attention, whose dropout reads PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.flatten(1, 2)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("method", "network", "side_by_side"),
    [("fedavg", dense, True), ("feduab", dense, True), ("fedavg", Attentive, False), ("feduab", Attentive, False)],
)
def test_networks_without_convolutions_run_side_by_side_if_they_draw_nothing(
    method: str, network: Callable[[], nn.Module], side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked, "CACHED", 2 * sum(p.numel() for p in network().parameters()))
    one, three = (run(method, cores, network=network) for cores in (1, 3))
    assert one.task.engine.chunk == 2
    for part, q in one.progress.state.broadcast.items():
        assert torch.equal(q.mean, three.progress.state.broadcast[part].mean), part
    (bound,) = three.task.engine._bounds.values()
    assert (bound.workers > 1) is side_by_side


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_they_agree_with_the_loop(method: str) -> None:
    side, loop = run(method, 2), run(method, 1, engine="loop")
    torch.testing.assert_close(side.posterior.mean, loop.posterior.mean, rtol=1e-4, atol=1e-5)


def test_compiled_steps_run_side_by_side_too() -> None:
    """Some seconds long: no other test would see a compiled step in a thread that did not compile it."""

    def small() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    compiled, eager = (run("fedavg", 2, (8, 8, 8), small, compile=how) for how in ("on", "off"))
    torch.testing.assert_close(compiled.posterior.mean, eager.posterior.mean, rtol=1e-4, atol=1e-5)


def test_generator_and_threads_are_as_before() -> None:
    number = torch.get_num_threads()
    torch.manual_seed(3)
    Convolved()
    before = torch.get_rng_state()
    run("fedavg", 2)  # seeds and makes the network as above
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == number


def test_results_come_in_the_order_of_the_items() -> None:
    def slow_first(n: int) -> tuple[int, int]:
        time.sleep(0.02 if n == 0 else 0)
        return n, torch.get_num_threads()

    with threads(1):
        assert list(side_by_side(slow_first, range(5), 3)) == [(n, 1) for n in range(5)]
    assert list(side_by_side(slow_first, [], 3)) == []


def test_few_results_wait_for_an_earlier_one() -> None:
    begun: list[int] = []
    held = threading.Event()

    def slow_first(n: int) -> int:
        begun.append(n)
        if n == 0:
            held.wait(5)
        return n

    results = side_by_side(slow_first, range(100), 2)
    threading.Timer(0.2, lambda: (most.append(len(begun)), held.set())).start()
    most: list[int] = []
    assert next(results) == 0
    assert most[0] <= AHEAD * 2
    assert list(results) == list(range(1, 100))


def test_an_error_of_one_is_an_error_of_all() -> None:
    def failing(n: int) -> int:
        if n == 2:
            raise torch.OutOfMemoryError("too much")
        return n

    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        list(side_by_side(failing, range(5), 2))


@pytest.mark.parametrize(
    ("cores", "items", "most", "small", "expected"),
    [
        (2, 10, 8, False, (2, 1)),
        (16, 10, 8, False, (8, 2)),
        (16, 10, 8, True, (8, 1)),
        (16, 2, 8, False, (2, 8)),
        (1, 10, 8, False, (1, 1)),
        (16, 10, 1, False, (1, 16)),
        (16, 10, 1, True, (1, 1)),
        (4, 1, 8, False, (1, 4)),
    ],
)
def test_cores_are_shared_out(cores: int, items: int, most: int, small: bool, expected: tuple[int, int]) -> None:
    with threads(cores):
        assert share(items, most, small=small) == expected


def test_transforms_and_modules_are_a_thread_s_own() -> None:
    """What threads rely on: vmap's stack is not seen by another thread, and neither is a module in use."""
    seen: dict[str, object] = {}
    layer = nn.Linear(2, 2)

    def look() -> None:
        seen["depth"] = torch._C._functorch.peek_interpreter_stack()
        seen["module"] = of_this_thread(layer)

    def inside(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return x

    vmap(inside)(torch.zeros(2))
    assert seen["depth"] is None
    assert seen["module"] is not layer
    assert seen["module"].weight is layer.weight
    own = of_this_thread(layer)
    assert own is of_this_thread(layer)
    assert own is not layer  # which is never called, so that it can be copied
    assert own is not seen["module"]


@pytest.mark.parametrize(
    ("lengths", "most", "before", "expected"),
    [
        ([60] * 10, 100, 0, 10),  # of equal clients all at once
        ([60] * 10, 4, 0, 4),
        ([220, 170, 140, 120, 100, 80, 60, 50, 40, 20], 100, 0, 3),  # 12.6 clients' steps in place of 22
        ([220, 170, 140, 120, 100, 80, 60, 50, 40, 20], 100, 2, 2),  # about as good, and compiled already
        ([220, 170, 140, 120, 100, 80, 60, 50, 40, 20], 100, 10, 10),  # another would be compiled anew
        ([60] * 10, 100, 2, 10),
        ([60] * 3, 100, 5, 5),  # a cohort that some have left
        ([60] * 10, 4, 5, 4),  # as many as memory holds
        ([300, 1, 1, 1], 100, 0, 1),
    ],
)
def test_compiled_clients_of_unequal_size_are_not_all_padded_to_the_longest(
    lengths: list[int], most: int, before: int, expected: int
) -> None:
    assert width(lengths, most, before) == expected
