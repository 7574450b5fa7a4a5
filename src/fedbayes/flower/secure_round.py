"""A round by secure sums: attempts with keys of their own, until there is a sum or too few are left for one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping

from fedbayes.errors import InputError
from fedbayes.federation.program import Order, Outcome
from fedbayes.federation.round import merged
from fedbayes.federation.sums import Totals, added_to, apart
from fedbayes.flower.asking import Asking
from fedbayes.flower.border import Refusal
from fedbayes.flower.hidden import NoPosterior
from fedbayes.flower.post import Answer
from fedbayes.flower.promises import Evidence
from fedbayes.flower.secure_sum import MASKED, SecureSum, Spoilt, TooFew
from fedbayes.flower.shown import LEAST, ONCE, Clients
from fedbayes.flower.total import Total
from fedbayes.flower.wire import Letter

NOTHING = Outcome(None, [], {}, {}, {}, 0)  # of a private round that has noise alone


class NoSum(InputError):
    """No attempt at a sum came to its end."""


class SecureRound:
    """What the attempts at a round's sum have in common."""

    def __init__(self, asking: Asking, order: Order, counted: Callable[[int], int], after: Callable[[], None]) -> None:
        self.asking, self.order, self.counted, self.after = asking, order, counted, after
        self.sums: list[Clients] = []  # that were asked for, and may be known
        self.spoilers: dict[int, str] = {}  # who made an attempt useless, and is not asked again in this round
        self.evidence: list[Evidence] = []
        self.unit = 0.0  # a typical weight; the same in all attempts, so that their sums are the same to the bit

    def run(self) -> Outcome:
        """The sum of an attempt; without any contribution where it is no posterior, and nobody knows by whose fault."""
        asking, failed, number, why = self.asking, 0, 0, ""
        while failed < asking.settings.attempts:
            if asking.noisy and asking.unmasking.begun(self.order.round):
                asking.notes.append(
                    f"the round is over: shares of its sum were asked for, and it was lost ({why or 'before'})"
                )
                return NOTHING
            attempt = self._attempt(number)
            number += 1
            try:
                outcome = self._sum(attempt)
                self._count(attempt)
            except NoPosterior as error:
                return self._skipped(attempt, str(error))
            except Spoilt as error:  # not counted: there are only so many clients that can
                why = str(error)
                attempt.refusals |= {k: Refusal(k, reason) for k, reason in error.clients.items()}
                self.spoilers |= error.clients
                self.evidence += error.evidence
                self.sums[:] = [clients - {found.client for found in self.evidence} for clients in self.sums]
            except TooFew as error:
                failed += 1
                why = str(error)
            else:
                return self._closed(attempt, outcome)
            self._count(attempt)
            others = [refusal for k, refusal in sorted(attempt.refusals.items()) if k not in self.spoilers]
            why += "".join(f"; {refusal}" for refusal in others)
            asking.notes.append(f"the secure sum was begun anew: {why}")
            if any(ONCE in refusal.reason for refusal in attempt.refusals.values()):
                return NOTHING  # the sum was shown and lost: the round is over, with noise alone
        raise NoSum(
            f"round {self.order.round + 1}: no secure sum came about ({why}). "
            "The rounds before it are kept: start the run again into the same folder when the nodes are back"
        )

    def _attempt(self, number: int) -> SecureSum:
        asking = self.asking
        head = {**asking.coded(), "attempt": f"{number}-{secrets.token_hex(8)}"}
        attempt = SecureSum(asking.program, self.order, asking.settings, head, self.sums)
        attempt.evidence = self.evidence
        if asking.noisy:
            attempt.before_shares = lambda: asking.unmasking.begin(self.order.round)
        return attempt

    def _sum(self, attempt: SecureSum) -> Outcome:
        asking = self.asking
        self.chosen = Total(asking.program, self.order, asking.settings.coding)
        asked = {k: node for k, node in asking.choose(self.order, self.chosen).items() if k not in self.spoilers}
        rows = [asking.roll.cards[node].rows for node in asked.values()]
        # Of a private sum weights have a bound, in whose terms its noise is.
        typical = sum(rows) / max(1, len(rows)) if asking.program.pooling.private is None else 1.0
        self.unit = self.unit or typical
        counted = {k: self.counted(k) for k in asked}

        def exchange(kind: str, letters: Mapping[int, Letter]) -> Iterator[tuple[int, Answer]]:
            clients = {asked[k]: k for k in letters}
            for node, answer in asking.exchange(kind, {asked[k]: letter for k, letter in letters.items()}):
                if isinstance(answer, str):  # it may be gone, though Flower does not know yet
                    asking.roll.forget(clients[node])
                if kind == MASKED:
                    self.after()
                yield clients[node], answer

        def expected(k: int) -> dict[str, object]:
            return asking.expected(k, self.order.round)

        return attempt.run(counted, self.unit, exchange, expected)

    def _count(self, attempt: SecureSum) -> None:
        for refusal in (*attempt.refusals.values(), *attempt.withheld.values()):
            self.asking.roll.count(refusal)

    def _left_out(self, attempt: SecureSum) -> dict[int, str]:
        refused = {k: refusal.reason for k, refusal in attempt.refusals.items()}
        return dict(sorted({**self.chosen.left_out, **refused, **self.spoilers}.items()))

    def _closed(self, attempt: SecureSum, outcome: Outcome) -> Outcome:
        notes = [f"client {k} had lost its own state, and began anew" for k in attempt.lost]
        notes += [f"client {k} is in the sum, but: {given.reason}" for k, given in sorted(attempt.withheld.items())]
        self.asking.notes += notes
        self.asking.took_part = sorted(outcome.own)
        return outcome._replace(left_out=self._left_out(attempt))

    def _skipped(self, attempt: SecureSum, why: str) -> Outcome:
        """A round without a contribution: the posterior stays, and what clients keep is as it was before."""
        clients = sorted(self.sums[-1])
        reason = f"the sum of {len(clients)} clients is no posterior ({why}): one of them spoilt it under its masks"
        self.asking.notes.append(f"the round was skipped: {reason}")
        self.asking.took_part = []
        return Outcome(None, [], {}, {**self._left_out(attempt), **dict.fromkeys(clients, reason)}, {}, 0)


