"""Calls of a module with other tensors than its own: what functional_call gives, and nothing left behind."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedbayes.model.call import call


class Tied(nn.Module):
    """One matrix in two places, as a language model's embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 4, bias=False)
        self.outward = nn.Linear(4, 4, bias=False)
        self.outward.weight = self.inward.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(torch.tanh(self.inward(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x[:, None])[0][:, 0]


NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    "shared layer": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
    "tied": Tied,
    "recurrent": Recurrent,
    "batchnorm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {n: t.detach() + 1 if t.dtype == torch.int64 else t.detach() * 0.7 + 0.1 for n, t in own.items()}


@pytest.mark.parametrize("network", NETWORKS)
def test_it_is_a_functional_call(network: str) -> None:
    torch.manual_seed(0)
    module, x = NETWORKS[network](), torch.randn(6, 4)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    ours, theirs = tensors_of(module), tensors_of(module)
    made = call(module, ours, x)
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    # On a copy: a layer that is used twice is left with the given weights by it.
    torch.testing.assert_close(made, functional_call(copy.deepcopy(module), theirs, (x,)))
    torch.testing.assert_close(ours, theirs)  # buffers are written where they were given


def test_gradients_of_stacked_weights_are_those_of_a_functional_call() -> None:
    module, x = NETWORKS["linear"](), torch.randn(6, 4)
    stacked = {n: torch.stack([t, 2 * t]) for n, t in tensors_of(module).items()}
    ours, theirs = (
        vmap(grad(lambda w, f=f: f(module, w).square().sum()))(stacked)
        for f in (lambda m, w: call(m, w, x), lambda m, w: functional_call(m, w, (x,)))
    )
    torch.testing.assert_close(ours, theirs)


def test_after_a_failure_a_module_has_its_own_weights() -> None:
    module = NETWORKS["linear"]()
    own = [*module.parameters()]
    with pytest.raises(RuntimeError):
        call(module, tensors_of(module), torch.randn(6, 3))
    with pytest.raises(KeyError):
        call(module, {**tensors_of(module), "nobody": torch.zeros(1)}, torch.randn(6, 4))
    assert all(a is b for a, b in zip(own, module.parameters()))
