"""Optimisers on dicts of vectors against torch.optim."""

import pytest
import torch
from torch.func import vmap

from fedbayes.clients.optimisers import OPTIMISERS, adam, sgd

TORCH = {
    "sgd": (lambda: sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (lambda: sgd(0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": (lambda: adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    "adam with other constants": (
        lambda: adam(0.8, 0.9, 1e-3),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3),
    ),
}


def _gradients(vectors, step):
    """Of a curved function that changes from step to step, so that state matters."""
    return {n: (v + step).sin() + 0.1 * v for n, v in vectors.items()}


def _run(optimiser, vectors, steps, lr):
    state = optimiser.init(vectors)
    for step in range(steps):
        state, vectors = optimiser.update(state, vectors, _gradients(vectors, step), lr)
    return vectors


@pytest.mark.parametrize("name", TORCH)
def test_steps_equal_torch_optim(name):
    ours, theirs = TORCH[name]
    start = {"mean": torch.randn(5, dtype=torch.float64), "rho": torch.randn(3, dtype=torch.float64)}
    parameters = {n: v.clone().requires_grad_() for n, v in start.items()}
    optimiser = theirs(list(parameters.values()))
    for step in range(12):
        for n, g in _gradients({n: p.detach() for n, p in parameters.items()}, step).items():
            parameters[n].grad = g
        optimiser.step()
    got = _run(ours(), start, 12, torch.tensor(0.1, dtype=torch.float64))
    for n, p in parameters.items():
        torch.testing.assert_close(got[n], p.detach(), rtol=1e-10, atol=1e-12)


def test_adam_keeps_its_digits_in_float32():
    start = {"a": torch.linspace(-1, 1, 7)}
    single = _run(adam(), start, 4, torch.tensor(1.0))["a"]
    double = _run(adam(), {"a": start["a"].double()}, 4, torch.tensor(1.0).double())["a"]
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", TORCH)
def test_stacked_clients_get_the_numbers_they_get_alone(name):
    ours = TORCH[name][0]()
    start = {"mean": torch.randn(4, 5), "rho": torch.randn(4, 3)}
    lr = torch.tensor([0.1, 0.05, 0.2, 0.01])
    together = vmap(lambda v, rate: _run(ours, v, 6, rate))(start, lr)
    for k in range(4):
        alone = _run(ours, {n: v[k] for n, v in start.items()}, 6, lr[k])
        for n in start:
            torch.testing.assert_close(together[n][k], alone[n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_update_leaves_its_arguments_as_they_were(name):
    optimiser = OPTIMISERS[name]()
    vectors, gradients = {"a": torch.ones(3)}, {"a": torch.ones(3)}
    state = optimiser.init(vectors)
    optimiser.update(state, vectors, gradients, torch.tensor(0.1))
    again, _ = optimiser.update(state, vectors, gradients, torch.tensor(0.1))
    assert torch.equal(vectors["a"], torch.ones(3))
    assert torch.equal(gradients["a"], torch.ones(3))
    once, _ = optimiser.update(optimiser.init(vectors), vectors, gradients, torch.tensor(0.1))
    assert str(once) == str(again)
