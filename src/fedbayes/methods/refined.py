"""Methods whose clients refine the posterior of their classifier at home (pFedPF), made of any other method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedbayes.clients.client import Client
from fedbayes.clients.laplace import CLASSIFIER, PRIORS, Finish, Laplace, standard, with_laplace
from fedbayes.clients.refine import FLOW_PRIORS, Flow, grafted, refine
from fedbayes.clients.trajectory import with_swag
from fedbayes.errors import InputError
from fedbayes.federation.program import Gather, Personal, Program
from fedbayes.federation.rules import rule_named
from fedbayes.methods.method import Method, Setting
from fedbayes.model.classifier import HEAD, Group, group_of
from fedbayes.model.curvature import STRUCTURES, check_curvature
from fedbayes.options import at_least_one, one_of, option, options_of, patterns, positive, record
from fedbayes.posterior.values import Parts, Point

REFINEMENTS = {
    "tune": "one more round of training on the client's rows",
    "none": "the model as it was received, with what is at home",
    "laplace": "a Laplace posterior of the classifier",
    "flow": "a chain of radial flows over that posterior, fitted to the client's rows",
}
POSTERIORS = {"laplace": "by the curvature of the likelihood", "swag": "moments of further steps of the classifier"}
AFTER = {"received": "the model as it was received", "trained": "one more round of training first"}
WHEN = {"end": "when personal models are made, at the broadcast", "every": "every round, beside the network"}


@record
class Refinement(Method):
    """How clients make their classifier's posterior their own; what trains is not changed by it.

    Of a network of points whose classifier is shared, clients' posteriors are pooled by moment matching (eq. 15).
    """

    refine: str | None = option("what a personal model is made by", one_of(REFINEMENTS), default="flow", rare=True)
    classifier: tuple[str, ...] = option("patterns of the classifier's weights", patterns, default=(HEAD,), rare=True)
    posterior: str = option("how the pooled posteriors are found", one_of(POSTERIORS), default="laplace", rare=True)
    hessian: str = option("structure of the curvature", one_of(STRUCTURES), default="kron", rare=True)
    prior_of: str = option("prior of Laplace's posterior", one_of(PRIORS), default="evidence", rare=True)
    prior_precision: float = option(
        'of the prior, where prior_of = "fixed"', positive, default=1.0, kind="scalar", rare=True
    )
    laplace: str = option("when posteriors are pooled", one_of(WHEN), default="end", rare=True)
    after: str = option("whether the client first trains once more", one_of(AFTER), default="received", rare=True)
    flow_length: int = option("steps of the chain", at_least_one, default=10, rare=True)
    flow_epochs: int = option("passes over a client's rows", at_least_one, default=20, rare=True)
    flow_batch: int = option("rows in a step", at_least_one, default=128, rare=True)
    flow_draws: int = option("draws in a step", at_least_one, default=4, rare=True)
    flow_lr: float = option("Adam's step size", positive, default=0.001, kind="scalar", rare=True)
    flow_prior: str = option('with "own" a client\'s rows count once', one_of(FLOW_PRIORS), default="sent", rare=True)
    walk_epochs: int = option('passes of the classifier, where posterior = "swag"', at_least_one, default=5, rare=True)
    walk_lr: float = option("their step size", positive, default=0.01, kind="scalar", rare=True)


OPTIONS = tuple(options_of(Refinement))


@record
class Refining(Refinement):
    """A method whose clients may refine their classifier's posterior at home: `refine`, and what goes with it."""

    refine: str | None = option(
        "what a personal model is made by; None: the method's own way", one_of(REFINEMENTS), default=None, rare=True
    )

    def check(self) -> None:
        super().check()
        defaults = {name: f.default for name, f in options_of(self).items()}
        changed = [name for name in OPTIONS if getattr(self, name) != defaults[name]]
        if changed and self.refine is None:
            raise InputError(f'{changed[0]} goes with a refinement: set refine = "flow" or "laplace"')

    def wrapped(self, program: Program, setting: Setting) -> Program:
        program = super().wrapped(program, setting)
        if self.refine is None:
            return program
        if setting.y is None:
            raise InputError("refine: the setting must say how targets look (y) and how many rows a client has (most)")
        return refined_program(program, self, setting.x, setting.y, setting.most)

    def scalars(self) -> dict[str, float]:
        own = super().scalars()
        return own if self.refine else {name: v for name, v in own.items() if name not in OPTIONS}


