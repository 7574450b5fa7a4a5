"""Clients that keep a factor of the posterior, a site: partitioned variational inference, and Bayesian ADMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Phase, Upload
from fedbayes.clients.variational import TILT, Tilt
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, Parts, map_tensors

LEAST = 1e-3  # of the prior's precision: what a cavity has at least, where factors of others are negative
PRIVATE_CLIP = "private_clip"  # among a round's options: the length of what a client adds to a private sum, at most
WITHIN = 1 - 1e-4  # of that length: rounding to float32 must not make a factor longer than what is added
FALL = 0.9  # of the broadcast's precision: what all clients of a round together may take off it


class State(NamedTuple):
    """The inner client's state, what holds it (a cavity, or a tilt of the broadcast), and the factor it came with."""

    inner: Any
    held: Any
    factor: dict[str, Tensor]


FIRST = "first"  # among the constants: where training starts in round 0


def partitioned(inner: Client, *, tilts: bool = False, begins: bool = False) -> Client:
    """From q / t_k^(1 / rho) as prior find q_k, send the damped change, keep the new factor.

    upload = q_k^damping * q^(1 - damping),  t_k <- t_k * (upload / q)^rho,  in natural parameters; the server
    multiplies q by all changes (the rule `dwc` with q as its reference). With rho = 1 this is Bui et al. (2018), else
    the client of Bayesian ADMM (Moellenhoff et al., 2026), whose weight of the KL has the factor rho too. The constant
    `first` is where training starts in round 0, for a network can't leave a prior that is centred on 0. A weight whose
    precision would fall by more than its client's share of `FALL` is damped further: so with rho = 1 the server never
    meets a precision that it must floor, and the prior times all factors is its posterior after every round. Factors
    are float64: a cavity may be a millionth of the posterior's precision.
    `tilts`: the inner client's prior is q, and the factor that divides it is told as a tilt; else it is the cavity as a
    Gaussian, which needs a positive precision. Means are then not held by the whole cavity, but by a part of q's
    precision, one for each time that the server adds what its clients have changed on average, and by the factor's own
    where that is more; where a mean stays, it comes to the same. In means, the product of sites is so reached by
    Douglas and Rachford's splitting, with damping as its relaxation: at a fixed precision it settles for convex losses.
    With cavities it is Jacobi's iteration, by diagonals alone, which leaves for good where many weights are correlated,
    as those of a network. Where the server goes ahead of the factors, these are carried along by a share `carried` of
    its way: a factor's `shift` is kept about that share of q's mean.
    `begins`: in the first round others are taken to add as much precision as this client begins with; else scales would
    be as wide as the few rows of one client allow.
    In a private run the change is shortened before the factor takes it: both hold the same.
    Scalar options: `rho`, `alpha`, `carried`, `damping`, `prior_scale`, `cohort`, `private_clip`, `least_curvature`,
    `kl_weight`.
    """

    def start(own: Own, info: Info) -> State:
        factor = about({name: own[name].double() for name in ("precision", "shift")}, -carried(info))
        q, first, fresh = _gaussian(info.broadcast), info.constants[FIRST], info.round == 0
        at = Gaussian(torch.where(fresh, first.mean, q.mean), torch.where(fresh, first.scale, q.scale), q.layout)
        begun = inner.start(own, info._replace(broadcast={**info.broadcast, "model": at}))
        least = LEAST * info.options["prior_scale"].double() ** -2
        if tilts:
            held = tilt_of(q, factor, info.options["rho"].double(), least, times_counted(info))
            if begins:
                held = held._replace(others=torch.where(fresh, others_alike(info), held.others))
            return State(begun, held, factor)
        return State(begun, without(q, factor, least), factor)

    def stepping(phase: Phase) -> Phase:
        def step(state: State, b: Any, tape: Tape, info: Info) -> State:
            return state._replace(inner=phase.step(state.inner, b, tape, seen(state.held, info)))

        return phase._replace(step=step)

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, seen(state.held, info))
        q, options = _gaussian(info.broadcast), info.options
        rho = options["rho"].double()
        fall = FALL / times_counted(info)
        fitted = _gaussian(done.parts)
        if tilts:
            least = LEAST * options["prior_scale"].double() ** -2
            fitted = less_precise(fitted, state.held.others, least)
        apart = further(q, fitted, state.held, rho) if tilts else 0.0
        upload = towards(q, fitted, options["damping"].double(), fall, apart)
        if PRIVATE_CLIP in options:
            upload = shortened(q, upload, WITHIN * options[PRIVATE_CLIP].double())
        # The factor takes the change as it is sent, rounded as the rule does: it is what the server adds.
        before, after = _naturals(q), _as_added(upload)
        factor = {name: state.factor[name] + rho * (after[name] - before[name]) for name in state.factor}
        metrics = {**done.metrics, "primal_residual": _distance(fitted, q)} if tilts else done.metrics
        return Upload({**done.parts, "model": upload}, about(factor, carried(info)), metrics)

    def nothing(broadcast: Parts) -> Own:
        zero = torch.zeros_like(broadcast["model"].mean, dtype=torch.float64)
        return {"precision": zero, "shift": zero.clone()}

    return Client(start, tuple(map(stepping, inner.phases)), finish, nothing)


def seen(held: Gaussian | Tilt, info: Info) -> Info:
    """What the inner client is told: the cavity in the broadcast's place, or the tilt beside it."""
    if isinstance(held, Tilt):
        return info._replace(constants={**info.constants, TILT: held})
    return info._replace(broadcast={**info.broadcast, "model": held})


def carried(info: Info) -> Tensor:
    """The share of q's mean that the shifts of kept factors are about."""
    return info.options["carried"].double() * _gaussian(info.broadcast).mean.double()


