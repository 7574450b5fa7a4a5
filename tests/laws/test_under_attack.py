"""Under attack, for every method: engines agree, nobody who lies changes nothing, and honest clients keep their own."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.attacks import ATTACKS, Attack
from fedbayes.methods import METHODS
from fedbayes.options import options_of
from fedbayes.report import write
from fedbayes.runs.folder import resume
from fedbayes.runs.folder import run as run_into
from fedbayes.runs.sweep import sweep
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run

SMALL: dict[str, Any] = {"batch": 5, "epochs": 1, "test_draws": 2, "samples": 2, "lr": 0.01}
FLOW = {"flow_epochs": 1, "flow_batch": 4, "flow_length": 2, "flow_draws": 2}  # where personal models are refined
SMALL |= {"server_batch": 5, "server_epochs": 1, "swa_start": 0, "swa_every": 1}
TRUTH = Attack("truth", "tells the truth", upload=lambda scene: scene.true)


def clients(sizes: tuple[int, ...] = (6, 9, 5, 12, 8)) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(n, 4, generator=random, dtype=torch.float64), torch.randint(3, (n,), generator=random))
        for n in sizes
    ]
    return from_clients(pairs, test=pairs[0], kind="classes", classes=3)


def trained(name: str, **settings: Any) -> Run:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    known, options = options_of(METHODS[name]), SMALL | (FLOW if name.endswith("_pf") else {})
    method = METHODS[name](**{key: v for key, v in options.items() if key in known})
    server = torch.linspace(-2, 2, 9 * 4, dtype=torch.float64).sin().reshape(9, 4)
    return fb.fit(network, clients(), method=method, rounds=1, seed=1, server_data=server, **settings)


@cache
def honestly(name: str) -> Run:
    return trained(name)


def leaves(run: Run) -> list[torch.Tensor]:
    return tree_leaves(run.progress.state.broadcast)


# Attacks are of points and of normals of independent weights: where covariances are full, they are refused.
ATTACKED = [name for name in METHODS if name != "laplace"]


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attack_without_attackers_is_the_plain_run_to_the_bit(name: str) -> None:
    plain, attacked = honestly(name), trained(name, attack="sign_flip", attackers=[])
    assert all(torch.equal(a, b) for a, b in zip(leaves(plain), leaves(attacked), strict=True))
    assert "attack" not in attacked.journal[0]


@pytest.mark.parametrize("name", ATTACKED)
def test_attackers_that_tell_the_truth_change_nothing(name: str) -> None:
    plain, attacked = honestly(name), trained(name, attack=TRUTH, attackers=2)
    torch.testing.assert_close(leaves(attacked), leaves(plain), rtol=1e-7, atol=1e-9)
    assert attacked.journal[0]["attack"] == "truth"
    assert len(attacked.journal[0]["attackers"]) == 2


@pytest.mark.parametrize("name", ATTACKED)
def test_loop_and_stacked_engine_agree_under_attack(name: str) -> None:
    loop, stacked = (trained(name, attack="noise", attackers=2, engine=engine) for engine in ("loop", "stacked"))
    torch.testing.assert_close(leaves(loop), leaves(stacked), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_under_both_engines(attack: str) -> None:
    loop, stacked = (trained("feduab", attack=attack, attackers=[1, 3], engine=e) for e in ("loop", "stacked"))
    torch.testing.assert_close(leaves(loop), leaves(stacked), rtol=1e-6, atol=1e-8)
    assert loop.journal[0]["attackers"] == [1, 3]
    plain = honestly("feduab")
    assert not all(torch.allclose(a, b) for a, b in zip(leaves(plain), leaves(loop)))


@pytest.mark.parametrize("name", ["pvi", "fedper", "bpfed"])
def test_honest_clients_keep_what_they_have(name: str) -> None:
    """In the first round nobody has heard a lie yet: all own states are those of the plain run."""

    def own(run: Run, k: int) -> list[torch.Tensor]:
        return tree_leaves(run.own.get(k))

    plain, attacked = (first_round(name, attack) for attack in (None, "sign_flip"))
    for k in range(5):
        assert own(plain, k)
        assert all(torch.equal(a, b) for a, b in zip(own(plain, k), own(attacked, k), strict=True))


def first_round(name: str, attack: str | None) -> Run:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return fb.fit(network, clients(), method=METHODS[name](batch=5, epochs=1), rounds=1, attack=attack)


def test_flipped_labels_are_the_attackers_alone() -> None:
    experiment = Experiment(data="digits", clients=10, rounds=1, attack="label_flip", attackers=(2, 5))
    task = build(experiment)
    rows = task.clients.train_rows
    for k in range(10):
        given, true = task.engine.store.y[rows(k)], task.clients.data.y[rows(k)]
        assert torch.equal(given, 9 - true if k in (2, 5) else true)


DIGITS = Experiment(
    **{"data": "digits", "network": "mlp", "network_options": {"hidden": [8]}, "clients": 8, "rounds": 2},
    method="fedavg",
    options={"epochs": 1, "batch": 50},
    attackers=0.25,
)


def test_members_of_a_sweep_may_be_attacked_in_different_ways(tmp_path: Path) -> None:
    members = [replace(DIGITS, attack=attack, engine="stacked") for attack in ("label_flip", "ipm", "noise")]
    tasks = [build(member) for member in members]
    together = [None] * len(tasks)
    for entries in rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks]):
        together = [entry[0] if entry else before for entry, before in zip(entries, together)]
    for member, progress in zip(members, together):
        run = run_into(member, tmp_path / str(member.attack))["fedavg"]
        torch.testing.assert_close(
            tree_leaves(progress.state.broadcast), tree_leaves(run.progress.state.broadcast), rtol=1e-4, atol=1e-5
        )


def test_a_run_under_attack_is_resumed_to_the_same_result(tmp_path: Path) -> None:
    experiment = replace(DIGITS, attack="noise", rounds=3, checkpoint_every=1)
    whole = run_into(experiment, tmp_path / "whole")["fedavg"]
    run_into(experiment, tmp_path / "cut")
    last = sorted((tmp_path / "cut" / "checkpoints").glob("*"))[-1]
    last.unlink()
    again = resume(tmp_path / "cut")["fedavg"]
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole), leaves(again), strict=True))
    assert [r["attackers"] for r in again.journal] == [r["attackers"] for r in whole.journal]
    page = write([tmp_path / "cut"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "under attack (noise) by 25% of the clients" in page


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attack": "lie"}, "attack"),
        ({"attackers": 0.2}, "there is no attack"),
        ({"attack_strength": 2.0}, "there is no attack"),
        ({"attack": "noise", "attackers": -1}, "attackers must be"),
        ({"attack": "noise", "attackers": 1.5}, "attackers must be"),
        ({"attack": "noise", "attack_strength": -1.0}, "attack_strength"),
        ({"attack": "certain", "method": "fedavg"}, "points have none"),
        ({"attack": "noise", "engine": "flower"}, "simulated in one process"),
    ],
)
def test_wrong_attacks_are_refused_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        build(Experiment(**{"data": "digits", "rounds": 1, **settings}))
    assert "\n" not in str(error.value)


def test_labels_of_a_regression_are_not_flipped() -> None:
    pairs = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(3)]
    with pytest.raises(InputError, match="class labels"):
        fb.fit(nn.Linear(3, 1), from_clients(pairs, kind="real"), method="fedavg", rounds=1, attack="label_flip")


def test_a_sweep_takes_attacks_as_values(tmp_path: Path) -> None:
    runs = sweep(replace(DIGITS, rounds=1), ["attack=noise,label_flip"], tmp_path)
    assert sorted(run.journal[0]["attack"] for run in runs.values()) == ["label_flip", "noise"]


LIAR = 3
FALLS = Experiment(
    **{"data": "digits", "network": "linear", "clients": 20, "rounds": 1, "engine": "loop"},
    partition="dirichlet",
    partition_options={"alpha": 0.3},
    method="feduab",
    options={"epochs": 1, "batch": 24, "test_draws": 2},
    attackers=(LIAR,),
)


def uploaded(experiment: Experiment) -> fb.Gaussian:
    """What the attacker would send in the first round if it told the truth."""
    task = build(experiment)
    (order,) = task.orders(task.begin())
    return task.engine.client(task.program, order, LIAR, None)[0].parts["model"]  # type: ignore[attr-defined]


def test_one_client_of_twenty_that_claims_to_be_sure_owns_the_log_pool(tmp_path: Path) -> None:
    experiment = replace(FALLS, attack="certain")
    run = run_into(experiment, tmp_path)["feduab"]
    torch.testing.assert_close(run.posterior.mean, uploaded(experiment).mean, rtol=0, atol=1e-5)


def test_one_client_of_twenty_that_claims_ten_times_its_rows_is_worth_ten(tmp_path: Path) -> None:
    experiment = replace(FALLS, attack="inflated_counts", options={**FALLS.options, "rule": "nwa"})
    honest = build(replace(experiment, attack=None, attackers=None))
    sizes = honest.clients.sizes.double()
    plain = run_into(replace(experiment, attack=None, attackers=None), tmp_path / "plain")["feduab"].posterior.mean
    run = run_into(experiment, tmp_path / "lied")["feduab"].posterior.mean
    more = 9 * sizes[LIAR] / sizes.sum()
    torch.testing.assert_close(run, (plain + more * uploaded(experiment).mean) / (1 + more), rtol=1e-4, atol=1e-5)


def test_attacks_on_full_covariances_are_refused() -> None:
    with pytest.raises(InputError, match="pools nothing that sign_flip could change"):
        trained("laplace", attack="sign_flip")
