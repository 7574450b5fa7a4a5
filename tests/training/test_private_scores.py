"""Scores of private runs: noisy sums with a share of the budget, in the account."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.training.prepare import prepare
from fedbayes.training.private_scores import LENGTH, _pairs, largest, noisy_scores

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
PRIVATE: dict[str, Any] = {"epsilon": 3.0, "private_scores": 0.2, "private_seed": 0, "delta": 1e-5}
METHOD = fb.methods.fedavg(epochs=1, batch=4, lr=0.3, weighting="equal")


def sites(count: int = 12) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    x = [torch.randn(3 + k % 4, 3, generator=random) for k in range(count)]
    return [(rows, (rows[:, 0] > 0).long()) for rows in x]


@pytest.mark.parametrize("level", ["clients", "rows"])
def test_scores_are_in_the_account_and_both_stay_within_the_budget(level: str) -> None:
    run = fb.fit(nn.Linear(3, 2), sites(4), method=METHOD, rounds=5, evaluate_every=2, private=level, **PRIVATE)
    privacy = run.task.privacy
    told = [record["round"] for record in run.journal if record["train"]]
    assert told == [2, 4, 5]
    assert all({*record["train"]} == {"accuracy", "nll"} for record in run.journal if record["train"])
    assert 0.97 * 3 < run.epsilon <= 3.0
    scores = Spent(1.0, privacy.scoring.noise, 3)
    assert 0.97 * 0.6 < epsilon_of((scores,), 1e-5) <= 0.6
    for name, account in run.progress.accounts.items():
        assert scores in account
        assert Spent(privacy.rates[name], privacy.noise, 5 * privacy.uses[name]) in account
    front = max(epsilon_of(account, 1e-5) for account in run.progress.accounts.values())
    assert run.epsilon == front


@pytest.mark.parametrize("level", ["clients", "rows"])
def test_without_noise_they_are_the_scores_of_all_rows(level: str) -> None:
    task = prepare(nn.Linear(3, 2), sites(), method=METHOD, rounds=2, private=level, **PRIVATE)
    privacy = replace(task.privacy, scoring=task.privacy.scoring._replace(noise=0.0))
    state = task.begin().state
    ours = noisy_scores(task, privacy, state)
    q, accuracy, nll = state.broadcast["model"].mean, [], []
    for x, y in sites():
        logs = (x @ q[:6].reshape(2, 3).T + q[6:]).log_softmax(-1)
        accuracy.append((logs.argmax(-1) == y).double())
        nll.append(-logs.gather(1, y[:, None])[:, 0].double().clamp(min=-largest(task)))
    for name, values in (("accuracy", accuracy), ("nll", nll)):
        each = torch.stack([v.mean() for v in values]) if level == "clients" else torch.cat(values)
        assert ours[name] == pytest.approx(float(each.mean()), abs=1e-6)


def test_noise_is_in_terms_of_the_longest_pair() -> None:
    """Over many draws, of everybody, so that nothing else differs."""
    task = prepare(nn.Linear(3, 2), sites(40), method=METHOD, rounds=2, private="clients", **PRIVATE)
    scoring = task.privacy.scoring._replace(noise=1.5)
    state, values = task.begin().state, []
    for seed in range(300):
        privacy = replace(task.privacy, scoring=scoring, random=task.privacy.random._replace(seed=seed))
        values.append(noisy_scores(task, privacy, state)["accuracy"])
    assert float(torch.tensor(values).std()) == pytest.approx(1.5 * LENGTH / 40, rel=0.15)


def test_whatever_a_network_gives_a_pair_is_within_its_bounds() -> None:
    task = prepare(nn.Linear(3, 2), sites(), method=METHOD, rounds=2, private="clients", **PRIVATE)
    for weight in (0.0, 1e30, float("nan")):
        state = task.begin().state
        q = state.broadcast["model"]
        broken = state._replace(broadcast={"model": replace(q, mean=torch.full_like(q.mean, weight))})
        for pairs in _pairs(task, broken, range(12)):
            assert bool(((pairs >= 0) & (pairs <= 1)).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": None, "noise_multiplier": 1.0}, "share of epsilon"),
        ({"private_scores": 1.5}, "between 0 and 1"),
        ({"private": None, "epsilon": None, "delta": None, "private_seed": None}, "not private"),
    ],
)
def test_shares_without_a_budget_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fb.fit(nn.Linear(3, 2), sites(), method=METHOD, rounds=1, **{"private": "clients", **PRIVATE, **options})


def test_scores_of_real_targets_are_refused() -> None:
    with pytest.raises(InputError, match="of classes"):
        fb.fit(nn.Linear(3, 1), [(x, x[:, :1]) for x, _ in sites()], method=METHOD, rounds=1, private="rows", **PRIVATE)
