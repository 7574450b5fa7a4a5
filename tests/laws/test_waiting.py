"""Rounds that do not wait: without delays they are the rounds that do, and who is no sum of changes is refused."""

from typing import Any

import pytest
import torch
from test_engines import METHODS, NETWORKS, UNEQUAL, sites

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.methods import METHODS as TABLE
from fedbayes.training.fit import fit

# Every row of the engines' table that can't be buffered, and a word of the reason.
REFUSED = {
    "fedavg, discrepancy": "weights compare",
    "fedag": "no sum of changes|networks of one round",
    "pfedbayes": "no sum of changes",
    "fedvi, wc, distance": "no sum of changes",
    "fedswag": "the spread of part 'model' is no change",
    "fedswag, low rank": "networks of one round",
    "fedbe": "looks at every upload",
    "fedbe, dirichlet": "looks at every upload",
    "fedppd_distill": "looks at every upload",
    "fedavg, laplace every round": "no sum of changes",
    "lg_fedavg, laplace every round": "no sum of changes",
}


def two_rounds(method: str, network: str = "mlp", **options: Any) -> fb.Run:
    torch.manual_seed(3)
    made = fb.methods.method_named(method.split(",")[0], {"batch": 5, "epochs": 2, **METHODS[method]})
    server = torch.linspace(-2, 2, 13 * 6, dtype=torch.float64).sin().reshape(13, 6)
    return fit(
        NETWORKS[network]().double(), sites(UNEQUAL), method=made, rounds=2, cohort=3, seed=4,
        server_data=server, evaluate_every=2, compile="off", **options,
    )  # fmt: skip


ALLOWED = [(method, "mlp") for method in METHODS if method not in REFUSED]


@pytest.mark.parametrize(("method", "network"), [*ALLOWED, ("feduab", "batchnorm, dropout"), ("fedavg", "convolution")])
def test_without_delays_and_with_a_buffer_of_the_cohort_it_is_the_synchronous_run_to_the_bit(
    method: str, network: str
) -> None:
    waits = two_rounds(method, network)
    goes_on = two_rounds(method, network, schedule="buffered", schedule_options={"buffer": 3})
    for part, q in waits.progress.state.broadcast.items():
        other = goes_on.progress.state.broadcast[part]
        assert torch.equal(q.mean, other.mean), part
        assert not hasattr(q, "scale") or torch.equal(q.scale, other.scale), part
    for ours, theirs in zip(waits.journal, goes_on.journal):
        assert ours["train"] == theirs["train"]
        assert ours.get("test") == theirs.get("test")


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_is_no_sum_of_changes_is_refused_with_the_reason(method: str) -> None:
    name = method.split(",")[0]
    with pytest.raises(InputError, match=f'schedule: {name} can\'t be "buffered": .*({REFUSED[method]})'):
        two_rounds(method, schedule="buffered")


def test_every_method_of_the_table_has_a_row() -> None:
    elsewhere = {"fedavg_pf", "fedper_pf", "lg_fedavg_pf", "laplace"}  # laplace has no BatchNorm: it has a test below
    assert {name.split(",")[0] for name in METHODS} | elsewhere == {*TABLE}


def test_newton_steps_of_two_broadcasts_are_not_added() -> None:
    network = NETWORKS["mlp"]().double()
    with pytest.raises(InputError, match=r'schedule: laplace can\'t be "buffered": .*no sum of changes'):
        fit(network, sites(UNEQUAL), method="laplace", rounds=1, schedule="buffered")
