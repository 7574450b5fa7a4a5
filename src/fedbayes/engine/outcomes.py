"""What the clients of a chunk bring, as one outcome for each federation that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbayes.clients.client import Info, Upload
from fedbayes.engine.clock import SUM, share
from fedbayes.engine.steps import Steps
from fedbayes.engine.together import Clients, take
from fedbayes.federation.contributions import LEFT_OUT, contribute, summed
from fedbayes.federation.influence import by_client
from fedbayes.federation.program import Contribution, Outcome, Program, Terms
from fedbayes.federation.sums import Totals, added_to, apart, by_bucket


class Seat(NamedTuple):
    """One client of one federation (a member of a sweep) in this round."""

    member: int
    client: int
    rows: Tensor
    length: int  # steps in all phases
    bucket: int | None = None  # the sum that it is dealt to, where there are several
    ghost: bool = False  # fills a chunk up to the size that was compiled; takes no step and is not counted


def outcomes(
    programs: Sequence[Program], steps: Steps, together: Clients, seats: list[Seat], uploads: Upload, info: Info
) -> list[tuple[int, Outcome]]:
    """Each member's outcome of a chunk; `programs` are those of the members."""
    results = []
    with share(SUM):
        for members in _alike(programs):
            mine = [c for c, seat in enumerate(seats) if seat.member in members]
            if mine:
                own = [seats[c] for c in mine]
                theirs = _only(mine, seats, together, uploads, info)
                results += _outcomes(programs[members[0]], steps, Clients(len(mine), together.info), own, *theirs)
    return results


def _alike(programs: Sequence[Program]) -> list[list[int]]:
    """Members whose server adds in the same way, so that their clients encode their terms as one."""
    groups: dict[Any, list[int]] = {}
    for member, program in enumerate(programs):
        rules = tuple((part, id(rule)) for part, rule in sorted(program.pooling.rules.items()))
        channel = tuple(map(id, program.pooling.channel))
        key = (rules, id(program.pooling.weighting), channel, program.needs_uploads)
        groups.setdefault(key, []).append(member)
    return list(groups.values())


def _only(mine: list[int], seats: list[Seat], together: Clients, uploads: Upload, info: Info) -> tuple[Upload, Info]:
    """The uploads and infos of some clients of a chunk."""
    if len(mine) == len(seats):
        return uploads, info
    return take(uploads, 0, mine), take(info, together.info, mine)


def _outcomes(
    program: Program, steps: Steps, together: Clients, seats: list[Seat], uploads: Upload, info: Info
) -> list[tuple[int, Outcome]]:
    """The sum of each member's finite terms, and what else its clients brought."""
    one = torch.ones((), dtype=torch.float64, device=info.n.device) if program.needs_uploads else None

    def term(upload: Upload, info: Info) -> tuple[Terms, Tensor]:
        terms, finite, figures = contribute(program, upload, info, one)
        return summed(program, terms), torch.cat([finite.double()[None], figures])

    terms, told = steps.around(term, together, uploads, info, known_by=program)
    fine, figures = [], []
    for finite, *few in told.tolist():  # the one wait for the device in a chunk
        fine.append(bool(finite))
        figures.append(few)
    metrics = {name: t.tolist() for name, t in uploads.metrics.items()}
    results = []
    for member in sorted({seat.member for seat in seats}):
        mine = [c for c, seat in enumerate(seats) if seat.member == member and not seat.ghost]
        counted = [c for c in mine if fine[c]]
        totals: Totals = {}
        gathered = []
        if program.needs_uploads:
            rows = {c: tree_map(lambda t, c=c: t[c], uploads.parts) for c in counted}
            gathered = [Contribution(seats[c].client, rows[c], info.n[c]) for c in counted]
        if counted and terms:
            totals = by_bucket(program, terms, {c: seats[c].bucket for c in counted})
        total, buckets = apart(totals)
        kept = {seats[c].client: uploads.own and tree_map(lambda t, c=c: t[c].clone(), uploads.own) for c in counted}
        results.append(
            (
                member,
                Outcome(
                    total,
                    gathered,
                    kept,
                    {seats[c].client: LEFT_OUT for c in mine if not fine[c]},
                    {name: sum(values[c] for c in counted) for name, values in metrics.items()},
                    len(counted),
                    influence=by_client([seats[c].client for c in counted], [figures[c] for c in counted]),
                    buckets=buckets,
                ),
            )
        )
    return results


class Tally:
    """What a member's clients have brought so far; a sum is in the memory of one, however many chunks there are."""

    def __init__(self, program: Program, version: int) -> None:
        self.program, self.version = program, version
        self.totals: Totals = {}
        self.chunks: list[Outcome] = []  # without their terms

    def add(self, chunk: Outcome) -> None:
        """Take a chunk in."""
        for bucket, terms in ((None, chunk.terms), *chunk.buckets.items()):
            if terms is not None:
                added_to(self.totals, self.program, terms, bucket)
        self.chunks.append(chunk._replace(terms=None, buckets={}))

    def outcome(self) -> Outcome:
        """All chunks as one outcome, clients in order."""
        chunks, (total, buckets) = self.chunks, apart(self.totals)
        names = {name for o in chunks for name in o.metrics}
        return Outcome(
            total,
            sorted((u._replace(version=self.version) for o in chunks for u in o.uploads), key=lambda u: u.client),
            dict(sorted((k, own) for o in chunks for k, own in o.own.items())),
            dict(sorted((k, why) for o in chunks for k, why in o.left_out.items())),
            {name: sum(o.metrics.get(name, 0.0) for o in chunks) for name in sorted(names)},
            sum(o.counted for o in chunks),
            self.version,
            dict(sorted((k, figures) for o in chunks for k, figures in o.influence.items())),
            buckets,
        )
