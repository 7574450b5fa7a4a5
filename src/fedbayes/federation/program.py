"""What a program is: a method bound to a network, in the pieces that a round is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedbayes.clients.client import Client, Own
from fedbayes.federation.flight import Flight
from fedbayes.federation.kept import Kept
from fedbayes.federation.rule import Rule, Statistics
from fedbayes.federation.weighting import Weighting
from fedbayes.model.model import Model
from fedbayes.noise import address
from fedbayes.posterior.values import Parts

SERVER = -1  # the server's number where it trains on data of its own
Terms = dict[str, Statistics]  # by part
COUNTS = "counts"  # among terms: what the channel counts over clients, beside the parts
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
# What an order is for. The address of its noise begins with the purpose, but for training and the server's own.
TRAIN, PERSONAL, GATHER, STATISTICS, AT_SERVER = "train", "personal", "gather", "statistics", "server"
PURPOSES = (TRAIN, PERSONAL, GATHER, STATISTICS, AT_SERVER)
OwnState = Callable[[int], Own | None]  # what a client keeps; None: it never took part before


class Order(NamedTuple):
    """An open round: who takes part, what they receive."""

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[int, ...]  # asked, but simulated as gone
    broadcast: Parts
    options: Mapping[str, float]
    version: int = 0  # of the broadcast: how often the posterior had changed
    purpose: str = TRAIN
    buckets: Mapping[int, int] = {}  # the bucket of each client of the cohort, where they are dealt to some

    def seed(self, seed: int | str) -> int | str:
        """The first part of the address of its noise, of that of the run."""
        return seed if self.purpose in (TRAIN, AT_SERVER) else address(seed, self.purpose)


class Contribution(NamedTuple):
    """One client's upload as it reached the server, for methods that need uploads."""

    client: int
    parts: Parts
    n: Tensor
    version: int = 0  # of the broadcast that it trained from


class Figures(NamedTuple):
    """Of one client in one round."""

    change: float  # rms of its change, capped and not yet clipped, of that part in which it moved farthest
    claim: float  # what it counts by: its weight, times the precision where the rule weighs by that; as it is added
    capped: float  # share of its weights whose precision was above the cap
    clipped: float  # 1 where its change was shortened


class Outcome(NamedTuple):
    """What an engine brings back from the clients of a round."""

    terms: Terms | None  # the sum over clients; None if nobody contributed
    uploads: list[Contribution]  # only where the program needs them
    own: dict[int, Own]  # new own state, by client
    left_out: dict[int, str]  # clients whose term was refused, and why
    metrics: dict[str, float]  # sums over the contributing clients
    counted: int  # how many clients contributed
    version: int = 0  # of the broadcast that they trained from; of several, the oldest
    influence: Mapping[int, Figures] = {}
    buckets: Mapping[int, Terms] = {}  # where clients are dealt to buckets: the sum of each, in place of one sum
    noisy: bool = False  # whether clients have added the noise of a private sum


class Gather(NamedTuple):
    """What clients send once for all personal models, beside the network: who makes it, and how it is pooled."""

    client: Client
    rules: Mapping[str, Rule]
    initial: Parts  # of the parts that are gathered
    reference: Callable[[Parts, Mapping[str, float]], Parts]


class Passed(NamedTuple):
    """An upload that has passed the channel, or a step of it; by part what was counted and seen of it there."""

    parts: Parts
    counts: Statistics = {}  # noqa: RUF012  (statistics that are added over clients; none of these is ever changed)
    sizes: Mapping[str, Tensor] = {}  # of its change, where that was measured
    capped: Mapping[str, Tensor] = {}  # the share of weights whose precision was above the cap
    clipped: Mapping[str, Tensor] = {}  # whether the change was shortened


class Transform(NamedTuple):
    """A step of the channel between a client and the server: on an upload as it leaves, on the sum as it arrives.

    `upload(parts, start, options)` is given what the client started from, in whose units its change is, and the round's
    options. `rows` gives the rows for which a client counts. `terms(terms, still, options)` is given what the upload
    adds to the sum, and what it would add if its client had not moved.
    """

    name: str
    upload: Callable[[Parts, Parts, Mapping[str, Any]], Passed] = lambda parts, start, options: Passed(parts)
    total: Callable[[Terms], Terms] = lambda terms: terms
    rows: Callable[[Tensor, Mapping[str, Any]], Tensor] = lambda n, options: n
    terms: Callable[[Terms, Terms, Mapping[str, Any]], Terms] | None = None


class Mechanism(NamedTuple):
    """How the sum of a private round is released: every client adds a vector of length `clip` at most."""

    clip: float
    noise: float  # deviation of the noise on each number of the sum, in terms of `clip`
    cohort: int  # clients expected in a round, by which the sum is divided, however many came


class Attacked(NamedTuple):
    """Clients that lie, in simulation: by which attack, who they are, and what a round's uploads become by it."""

    name: str
    clients: tuple[int, ...]
    tell: Callable[[Order, list[Contribution]], list[Contribution]] | None  # None: they lie in their data alone


