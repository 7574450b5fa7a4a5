"""FedDyn, FedLap and SCAFFOLD on least squares: where clients differ they still end at the minimum of all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.model.likelihood import normal
from fedbayes.runs.folder import resume
from fedbayes.runs.folder import run as run_into


def sites(sizes: tuple[int, ...] = (12, 20, 28)) -> list[Any]:
    """Clients whose rows differ in spread, and whose own minima are far apart."""
    random = torch.Generator().manual_seed(1)
    pairs = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 2, generator=random) * torch.tensor([1.0 + k, 2.0 - 0.5 * k])
        truth = torch.tensor([[1.0 - k], [-0.5 + k]])
        pairs.append((x, x @ truth + 0.1 * torch.randn(n, 1, generator=random)))
    return pairs


def minimum(pairs: list[Any], *, by_rows: bool, precision: float = 0.0) -> torch.Tensor:
    """Of the sum of the clients' mean losses, or of all rows' losses, and a normal prior."""
    left, right = precision * torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    for x, y in pairs:
        weight = 1.0 if by_rows else 1 / len(x)
        left, right = left + weight * (x.T @ x).double(), right + weight * (x.T @ y).double()
    return torch.linalg.solve(left, right)[:, 0]


def trained(method: fb.methods.Method, rounds: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    run = fb.fit(
        nn.Linear(2, 1, bias=False), from_clients(sites(), kind="real"), method=method, rounds=rounds,
        likelihood=normal(1.0), evaluate_every=rounds, **options,
    )  # fmt: skip
    return run.posterior.mean.double()


WORK = {"epochs": 10, "batch": 28, "lr": 0.05}


@pytest.mark.parametrize("task", [{}, {"cohort": 2}], ids=str)
@pytest.mark.parametrize(
    ("method", "rounds"), [(fb.methods.feddyn(rho=1.0, **WORK), 25), (fb.methods.scaffold(**WORK), 15)]
)
def test_drift_is_gone(method: fb.methods.Method, rounds: int, task: dict[str, Any]) -> None:
    want = minimum(sites(), by_rows=False)
    found = trained(method, 2 * rounds if task else rounds, **task)
    torch.testing.assert_close(found, want, rtol=0, atol=0.02)


def test_fedlap_ends_at_the_most_probable_weights_of_all_rows() -> None:
    method = fb.methods.fedlap(rho=20.0, gamma=0.7, prior_scale=0.3, **WORK)
    want = minimum(sites(), by_rows=True, precision=0.3**-2)
    torch.testing.assert_close(trained(method, 50), want, rtol=0, atol=0.02)


def test_plain_averages_drift() -> None:
    plain = trained(fb.methods.fedavg(weighting="equal", **WORK), 15)
    assert (plain - minimum(sites(), by_rows=False)).abs().max() > 0.1


def test_a_first_round_of_scaffold_is_that_of_fedavg() -> None:
    plain = trained(fb.methods.fedavg(weighting="equal", **WORK), 1)
    torch.testing.assert_close(trained(fb.methods.scaffold(**WORK), 1), plain, rtol=1e-6, atol=1e-7)


def test_what_they_are_can_not_be_chosen() -> None:
    with pytest.raises(InputError, match="weighting is fixed in feddyn"):
        fb.methods.feddyn(weighting="size")
    with pytest.raises(InputError, match="optimiser is fixed in scaffold"):
        fb.methods.scaffold(optimiser="adam")


@pytest.mark.parametrize("method", ["feddyn", "scaffold", "fedlap", "bayes_admm", "fedlap_cov", "fedivon"])
def test_a_run_is_resumed_to_the_same_result(method: str, tmp_path: Path) -> None:
    """What the server keeps of sites, duals and controls is in the checkpoint."""
    x = Experiment(
        data="digits", network="linear", clients=3, cohort=2, rounds=3, evaluate_every=3, checkpoint_every=1,
        method=method, options={"epochs": 1, "batch": 200, "test_draws": 2},
    )  # fmt: skip
    whole = run_into(x, tmp_path)[method].progress.state
    sorted((tmp_path / "checkpoints").glob("*"))[-1].unlink()
    again = resume(tmp_path)[method].progress.state
    for a, b in zip(tree_leaves((whole.broadcast, whole.stages)), tree_leaves((again.broadcast, again.stages))):
        assert (a is None and b is None) or torch.equal(a, b)
