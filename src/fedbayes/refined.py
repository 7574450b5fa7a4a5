"""Methods whose clients refine the posterior of their classifier at home (pFedPF), made of any other method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedbayes.clients.client import Client
from fedbayes.clients.laplace import CLASSIFIER, PRIORS, Laplace, standard, with_laplace
from fedbayes.clients.refine import FLOW_PRIORS, Flow, grafted, refine
from fedbayes.clients.trajectory import with_swag
from fedbayes.composition import Method, Setting, check_options
from fedbayes.curvature import STRUCTURES, check_curvature
from fedbayes.errors import InputError, unknown
from fedbayes.federation import Gather, Program
from fedbayes.group import HEAD, Group, group_of
from fedbayes.posterior import Parts, Point
from fedbayes.server.rules import rule_named

REFINEMENTS = {
    "tune": "one more round of training on the client's rows",
    "none": "the model as it was received, with what is at home",
    "laplace": "a Laplace posterior of the classifier",
    "flow": "a chain of radial flows over that posterior, fitted to the client's rows",
}
POSTERIORS = {"laplace": "by the curvature of the likelihood", "swag": "moments of further steps of the classifier"}
WHEN = {"end": "when personal models are made, at the broadcast", "every": "every round, beside the network"}


@dataclass(frozen=True)
class Refinement:
    """How clients make their classifier's posterior their own; see `refined`."""

    refine: str = "flow"
    classifier: tuple[str, ...] = (HEAD,)
    posterior: str = "laplace"
    hessian: str = "kron"
    prior_of: str = "evidence"
    prior_precision: float = 1.0
    laplace: str = "end"
    after: str = "received"
    flow_length: int = 10
    flow_epochs: int = 20
    flow_batch: int = 128
    flow_draws: int = 4
    flow_lr: float = 1e-3
    flow_prior: str = "sent"
    walk_epochs: int = 5
    walk_lr: float = 0.01

    def check(self) -> None:
        """Refuse options that make no sense, each by name."""
        tables: dict[str, Mapping[str, Any]] = {
            "refine": REFINEMENTS,
            "posterior": POSTERIORS,
            "hessian": STRUCTURES,
            "prior_of": PRIORS,
            "laplace": WHEN,
            "flow_prior": FLOW_PRIORS,
            "after": {"received": None, "trained": None},
        }
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise unknown(name, getattr(self, name), table)
        check_options({name: value for name, value in vars(self).items() if name not in tables})


OPTIONS = tuple(Refinement.__dataclass_fields__)


def refined(base: Method, **options: Any) -> Method:
    """`base`, whose clients refine their classifier's posterior at home; it trains as before.

    `refine` is "tune", "none", "laplace" or "flow" (see `REFINEMENTS`). `classifier` are patterns of weights; `hessian`
    is "kron", "diag" or "full"; `prior_of` "evidence", "fixed" (`prior_precision`) or "broadcast". Of a network of
    points whose classifier is shared, clients' posteriors are pooled by moment matching (eq. 15): `laplace` = "end",
    when personal models are made, or "every" round. `after` "trained": the client first trains once more.
    `flow_*`: length of the chain, passes, rows and draws in a step, Adam's learning rate, and `flow_prior`, the
    prior: "sent", or "own", with which a client's rows count once. `posterior` "swag": the pooled posteriors are
    moments of `walk_epochs` more passes of the classifier at `walk_lr`.
    """
    asked = Refinement(**{**options, "classifier": tuple(options.get("classifier", (HEAD,)))})
    asked.check()

    def build(setting: Setting) -> Program:
        if setting.y is None:
            raise InputError("refine: the setting must say how targets look (y) and how many rows a client has (most)")
        return refined_program(base.build(setting), asked, setting.x, setting.y, setting.most)

    name = f"{base.name}_pf" if asked.refine == "flow" else base.name
    return Method(name, {**base.options, **{n: getattr(asked, n) for n in OPTIONS}}, build)


