"""The server's side of a secure sum: it asks four times a round, and learns the sum and who took part in it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fedbayes.clients.client import Info, Own, Upload
from fedbayes.federation.program import Order, Outcome, Program, Terms
from fedbayes.federation.round import contribute
from fedbayes.federation.rules import added
from fedbayes.flower import masks
from fedbayes.flower.fixed import METRIC, dequantise, flat, split
from fedbayes.flower.post import Answer
from fedbayes.flower.settings import Settings
from fedbayes.flower.shown import LEAST, Clients, few, names
from fedbayes.flower.wire import Head, Letter, Refused, write

KEYS, SHARES, MASKED, UNMASK = "train.keys", "train.shares", "train.masked", "train.unmask"
Exchange = Callable[[str, Mapping[int, Letter]], Iterator[tuple[int, Answer]]]  # by client
Open = Callable[[int, Answer], Letter]  # of a client's answer; Refused where it can't be used


class TooFew(ValueError):
    """So many clients are gone that the masks of the others can't be taken off."""


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
        self.least = max(LEAST, min(settings.min_clients, len(order.cohort)))
        self.left_out: dict[int, str] = {}
        self.withheld: dict[int, str] = {}  # by those who are in the sum, but give no shares
        self.notes: list[str] = []

    def run(self, counted: Mapping[int, int], unit: float, exchange: Exchange, read_one: Open) -> Outcome:
        """The outcome over the clients of `counted`, who kept their own state after the rounds that it names."""
        self.exchange, self.read_one, self.clients = exchange, read_one, len(counted)
        public = self._ask(KEYS, {k: {} for k in counted}, mask_key=bytes, box_key=bytes)
        self.keys = {k: letter.head["mask_key"] for k, letter in public.items()}
        self._enough(public)
        near = masks.neighbours(sorted(public), secrets.randbits(64))
        about = {
            k: {
                "near": others,
                "mask_keys": [self.keys[j] for j in others],
                "box_keys": [public[j].head["box_key"] for j in others],
            }
            for k, others in near.items()
        }
        shared = self._ask(SHARES, about, to=list, boxes=list)
        self._enough(shared)
        boxes: dict[int, dict[int, bytes]] = {k: {} for k in shared}
        for source, letter in shared.items():
            for to, sealed in zip(letter.head["to"], letter.head["boxes"]):
                if to in boxes:
                    boxes[to][source] = sealed
        sent = {"weight_unit": unit, "clients": self.clients, "dtype": self.settings.dtype, "delta": False}
        arrays = write(self.order.broadcast, self.settings.coding)
        orders = {
            k: {**sent, "counted": counted[k], "sources": [*own], "boxes": [*own.values()]} for k, own in boxes.items()
        }
        total = _Total(self)
        for k, letter in self._each(MASKED, orders, arrays, own=bool, lost=bool, figures=list):
            try:
                total.add(k, letter)
            except Refused as why:
                self.left_out[k] = str(why)
        self._enough(total.own)
        self._take_off(total, {k: [j for j in near[k] if j in shared] for k in shared})
        return total.outcome()

    def _take_off(self, total: _Total, near: Mapping[int, list[int]]) -> None:
        """Ask for the shares of what hides the sum, and take it off."""
        alive = frozenset(total.own)
        if clients := few([*self.before, alive]):
            raise TooFew(
                f"beside a sum of this round that may be known, one over {names(alive)} would show {names(clients)}"
            )
        self.before.append(alive)
        about = {k: {"alive": sorted(alive), "gone": [j for j in near[k] if j not in alive]} for k in alive}
        found: dict[int, list[bytes]] = {}
        for _ in range(self.settings.attempts):
            given = self._ask(UNMASK, about, of=list, shares=list)
            about = {k: head for k, head in about.items() if k not in given and k not in self.withheld}
            for letter in given.values():
                for owner, share in zip(letter.head["of"], letter.head["shares"]):
                    found.setdefault(owner, []).append(share)
            if all(len(found.get(k, [])) >= masks.threshold(self.holders[k]) for k in near):
                break
        for k in near:
            held = found.get(k, [])
            if len(held) < masks.threshold(self.holders[k]):
                reasons = "".join(f"; client {j}: {why}" for j, why in sorted(self.withheld.items()))
                needed = masks.threshold(self.holders[k])
                raise TooFew(f"{len(held)} of {needed} shares of client {k}'s mask came back{reasons}")
            secret = masks.combine_shares(held)
            if k in alive:
                total.vector -= masks.mask(secret, masks.purpose("own", *self.at), len(total.vector))
                continue
            for j in near[k]:  # what is left of its masks lies on its neighbours' vectors
                if j in alive:
                    pair = masks.mask(
                        masks.agreed(secret, self.keys[j]), masks.purpose("pair", *self.at), len(total.vector)
                    )
                    total.vector += pair if k > j else -pair

    def _enough(self, there: Mapping[int, Any]) -> None:
        if len(there) < self.least:
            raise TooFew(f"{len(there)} clients answered, a secure sum needs {self.least}")

    def _ask(self, kind: str, about: Mapping[int, Head], **kinds: type) -> dict[int, Letter]:
        made = dict(sorted(self._each(kind, about, {}, **kinds)))
        if kind == SHARES:
            self.holders = {k: len(head["near"]) + 1 for k, head in about.items()}
        return made

    def _each(
        self, kind: str, about: Mapping[int, Head], arrays: dict[str, np.ndarray], **kinds: type
    ) -> Iterator[tuple[int, Letter]]:
        """Answers that can be used, as they come; who gives none is left out, with the reason."""
        letters = {k: Letter({**self.head, **more, "client": k}, arrays) for k, more in about.items()}
        for k, answer in self.exchange(kind, letters):
            try:
                letter = self.read_one(k, answer)
                for key, expected in kinds.items():
                    if not isinstance(letter.head.get(key), expected):
                        raise Refused(f"{key} is missing from its answer to {kind}")
            except Refused as why:
                if kind != UNMASK:
                    self.left_out[k] = str(why)
                elif isinstance(answer, Letter):  # it refused, and would again; one who is silent may be asked again
                    self.withheld[k] = str(why)
                continue
            yield k, letter


