"""A round as pure functions: open it, let clients contribute, add, close it. Engines only carry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedbayes.clients.client import Client, Info, Upload
from fedbayes.clients.optimisers import Optimiser
from fedbayes.errors import InputError
from fedbayes.federation.rules import RULES, Rule, Statistics, added, largest
from fedbayes.federation.weighting import WEIGHTINGS, Weighting
from fedbayes.model.gradient import still
from fedbayes.model.model import Model, is_static
from fedbayes.noise import generator
from fedbayes.posterior.lowrank import mean_covariance
from fedbayes.posterior.values import Draws, Gaussian, LowRank, Parts, Point, Posterior, scales

SERVER = -1  # the server's number where it trains on data of its own
Terms = dict[str, Statistics]  # by part
# Where the observation noise of a regression comes from.
NOISE = {
    "likelihood": "the likelihood's own",
    "none": "no noise: the networks' disagreement is all the variance there is (one network: the likelihood's own)",
    "own": "each network on its own client's rows",
    "train": "all networks together on all rows that trained them",
    "heldout": "each client's rows judged by the networks of the other clients",
    "calibrated": "as heldout, and a factor on the networks' disagreement beside the noise",
}
BY_MEMBERS = ("own", "train", "heldout", "calibrated")  # judged by the networks of the cohort
MEMBERS = "members."  # before a part's name: the cohort's uploads of it, kept as Draws
# Kept for prediction only, beside what is broadcast: the noise of the predictor, that of one network by itself (a
# personal model), and the numbers of the clients whose uploads are kept.
NOISE_PART, LONE_NOISE, WHO = "noise", "lone_noise", "who"


class Gather(NamedTuple):
    """What clients send once for all personal models, beside the network: who makes it, and how it is pooled."""

    client: Client
    rules: Mapping[str, Rule]
    initial: Parts  # of the parts that are gathered
    reference: Callable[[Parts, Mapping[str, float]], Parts]


class Program(NamedTuple):
    """A method bound to a network: all that open, clients, close and prediction need."""

    model: Model
    client: Client
    initial: Parts
    rules: Mapping[str, Rule]  # by shared part; a part without a rule stays home
    weighting: Weighting
    options: Callable[[int], Mapping[str, float]]  # scalar options of a round
    reference: Callable[[Parts, Mapping[str, float]], Parts] = lambda broadcast, options: broadcast
    main: str = "model"  # the part that predicts, and by which clients are weighed
    test_draws: int = 1
    dropout: bool = False  # MC dropout: dropout stays on in prediction
    server_optimiser: tuple[Optimiser, float] | None = None  # on the pooled mean, with its learning rate
    server_client: Client | None = None  # trains on the server's data after the pooling
    # What it trains towards on unlabelled inputs [N, ...], made of the cohort's uploads (parts `members.*`) and noise
    # of an address; without, the data's own targets.
    server_targets: Callable[[Parts, Tensor, tuple[int | str, ...]], Tensor] | None = None
    uploaded: Callable[[Parts], Parts] = lambda broadcast: broadcast  # the kind of an upload, for its size
    members: bool = False  # the round's uploads are kept and predict, as an ensemble
    closed: bool = False  # a linear network: the moments of its prediction in closed form
    noise: str = "likelihood"  # where the observation noise of a regression comes from
    personal: Client | None = None  # what a client does to make the model its own; its upload is that model, whole
    whole: bool = True  # whether the broadcast predicts; else only personal models do
    gather: Gather | None = None  # what all clients send before personal models are made
    predictor: Callable[[Parts], Parts] = lambda parts: parts  # the parts that predict, of those broadcast
    plain: Any = None  # the program before its personal models were refined
    norm_passes: int = 0  # over the cohort's rows, to take BatchNorm's statistics again of the pooled network
    # What clients read beside the broadcast that the seed, the network or an option decides, by name. A client closes
    # over none of it: members of a sweep share one client. Frozen weights of `model` need not be named.
    constants: Mapping[str, Any] = {}
    most: int = 0  # rows of the largest client that its clients' caches have room for; 0: they cache nothing

    @property
    def known(self) -> Mapping[str, Any]:
        """All constants that clients are told in `Info`."""
        return {**self.model.frozen, **self.constants}

    @property
    def tuned(self) -> Client:
        """The client that makes a personal model: the program's own word, or its training client."""
        return self.personal or self.client

    @property
    def needs_uploads(self) -> bool:
        """Whether the server must see every upload (memory O(cohort * weights)) instead of a running sum."""
        seen = self.members or self.server_targets is not None or self.noise in BY_MEMBERS
        return self.weighting.compare is not None or seen


