"""Faults are shown as what they are: the network's own, ours, and what vmap can't do."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.engine import chunks
from fedbayes.engine.workers import threads
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory


def sites(count: int = 4) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(9, 6, generator=random), torch.randint(3, (9,), generator=random)) for _ in range(count)]
    return from_clients(pairs, test=pairs[0], kind="classes", classes=3)


class Network(nn.Module):
    """A linear map whose forward does something more."""

    def __init__(self, more: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self, self.linear(x))


def forgets_a_case(network: nn.Module, out: Tensor) -> Tensor:
    if network.training:
        raise ValueError("the training branch was never written")
    return out


def cuts_too_much(network: nn.Module, out: Tensor) -> Tensor:
    return out.reshape(-1, 7) if network.training else out


def calls_nobody(network: nn.Module, out: Tensor) -> Tensor:
    return network.absent(out) if network.training else out


def looks_at_a_value(network: nn.Module, out: Tensor) -> Tensor:
    return out * 2 if out.sum().item() > 1e9 else out


FAULTS = {forgets_a_case: "never written", cuts_too_much: "shape '.*' is invalid", calls_nobody: "absent"}


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_of_the_network_in_training_is_raised_as_itself(fault, method: str) -> None:
    with pytest.raises((ValueError, RuntimeError, AttributeError), match=FAULTS[fault]) as caught:
        fit(Network(fault), sites(), method=method, rounds=1, engine="stacked")
    assert "vmap" not in str(caught.value)


def test_so_is_a_fault_of_one_client_later_in_its_steps() -> None:
    steps = []

    def tires(network: nn.Module, out: Tensor) -> Tensor:
        steps.append(out)
        if network.training and len(steps) > 4:
            raise RuntimeError("out of ink")
        return out

    with pytest.raises(RuntimeError, match="out of ink"):
        fit(Network(tires), sites(), method="fedavg", rounds=3, engine="stacked", at_once=2)


def test_a_fault_that_comes_once_is_not_taken_for_one_of_vmap() -> None:
    calls = []

    def stumbles(network: nn.Module, out: Tensor) -> Tensor:
        if network.training:
            calls.append(out)
            if len(calls) == 4:
                raise ValueError("the table was not there yet")
        return out

    with pytest.raises(ValueError, match="not there yet"):
        fit(Network(stumbles), sites(), method="fedavg", rounds=2, engine="stacked")


@pytest.mark.parametrize("place", ["outcomes", "table_of", "info_of"])
def test_a_fault_of_the_engine_is_raised_as_itself(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a slip of ours")

    monkeypatch.setattr(chunks, place, broken)
    with pytest.raises(RuntimeError, match="a slip of ours"):
        fit(nn.Linear(6, 3), sites(), method="feduab", rounds=1, engine="stacked")


def test_members_of_a_sweep_that_vmap_cannot_take_run_in_the_loop_and_say_so() -> None:
    torch.manual_seed(3)
    network = Network(looks_at_a_value)
    tasks = [prepare(network, sites(), method="fedavg", rounds=2, seed=s, engine="stacked") for s in (0, 1)]
    entries = list(rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks]))
    notes = [note for _, record in entries[0] for note in record.get("notes", ())]
    assert len(notes) == 1
    assert notes[0].startswith("engine loop instead of stacked, vmap can't take this network: vmap: ")
    for seed, (progress, record) in enumerate(entries[-1]):
        assert "notes" not in record
        alone = fit(network, sites(), method="fedavg", rounds=2, seed=seed, engine="loop")
        assert torch.equal(progress.state.broadcast["model"].mean, alone.posterior.mean)


def test_the_sums_of_chunks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks a round has, what is alive of a worker is the running total and the newest chunk's."""
    whole, living, most = chunks.outcomes, [], []

    def watched(*arguments):
        gc.collect()
        most.append(sum(one() is not None for one in living))
        made = whole(*arguments)
        living.extend(weakref.ref(t) for _, outcome in made for t in tree_leaves(outcome.terms))
        return made

    monkeypatch.setattr(chunks, "outcomes", watched)
    gc.freeze()  # what is there already takes a second to look through, each time
    try:
        with threads(1):  # a second worker would have chunks of its own
            fit(nn.Linear(6, 3), sites(6), method="fedavg", rounds=1, engine="stacked", at_once=1)
    finally:
        gc.unfreeze()
    assert len(most) == 6
    assert max(most) <= len(living) // 6


def test_a_prediction_leaves_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    run = fit(nn.Linear(6, 3), sites(), method="feduab", rounds=1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    run.predict(run.task.clients.data.test_x)
    assert torch.equal(before, torch.get_rng_state())
    assert not seeds, "the generators of CUDA devices were seeded, for good"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", ["off", "graph"])
def test_training_and_prediction_leave_the_generator_of_a_gpu_as_it_was(compile: str) -> None:
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    run = fit(nn.Linear(6, 3), sites(), method="feduab", rounds=2, device="cuda", compile=compile)
    run.predict(run.task.clients.data.test_x)
    assert torch.equal(before, torch.cuda.get_rng_state())
