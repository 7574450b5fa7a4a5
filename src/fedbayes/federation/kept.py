"""What the server keeps for prediction beside the broadcast: the cohort's networks, and the observation noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.posterior.values import Parts, Point

MEMBERS = "members."  # before a part's name, where members are written as parts
NOISE_PART, LONE_NOISE, WHO = "noise", "lone_noise", "who"


class Kept(NamedTuple):
    """What predicts beside the broadcast, and never reaches a client that trains."""

    members: Parts = {}  # noqa: RUF012  (the cohort's uploads, one ensemble for each part; never changed)
    who: tuple[int, ...] = ()  # the clients who sent them, where the noise is judged on their rows
    noise: Tensor | None = None  # of the predictor: variances, then factors on the networks' disagreement, [2 * D]
    lone_noise: Tensor | None = None  # of one network by itself, as a personal model is one

    def as_parts(self) -> Parts:
        """As named parts, for files and letters."""
        parts: Parts = {MEMBERS + part: q for part, q in self.members.items()}
        if self.who:
            parts[WHO] = Point(torch.tensor(self.who))
        if self.noise is not None:
            parts[NOISE_PART] = Point(self.noise)
        if self.lone_noise is not None:
            parts[LONE_NOISE] = Point(self.lone_noise)
        return parts


def apart(parts: Parts) -> tuple[Parts, Kept]:
    """Named parts of a file or letter as the broadcast, and what is kept beside it."""
    members = {part.removeprefix(MEMBERS): q for part, q in parts.items() if part.startswith(MEMBERS)}
    who, noise, lone = (parts[name].mean if name in parts else None for name in (WHO, NOISE_PART, LONE_NOISE))
    names = (NOISE_PART, LONE_NOISE, WHO)
    broadcast = {part: q for part, q in parts.items() if part not in names and not part.startswith(MEMBERS)}
    return broadcast, Kept(members, () if who is None else tuple(who.tolist()), noise, lone)
