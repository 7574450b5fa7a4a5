"""Who is online: which node speaks for which client, asked once of each node that comes, and who was put aside."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedbayes.flower.border import Card, Refusal, card_of, guarded
from fedbayes.flower.node import QUERY
from fedbayes.flower.places import Places, Who
from fedbayes.flower.post import Answer, Post, exchange
from fedbayes.flower.settings import Settings
from fedbayes.flower.wire import Head, Letter, Refused


class Away(NamedTuple):
    """A node that was turned away, and when it may try again: it may have been mended, or started anew."""

    why: str
    again: float
    delay: float


class Roll:
    """Cards by node, and the nodes that were turned away; those are asked again, after twice as long each time.

    `sizes` are the training and test rows of each client as far as the server knows them, 0 where it does not.
    """

    def __init__(
        self, post: Post, head: Head, sizes: Sequence[tuple[int, int]], settings: Settings, places: Places
    ) -> None:
        self.post, self.head, self.sizes, self.settings, self.places = post, head, sizes, settings, places
        self.cards: dict[int, Card] = {}
        self.turned_away: dict[int, Away] = {}
        self.offences: dict[int, int] = {}  # by client: replies that could not be used
        self.put_aside: dict[int, str] = {}
        self.notes: list[str] = []

    def online(self) -> dict[int, int]:
        """The node of each client that is online now; nodes not met before are asked who they are."""
        nodes, new = self.met()
        if new:
            for node, answer in exchange(self.post, QUERY, new, self.settings.wait):
                self.enter(node, answer, nodes)
        return self.seated()

    def seated(self) -> dict[int, int]:
        """The node of each client whose card is known, but for those put aside."""
        cards = sorted(self.cards.items())
        return {card.client: node for node, card in cards if card.client not in self.put_aside}

    def met(self) -> tuple[Mapping[int, Who], dict[int, Letter]]:
        """The nodes that are online, and letters to those that must be asked who they are."""
        nodes = self.post.nodes()
        for known in [*self.cards]:
            if known not in nodes:
                self.notes.append(f"client {self.cards.pop(known).client} is no longer online")
        for gone in [node for node in self.turned_away if node not in nodes]:
            del self.turned_away[gone]
        now = time.monotonic()
        away = {node for node, card in self.turned_away.items() if card.again > now}
        return nodes, {node: Letter(self.head, {}) for node in nodes if node not in self.cards and node not in away}

    def wait_for(self, enough: int, wanted: Mapping[int, object] | None = None) -> dict[int, int]:
        """The clients online, as soon as `enough` of those wanted are; those there are when the time is up."""
        end = time.monotonic() + self.settings.wait
        while True:
            clients = self.online()
            met = sum(1 for client in clients if wanted is None or client in wanted)
            if met >= enough or time.monotonic() >= end:
                return clients
            time.sleep(min(self.post.pause, max(0.0, end - time.monotonic())))

    def forget(self, client: int) -> None:
        """Ask a client's node again who it is, before it is trusted with another round."""
        for node in [node for node, card in self.cards.items() if card.client == client]:
            del self.cards[node]

    def count(self, refusal: Refusal) -> None:
        """Remember an offence; who has as many as are allowed is asked nothing more."""
        k, most = refusal.client, self.settings.max_offences
        if not refusal.offence or k in self.put_aside:
            return
        self.offences[k] = self.offences.get(k, 0) + 1
        if most and self.offences[k] >= most:
            self.put_aside[k] = f"put aside after {most} replies that could not be used, the last: {refusal.reason}"
            self.notes.append(f"client {k} was {self.put_aside[k]}")

    def absence(self, client: int) -> str:
        """Why a client is not among those online."""
        return self.put_aside.get(client, "no node was online")

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def enter(self, node: int, answer: Answer, nodes: Mapping[int, Who]) -> None:
        """Take in what a node says of itself, or turn it away."""
        card = guarded(node, card_of, answer, self.head, self.sizes, self.settings.max_rows)
        if not isinstance(card, Refusal):
            try:
                self._seat(node, card, nodes)
                return
            except Refused as why:
                card = Refusal(node, why)
        before = self.turned_away.get(node)
        delay = self.settings.wait if before is None else 2 * before.delay
        self.turned_away[node] = Away(card.reason, time.monotonic() + delay, delay)
        if before is None or before.why != card.reason:
            self.notes.append(f"node {node} was turned away: {card.reason}")

    def _seat(self, node: int, card: Card, nodes: Mapping[int, Who]) -> None:
        """Give a node its client's place; Refused where another has it."""
        who = nodes[node]
        for other, theirs in [*self.cards.items()]:
            if theirs.client == card.client:
                if who.registered != card.client or nodes[other].registered == card.client:
                    raise Refused(
                        f"another node speaks for client {card.client} already: give each its own partition-id"
                    )
                del self.cards[other]
        note = self.places.take(card.client, who)
        self.notes += [] if note is None else [note]
        self.turned_away.pop(node, None)
        self.cards[node] = card
        self.notes.append(f"client {card.client} is online with {card.rows} rows")
