"""Who is there: which node speaks for which client, asked once of each node that comes online."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from fedbayes.flower.border import Card, Refusal, card_of, guarded
from fedbayes.flower.node import QUERY
from fedbayes.flower.post import Answer, Post, exchange
from fedbayes.flower.wire import Head, Letter, Refused


class Away(NamedTuple):
    """A node that was turned away, and when it may try again: it may have been mended, or started anew."""

    why: str
    again: float
    delay: float


class Roll:
    """Cards by node, and the nodes that were turned away; those are asked again, after twice as long each time."""

    def __init__(self, post: Post, head: Head, clients: int, seconds: float) -> None:
        self.post, self.head, self.clients, self.seconds = post, head, clients, seconds
        self.cards: dict[int, Card] = {}
        self.turned_away: dict[int, Away] = {}
        self.notes: list[str] = []

    def online(self) -> dict[int, int]:
        """The node of each client that is online now; nodes not met before are asked who they are."""
        there = self.post.nodes()
        for known in [*self.cards]:
            if known not in there:
                self.notes.append(f"client {self.cards.pop(known).client} is no longer online")
        for gone in [node for node in self.turned_away if node not in there]:
            del self.turned_away[gone]
        now = time.monotonic()
        away = {node for node, card in self.turned_away.items() if card.again > now}
        new = {node: Letter(self.head, {}) for node in there if node not in self.cards and node not in away}
        if new:
            for node, answer in exchange(self.post, QUERY, new, self.seconds):
                self._enter(node, answer)
        return {card.client: node for node, card in sorted(self.cards.items())}

    def wait_for(self, enough: int, wanted: Mapping[int, object] | None = None) -> dict[int, int]:
        """The clients online, as soon as `enough` of those wanted are; what there is when the time is up."""
        end = time.monotonic() + self.seconds
        while True:
            there = self.online()
            met = sum(1 for client in there if wanted is None or client in wanted)
            if met >= enough or time.monotonic() >= end:
                return there
            time.sleep(min(self.post.pause, max(0.0, end - time.monotonic())))

    def forget(self, client: int) -> None:
        """Ask a client's node again who it is, before it is trusted with another round."""
        for node in [node for node, card in self.cards.items() if card.client == client]:
            del self.cards[node]

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def _enter(self, node: int, answer: Answer) -> None:
        card = guarded(node, self._card, answer)
        if isinstance(card, Refusal):
            before = self.turned_away.get(node)
            delay = self.seconds if before is None else 2 * before.delay
            self.turned_away[node] = Away(card.reason, time.monotonic() + delay, delay)
            if before is None or before.why != card.reason:
                self.notes.append(f"node {node} was turned away: {card.reason}")
            return
        self.turned_away.pop(node, None)
        self.cards[node] = card
        self.notes.append(f"client {card.client} is online with {card.rows} rows")

    def _card(self, answer: Answer) -> Card:
        card = card_of(answer, self.head, self.clients)
        if any(card.client == other.client for other in self.cards.values()):
            raise Refused(f"another node speaks for client {card.client} already: give each its own partition-id")
        return card