def refined_program(program: Program, refinement: Refinement, x: Tensor, y: Tensor, most: int) -> Program:
    """A program with that refinement; x and y are a batch of inputs and targets, `most` the most rows of a client."""
    plain = program
    model, tuned = program.model, program.tuned
    if refinement.refine == "tune":
        return program
    received = tuned._replace(phases=())
    if refinement.refine == "none":
        return program._replace(personal=Personal(received, plain=plain))
    if program.prediction.members or program.prediction.noise not in ("likelihood", "none"):
        raise InputError(
            "refine: this method predicts by an ensemble of networks; there is no one classifier to refine"
        )
    group = group_of(model, model.module, tuple(refinement.classifier), x)
    check_curvature(group, refinement.hessian)
    laplace = Laplace(group, refinement.hessian, refinement.prior_of)
    flow = Flow(
        refinement.flow_length,
        refinement.flow_epochs,
        refinement.flow_batch,
        refinement.flow_draws,
        refinement.flow_prior,
    )
    inner = tuned if refinement.after == "trained" else received
    sent = program.initial[group.part]
    shared = sent.layout is not None and set(group.layout.names) <= set(sent.layout.names)
    scalars = {
        "flow_lr": refinement.flow_lr,
        "prior_precision": refinement.prior_precision,
        "walk_lr": refinement.walk_lr,
    }
    options = program.options
    refining = refine(
        inner, inner.finish, laplace, target=y[:1], rows=most, flow=flow if refinement.refine == "flow" else None
    )
    program = program._replace(
        personal=Personal(refining, plain=plain, most=most),
        options=lambda number: {**options(number), **scalars},
    )
    pooled = isinstance(sent, Point) and shared
    # Where personal models have a client of their own (feddyn), the training client's state is no state of that one.
    same = tuned.start is plain.client.start
    sender = plain.client if same or refinement.laplace == "every" else tuned
    whole = tuned.finish if same else sender.finish
    if refinement.flow_prior == "own" and not isinstance(sent, Point):
        raise InputError('flow_prior: "own" is for a network of points; a normal over its weights is its own prior')
    if refinement.prior_of == "broadcast" and not (pooled and refinement.laplace == "every"):
        raise InputError('prior_of: "broadcast" needs a posterior that is sent each round; set laplace = "every"')
    if not pooled:
        if refinement.posterior == "swag":
            raise InputError("posterior: swag is for a classifier of points that is shared; use laplace")
        return program
    if refinement.posterior == "swag":
        walk = _swag(group, whole, refinement, y, most)
        return _pooled(program, laplace._replace(structure="diag"), refinement.laplace, sender, walk)
    return _pooled(program, laplace, refinement.laplace, sender, lambda client: with_laplace(client, whole, laplace))


def _swag(group: Group, whole: Finish, refinement: Refinement, y: Tensor, most: int) -> Callable[[Client], Client]:
    return lambda client: with_swag(
        client, whole, group, target=y[:1], rows=most, epochs=refinement.walk_epochs, batch=refinement.flow_batch
    )


def _pooled(
    program: Program, laplace: Laplace, when: str, sender: Client, sending: Callable[[Client], Client]
) -> Program:
    """With clients that send their classifier's posterior: in every round, or when it is gathered."""
    group = laplace.group
    rule = rule_named("lp" if laplace.structure == "diag" else "moment_matching")
    first = standard(group, laplace.structure, program.initial[group.part].mean)
    before = program.pooling.reference

    def reference(broadcast: Parts, options: Mapping[str, float]) -> Parts:
        known = {part: q for part, q in broadcast.items() if part != CLASSIFIER}
        return {**before(known, options), CLASSIFIER: Point(_classifier(group, broadcast), group.layout)}

    if when == "end":
        client = sending(sender._replace(phases=()))
        gather = Gather(client, {CLASSIFIER: rule}, {CLASSIFIER: first}, reference)
        return program._replace(personal=program.personal._replace(gather=gather))
    return program._replace(
        client=sending(sender),
        initial={**program.initial, CLASSIFIER: first},
        pooling=program.pooling._replace(rules={**program.pooling.rules, CLASSIFIER: rule}, reference=reference),
        prediction=program.prediction._replace(
            parts=lambda parts: _predictor(group, program.prediction.parts(parts), program.prediction.whole)
        ),
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
