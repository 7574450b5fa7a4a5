"""The table of methods: a paper's name -> a composition of client, rule, weighting and predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import unwrap
from typing import Any

import torch

from fedbayes.clients.partitioned import own_model, partitioned
from fedbayes.clients.variational import initial_scale, variational
from fedbayes.composition import (
    Method,
    Setting,
    batch_like,
    by_round,
    check_batch,
    check_dropout,
    check_options,
    check_points,
    in_schedule,
    is_linear,
    model_of,
    optimiser_named,
    point_client,
    server_optimiser,
)
from fedbayes.distilled import distil_options, distilling, fedppd, fedppd_distill
from fedbayes.errors import InputError, unknown
from fedbayes.federation import Program, check_rules, static_rules
from fedbayes.group import HEAD
from fedbayes.model import points_by_default
from fedbayes.networks.estimators import plan
from fedbayes.personal import held_near_a_copy, keeping_home
from fedbayes.posterior import Gaussian, Parts, Point
from fedbayes.refined import OPTIONS, refined
from fedbayes.relatives import averaging, collecting
from fedbayes.server.rules import Rule, rule_named
from fedbayes.server.weighting import weighting_named


def refinable(make: Callable[..., Method]) -> Callable[..., Method]:
    """The method maker, which also takes the options of `refined`: `refine` = "flow", and those that go with it."""

    @wraps(make)
    def made(**options: Any) -> Method:
        asked = {name: options.pop(name) for name in OPTIONS if name in options}
        if asked and "refine" not in asked:
            raise InputError(f'{next(iter(asked))} goes with a refinement: set refine = "flow" or "laplace"')
        method = make(**options)
        return refined(method, **asked) if asked else method

    return made


@refinable
def fedavg(
    *,
    lr: float = 0.05,
    epochs: int = 5,
    batch: int = 10,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    clip: float = 0.0,
    adversarial: float = 0.0,
    rule: str | Rule = "fedavg",
    weighting: str = "size",
    server: str | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    mc_dropout: bool = False,
    test_draws: int = 20,
) -> Method:
    """Point clients averaged by size (McMahan et al., 2017); `proximal` > 0 holds them near the broadcast.

    `mc_dropout` keeps dropout on in prediction. The learning rate is multiplied by `lr_decay` each round after
    `lr_silent` rounds; `lr_within` "falling" takes it linearly to 0 within each, "steps" multiplies it by
    `lr_drop` after each `lr_drop_every` epochs. `clip` > 0 is the largest norm of a
    gradient, `adversarial` > 0 the length of a step uphill in each input, trained on beside the input itself.
    `server`: "sgd" (momentum) or "adam" on the pooled mean.
    """
    options = dict(locals())
    check_options(options)

    def build(setting: Setting) -> Program:
        check_dropout(setting, mc_dropout)
        model = model_of(setting, None)
        client = point_client(setting, model, options)
        initial: Parts = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        scalars = {
            "lr": lr,
            "weight_decay": weight_decay,
            "proximal": proximal,
            "clip": clip,
            "adversarial": adversarial,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        program = Program(
            model,
            client,
            initial,
            {part: rule_named(rule) for part in model.trainable} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            dropout=mc_dropout,
            test_draws=test_draws,
            server_optimiser=server_optimiser(server, server_lr, server_momentum),
        )
        check_rules(program)
        return program

    return Method("fedprox" if proximal else "fedavg", options, build)


@refinable
def fedprox(*, proximal: float = 0.01, **options: Any) -> Method:
    """FedAvg whose clients pay proximal / 2 * |w - broadcast|^2 (Li et al., 2020)."""
    if not proximal > 0:
        raise InputError(f"proximal must be positive for fedprox, not {proximal}; fedavg is the method with 0")
    return _call(fedavg, {"proximal": proximal, **options})


def fedag(
    *,
    lr: float = 0.06,
    epochs: int = 40,
    batch: int = 1,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "falling",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    clip: float = 10.0,
    weighting: str = "equal",
    predict: str = "bootstrap",
    noise: str = "heldout",
    test_draws: int = 100,
) -> Method:
    """FedAG: point clients go on from the mean; the server fits a normal to their weights (Thorgeirsson, 2021).

    `predict`: "bootstrap" (the clients' networks as an ensemble), "monte_carlo" (`test_draws` from the normal), or
    "closed" (eq. 6, for a linear network). `noise` is the observation noise of a regression: "none" (eq. 5 alone),
    "own", "train", "heldout" or "calibrated", see `federation.NOISE`; "likelihood" is the likelihood's own.
    """
    options = dict(locals())
    check_options(options)

    def build(setting: Setting) -> Program:
        model = model_of(setting, None)
        if predict == "closed" and not is_linear(setting.network):
            raise InputError('predict = "closed" is the form of a linear network; use "bootstrap" or "monte_carlo"')
        start = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        # Before the first round nobody disagrees. A Gaussian all the same: every broadcast has one shape and size.
        spread: Parts = {
            part: Gaussian(q.mean, torch.full_like(q.mean, 1e-12), q.layout) if part in model.trainable else q
            for part, q in start.items()
        }

        def points(broadcast: Parts, scalars: Mapping[str, float] | None = None) -> Parts:
            return {part: Point(q.mean, q.layout) for part, q in broadcast.items()}

        scalars = {
            "lr": lr,
            "weight_decay": weight_decay,
            "clip": clip,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        return Program(
            model,
            point_client(setting, model, options),
            spread,
            {part: rule_named("fedag") for part in model.trainable} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            reference=points,
            uploaded=points,
            test_draws=test_draws,
            members=predict == "bootstrap",
            closed=predict == "closed",
            noise=noise if setting.likelihood.kind == "real" else "likelihood",
        )

    return Method("fedag", options, build)


@refinable
def fedvi(
    *,
    lr: float = 0.05,
    epochs: int = 5,
    batch: int = 10,
    optimiser: str = "sgd",
    momentum: float = 0.0,
    train_draws: int = 1,
    test_draws: int = 20,
    estimator: str = "local",
    kl: str = "constant",
    kl_weight: float = 1e-4,
    prior: str = "broadcast",
    prior_scale: float = 1.0,
    initial: float | Mapping[str, float] = 0.1,
    division: float = 1.0,
    points: tuple[str, ...] = (),
    lr_decay: float = 1.0,
    lr_silent: int = 0,
    lr_within: str = "constant",
    lr_drop: float = 0.85,
    lr_drop_every: int = 1,
    rule: str | Rule = "log_pool",
    weighting: str = "size",
    server: str | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
) -> Method:
    """Variational clients under any rule, weighting, prior and estimator.

    `initial` is the first layer's scale, its square divided by `division` at each next layer; or a table of scales by
    pattern of name. `kl` says what multiplies
    `kl_weight`: "constant" (1), "1/B", "1/n" or "blundell". `prior` is "broadcast" or "fixed" (N(0, prior_scale^2)).
    `points` are patterns of weights that are not given a distribution, beside BatchNorm's and the likelihood's own.
    """
    options = dict(locals())
    check_options(options)

    def build(setting: Setting) -> Program:
        model = model_of(setting, [*points_by_default(setting.network, setting.likelihood), *points])
        check_points(setting, model, points)
        check_batch(setting, model, batch)
        made = plan(model, "model", batch_like(setting.x, batch), estimator)
        learner = variational(
            model,
            made,
            optimiser=optimiser_named(optimiser, momentum),
            epochs=epochs,
            batch=batch,
            train_draws=train_draws,
            kl=kl,
            prior=prior,
            falling=lr_within == "falling",
        )
        client = in_schedule(learner, lr_within)
        first: Parts = {part: Point(v, model.layouts[part]) for part, v in model.initial().items()}
        mean = first["model"].mean
        first["model"] = Gaussian(mean, initial_scale(model, initial, division).to(mean), model.layouts["model"])

        def reference(broadcast: Parts, scalars: Mapping[str, float]) -> Parts:
            if prior == "broadcast":
                return broadcast
            q = broadcast["model"].mean
            fixed = Gaussian(torch.zeros_like(q), torch.as_tensor(scalars["prior_scale"]).to(q).expand_as(q), q_layout)
            return {**broadcast, "model": fixed}

        q_layout = model.layouts["model"]
        scalars = {
            "lr": lr,
            "kl_weight": kl_weight,
            "prior_scale": prior_scale,
            "lr_drop": lr_drop,
            "lr_drop_every": lr_drop_every,
        }
        shared = {part: rule_named("fedavg") for part in model.trainable if part != "model"}
        program = Program(
            model,
            client,
            first,
            {"model": rule_named(rule), **shared} | static_rules(model),
            weighting_named(weighting),
            by_round(scalars, lr_decay, lr_silent),
            reference=reference,
            test_draws=test_draws,
            server_optimiser=server_optimiser(server, server_lr, server_momentum),
        )
        check_rules(program)
        return program

    return Method("fedvi", options, build)


@refinable
def feduab(*, draws: int | None = None, division: float = 2.0, **options: Any) -> Method:
    """FedUAB: the broadcast posterior is start and prior, the log-linear pool (eq. 8) by size, H = `division` = 2.

    `draws` is the paper's Z: it sets `train_draws` and `test_draws` unless they are given.
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    method = _call(fedvi, {"division": division, **options})
    return Method("feduab", method.options, method.build)


@refinable
def pvi(*, damping: float = 0.5, prior_scale: float = 1.0, initial: float = 0.1, **options: Any) -> Method:
    """Partitioned variational inference: clients keep a factor of the posterior, and send its change (Bui, 2018).

    The prior N(0, prior_scale^2) is the first broadcast; training starts from the network's own weights with scale
    `initial`. `damping` in (0, 1] is the share of the change that is made: about 1 / clients where they are alike.
    """
    options = {"kl": "1/n", "kl_weight": 1.0, "lr_within": "falling", **options}
    fixed = [name for name in ("prior", "rule", "weighting", "division") if name in options]
    if fixed:
        raise InputError(f"{fixed[0]} is fixed in pvi: the prior is the cavity, the rule adds natural parameters")
    base = _call(fedvi, {"rule": "dwc", "prior_scale": prior_scale, "initial": initial, **options})
    check_options({"damping": damping})

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        first = program.initial["model"]
        assert isinstance(first, Gaussian)
        prior = Gaussian(torch.zeros_like(first.mean), torch.full_like(first.mean, prior_scale), first.layout)
        client = partitioned(program.client, first=first)
        return program._replace(
            client=client,
            personal=own_model(client, program.client),
            initial={**program.initial, "model": prior},
            options=lambda number: {**program.options(number), "damping": damping},
        )

    return Method("pvi", {"damping": damping, **base.options}, build)


@refinable
def fedper(*, home: tuple[str, ...] = (HEAD,), **options: Any) -> Method:
    """FedAvg whose clients keep some weights for themselves, by pattern: the last layer (Arivazhagan et al., 2019)."""
    base = _call(fedavg, options)
    return keeping_home(base, "fedper", {"home": home, **base.options}, home=tuple(home))


@refinable
def lg_fedavg(*, shared: tuple[str, ...] = (HEAD,), **options: Any) -> Method:
    """FedAvg of some weights only, by pattern: the last layer; all others stay home (Liang et al., 2020)."""
    base = _call(fedavg, options)
    return keeping_home(base, "lg_fedavg", {"shared": shared, **base.options}, shared=tuple(shared))


@refinable
def bpfed(*, home: tuple[str, ...] = (HEAD,), draws: int | None = None, **options: Any) -> Method:
    """BPFed: variational clients that keep some weights, by pattern; their prior is the client's own last posterior.

    Chen et al. (2023). What is shared has the broadcast as its prior, and is pooled by `rule`.
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    base = _call(fedvi, options)
    return keeping_home(base, "bpfed", {"home": home, **base.options}, home=tuple(home))


@refinable
def pfedbayes(
    *,
    lr: float = 1e-3,
    optimiser: str = "adam",
    global_lr: float | None = None,
    kl: str = "1/n",
    kl_weight: float = 10.0,
    rule: str | Rule = "mean_rho",
    draws: int | None = None,
    **options: Any,
) -> Method:
    """pFedBayes: a personal posterior held near the client's copy of the global one, which follows it (Zhang, 2022).

    `kl_weight` is the paper's zeta against the summed log-likelihood (`kl` = "1/n"); `global_lr` is of the copy, `lr`
    where it is not given. The copies are pooled as means of (mean, rho).
    """
    if draws is not None:
        options = {"train_draws": draws, "test_draws": draws, **options}
    if options.get("prior", "broadcast") != "broadcast":
        raise InputError("prior is fixed in pfedbayes: it is the client's copy of the global posterior")
    given = {"lr": lr, "optimiser": optimiser, "kl": kl, "kl_weight": kl_weight, "rule": rule}
    check_options({"global_lr": lr if global_lr is None else global_lr})
    base = _call(fedvi, {**given, **options})
    return held_near_a_copy(base, optimiser=optimiser, lr=lr if global_lr is None else global_lr, kl=kl)


# pFedPF's local training, where it differs from what the methods do by themselves.
PFEDPF = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "batch": 128, "refine": "flow"}


def fedavg_pf(**options: Any) -> Method:
    """pFedPF over FedAvg: Laplace posteriors of the classifier pooled by moments, refined at home by radial flows."""
    return _call(fedavg, {**PFEDPF, **options})


def fedper_pf(**options: Any) -> Method:
    """pFedPF over FedPer: the classifier and its posterior stay home (Luo et al., 2024)."""
    return _call(fedper, {**PFEDPF, **options})


def lg_fedavg_pf(**options: Any) -> Method:
    """pFedPF over LG-FedAvg: only the classifier and its posterior are shared (Luo et al., 2024)."""
    return _call(lg_fedavg, {**PFEDPF, **options})


def fedswag(
    *,
    covariance: str = "diagonal",
    rank: int = 10,
    swag_rounds: int = 1,
    swag_every: int = 1,
    swag_start: float = 0.5,
    swag_lr: float | None = None,
    pooled: str = "nwa",
    test_draws: int = 20,
    **options: Any,
) -> Method:
    """FedAvg, and SWAG on every client in the last `swag_rounds` rounds (Maddox et al., 2019; Linsner et al., 2021).

    `covariance` "low_rank": the diagonal and the last `rank` deviations, half each; the server keeps all factors.
    Iterates count every `swag_every` steps after the share `swag_start` of a round's, at rate `swag_lr` (`lr` where it
    is not given). `pooled` is the rule for the normals; that of low rank has the mean of the clients' covariances.
    """
    own = {k: v for k, v in locals().items() if k != "options"}
    check_options(own)
    _refuse("fedswag", options, "rule", "it is `pooled`")
    return collecting(_call(fedavg, options), own)


def fedpa(
    *,
    samples: int = 5,
    shrinkage: float = 0.01,
    burn_share: float = 0.4,
    plain_rounds: int = 0,
    server: str = "sgd",
    server_lr: float = 0.2,
    **options: Any,
) -> Method:
    """FedPA: clients send Sigma^-1 (broadcast - mean) of their posterior samples (Al-Shedivat et al., 2021).

    `samples` means of consecutive iterates after a share `burn_share` of a round's steps; `shrinkage` is the paper's
    rho. The server's optimiser takes the averaged deltas for gradients. The first `plain_rounds` are FedAvg's.
    """
    own = {"samples": samples, "shrinkage": shrinkage, "burn_share": burn_share, "plain_rounds": plain_rounds}
    check_options(own)
    return averaging(_call(fedavg, {"server": server, "server_lr": server_lr, **options}), own)


def fedbe(**options: Any) -> Method:
    """FedAvg with a server that distils an ensemble around the clients on unlabelled inputs (Chen & Chao, 2021)."""
    _refuse("fedbe", options, "server", "the server distils")
    own = distil_options(**{k: options.pop(k) for k in option_names(distil_options) if k in options})
    base = _call(fedavg, options)

    def build(setting: Setting) -> Program:
        program = base.build(setting)
        return distilling(program, {"server_lr": program.model}, own)

    return Method("fedbe", {**base.options, **own}, build)


def _refuse(method: str, options: Mapping[str, Any], name: str, why: str) -> None:
    if name in options:
        raise InputError(f"{name} is fixed in {method}: {why}")


# Methods that hand their remaining options on to another, or to several.
BASES: dict[str, Callable[..., Any] | tuple[Callable[..., Any], ...]] = {
    "fedavg_pf": fedavg,
    "fedper_pf": fedper,
    "lg_fedavg_pf": lg_fedavg,
    "fedprox": fedavg,
    "feduab": fedvi,
    "pvi": fedvi,
    "fedper": fedavg,
    "lg_fedavg": fedavg,
    "bpfed": fedvi,
    "pfedbayes": fedvi,
    "fedswag": fedavg,
    "fedpa": fedavg,
    "fedbe": (distil_options, fedavg),
    "fedppd_distill": (distil_options, fedppd),
}


METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedag": fedag,
    "feduab": feduab,
    "fedvi": fedvi,
    "pvi": pvi,
    "pfedbayes": pfedbayes,
    "bpfed": bpfed,
    "fedper": fedper,
    "lg_fedavg": lg_fedavg,
    "fedavg_pf": fedavg_pf,
    "fedper_pf": fedper_pf,
    "lg_fedavg_pf": lg_fedavg_pf,
    "fedppd": fedppd,
    "fedswag": fedswag,
    "fedpa": fedpa,
    "fedbe": fedbe,
    "fedppd_distill": fedppd_distill,
}


def method_named(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method of the table with options, each checked by name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return _call(METHODS[name], dict(options or {}))


def option_names(make: Callable[..., Any]) -> list[str]:
    """The options that a method takes, those of the methods it builds on included."""
    plain = unwrap(make)
    names = list(plain.__kwdefaults__ or {}) + (list(OPTIONS) if plain is not make else [])
    base = BASES.get(make.__name__, ())
    for other in base if isinstance(base, tuple) else (base,):
        names += [n for n in option_names(other) if n not in names]
    return names


def _call(make: Callable[..., Method], options: dict[str, Any]) -> Method:
    known = option_names(make)
    for name in options:
        if name not in known:
            raise unknown(f"option of {make.__name__}", name, known)
    return make(**options)