def about(factor: Mapping[str, Tensor], centre: Tensor) -> dict[str, Tensor]:
    """Natural parameters whose shift is about a centre: precision * (mean - centre)."""
    return {**factor, "shift": factor["shift"] - centre * factor["precision"]}


def tilt_of(q: Gaussian, factor: dict[str, Tensor], rho: Tensor, least: Tensor, counted: Tensor) -> Tilt:
    """What q / factor^(1 / rho) has in its negative logarithm beside that of q, about q's mean.

    With rho >= 1 no less precision than `least` is left, as in `without`; below, the likelihood has what is missing for
    scales. Means are held by q's precision over `counted`, or by the factor's own where that is more.
    """
    precision, dtype = factor["precision"] / rho, q.mean.dtype
    whole = q.scale.double().square().reciprocal()
    pull = factor["shift"] / rho - precision * q.mean.double()
    unknown = (precision > whole - least) & (rho >= 1)
    pull, precision = torch.where(unknown, 0.0, pull), torch.where(unknown, whole - least, precision)
    own = torch.maximum(whole / counted, precision * rho.clamp(max=1))
    held = whole - torch.minimum(own, whole)
    return Tilt(*(t.to(dtype) for t in (pull, precision, held, torch.zeros_like(held))))


def further(q: Gaussian, fitted: Gaussian, held: Tilt, rho: Tensor) -> Tensor:
    """How much more precision a mean was found under than its scale: so much more the shift changes for its way.

    So that the change is what the client has found where curvatures are diagonal; and for a curvature that the factor
    knew before, no more than twice the precision that held the mean (1 + rho times for rho < 1), beyond which
    reflections would leave for good.
    """
    whole, new = (value.scale.double().square().reciprocal() for value in (q, fitted))
    own, known = whole - held.held.double(), held.precision.double() + (new - whole).clamp(max=0)
    return (held.precision - held.held).double() - (known - rho.clamp(max=1) * own).clamp(min=0)


def times_counted(info: Info) -> Tensor:
    """How often the server adds the mean change of its clients: C times where it has the product of sites."""
    rho, alpha, cohort = (info.options[name].double() for name in ("rho", "alpha", "cohort"))
    return (1 - alpha + alpha * rho * cohort).clamp(min=1)


def others_alike(info: Info) -> Tensor:
    """The precision that other clients add, if they begin as this one does."""
    rows = info.n / info.options["kl_weight"]
    return ((times_counted(info) - 1) * rows * info.options["least_curvature"]).to(rows.dtype)


def less_precise(q: Gaussian, precision: Tensor, least: Tensor) -> Gaussian:
    """q without a precision of others about its own mean."""
    left = torch.maximum(q.scale.double().square().reciprocal() - precision.double(), least)
    return Gaussian(q.mean, left.rsqrt().to(q.mean.dtype), q.layout)


def without(q: Gaussian, factor: dict[str, Tensor], least: Tensor) -> Gaussian:
    """The cavity q / factor. It holds the prior: where it has less precision than `least`, negative factors of others
    have left nothing to be known but where q is."""
    whole = _naturals(q)
    precision, shift = (whole[name] - factor[name] for name in ("precision", "shift"))
    known = precision > least
    precision = torch.where(known, precision, least)
    mean = torch.where(known, shift / precision, q.mean.double())
    return Gaussian(mean.to(q.mean.dtype), precision.rsqrt().to(q.mean.dtype), q.layout)


def towards(q: Gaussian, fitted: Gaussian, damping: Tensor, fall: Tensor, apart: Tensor | float = 0.0) -> Gaussian:
    """q * (fitted / q)^c with c = damping, or less where more than `fall` of q's precision would go.

    `apart` is how much more precision the mean was found under than the scale.
    """
    old, new = (value.scale.double().square().reciprocal() for value in (q, fitted))
    loss = (damping * (old - new)).clamp(min=0)
    part = damping * torch.where(loss > fall * old, fall * old / loss, 1.0)
    precision = old + part * (new - old)
    # From q's own mean: the difference of two large products would lose small moves.
    mean = q.mean.double() + part * (new + apart) * (fitted.mean.double() - q.mean.double()) / precision
    return Gaussian(mean.to(q.mean.dtype), precision.rsqrt().to(q.mean.dtype), q.layout)


def shortened(q: Gaussian, upload: Gaussian, length: Tensor) -> Gaussian:
    """A part of the change from q in natural parameters, in units of q, so that it is of this length at most."""
    unit = q.scale.double()
    precision = (unit / upload.scale.double()).square()
    shift = precision * (upload.mean.double() - q.mean.double()) / unit
    size = ((precision - 1).square().sum() + shift.square().sum()).sqrt()
    return towards(q, upload, torch.where(size > length, length / size, 1.0), size.new_tensor(torch.inf))


def own_model(client: Client, inner: Client) -> Client:
    """A partitioned client whose upload is the posterior it found, undamped."""

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, seen(state.held, info))
        return Upload(done.parts, {}, done.metrics)

    return client._replace(finish=finish)


def _distance(q: Gaussian, other: Gaussian) -> Tensor:
    """The root mean square of the difference of means, in the other's scales."""
    return ((q.mean - other.mean) / other.scale).square().mean().sqrt()


def _naturals(q: Gaussian) -> dict[str, Tensor]:
    shift, precision = map_tensors(q, Tensor.double).naturals()
    return {"precision": precision, "shift": shift}


def _as_added(q: Gaussian) -> dict[str, Tensor]:
    mean, variance = (t.double() for t in q.moments())
    return {"precision": variance.reciprocal(), "shift": mean / variance}


def _gaussian(parts: Parts) -> Gaussian:
    q = parts["model"]
    assert isinstance(q, Gaussian)
    return q