class _Total:
    """The sum of masked vectors, and of what travels in the clear beside them."""

    def __init__(self, secure: SecureSum) -> None:
        self.secure, self.program = secure, secure.program
        self.hidden, clear = split(self.program, like(self.program, secure.order))
        self.clear_like = flat(clear)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of what is hidden, once the first has named its figures
        self.vector = np.zeros(0, np.uint64)
        self.clear: Terms = {}
        self.own: dict[int, Own] = {}

    def add(self, k: int, letter: Letter) -> None:
        """Add a client's vector, checked; what it holds can't be looked at."""
        figures = {str(name): torch.zeros(()) for name in letter.head["figures"]}
        names = flat({**self.hidden, **({METRIC: figures} if figures else {})})
        shapes = {name: tuple(t.shape) for name, t in names.items()}
        if self.shapes and shapes != self.shapes:
            raise Refused(f"its figures are {', '.join(figures)}, not those of the others")
        clear = {name: a for name, a in letter.arrays.items() if name != "sum"}
        vector, size = letter.arrays.get("sum"), sum(math.prod(shape) for shape in shapes.values())
        if vector is None or vector.dtype != np.uint64 or vector.shape != (size,):
            raise Refused(f"its masked sum is not {size} words of 64 bits")
        if {name: a.shape for name, a in clear.items()} != {n: tuple(t.shape) for n, t in self.clear_like.items()}:
            raise Refused(f"what it sends in the clear is not {', '.join(self.clear_like) or 'nothing'}")
        for name, a in clear.items():
            part, key = name.split("/")
            more = {key: torch.from_numpy(a.copy()).to(self.clear_like[name].dtype)}
            self.clear[part] = added(self.program.pooling.rules[part], self.clear.get(part), more)
        self.shapes = shapes
        self.vector = vector + self.vector if len(self.vector) else vector.copy()
        self.own[k] = {"counted": torch.tensor(self.secure.order.round)} if letter.head["own"] else {}
        if letter.head["lost"]:
            self.secure.notes.append(f"client {k} had lost its own state, and began anew")

    def outcome(self) -> Outcome:
        """The sum in the clear; a number of clients that is not whole says that masks are left on it."""
        terms = dequantise(self.vector, self.shapes, self.secure.clients)
        metrics = {name: float(t) for name, t in terms.pop(METRIC, {}).items()}
        for part, statistics in terms.items():
            if "count" in statistics and float(statistics["count"]) != len(self.own):
                raise TooFew(f"masks are left on part {part!r}: its sum counts {float(statistics['count']):g} clients")
        for part, maxima in self.clear.items():
            terms[part] = {**terms.get(part, {}), **maxima}
        return Outcome(terms, [], self.own, self.secure.left_out, metrics, len(self.own))


def like(program: Program, order: Order) -> Terms:
    """The names and shapes of a client's statistics, from the broadcast in a client's place."""
    mean = order.broadcast[program.prediction.part].mean
    options = {name: torch.tensor(v, dtype=mean.dtype) for name, v in order.options.items()}
    one = torch.ones((), dtype=torch.float64)
    info = Info(order.broadcast, options, torch.tensor(order.round), torch.tensor(1), ())
    return contribute(program, Upload(program.pooling.uploaded(order.broadcast), {}, {}), info, one)[0]
