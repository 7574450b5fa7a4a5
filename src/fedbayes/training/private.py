"""A private run: its mechanism, its budget, what it releases of a round, and its account."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Phase
from fedbayes.clients.private_rows import ROW_BATCH, ROW_CLIP, ROW_NOISE
from fedbayes.errors import InputError
from fedbayes.federation.accounting import Account, Spent, affordable, epsilon_of, library, noise_for, with_more
from fedbayes.federation.ledger import Release, total
from fedbayes.federation.private import released, with_private_sums
from fedbayes.federation.program import BY_MEMBERS, Mechanism, Order, Outcome, Program, Terms
from fedbayes.federation.randomness import NOT_PRIVATE, Randomness
from fedbayes.federation.waiting import SYNCHRONOUS
from fedbayes.training.settings import CLIENTS, ROWS, Privacy

Accounts = Mapping[str, Account]  # of the run as a whole (under ""), or of each site by its number
WHOLE = ""
DELTA = 1e-5
SHARE = 0.1  # of those who are protected: what delta is below
# What a private run keeps of a round's record; the rest tells who came, and how it went at home.
OPEN = ("round", "scales", "floored", "stopped", "diverged", "notes", "test", "pretrained")
MEMORY = "out of memory"  # how notes begin that tell how many clients there were


class Told(NamedTuple):
    """What is released over a run: so many rounds, and scores after every so many."""

    rounds: int
    every: int


class Scoring(NamedTuple):
    """The mechanism by which scores are released."""

    noise: float  # in terms of what one client, or one row, can add
    rates: Mapping[str, float]  # at which somebody is in a release, as accounts are kept
    every: int  # rounds between two of them
    share: float  # of the budget

    def account(self, name: str, rounds: int) -> Account:
        """What so many rounds spend."""
        return (Spent(self.rates[name], self.noise, -(-rounds // self.every)),)


@dataclass(frozen=True)
class PrivateRun:
    """How a run is private, and what it may spend."""

    level: str
    rates: Mapping[str, float]  # at which somebody is in a release, as accounts are kept
    uses: Mapping[str, int]  # of the mechanism in a round
    noise: float
    clip: float
    delta: float
    budget: float | None
    random: Randomness
    public_test: bool
    scoring: Scoring | None = None

    @property
    def words(self) -> str:
        """One line for the terminal."""
        budget = "" if self.budget is None else f", budget epsilon {self.budget:g}"
        private = "" if self.random.is_private else f"; {NOT_PRIVATE}"
        return f"private {self.level}: noise {self.noise:g} x clip {self.clip:g}, delta {self.delta:g}{budget}{private}"

    def after(self, accounts: Accounts, took_part: Sequence[int] = ()) -> dict[str, Account]:
        """The accounts after one more round; of sites those that took part."""
        names = [WHOLE] if self.level == CLIENTS else [str(k) for k in took_part]
        more = {n: with_more(accounts.get(n, ()), self.rates[n], self.noise, self.uses[n]) for n in names}
        return {**accounts, **more}

    def after_scores(self, accounts: Accounts) -> dict[str, Account]:
        """The accounts after scores were released."""
        assert self.scoring is not None
        rates, noise = self.scoring.rates, self.scoring.noise
        return {**accounts, **{name: with_more(accounts.get(name, ()), rate, noise) for name, rate in rates.items()}}

    def epsilon(self, accounts: Accounts) -> float:
        """What has been spent: of sites, by that which spent most."""
        return max((epsilon_of(account, self.delta) for account in _front(accounts)), default=0.0)

    def check_room(self, accounts: Accounts, before: Sequence[Release], what: str, epsilon: float) -> None:
        """Refuse a release beside the rounds, after those before, that would pass the budget."""
        spent = self.epsilon(accounts) + total(before)
        if self.budget is not None and spent + epsilon > self.budget:
            raise InputError(
                f"epsilon: this {what} would spend {epsilon:g} of every row, and of the run's budget of "
                f"{self.budget:g} there is {max(0.0, self.budget - spent):.4g} left; give less, or train with a "
                "noise_multiplier that leaves more"
            )

    def rounds_left(self, accounts: Accounts, most: int, beside: float = 0.0) -> int:
        """Rounds that the budget allows, of at most so many, if everybody takes part; `beside` is spent already."""
        if self.budget is None or not most:
            return most
        if beside >= self.budget:
            return 0
        names = [WHOLE] if self.level == CLIENTS else _worst(self.rates, self.uses, accounts)
        return min(self._left(name, accounts.get(name, ()), most, self.budget - beside) for name in names)

    def _left(self, name: str, account: Account, most: int, budget: float) -> int:
        rate, uses = self.rates[name], self.uses[name]
        others = tuple(s for s in account if (s.rate, s.noise) != (rate, self.noise))
        used = sum(s.uses for s in account) - sum(s.uses for s in others)
        if self.scoring is not None:  # the next round may be scored
            others = with_more(others, self.scoring.rates[name], self.scoring.noise)
        # The same question in every round, so that it is answered once.
        return (affordable(budget, self.delta, rate, self.noise, used + most * uses, others) - used) // uses

    def seed_of_steps(self, seed: int) -> int | str:
        """The first part of the address of the noise within clients: where rows are private, one that nobody knows."""
        return self.random.key if self.level == ROWS else seed

    def release(self, program: Program, order: Order, outcome: Outcome) -> tuple[Order, Outcome]:
        """What may be seen of a round: where clients are private its noisy sum, where rows are what clients sent."""
        if self.level == ROWS:
            return order, outcome
        return released(program, order, outcome, lambda count: self.random.normals(count, order.round))

    def public(self, record: Mapping[str, Any], outcome: Outcome, accounts: Accounts, due: bool) -> dict[str, Any]:
        """A round's record without what is nobody's business, and with what was spent."""
        kept = dict(record) if self.level == ROWS else {name: v for name, v in record.items() if name in OPEN}
        kept |= {"train": {}} if self.level == ROWS else self._expected(record, outcome)
        if "notes" in kept:
            kept["notes"] = [note for note in kept["notes"] if not note.startswith(MEMORY)]
        if due:
            kept |= {"epsilon": self.epsilon(accounts), "delta": self.delta}
        if not self.random.is_private:
            kept["notes"] = [*kept.get("notes", ()), NOT_PRIVATE]
        return kept

    def _expected(self, record: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
        """What a record must have, of the expected cohort; and the name of the noisy sum."""
        sent = {name: record[name] for name in ("bytes_down", "bytes_up")}
        return {
            **{"cohort": outcome.counted, "dropped": [], "left_out": {}, "train": {}},
            **sent,
            "release": digest_of(outcome.terms or {}),
        }


def digest_of(terms: Terms) -> str:
    """A name for a noisy sum: another noise has another."""
    digest = hashlib.blake2b(digest_size=8)
    for part in sorted(terms):
        for key in sorted(terms[part]):
            digest.update(terms[part][key].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _front(accounts: Accounts) -> list[Account]:
    """The accounts of which one has spent most: others have a smaller rate and fewer uses of the same noise."""
    single = {a[0] for a in accounts.values() if len(a) == 1}
    worst = [a for a in single if not any(_above(b, a) for b in single)]
    return [*((a,) for a in worst), *{a for a in accounts.values() if len(a) > 1}]


def _above(a: Spent, b: Spent) -> bool:
    return a != b and a.rate >= b.rate and a.noise <= b.noise and a.uses >= b.uses


def _worst(rates: Mapping[str, float], uses: Mapping[str, int], accounts: Accounts) -> list[str]:
    """The sites of which one will be the first to have spent its budget."""
    rows = {(rates[n], uses[n], accounts.get(n, ())): n for n in rates}
    worst: list[str] = []
    for (rate, count, account), name in rows.items():
        if not any(
            (r, c, a) != (rate, count, account) and r >= rate and c >= count and a == account for r, c, a in rows
        ):
            worst.append(name)
    return worst


def with_privacy(
    program: Program, options: Privacy, sizes: Tensor, cohort: int, told: Told, rows: float | None
) -> tuple[Program, PrivateRun | None]:
    """The program whose rounds, or whose clients' steps, are private as the options ask; and how the run is so."""
    if options.private is None:
        for name in ("epsilon", "delta", "noise_multiplier", "private_seed", "private_scores"):
            if getattr(options, name) is not None:
                raise InputError(f"{name}: the run is not private; set private = '{CLIENTS}' or '{ROWS}'")
        return program, None
    library()
    check_gathered(program)
    if options.private == CLIENTS:
        run = private_run(options, {WHOLE: (cohort / len(sizes), 1)}, told, SHARE / len(sizes))
        return with_private_sums(program, Mechanism(run.clip, run.noise, cohort), rows), run
    phases = program.client.phases
    if len(phases) != 1 or not phases[0].private:
        raise InputError(
            "private: the steps of this method's clients have no private form; use fedavg, feduab, fedivon or pvi"
        )
    if program.prediction.noise in BY_MEMBERS:
        raise InputError("private: the noise of this regression is judged on clients' rows; set noise = 'likelihood'")
    steps = {str(k): _steps(n, phases[0]) for k, n in enumerate(sizes.tolist())}
    run = private_run(options, steps, told, SHARE / int(sizes.max()))
    own, batch = program.options, phases[0].batch
    more = {ROW_CLIP: run.clip, ROW_NOISE: run.noise, ROW_BATCH: float(batch)}
    return program._replace(options=lambda number: {**own(number), **more}), run


