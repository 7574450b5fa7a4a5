"""What a private run has spent, from its folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import folder_name
from fedbayes.federation.accounting import epsilon_of, with_more
from fedbayes.federation.randomness import NOT_PRIVATE
from fedbayes.runs.folder import load
from fedbayes.runs.home import experiment_in
from fedbayes.training.private import WHOLE


class Spending(NamedTuple):
    """What was spent on a run's clients together, or on the rows of one site."""

    who: str
    rate: float
    noise: float
    uses: int
    delta: float
    epsilon: float
    by_divergences: float  # the same by RDP, which is never less
    later: float  # after some more rounds


def spending(folder: str | Path, more: int = 0) -> list[Spending]:
    """The account of a private run; of its sites, one each. `more` rounds would bring it to `later`."""
    experiment = experiment_in(folder)
    if experiment.private is None:
        raise InputError(f"{folder} holds no private run; set private = 'clients' or 'rows' before training")
    folders = [Path(folder) / folder_name(m) for m in experiment.methods] or [Path(folder)]
    return [row for one in folders for row in _of(one, more)]


def _of(folder: Path, more: int) -> list[Spending]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of runs that are not finished
        run = load(folder)
    privacy, rows = run.task.privacy, []
    assert privacy is not None
    for name, account in sorted(run.progress.accounts.items()):
        ahead = with_more(account, privacy.rates[name], privacy.noise, more * privacy.uses[name])
        if privacy.scoring is not None:
            scored = privacy.scoring.account(name, more)[0]
            ahead = with_more(ahead, *scored)
        who = "clients" if name == WHOLE else run.task.clients.name(int(name))
        note = "" if privacy.random.is_private else f" ({NOT_PRIVATE.split(':')[0]})"
        own = [s for s in account if privacy.scoring is None or s.noise != privacy.scoring.noise]
        delta, last, uses = privacy.delta, own[-1], sum(s.uses for s in own)
        losses, divergences = epsilon_of(account, delta), epsilon_of(account, delta, "rdp")
        later = epsilon_of(ahead, delta)
        rows.append(Spending(who + note, last.rate, last.noise, uses, delta, losses, divergences, later))
    return rows