class FederationState(NamedTuple):
    """All that the server carries from round to round."""

    round: int  # rounds closed so far
    broadcast: Parts
    optimiser: Any = None


class Order(NamedTuple):
    """An open round: who takes part, what they receive."""

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[int, ...]  # asked, but simulated as gone
    broadcast: Parts
    options: Mapping[str, float]


class Contribution(NamedTuple):
    """One client's upload as it reached the server, for methods that need uploads."""

    client: int
    parts: Parts
    n: Tensor


class Outcome(NamedTuple):
    """What an engine brings back from the clients of a round."""

    terms: Terms | None  # the sum over clients; None if nobody contributed
    uploads: list[Contribution]  # only where the program needs them
    own: dict[int, Any]  # new own state, by client
    left_out: dict[int, str]  # clients whose term was refused, and why
    metrics: dict[str, float]  # sums over the contributing clients
    counted: int  # how many clients contributed


def static_rules(model: Model) -> dict[str, Rule]:
    """Rules of the parts that are not trained: float buffers are averaged by size, counters take the largest."""
    table = {"buffers": RULES["fedavg"], "counters": largest}
    return {part: table[part.rpartition(".")[2]] for part in model.static}


def begin(program: Program) -> FederationState:
    """The state before the first round."""
    optimiser = None
    if program.server_optimiser is not None:
        optimiser = program.server_optimiser[0].init({"mean": program.initial[program.main].mean})
    return FederationState(0, program.initial, optimiser)


def open_round(
    program: Program, state: FederationState, *, clients: int, cohort: int, seed: int, dropout: float = 0.0
) -> Order:
    """Choose the cohort of the next round by its address, drop a share of it, and fix the round's options."""
    number = state.round
    staying, gone = cohort_of(number, clients=clients, cohort=cohort, seed=seed, dropout=dropout)
    return Order(number, staying, gone, broadcast_of(program, state), program.options(number))


def broadcast_of(program: Program, state: FederationState) -> Parts:
    """What clients receive: the state's parts without what is kept beside them for prediction."""
    return {part: q for part, q in state.broadcast.items() if part in program.initial}