def refined_program(program: Program, asked: Refinement, x: Tensor, y: Tensor, most: int) -> Program:
    """A program with that refinement; x and y are a batch of inputs and targets, `most` the most rows of a client."""
    plain = program
    model, tuned = program.model, program.tuned
    if asked.refine == "tune":
        return program
    received = tuned._replace(phases=())
    if asked.refine == "none":
        return program._replace(personal=received, plain=plain)
    if program.members or program.noise not in ("likelihood", "none"):
        raise InputError(
            "refine: this method predicts by an ensemble of networks; there is no one classifier to refine"
        )
    group = group_of(model, model.module, asked.classifier, x)
    check_curvature(group, asked.hessian)
    laplace = Laplace(group, asked.hessian, asked.prior_of)
    flow = Flow(asked.flow_length, asked.flow_epochs, asked.flow_batch, asked.flow_draws, asked.flow_prior)
    inner = tuned if asked.after == "trained" else received
    sent = program.initial[group.part]
    shared = sent.layout is not None and set(group.layout.names) <= set(sent.layout.names)
    scalars = {"flow_lr": asked.flow_lr, "prior_precision": asked.prior_precision, "walk_lr": asked.walk_lr}
    options = program.options
    program = program._replace(
        personal=refine(
            inner, inner.finish, laplace, target=y[:1], rows=most, flow=flow if asked.refine == "flow" else None
        ),
        options=lambda number: {**options(number), **scalars},
        plain=plain,
        most=most,
    )
    pooled = isinstance(sent, Point) and shared
    if asked.flow_prior == "own" and not isinstance(sent, Point):
        raise InputError('flow_prior: "own" is for a network of points; a normal over its weights is its own prior')
    if asked.prior_of == "broadcast" and not (pooled and asked.laplace == "every"):
        raise InputError('prior_of: "broadcast" needs a posterior that is sent each round; set laplace = "every"')
    if not pooled:
        if asked.posterior == "swag":
            raise InputError("posterior: swag is for a classifier of points that is shared; use laplace")
        return program
    if asked.posterior == "swag":
        return _pooled(program, laplace._replace(structure="diag"), asked.laplace, _swag(group, tuned, asked, y, most))
    return _pooled(program, laplace, asked.laplace, lambda client: with_laplace(client, tuned.finish, laplace))


def _swag(group: Group, tuned: Client, asked: Refinement, y: Tensor, most: int) -> Callable[[Client], Client]:
    return lambda client: with_swag(
        client, tuned.finish, group, target=y[:1], rows=most, epochs=asked.walk_epochs, batch=asked.flow_batch
    )


def _pooled(program: Program, laplace: Laplace, when: str, sending: Callable[[Client], Client]) -> Program:
    """With clients that send their classifier's posterior: in every round, or when it is gathered."""
    group = laplace.group
    rule = rule_named("lp" if laplace.structure == "diag" else "moment_matching")
    first = standard(group, laplace.structure, program.initial[group.part].mean)
    before = program.reference

    def reference(broadcast: Parts, options: Mapping[str, float]) -> Parts:
        known = {part: q for part, q in broadcast.items() if part != CLASSIFIER}
        return {**before(known, options), CLASSIFIER: Point(_classifier(group, broadcast), group.layout)}

    if when == "end":
        client = sending(program.client._replace(phases=()))
        return program._replace(gather=Gather(client, {CLASSIFIER: rule}, {CLASSIFIER: first}, reference))
    return program._replace(
        client=sending(program.client),
        initial={**program.initial, CLASSIFIER: first},
        rules={**program.rules, CLASSIFIER: rule},
        reference=reference,
        predictor=lambda parts: _predictor(group, parts, program.whole),
    )


def _classifier(group: Group, broadcast: Parts) -> Tensor:
    """The classifier's weights in a broadcast, which may hold only a part of the network."""
    q = broadcast[group.part]
    assert q.layout is not None
    return group.layout.join(q.layout.split(q.mean))


def _predictor(group: Group, parts: Parts, whole: bool) -> Parts:
    """The network with its classifier's posterior, where the broadcast is a whole network."""
    rest = {part: q for part, q in parts.items() if part != CLASSIFIER}
    return grafted(group, rest, parts[CLASSIFIER]) if whole and CLASSIFIER in parts else rest