def check_public(privacy: PrivateRun | None, what: str = "histograms", mend: str = "give epsilon, or ") -> None:
    """Refuse what tells of a private run's test rows without noise, unless they are nobody's secret."""
    if privacy is not None and not privacy.public_test:
        raise InputError(
            f"the run is private, and {what} of its test rows have no noise: {mend}train with public_test = true "
            "where they are nobody's secret"
        )


def check_gathered(program: Program) -> None:
    """Refuse personal models for which clients send something beside the rounds."""
    if program.personal.gather is not None:
        raise InputError(
            "private: the posteriors that clients send for one another's personal models have no noise and are in no "
            'account; set refine = "tune"'
        )


def _steps(n: int, phase: Phase) -> tuple[float, int]:
    """The rate at which a row is in a step, and the steps of a round, for a client of so many rows."""
    return min(1.0, phase.batch / n), phase.epochs * -(-n // phase.batch)


def private_run(options: Privacy, kept: Mapping[str, tuple[float, int]], told: Told, most: float) -> PrivateRun:
    """The run that the options ask for; `kept` has the rate and the uses in a round of each account."""
    assert options.private is not None
    delta = min(DELTA, most) if options.delta is None else options.delta
    noise, rounds = options.noise_multiplier, told.rounds
    scoring = _scoring(
        options, {n: rate if options.private == CLIENTS else 1.0 for n, (rate, _) in kept.items()}, delta, told
    )
    if noise is None:
        if options.epsilon is None:
            raise InputError("private: give epsilon, by which the noise is chosen, or noise_multiplier")
        beside = () if scoring is None else scoring.account(next(iter(kept)), rounds)
        noise = max(noise_for(options.epsilon, delta, rate, uses * rounds, beside) for rate, uses in _extremes(kept))
    rates, uses = {name: rate for name, (rate, _) in kept.items()}, {name: many for name, (_, many) in kept.items()}
    random = Randomness(options.private_seed)
    run = PrivateRun(
        options.private,
        rates,
        uses,
        noise,
        options.private_clip,
        delta,
        options.epsilon,
        random,
        options.public_test,
        scoring,
    )
    if rounds and run.rounds_left({}, 1) == 0:
        raise InputError(f"epsilon: one round at noise {noise:g} costs more than {options.epsilon:g}; raise either")
    return run


def _scoring(options: Privacy, rates: Mapping[str, float], delta: float, told: Told) -> Scoring | None:
    """The noise of scores that are told: alone they cost their share of epsilon."""
    if options.private_scores is None:
        return None
    if options.epsilon is None:
        raise InputError("private_scores: it is a share of epsilon; give epsilon too")
    uses = -(-told.rounds // told.every)
    noise = noise_for(options.private_scores * options.epsilon, delta, max(rates.values()), uses)
    return Scoring(noise, rates, told.every, options.private_scores)


def _extremes(kept: Mapping[str, tuple[float, int]]) -> list[tuple[float, int]]:
    pairs = set(kept.values())
    return [p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)]


def check_private(options: Privacy, arguments: Mapping[str, Any]) -> None:
    """Refuse what would show clients' rows without noise, each by name."""
    if options.private is None:
        return
    shown = {
        "validation": "scores of rows that clients hold out have no noise",
        "target_loss": "the training loss has no noise",
        "personal_every": "scores of personal models have no noise",
        "stages": "what a stage of your own looks at is in no account",
        "delays": "the simulated clock tells who came",
        "attack": "an attack is simulated on uploads, which a private run does not hold",
        "class_weights": "how often classes occur is counted without noise",
    }
    if not options.public_test:
        shown["target_accuracy"] = "scores of test rows have no noise; set public_test where they are nobody's secret"
    if options.private == ROWS:
        del shown["attack"], shown["stages"], shown["delays"]
    if arguments["schedule"] != SYNCHRONOUS:
        raise InputError("schedule: a private run counts its rounds, which must wait; leave it out")
    for name, why in shown.items():
        if arguments[name] is not None and arguments[name] not in (0, (), []):
            raise InputError(f"{name}: the run is private, and {why}; leave it out")