def cohort_of(
    number: int, *, clients: int, cohort: int, seed: int, dropout: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who takes part in a round, and who was asked but dropped out; known before the round is reached."""
    chosen = drawn(number, clients=clients, seed=seed)[:cohort]
    gone = torch.rand(cohort, generator=generator(seed, number, "dropout")) < dropout
    return tuple(sorted(chosen[~gone].tolist())), tuple(sorted(chosen[gone].tolist()))


def drawn(number: int, *, clients: int, seed: int) -> Tensor:
    """All clients in the order in which a round calls them."""
    return torch.randperm(clients, generator=generator(seed, number, "cohort"))


def contribute(program: Program, upload: Upload, info: Info, weight: Tensor | None = None) -> tuple[Terms, Tensor]:
    """A client's term of the sum for each shared part, and whether all of it is finite."""
    options = info.options
    reference = program.reference(info.broadcast, options)  # type: ignore[arg-type]
    if weight is None:
        assert program.weighting.weigh is not None
        weight = program.weighting.weigh(upload.parts[program.main], info.broadcast[program.main], info.n)
    size = info.n.double()
    terms = {
        part: rule.encode(upload.parts[part], size if is_static(part) else weight, reference[part])
        for part, rule in program.rules.items()
    }
    checked = [terms[part][key] for part in terms for key in terms[part]]
    for part in program.rules or upload.parts:  # personal models are not pooled: all of them is looked at
        q = upload.parts[part]
        checked += tree_leaves(q)
        scale = scales(q)
        if scale is not None:
            checked.append(torch.where(scale > 0, scale, torch.nan))
    finite = torch.stack([torch.isfinite(t).all() for t in checked if t.is_floating_point()]).all()
    return terms, finite


def at_home(program: Program) -> Program:
    """The program by which clients make their personal models: nothing is pooled, every upload is kept."""
    if program.personal is None:
        raise InputError("personal_every: this method has no personal models; set it to 0")
    return program._replace(client=program.personal, rules={}, members=True)


def gathering(program: Program) -> Program | None:
    """The program by which clients send what personal models need of one another; None: nothing."""
    if program.gather is None:
        return None
    made = program.gather
    return program._replace(
        client=made.client,
        rules=made.rules,
        initial={**program.initial, **made.initial},
        reference=made.reference,
        members=False,
    )


def restating(program: Program) -> Program | None:
    """The program by which a cohort takes BatchNorm's statistics of the pooled network; None: they are averaged.

    Clients take the steps they have without gradients, at rate 0, and only the statistics are pooled.
    """
    if not program.norm_passes:
        return None
    rules = {part: rule for part, rule in program.rules.items() if is_static(part)}
    if not rules:
        raise InputError("norm_passes: the network shares no statistics such as BatchNorm's; set it to 0")
    passes = program.norm_passes
    phases = tuple(phase._replace(step=still(phase.step), epochs=passes) for phase in program.client.phases)
    return program._replace(
        client=program.client._replace(phases=phases),
        rules=rules,
        weighting=WEIGHTINGS["size"],
        options=lambda number: {**program.options(number), "lr": 0.0},
        server_optimiser=None,
        members=False,
        noise="likelihood",
    )


def add_terms(program: Program, terms: Iterable[Terms], total: Terms | None = None) -> Terms:
    """The sum over clients, or over sums, in the memory of a running total where there is one.

    Terms may come one at a time: memory O(weights). They themselves are not changed.
    """
    for more in terms:
        before = dict.fromkeys(more) if total is None else total
        total = {part: added(program.rules[part], before[part], t) for part, t in more.items()}
    assert total is not None
    return total


def close_round(
    program: Program, state: FederationState, order: Order, outcome: Outcome
) -> tuple[FederationState, dict[str, float]]:
    """The state after a round, and numbers to report of the aggregation. Without any term the posterior stays."""
    terms = outcome.terms
    if program.needs_uploads and outcome.uploads:
        terms = _weigh_uploads(program, order, outcome.uploads)
    if terms is None:
        return state._replace(round=state.round + 1), {}
    reference = program.reference(order.broadcast, order.options)
    pooled = dict(order.broadcast)
    report: dict[str, float] = {}
    for part, rule in program.rules.items():
        pooled[part] = rule.decode(terms[part], reference[part])
        report |= rule.report(terms[part], reference[part])
    optimiser = state.optimiser
    if program.server_optimiser is not None:
        pooled[program.main], optimiser = _server_step(program, state, pooled[program.main])
    if program.members or program.noise in BY_MEMBERS:
        pooled |= gathered(program, pooled, outcome.uploads)
    return FederationState(state.round + 1, pooled, optimiser), report


def _weigh_uploads(program: Program, order: Order, uploads: Sequence[Contribution]) -> Terms:
    compare = program.weighting.compare
    weights = [None] * len(uploads) if compare is None else list(compare([u.parts[program.main] for u in uploads]))

    def term(u: Contribution, weight: Tensor | None) -> Terms:
        info = Info(order.broadcast, order.options, torch.tensor(order.round), u.n, ())  # type: ignore[arg-type]
        return contribute(program, Upload(u.parts, {}, {}), info, weight)[0]

    return add_terms(program, map(term, uploads, weights))


def gathered(program: Program, pooled: Parts, uploads: Sequence[Contribution]) -> Parts:
    """The cohort's uploads as one ensemble for each part, under names of their own.

    Normals with a covariance become one, about the pooled mean, with the mean of their covariances by size.
    """
    if isinstance(uploads[0].parts[program.main], LowRank):
        sizes = torch.stack([u.n for u in uploads]).double()
        low = [q for u in uploads if isinstance(q := u.parts[program.main], LowRank)]
        return {MEMBERS + program.main: mean_covariance(pooled[program.main].mean, low, sizes)}
    kept: Parts = {
        MEMBERS + part: Draws(torch.stack([u.parts[part].mean for u in uploads]), program.initial[part].layout)
        for part in program.rules
        if program.initial[part].mean.is_floating_point()  # counters are no one's own
    }
    if program.noise in BY_MEMBERS:  # which is judged on the rows of those who sent them
        kept[WHO] = Point(torch.tensor([u.client for u in uploads], device=pooled[program.main].mean.device))
    return kept


def beside(part: str) -> bool:
    """Whether a part is kept for prediction only, beside what is broadcast."""
    return part in (NOISE_PART, LONE_NOISE, WHO) or part.startswith(MEMBERS)


def predicting(program: Program, parts: Parts) -> Parts:
    """The parts that predict: the kept uploads instead of the pooled posterior where the program says so."""
    own = program.predictor({part: q for part, q in parts.items() if not beside(part) or part == NOISE_PART})
    if program.noise == "none" and program.model.likelihood.kind == "real":
        own[NOISE_PART] = Point(torch.tensor([0.0, 1.0]))
    if not program.members:
        return own
    return own | {part.removeprefix(MEMBERS): q for part, q in parts.items() if part.startswith(MEMBERS)}


def _server_step(program: Program, state: FederationState, pooled: Posterior) -> tuple[Posterior, Any]:
    """Reddi et al. (2021): the pooled mean's move is the gradient of the server's optimiser; scales are pooled."""
    assert program.server_optimiser is not None
    optimiser, lr = program.server_optimiser
    old = state.broadcast[program.main].mean
    moved, stepped = optimiser.update(state.optimiser, {"mean": old}, {"mean": old - pooled.mean}, old.new_tensor(lr))
    if isinstance(pooled, Gaussian):
        return Gaussian(stepped["mean"], pooled.scale, pooled.layout), moved
    return Point(stepped["mean"], pooled.layout), moved


def cohort_size(cohort: int | float | None, clients: int) -> int:
    """A cohort given as a number (int), a fraction (float in (0, 1]) or everybody (None)."""
    if cohort is None:
        return clients
    number = isinstance(cohort, Real) and not isinstance(cohort, bool)
    if not number or not math.isfinite(cohort) or cohort <= 0:
        raise InputError(f"cohort must be a positive number of clients or a fraction of them, not {cohort!r}")
    if isinstance(cohort, float):
        if cohort > 1:
            raise InputError(f"cohort: a fraction lies in (0, 1], not {cohort}; give a whole number for a count")
        return max(1, round(cohort * clients))
    if cohort > clients:
        raise InputError(f"cohort: {cohort} clients a round were asked for, but there are only {clients}")
    return cohort


def check_rules(program: Program) -> None:
    """Refuse rules that can't take what the clients upload, before any training."""
    for part, rule in program.rules.items():
        q = program.initial[part]
        if not is_static(part) and not isinstance(q, rule.takes):
            fitting = [name for name, r in RULES.items() if isinstance(q, r.takes)]
            raise InputError(f"this rule can't pool a {type(q).__name__}: use one of {', '.join(fitting)}")
