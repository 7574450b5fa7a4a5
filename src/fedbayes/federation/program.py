"""What a program is: a method bound to a network, in the pieces that a round is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedbayes.clients.client import Client
from fedbayes.federation.rules import Rule, Statistics
from fedbayes.federation.weighting import Weighting
from fedbayes.model.model import Model
from fedbayes.posterior.values import Parts

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


class Gather(NamedTuple):
    """What clients send once for all personal models, beside the network: who makes it, and how it is pooled."""

    client: Client
    rules: Mapping[str, Rule]
    initial: Parts  # of the parts that are gathered
    reference: Callable[[Parts, Mapping[str, float]], Parts]


class Transform(NamedTuple):
    """A step of the channel between a client and the server: on an upload as it leaves, on the sum as it arrives."""

    name: str
    upload: Callable[[Parts, Parts], Parts] = lambda parts, reference: parts
    total: Callable[[Terms], Terms] = lambda terms: terms


class Pooling(NamedTuple):
    """How the clients' uploads become one posterior."""

    rules: Mapping[str, Rule]  # by shared part; a part without a rule stays home
    weighting: Weighting
    reference: Callable[[Parts, Mapping[str, float]], Parts] = lambda broadcast, options: broadcast
    uploaded: Callable[[Parts], Parts] = lambda broadcast: broadcast  # the kind of an upload, for its size
    channel: tuple[Transform, ...] = ()  # what uploads and their sum pass, in order


class Prediction(NamedTuple):
    """What predicts, and how."""

    part: str = "model"  # the part that predicts, and by which clients are weighed
    draws: int = 1
    dropout: bool = False  # MC dropout: dropout stays on in prediction
    members: bool = False  # the round's uploads are kept and predict, as an ensemble
    closed: bool = False  # a linear network: the moments of its prediction in closed form
    noise: str = "likelihood"  # where the observation noise of a regression comes from
    whole: bool = True  # whether the broadcast predicts; else only personal models do
    parts: Callable[[Parts], Parts] = lambda parts: parts  # the parts that predict, of those broadcast


class Personal(NamedTuple):
    """How a client makes the model its own."""

    client: Client | None = None  # its upload is the personal model, whole; None: the client that trains
    gather: Gather | None = None  # what all clients send before personal models are made
    plain: Any = None  # the program before its personal models were refined
    most: int = 0  # rows of the largest client that its clients' caches have room for; 0: they cache nothing


class Server(NamedTuple):
    """What the server does with rows and networks of its own."""

    client: Client | None = None  # trains on the server's data after the pooling
    # What it trains towards on unlabelled inputs [N, ...], made of the cohort's uploads (parts `members.*`) and noise
    # of an address; without, the data's own targets.
    targets: Callable[[Parts, Tensor, tuple[int | str, ...]], Tensor] | None = None
    norm_passes: int = 0  # over the cohort's rows, to take BatchNorm's statistics again of the pooled network


class Context(NamedTuple):
    """What a stage may look at: the broadcast of the round, its options, and who contributed what."""

    order: Order
    outcome: Outcome


class Stage(NamedTuple):
    """Something that the server does with the pooled parts, in turn: its state before the first round, and one round.

    `apply(context, state, parts)` gives the parts, the next state, and numbers for the journal. A stage's state is kept
    in checkpoints under its name.
    """

    name: str
    init: Callable[[Parts], Any]
    apply: Callable[[Context, Any, Parts], tuple[Parts, Any, dict[str, float]]]


class Program(NamedTuple):
    """A method bound to a network: all that open, clients, close and prediction need."""

    model: Model
    client: Client
    initial: Parts
    options: Callable[[int], Mapping[str, float]]  # scalar options of a round
    pooling: Pooling
    stages: tuple[Stage, ...] = ()  # what the server does after pooling, in order
    prediction: Prediction = Prediction()
    personal: Personal = Personal()
    server: Server = Server()
    # What clients read beside the broadcast that the seed, the network or an option decides, by name. A client closes
    # over none of it: members of a sweep share one client. Frozen weights of `model` need not be named.
    constants: Mapping[str, Any] = {}

    @property
    def known(self) -> Mapping[str, Any]:
        """All constants that clients are told in `Info`."""
        return {**self.model.frozen, **self.constants}

    @property
    def tuned(self) -> Client:
        """The client that makes a personal model: the program's own word, or its training client."""
        return self.personal.client or self.client

    @property
    def needs_uploads(self) -> bool:
        """Whether the server must see every upload (memory O(cohort * weights)) instead of a running sum."""
        judged = self.prediction.members or self.prediction.noise in BY_MEMBERS
        compared = self.pooling.weighting.compare is not None
        combined = any(rule.combine is not None for rule in self.pooling.rules.values())
        return judged or compared or combined or self.server.targets is not None


class FederationState(NamedTuple):
    """All that the server carries from round to round."""

    round: int  # rounds closed so far
    broadcast: Parts
    stages: Mapping[str, Any] = {}  # the state of each stage, by its name
