"""The sum of vectors under masks, and of what travels in the clear beside them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedbayes.clients.client import Info, Upload
from fedbayes.federation.contributions import contribute
from fedbayes.federation.pooling import pooled
from fedbayes.federation.program import Order, Outcome, Program, Terms
from fedbayes.flower.fixed import METRIC, RANGE, dequantise, flat, split
from fedbayes.flower.secure_letters import Masked, words
from fedbayes.posterior.values import check


class NoPosterior(ValueError):
    """The sum is none of posteriors: a client has spoilt it under its masks, where nobody can see which."""


class Hidden:
    """What clients have in common in a round, and their running sum by the figures that they report.

    Figures are named by the clients. Where they differ, those that most clients name are taken, and not the first ones.
    """

    def __init__(self, program: Program, order: Order) -> None:
        self.program, self.order = program, order
        hidden, clear = split(program, like(program, order))
        self.hidden, self.clear = hidden, flat(clear)
        self.words = words({name: tuple(t.shape) for name, t in flat(hidden).items()})
        self.sums: dict[tuple[str, ...], np.ndarray] = {}
        self.replies: dict[int, Masked] = {}  # without their vectors

    def add(self, k: int, reply: Masked) -> None:
        before = self.sums.get(reply.figures)
        self.sums[reply.figures] = reply.vector.copy() if before is None else before + reply.vector
        self.replies[k] = reply._replace(vector=np.zeros(0, np.uint64))

    def agreed(self) -> tuple[tuple[str, ...], dict[int, str]]:
        """The figures that most clients name, and why the others are left out."""
        named = [reply.figures for reply in self.replies.values()]
        common = max(sorted({*named}), key=named.count, default=())
        others = {k: reply.figures for k, reply in self.replies.items() if reply.figures != common}
        words = ", ".join(common) or "none"
        return common, {
            k: f"its figures are {', '.join(theirs) or 'none'}, not {words}" for k, theirs in others.items()
        }

    def outcome(self, vector: np.ndarray, replies: dict[int, Masked], clients: int) -> Outcome:
        """The sum in the clear, of `replies`; NoPosterior where no clients that keep to the range can have made it."""
        figures, _ = self.agreed()
        named = {METRIC: {name: torch.zeros(()) for name in figures}} if figures else {}
        shapes = {name: tuple(t.shape) for name, t in flat({**self.hidden, **named}).items()}
        terms = dequantise(vector, shapes, clients)
        metrics = {name: float(t) for name, t in terms.pop(METRIC, {}).items()}
        for part, statistics in terms.items():
            for key, t in statistics.items():
                if float(t.abs().max() if t.numel() else 0) > len(replies) * RANGE:
                    raise NoPosterior(f"{key} of part {part!r} is larger than {len(replies)} clients can make it")
            if "count" in statistics:  # known here, and not for clients to say
                statistics["count"] = torch.full_like(statistics["count"], len(replies))
        for reply in replies.values():
            for name, t in reply.clear.items():
                part, key = name.split("/")
                self._largest(terms, part, key, t)
        own = {
            k: {"counted": torch.tensor(self.order.round)} if reply.own else {} for k, reply in sorted(replies.items())
        }
        outcome = Outcome(terms, [], own, {}, metrics, len(own))
        if self.program.pooling.private is None:  # what noise made of a private sum is mended when it is released
            self._check(outcome)
        return outcome

    def _largest(self, terms: Terms, part: str, key: str, t: Tensor) -> None:
        before = terms.setdefault(part, {}).get(key)
        terms[part][key] = t if before is None else torch.maximum(before, t)

    def _check(self, outcome: Outcome) -> None:
        parts, _ = pooled(self.program, self.order, outcome)
        for part, q in parts.items():
            try:
                check(q, f"part {part!r}")
            except ValueError as error:
                raise NoPosterior(str(error)) from error


def like(program: Program, order: Order) -> Terms:
    """The names and shapes of a client's statistics, from the broadcast in a client's place."""
    mean = order.broadcast[program.prediction.part].mean
    options = {name: torch.tensor(v, dtype=mean.dtype) for name, v in order.options.items()}
    one = torch.ones((), dtype=torch.float64)
    info = Info(order.broadcast, options, torch.tensor(order.round), torch.tensor(1), ())
    return contribute(program, Upload(program.pooling.uploaded(order.broadcast), {}, {}), info, one).terms