def secure_outcome(asking: Asking, order: Order, counted: Callable[[int], int], after: Callable[[], None]) -> Outcome:
    """A round's secure sum; of buckets one for each, in turn. Most must come about, and the others are left out."""
    least = max(LEAST, asking.settings.min_clients)
    if asking.program.pooling.private is not None and len(order.cohort) < least:
        return NOTHING
    if not order.buckets:
        return SecureRound(asking, order, counted, after).run()
    called = {*order.cohort, *order.dropped}
    outcomes, failures = [], []
    totals: Totals = {}
    buckets = sorted({*order.buckets.values()})
    for bucket in buckets:
        cohort = tuple(k for k in order.cohort if order.buckets[k] == bucket)
        # Nobody is asked for two sums of a round: who is called already stands in for no other.
        part = order._replace(cohort=cohort, dropped=tuple(sorted(called - {*cohort})), buckets={})
        try:
            outcome = SecureRound(asking, part, counted, after).run()
        except NoSum as error:
            failures.append(error)
            outcome = Outcome(None, [], {}, dict.fromkeys(cohort, "its bucket has no secure sum"), {}, 0)
            asking.notes.append(f"bucket {bucket} was left out: {error}")
        called |= {*outcome.own, *outcome.left_out}
        if outcome.terms is not None:
            added_to(totals, asking.program, outcome.terms, bucket)
        outcomes.append(outcome._replace(terms=None))
    if failures and 2 * len(failures) >= len(buckets):
        raise failures[0]
    terms, sums = apart(totals)
    whole = merged(asking.program, outcomes)
    asking.took_part = sorted(whole.own)
    return whole._replace(terms=terms, buckets=sums)
