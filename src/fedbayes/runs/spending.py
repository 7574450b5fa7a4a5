"""What a private run has spent, from its folder: in training, beside it, and in all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import folder_name
from fedbayes.experiments.keys import SAVED
from fedbayes.federation.accounting import Account, epsilon_of, with_more
from fedbayes.federation.ledger import total
from fedbayes.federation.randomness import NOT_PRIVATE
from fedbayes.runs.folder import load
from fedbayes.runs.home import experiment_in
from fedbayes.runs.releases import releases_in
from fedbayes.training.private import WHOLE, PrivateRun
from fedbayes.training.run import Run

TEST_ROWS, IN_ALL = "test rows", "in all"


class Spending(NamedTuple):
    """What was spent on a run's clients together, on the rows of one site, beside the rounds, or in all."""

    who: str
    rate: float | None  # None: no mechanism of its own
    noise: float | None
    uses: int | None
    delta: float
    epsilon: float
    by_divergences: float  # the same by RDP, which is never less
    later: float  # after some more rounds


def spending(folder: str | Path, more: int = 0) -> list[Spending]:
    """The account of a private run; of its sites, one each. `more` rounds would bring it to `later`.

    Calibrations under noise follow, and the sum of all, where there is more than one thing to add.
    """
    experiment = experiment_in(folder)
    if experiment.private is None:
        raise InputError(f"{folder} holds no private run; set private = 'clients' or 'rows' before training")
    if experiment.network == SAVED:
        raise InputError(
            f"{folder} was written by fb.save, without an account; its journal has the epsilon of its rounds"
        )
    folders = [Path(folder) / folder_name(m) for m in experiment.methods] or [Path(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of runs that are not finished
        runs = {one.name if experiment.methods else "": load(one) for one in folders}
    rows = [row for name, run in runs.items() for row in _of(run, f"{name}: " if name else "", more)]
    beside = [release for one in folders for release in releases_in(one)]
    spent = total(beside)
    if beside:
        rows.append(Spending(TEST_ROWS, None, None, len(beside), 0.0, spent, spent, spent))
    return [*rows, _in_all([*runs.values()], spent, more)] if beside or len(runs) > 1 else rows


def _of(run: Run, name: str, more: int) -> list[Spending]:
    """What each of a run's accounts has spent in training."""
    privacy, rows = _privacy(run), []
    note = "" if privacy.random.is_private else f" ({NOT_PRIVATE.split(':')[0]})"
    for key, account in sorted(run.progress.accounts.items()):
        who = "clients" if key == WHOLE else run.task.clients.name(int(key))
        own = [s for s in account if privacy.scoring is None or s.noise != privacy.scoring.noise]
        last, uses = own[-1], sum(s.uses for s in own)
        epsilons = _epsilons(account, _ahead(privacy, key, account, more), privacy.delta)
        rows.append(Spending(name + who + note, last.rate, last.noise, uses, privacy.delta, *epsilons))
    return rows


def _in_all(runs: Sequence[Run], beside: float, more: int) -> Spending:
    """What whoever is in all of it has lost: the accounts of all runs as one, and what was spent beside the rounds."""
    now: dict[str, Account] = {}
    ahead: dict[str, Account] = {}
    for run in runs:
        for key, account in run.progress.accounts.items():
            now[key] = _joined(now.get(key, ()), account)
            ahead[key] = _joined(ahead.get(key, ()), _ahead(_privacy(run), key, account, more))
    delta = _privacy(runs[0]).delta
    worst = [max(column) + beside for column in zip(*(_epsilons(now[key], ahead[key], delta) for key in now))]
    return Spending(IN_ALL, None, None, None, delta, *(worst or [beside] * 3))


def _privacy(run: Run) -> PrivateRun:
    assert run.task.privacy is not None
    return run.task.privacy


def _ahead(privacy: PrivateRun, key: str, account: Account, more: int) -> Account:
    """An account after some more rounds."""
    ahead = with_more(account, privacy.rates[key], privacy.noise, more * privacy.uses[key])
    return ahead if privacy.scoring is None else with_more(ahead, *privacy.scoring.account(key, more)[0])


def _joined(one: Account, other: Account) -> Account:
    for spent in other:
        one = with_more(one, *spent)
    return one


def _epsilons(account: Account, ahead: Account, delta: float) -> tuple[float, float, float]:
    """By privacy losses, by divergences, and by losses after some more rounds."""
    return epsilon_of(account, delta), epsilon_of(account, delta, "rdp"), epsilon_of(ahead, delta)