class Pooling(NamedTuple):
    """How the clients' uploads become one posterior."""

    rules: Mapping[str, Rule]  # by shared part; a part without a rule stays home
    weighting: Weighting
    reference: Callable[[Parts, Mapping[str, float]], Parts] = lambda broadcast, options: broadcast
    uploaded: Callable[[Parts], Parts] = lambda broadcast: broadcast  # the kind of an upload, for its size
    channel: tuple[Transform, ...] = ()  # what uploads and their sum pass, in order
    as_sent: str = ""  # why an upload must be taken as it was sent, where it must
    attacked: Attacked | None = None  # who lies, in simulation
    buckets: int = 0  # sums to which the clients of a round are dealt; 0: there is one
    over: Mapping[str, Rule] = {}  # robust rules over the posteriors of buckets, by part; `rules` make those
    private: Mechanism | None = None  # how sums are released, where clients are private
    clips_itself: bool = False  # whether clients keep what they sent, and shorten it themselves where that is private

    def beside(self, **changes: Any) -> Pooling:
        """The pooling of what is no round of training: without a channel, and nobody lies."""
        return self._replace(channel=(), attacked=None, private=None, **changes)


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
    made: int = 0  # rounds after which what predicts begins to be made: those up to there are not the best


class Personal(NamedTuple):
    """How a client makes the model its own."""

    client: Client | None = None  # its upload is the personal model, whole; None: the client that trains
    gather: Gather | None = None  # what all clients send before personal models are made
    plain: Program | None = None  # the program before its personal models were refined
    most: int = 0  # rows of the largest client that its clients' caches have room for; 0: they cache nothing


class Store(NamedTuple):
    """Data on a device, held once, and the rows of each client; beside them the server's own."""

    x: Tensor
    y: Tensor
    rows: Callable[[int], Tensor]
    server: Store | None = None

    def of(self, order: Order) -> Store:
        """The data that an order is about: the clients', or the server's."""
        if order.cohort != (SERVER,):
            return self
        assert self.server is not None
        return self.server


def nothing() -> None:
    """Called after a client where nothing watches."""


class Engine(Protocol):
    """Carries an order of a program to clients, and brings back what they made of it.

    The clients of a round, personal models, statistics taken again and the server's own training all go through `run`.
    """

    seed: int | str  # the first part of the address of all noise
    store: Store  # the data at hand

    def run(self, program: Program, order: Order, own: OwnState, after: Callable[[], None] = nothing) -> Outcome:
        """Let each client of the order contribute; `after` is called when a client is done."""

    def take_notes(self) -> list[str]:
        """Notes since the last call, such as a fallback that was taken."""


class Context(NamedTuple):
    """What a stage may look at and ask for: the round, who contributed what, and the engine that runs clients."""

    program: Program
    order: Order
    outcome: Outcome
    engine: Engine
    own: OwnState  # as the clients have it after the round


class ServerData(NamedTuple):
    """What a stage needs at the server: so many inputs at least, and targets like these for them."""

    least: int
    targets: Callable[[Tensor, int], Tensor] | None = None  # zeros for inputs and a seed; None: rows with labels


class Stage(NamedTuple):
    """Something that the server does with the pooled parts, in turn: its state before the first round, and one round.

    `apply(context, state, parts)` gives the parts, the next state, and numbers for the journal. A stage's state is kept
    in checkpoints under its name.
    """

    name: str
    init: Callable[[Parts], Any]
    apply: Callable[[Context, Any, Parts], tuple[Parts, Any, dict[str, float]]]
    uploads: bool = False  # whether it looks at every upload
    server: ServerData | None = None  # data that it trains on at the server
    told: Callable[[Any], Mapping[str, float]] = lambda state: {}  # numbers of its state, among a round's options


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
    # What clients read beside the broadcast that the seed, the network or an option decides, by name. A client closes
    # over none of it: members of a sweep share one client. Frozen weights of `model` need not be named.
    constants: Mapping[str, Any] = {}

    @property
    def known(self) -> Mapping[str, Any]:
        """All constants that clients are told in `Info`."""
        return {**self.model.frozen, **self.constants}

    @property
    def tuned(self) -> Client:
        """The client that makes a personal model: its own where it has one, else the training client."""
        return self.personal.client or self.client

    @property
    def needs_uploads(self) -> bool:
        """Whether the server must see every upload (memory O(cohort * weights)) instead of a running sum."""
        judged = self.prediction.members or self.prediction.noise in BY_MEMBERS
        compared = self.pooling.weighting.compare is not None
        combined = any(rule.combine is not None for rule in self.pooling.rules.values())
        looked_at = any(stage.uploads for stage in self.stages)
        attacked = self.pooling.attacked is not None and self.pooling.attacked.tell is not None
        return judged or compared or combined or looked_at or attacked or not self.pooling.rules


class FederationState(NamedTuple):
    """All that the server carries from round to round."""

    round: int  # rounds closed so far
    broadcast: Parts
    stages: Mapping[str, Any] = {}  # the state of each stage, by its name
    kept: Kept = Kept()  # what predicts beside the broadcast
    version: int = 0  # of the broadcast: how often the posterior has changed
    flight: Flight = Flight()  # who is on the way, and the clock
