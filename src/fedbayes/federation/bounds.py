"""Bounded terms: how sure one client may be, how far it may move the model, and for how many rows it counts.

In units of the broadcast q_0 = N(m_0, s_0^2) that a client started from: d = (m - m_0) / s_0 and the precision
l = s_0^2 / s^2. A point has unit scale and claims no precision. The bounds are transforms of the channel, so that terms
still add: in every engine, on Flower, and under a secure sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.errors import InputError
from fedbayes.federation.changes import CAP, CLIP, ROWS, Change, bound_of, change_of, started, trained_parts
from fedbayes.federation.program import COUNTS, Context, Passed, Program, Stage, Transform
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Gaussian, LowRank, Parts, Point, Posterior

MILD = 10.0  # the cap of precision that is on by default where clients are strangers
BOUNDS = "bounds"
# Sizes of changes are counted in bins of equal width in their logarithm, each 7.5 % wide.
LOW, HIGH, BINS = -8.0, 8.0, 512


class Bounds(NamedTuple):
    """What no client may exceed in a round; None: no bound."""

    precision: float | None = None  # of each weight, in units of the broadcast's
    change: float | None = None  # rms of (d, log l); with a quantile that of the first round
    quantile: float | None = None  # of the sizes of the last round's changes, which is the next bound
    rows: float | None = None  # for which a client counts


def with_bounds(program: Program, bounds: Bounds) -> Program:
    """The program whose uploads pass the bounds on their way; those that have no meaning for it are refused."""
    clips = bounds.change is not None or bounds.quantile is not None
    if bounds.precision is not None or clips:
        _check(program, CLIP if clips else CAP, bounds.precision is not None)
    numbers: dict[str, float] = {}
    channel: list[Transform] = []
    if bounds.rows is not None:
        numbers[ROWS] = bounds.rows
        channel.append(CAPPED_ROWS)
    if bounds.precision is not None:
        numbers[CAP] = bounds.precision
        channel.append(CAPPED)
    stages: tuple[Stage, ...] = ()
    if clips:
        first = torch.inf if bounds.change is None else bounds.change
        numbers |= {bound_of(part): first for part in trained_parts(program)}
        channel.append(CLIPPED if bounds.quantile is None else CLIPPED_AND_COUNTED)
        stages = () if bounds.quantile is None else (following(program, first, bounds.quantile),)
    if not channel:
        return program
    own = program.options
    return program._replace(
        options=lambda number: {**own(number), **numbers},
        pooling=program.pooling._replace(channel=(*program.pooling.channel, *channel)),
        stages=(*program.stages, *stages),
    )


def compares(program: Program) -> bool:
    """Whether uploads are measured against what their clients started from, on their way."""
    return any(step is not CAPPED_ROWS for step in program.pooling.channel)


def counts_rows(program: Program) -> bool:
    """Whether it matters for how many rows a client counts: to its weight, or to what is averaged by size."""
    pooling, part = program.pooling, program.prediction.part
    if any(is_static(name) and rule.weighted for name, rule in pooling.rules.items()):
        return True
    if any(stage.uploads and stage.server is None for stage in program.stages):
        return True  # a stage of the user's own may read the rows of an upload
    if not any(rule.weighted for rule in pooling.rules.values()):
        return False
    sent, weigh = pooling.uploaded(program.initial)[part], pooling.weighting.weigh
    if isinstance(sent, LowRank):
        return True  # their covariances are averaged by size
    if weigh is None:
        return False
    one, two = (weigh(sent, program.initial[part], torch.tensor(rows)) for rows in (1, 2))
    return not torch.equal(one, two)


def mildly_bounded(program: Program) -> Program:
    """The program with a mild cap where clients count by the precision that they claim, and it can be bounded."""
    sure = any(rule.weighs_precision for rule in program.pooling.rules.values())
    if not sure or program.pooling.as_sent or not _comparable(program):
        return program
    return with_bounds(program, Bounds(precision=MILD))


def _check(program: Program, name: str, caps: bool) -> None:
    """Refuse a bound for uploads that must be taken as they are, or whose change has no size."""
    if program.pooling.as_sent:
        raise InputError(f"{name}: {program.pooling.as_sent}; leave it out")
    sent = program.pooling.uploaded(program.initial)
    for part in trained_parts(program):
        if not isinstance(sent[part], Point | Gaussian):
            raise InputError(
                f"{name}: part {part!r} is uploaded as a {type(sent[part]).__name__}; bounds are for points and for "
                "normals of independent weights, leave it out"
            )
    if caps and not _comparable(program):
        raise InputError(
            f"{CAP}: clients of this method start from points and send normals: there is no precision to compare "
            f"theirs with; leave it out, {CLIP} and {ROWS} hold"
        )


def _comparable(program: Program) -> bool:
    """Whether all normals that are sent were normals before."""
    sent, start = program.pooling.uploaded(program.initial), started(program, program.initial, program.options(0))
    parts = trained_parts(program)
    plain = all(isinstance(sent[part], Point | Gaussian) for part in parts)
    return plain and all(isinstance(start[part], type(sent[part])) for part in parts)


def capped(q: Posterior, start: Posterior, cap: Tensor | float) -> Posterior:
    """q with at most `cap` times the precision that it started from, for each weight: s >= s_0 / sqrt(cap)."""
    if not (isinstance(q, Gaussian) and isinstance(start, Gaussian)):
        return q
    return replace(q, scale=torch.maximum(q.scale, _least(start, cap)))


def _least(start: Gaussian, cap: Tensor | float) -> Tensor:
    return start.scale * torch.as_tensor(cap, dtype=torch.float64, device=start.scale.device).rsqrt().to(start.scale)


def clipped(q: Posterior, start: Posterior, bound: Tensor | float) -> Posterior:
    """One step of centred clipping around the broadcast (Karimireddy et al., 2021): u <- u min(1, bound / rms(u)).

    u = (d, log l): the mean moves a part of the way, and so does the logarithm of the scale. What is within the bound
    stays as it is, to the bit.
    """
    return _shortened(q, start, change_of(q, start), bound)


def _shortened(q: Posterior, start: Posterior, change: Change, bound: Tensor | float) -> Posterior:
    within = torch.as_tensor(bound, dtype=torch.float64, device=q.mean.device)
    share = torch.where(change.size > within, within / change.size, 1.0)[..., None].to(q.mean.dtype)
    point: Any = q
    made = replace(point, mean=torch.lerp(start.mean, q.mean, share))
    if change.log_scale is None:
        return made
    return replace(made, scale=made.scale * ((share - 1) * change.log_scale).exp())


def _capped(parts: Parts, start: Parts, options: Mapping[str, Any]) -> Passed:
    sent, shares = dict(parts), {}
    for part, q in parts.items():
        was = start.get(part)
        if isinstance(q, Gaussian) and isinstance(was, Gaussian):
            sent[part] = capped(q, was, options[CAP])
            shares[part] = (_least(was, options[CAP]) > q.scale).double().mean(-1)
    return Passed(sent, capped=shares)


def _clipped(parts: Parts, start: Parts, options: Mapping[str, Any]) -> Passed:
    sent, sizes = dict(parts), {}
    for part, q in parts.items():
        if bound_of(part) in options:
            change = change_of(q, start[part])
            sizes[part] = change.size
            sent[part] = _shortened(q, start[part], change, options[bound_of(part)])
    return Passed(sent, sizes=sizes, clipped={part: size > options[bound_of(part)] for part, size in sizes.items()})


def _clipped_and_counted(parts: Parts, start: Parts, options: Mapping[str, Any]) -> Passed:
    passed = _clipped(parts, start, options)
    return passed._replace(counts={part: bins_of(size) for part, size in passed.sizes.items()})


def _fewer(n: Tensor, options: Mapping[str, Any]) -> Tensor:
    return n.double().clamp(max=options[ROWS])


# One of each for all programs, so that members of a sweep that differ in numbers alone are bounded as one.
CAPPED = Transform("cap of precision", upload=_capped)
CLIPPED = Transform("clip of the change", upload=_clipped)
CLIPPED_AND_COUNTED = Transform("clip of the change, counted", upload=_clipped_and_counted)
CAPPED_ROWS = Transform("cap of rows", rows=_fewer)


def bins_of(size: Tensor) -> Tensor:
    """The size of a change as a histogram of one: [BINS]. What is no number is in no bin."""
    place = ((size.log10() - LOW) / (HIGH - LOW) * BINS).floor().clamp(0, BINS - 1)
    return (torch.arange(BINS, device=size.device) == place).double()


def quantile_of(counts: Tensor, quantile: float) -> float:
    """The upper edge of the bin in which a quantile of the counted sizes lies."""
    whole = counts.double().round()
    at = int((whole.cumsum(-1) < quantile * whole.sum() - 1e-9).sum())
    return float(10 ** (LOW + (min(at, BINS - 1) + 1) * (HIGH - LOW) / BINS))


def following(program: Program, first: float, quantile: float) -> Stage:
    """The bound on the next round's changes is a quantile of the sizes of this round's, for each part.

    Its state is the bounds, so that a run that goes on clips as before. Counts that so many clients can't have made,
    as one may under its masks, leave a bound as it was.
    """
    parts = trained_parts(program)

    def init(broadcast: Parts) -> dict[str, Tensor]:
        return {part: torch.tensor(first, dtype=torch.float64) for part in parts}

    def apply(context: Context, state: Any, pooled: Parts) -> tuple[Parts, Any, dict[str, float]]:
        terms, counted = context.outcome.terms or {}, context.outcome.counted
        bounds = dict(state)
        for part, counts in terms.get(COUNTS, {}).items():
            fits = bool((counts > -0.5).all()) and round(float(counts.sum())) == counted
            if fits:
                bounds[part] = torch.tensor(quantile_of(counts, quantile), dtype=torch.float64)
        return pooled, bounds, {f"next_{bound_of(part)}": float(bounds[part]) for part in parts}

    def told(state: Any) -> dict[str, float]:
        return {bound_of(part): float(state[part]) for part in parts}

    return Stage(BOUNDS, init, apply, told=told)
