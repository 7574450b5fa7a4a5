"""Servers whose posterior is made of clients' sites: of normals, and of points that keep a linear term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.partitioned import about
from fedbayes.federation.encodings import DWC_FLOOR
from fedbayes.federation.program import Context, Order, Stage
from fedbayes.posterior.values import Gaussian, Parts, Point, map_tensors

SITES = "sites"
Naturals = dict[str, Tensor]  # precision, and shift = precision * mean


def mixed_sites(
    *, rho: float, damping: float, alpha: float, carried: float, prior_scale: float, part: str = "model"
) -> Stage:
    """eta = (1 - alpha) mean_k eta_k + alpha (eta_prior + sum of all clients' sites), where uploads are damped.

    Its state is the sum of the sites, those of absent clients included: of what is sent, rho times the change is added.
    By the mean no client moves the server by more than 1 / clients of the round, however few of them came: with a small
    alpha it would else follow whoever came, and leave for good. Shifts are about the share `carried` of the broadcast's
    mean, as clients keep them. With alpha = rho = 1, and nothing carried, it is the product that was pooled.
    """

    def init(parts: Parts) -> Naturals:
        zero = torch.zeros_like(parts[part].mean, dtype=torch.float64)
        return {"precision": zero, "shift": zero.clone()}

    def apply(context: Context, state: Naturals, parts: Parts) -> tuple[Parts, Naturals, dict[str, float]]:
        q = context.order.broadcast[part]
        assert isinstance(q, Gaussian)
        old, change = naturals(q), changes(context, part)
        centre = carried * q.mean.double()
        count = damping * max(context.outcome.counted, (1 - alpha) * asked(context.order))
        kept = about(change, centre)
        sites = {name: state[name] + rho * kept[name] for name in state}
        whole = about(sites, -centre)
        product = {**whole, "precision": whole["precision"] + prior_scale**-2}
        mean = {name: old[name] + change[name] / count for name in old}
        mixed = {name: (1 - alpha) * mean[name] + alpha * product[name] for name in old}
        moved, floored = gaussian(mixed, q)
        report = {
            "dual_residual": float(((moved.mean - q.mean) / q.scale).square().mean().sqrt()),
            "sites_apart": float((product["precision"] / mixed["precision"] - 1).abs().mean()),
            "floored": floored,
        }
        return {**parts, part: moved}, sites, report

    return Stage(SITES, init, apply)


def asked(order: Order) -> int:
    """The clients of a round, whether or not they came."""
    return len(order.cohort) + len(order.dropped)


def naturals(q: Gaussian) -> Naturals:
    """Precision, and precision times mean, in float64."""
    shift, precision = map_tensors(q, Tensor.double).naturals()
    return {"precision": precision, "shift": shift}


def changes(context: Context, part: str) -> Naturals:
    """The sum over clients of the change in natural parameters that each sent, in float64."""
    q, terms = context.order.broadcast[part], context.outcome.terms
    assert isinstance(q, Gaussian)
    old = naturals(q)
    if terms is not None and part in terms:  # in units of the broadcast, about its mean
        t, scale = terms[part], q.scale.double()
        precision = old["precision"] * (t["precision"] - t["count"])
        return {"precision": precision, "shift": precision * q.mean.double() + t["shift"] / scale}
    sent = [naturals(u.parts[part]) for u in context.outcome.uploads if isinstance(u.parts[part], Gaussian)]  # type: ignore[arg-type]
    return {name: sum((n[name] - old[name] for n in sent), torch.zeros_like(old[name])) for name in old}


def gaussian(mixed: Mapping[str, Tensor], q: Gaussian) -> tuple[Gaussian, float]:
    """The normal of natural parameters, and how many weights had too little precision: they keep q's mean."""
    old = q.scale.double() ** -2
    floored = mixed["precision"] < DWC_FLOOR * old
    precision = torch.where(floored, DWC_FLOOR * old, mixed["precision"])
    mean = torch.where(floored, q.mean.double(), mixed["shift"] / precision)
    dtype: Any = q.mean.dtype
    return Gaussian(mean.to(dtype), precision.rsqrt().to(dtype), q.layout), float(floored.sum())


def mixed_duals(*, rho: float, gamma: float, clients: int, precision: float, part: str = "model") -> Stage:
    """w = (clients * rho * mean_k w_k + sum of all clients' v_k) / (clients * rho + precision), for points.

    The sum of duals is its state, those of absent clients included. `precision` is the prior's; 0: there is none, and
    the server is FedDyn's (Acar et al., 2021).
    """

    def init(parts: Parts) -> Tensor:
        return torch.zeros_like(parts[part].mean)

    def apply(context: Context, state: Tensor, parts: Parts) -> tuple[Parts, Tensor, dict[str, float]]:
        old, mean = context.order.broadcast[part].mean, parts[part].mean
        duals = state + gamma * rho * context.outcome.counted * (mean - old)
        weight = clients * rho
        moved = (weight * mean + duals) / (weight + precision)
        report = {"dual_residual": float((moved - old).square().mean().sqrt())}
        return {**parts, part: Point(moved, parts[part].layout)}, duals, report

    return Stage(SITES, init, apply)


def control(clients: int, part: str) -> Stage:
    """SCAFFOLD's control variate: c + share of clients that took part * mean of their changes."""

    def apply(context: Context, state: None, parts: Parts) -> tuple[Parts, None, dict[str, float]]:
        old, mean = context.order.broadcast[part].mean, parts[part].mean
        moved = old + context.outcome.counted / clients * (mean - old)
        return {**parts, part: Point(moved, parts[part].layout)}, state, {}

    return Stage(part, lambda parts: None, apply)
