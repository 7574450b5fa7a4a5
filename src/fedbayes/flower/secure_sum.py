"""The server's side of a secure sum: it asks four times a round, and learns the sum and who took part in it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fedbayes.federation.program import Order, Outcome, Program, Terms
from fedbayes.flower import masks, noise_shares
from fedbayes.flower.border import Refusal, Unusable, guarded
from fedbayes.flower.fixed import flat
from fedbayes.flower.hidden import Hidden
from fedbayes.flower.node import told_by
from fedbayes.flower.post import Answer
from fedbayes.flower.promises import Evidence, Promise, key_of, seed_of
from fedbayes.flower.secure_letters import Dealer, Dealt, Form, Keys, dealt_of, keys_of, masked_of, shares_of
from fedbayes.flower.settings import Settings
from fedbayes.flower.shown import LEAST, Clients, few, names
from fedbayes.flower.wire import Head, Letter, write

KEYS, SHARES, MASKED, UNMASK = "train.keys", "train.shares", "train.masked", "train.unmask"
Exchange = Callable[[str, Mapping[int, Letter]], Iterator[tuple[int, Answer]]]  # by client
Value = TypeVar("Value")


class TooFew(ValueError):
    """So many clients are gone that the masks of the others can't be taken off, or must not be."""


class Spoilt(ValueError):
    """Clients have made an attempt useless; without them another can be made."""

    def __init__(self, clients: Mapping[int, str], evidence: Iterable[Evidence] = ()) -> None:
        self.clients, self.evidence = clients, [*evidence]
        super().__init__("; ".join(f"client {k}: {why}" for k, why in sorted(clients.items())))


class SecureSum:
    """One attempt at a round's sum, over the clients that are asked.

    Who is in it is settled before anything is unmasked: an attempt with too few clients, or with a few more or less
    than one of the same round that may have been unmasked, ends before that and shows nothing.
    """

    def __init__(self, program: Program, order: Order, settings: Settings, head: Head, before: list[Clients]) -> None:
        self.program, self.order, self.settings = program, order, settings
        self.before = before  # the sums of this round that were asked for; this one joins them
        self.at = head["run"], order.round, head["attempt"]
        self.head = {**head, "round": order.round}
        self.private = program.pooling.private
        # The noise of a private sum is dealt for so many at least, whoever was drawn for the round.
        least = settings.min_clients if self.private else min(settings.min_clients, len(order.cohort))
        self.least = max(LEAST, least)
        self.noise: dict[int, list[bytes]] = {}  # seeds of what is too much, by client
        self.refusals: dict[int, Refusal] = {}  # of those who are not in the sum
        self.silent: set[int] = set()
        self.withheld: dict[int, Refusal] = {}  # of those who are in it, but give no shares
        self.evidence: list[Evidence] = []  # against clients of earlier attempts
        self.before_shares: Callable[[], None] = lambda: None

    def run(
        self, counted: Mapping[int, int], unit: float, exchange: Exchange, expected: Callable[[int], Head]
    ) -> Outcome:
        """The outcome over the clients of `counted`, who kept their own state after the rounds that it names."""
        self.exchange, self.expected, self.clients = exchange, expected, max(1, len(self.order.cohort))
        self.keys = self._keys(counted)
        self._enough(self.keys)
        self.near = masks.neighbours(sorted(self.keys), secrets.randbits(64))
        self.dealt = self._dealt()
        self._enough(self.dealt)
        self.near = {k: [j for j in self.near[k] if j in self.dealt] for k in self.dealt}
        hidden = self._masked({k: {"counted": counted[k], "weight_unit": unit} for k in self.dealt})
        unable = [k for k in self.dealt if k in self.refusals and not self.refusals[k].offence and k not in self.silent]
        if 2 * len(unable) > len(self.dealt):
            reasons = "; ".join(str(self.refusals[k]) for k in unable)
            raise Unusable(f"round {self.order.round + 1}: most clients can't train from the broadcast ({reasons})")
        figures, others = hidden.agreed()
        for k, why in others.items():
            self._refuse(k, Refusal(k, why))
        replies = {k: reply for k, reply in sorted(hidden.replies.items()) if k not in others}
        alive = self._settled(replies, {k: reply.bad for k, reply in hidden.replies.items()})
        vector = hidden.sums[figures]
        self.before_shares()
        for mask in self._masks(alive, self._shares(alive), len(vector)):
            vector += mask
        self.lost = [k for k in replies if replies[k].lost]
        outcome = hidden.outcome(vector, replies, self.clients)
        return outcome if self.private is None else self._calmed(outcome)

    def _calmed(self, outcome: Outcome) -> Outcome:
        """The sum without the noise that is more than it must have."""
        assert self.private is not None
        assert outcome.terms is not None
        named = flat(outcome.terms)
        sizes = noise_shares.deviations(self._steps(), self.settings.colluding, self.private.clip * self.private.noise)
        lengths = [t.numel() for t in named.values()]
        excess = torch.from_numpy(noise_shares.excess(self.noise, sizes, self.at, sum(lengths)))
        terms: Terms = {}
        for (name, t), own in zip(named.items(), excess.split(lengths)):
            part, key = name.split("/")
            terms.setdefault(part, {})[key] = t - own.reshape(t.shape)
        return outcome._replace(terms=terms, noisy=True)

    def _steps(self) -> list[int]:
        return noise_shares.steps(self.least, self.clients)

    def _keys(self, counted: Iterable[int]) -> dict[int, Keys]:
        def read(k: int, answer: Answer) -> Keys:
            return keys_of(answer, self.expected(k), masks.purpose(f"key {k}", *self.at))

        keys = dict(self._ask(KEYS, {k: {} for k in counted}, read))
        holders: dict[bytes, list[int]] = {}
        for k, own in keys.items():
            for key in own:
                holders.setdefault(key, []).append(k)
        for k in {k for shared in holders.values() if len(shared) > 1 for k in shared}:
            # Each has shown that it holds the private key, so that nobody's was copied: they have one together.
            self._refuse(k, Refusal(k, "its key is another client's too"))
            del keys[k]
        return dict(sorted(keys.items()))

    def _dealt(self) -> dict[int, Dealt]:
        about = {
            k: {
                "near": others,
                "mask_keys": [self.keys[j].mask for j in others],
                "box_keys": [self.keys[j].box for j in others],
            }
            for k, others in self.near.items()
        }

        def read(k: int, answer: Answer) -> Dealt:
            dealer = Dealer(k, self.near[k], self.keys[k].mask, masks.purpose(f"promise {k}", *self.at))
            return dealt_of(answer, self.expected(k), dealer)

        return dict(sorted(self._ask(SHARES, about, read)))

    def _masked(self, about: Mapping[int, Head]) -> Hidden:
        hidden = Hidden(self.program, self.order)
        sent = {"clients": self.clients, "dtype": self.settings.dtype, "delta": False}
        sent |= told_by(self.program, self.order)
        letters = {
            k: {
                **sent,
                **more,
                "sources": self.near[k],
                "boxes": [self.dealt[j].boxes[k] for j in self.near[k]],
                "promises": [self.dealt[j].promise.pair(k) + self.dealt[j].promise.root for j in self.near[k]],
            }
            for k, more in about.items()
        }

        def read(k: int, answer: Answer) -> Any:
            return masked_of(answer, self.expected(k), Form(hidden.words, hidden.clear, self.near[k]))

        for k, reply in self._ask(MASKED, letters, read, write(self.order.broadcast, self.settings.coding)):
            hidden.add(k, reply)
        return hidden

    def _settled(self, replies: Mapping[int, Any], bad: Mapping[int, frozenset[int]]) -> Clients:
        """Who is in the sum; ends the attempt where it could not be unmasked, or must not be."""
        self.bad = bad
        complaints = {k: sum(k in theirs for theirs in bad.values()) for k in self.dealt}
        # A dealer may keep its own share back: the others' must do. One complaint is too few to believe.
        spare = {k: len(dealt.promise.holders) - 1 - self._needed(k) for k, dealt in self.dealt.items()}
        blamed = {k: number for k, number in complaints.items() if number > max(1, spare[k])}
        if blamed:
            text = "of its neighbours could not use the shares that it dealt"
            raise Spoilt({k: f"{number} {text}" for k, number in blamed.items()})
        self._enough(replies)
        alive = frozenset(replies)
        for k, dealt in self.dealt.items():
            able = [j for j in dealt.promise.holders if j in alive and k not in bad[j]]
            if complaints[k] and spare[k] > 0:
                able = [j for j in able if j != k]
            if len(able) < self._needed(k):
                raise TooFew(f"{len(able)} clients are left that hold shares of client {k}'s mask")
        if clients := few([*self.before, alive]):
            raise TooFew(
                f"beside a sum of this round that may be known, one over {names(alive)} would show {names(clients)}"
            )
        self.before.append(alive)
        return alive

    def _shares(self, alive: Clients) -> dict[int, dict[int, bytes]]:
        """Shares of the seeds of those in the sum and of the keys of the others, by owner and holder."""
        evidence = [found.written() for found in self.evidence]
        about = {
            k: {"alive": sorted(alive), "gone": [j for j in self.near[k] if j not in alive], "evidence": evidence}
            for k in sorted(alive)
        }
        wanted = {
            j: {
                k: self.dealt[k].promise.share(j, of_key=k not in alive)
                for k in [j, *self.near[j]]
                if k not in self.bad[j]
            }
            for j in about
        }
        shares: dict[int, dict[int, bytes]] = {k: {} for k in self.dealt}
        many = 0 if self.private is None else noise_shares.surplus(self._steps(), len(alive))
        for _ in range(self.settings.attempts):
            for j, given in self._ask(UNMASK, about, lambda j, a: shares_of(a, self.expected(j), wanted[j], many)):
                del about[j]
                self.noise[j] = given.noise
                for k, share in given.shares.items():
                    shares[k][j] = share
            about = {j: head for j, head in about.items() if j not in self.withheld}
            if not about or all(self._missing(k, held) <= 0 for k, held in shares.items()):
                break
        return shares

    def _needed(self, k: int) -> int:
        return masks.threshold(len(self.dealt[k].promise.holders))

    def _missing(self, k: int, held: Mapping[int, bytes]) -> int:
        return self._needed(k) - len(held)

    def _masks(self, alive: Clients, shares: Mapping[int, Mapping[int, bytes]], size: int) -> Iterator[np.ndarray]:
        """What takes the masks off the sum: those of who is in it, and of the others what is left of theirs."""
        found: dict[int, bytes] = {}
        false: dict[int, Promise] = {}
        for k, held in shares.items():
            if self._missing(k, held) > 0:
                reasons = "".join(f"; {refusal}" for _, refusal in sorted(self.withheld.items()))
                raise TooFew(f"{self._missing(k, held)} shares too few of client {k}'s mask came back{reasons}")
            promise = self.dealt[k].promise
            secret = seed_of(promise, held) if k in alive else key_of(promise, held, self.keys[k].mask)
            if secret is None:
                false[k] = promise
            else:
                found[k] = secret
        if false:
            signed = {k: (self.keys[k].mask, self.dealt[k].proof) for k in false}
            evidence = [Evidence.against(k, self.at[2], false[k], shares[k], signed[k]) for k in false if k in alive]
            raise Spoilt(dict.fromkeys(false, "the shares that it dealt are not of what it promised"), evidence)
        for k, secret in found.items():
            if k in alive:
                yield -masks.mask(secret, masks.purpose("own", *self.at), size)
                continue
            for j in self.near[k]:  # what is left of its masks lies on its neighbours' vectors
                if j in alive:
                    key = masks.agreed(secret, self.keys[j].mask)
                    pair = masks.mask(key, masks.purpose("pair", *self.at), size)
                    yield pair if k > j else -pair

    def _enough(self, clients: Mapping[int, Any]) -> None:
        if len(clients) < self.least:
            raise TooFew(f"{len(clients)} clients answered, a secure sum needs {self.least}")

    def _refuse(self, k: int, refusal: Refusal) -> None:
        self.refusals[k] = refusal

    def _ask(
        self,
        kind: str,
        about: Mapping[int, Head],
        read: Callable[[int, Answer], Value],
        arrays: dict[str, np.ndarray] | None = None,
    ) -> Iterator[tuple[int, Value]]:
        """Replies as they come, each read inside the border's guard; who gives none that can be used is refused."""
        sent = arrays or {}
        letters = {k: Letter({**self.head, **more, "client": k}, sent) for k, more in about.items()}
        for k, answer in self.exchange(kind, letters):
            value = guarded(k, partial(read, k), answer)
            if isinstance(answer, str):
                self.silent.add(k)
            if not isinstance(value, Refusal):
                yield k, value
            elif kind != UNMASK:
                self._refuse(k, value)
            elif not isinstance(answer, str):  # it refuses, and would again; one who is silent may be asked again
                self.withheld[k] = value
