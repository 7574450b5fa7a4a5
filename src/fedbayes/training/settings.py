"""How a federation is trained and judged, as records: what `fit` and experiment files take. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedbayes.federation.waiting import DELAYS, SCHEDULES, SYNCHRONOUS
from fedbayes.options import (
    Check,
    at_least_one,
    check_values,
    finite,
    flag,
    name_in,
    not_negative,
    number,
    one_of,
    option,
    patterns,
    positive,
    record,
    share,
    subtable,
    up_to_one,
    whole,
)

ENGINES = {
    "auto": "the one that is fast for this network and device",
    "loop": "one client after another",
    "stacked": "many clients as one tensor program",
}
COMPILE = {
    "auto": "where it pays",
    "off": "never",
    "captured": "no, but captured as a CUDA graph: nothing to wait for",
    "on": "before the first round",
    "graph": "and captured as a CUDA graph",
    "soon": "beside the first rounds, which run eagerly meanwhile: the same to rounding only",
}
PRECISIONS = {
    "float32": "all in float32",
    "tf32": "float32 with TF32 products on a GPU",
    "bf16": "training in bfloat16 by autocast, posteriors and predictions in float32",
}
AUGMENTATIONS = {"crop_flip": "shifted by up to 4 pixels, mirrored half of the time"}
ATTACKS = {
    "sign_flip": "the negative of what was learned",
    "noise": "noise",
    "label_flip": "what is learned of labels turned about",
    "alie": "a little off, within the deviation of honest clients",
    "ipm": "the negative of what all others learned",
    "mimic": "what one honest client uploads",
    "overconfident": "a far mean, claimed with certainty",
    "certain": "the true mean, claimed with certainty",
    "underconfident": "the true mean with huge scales",
    "inflated_counts": "the truth, with more rows than there are",
    "ipm_apart": "as ipm, but no two the same",
    "mimic_apart": "as mimic, but no two the same",
}
CLIENTS, ROWS = "clients", "rows"
PRIVATE = {
    CLIENTS: "each client, with all its rows: noise on the sum of a round",
    ROWS: "each row of each client: noise in every step at home",
}
MONITORS = {"nll": 1, "accuracy": -1}  # scores that choose the best round, and their direction


METHOD, ROUNDS = "feduab", 50  # where the user names none


class ForTables(NamedTuple):
    """What is taken for tables (`fb.data.from_tables`) where the user names no method: chosen by training rows alone.

    Steps on all rows of a site, up to 256, end in seconds, and Adam's suit columns however many, and any noise.
    """

    method: str = "pvi"
    network: str = "linear"
    rounds: int = 20

    @property
    def options(self) -> dict[str, Any]:
        """The method's options."""
        steps = {"batch": 256, "epochs": 10, "optimiser": "adam", "lr": 0.02, "train_draws": 1}
        return {**steps, "damping": 0.5, "prior_scale": 0.5, "test_draws": 200}


FOR_TABLES = ForTables()


def _names_weights(v: Any) -> bool:
    return v == "balanced" or (isinstance(v, list | tuple) and bool(v) and all(map(positive.holds, v)))


def _names_device(v: Any) -> bool:
    return (isinstance(v, str) and v != "") or type(v).__name__ == "device"  # torch.device


def _names_attackers(v: Any) -> bool:
    if isinstance(v, list | tuple):
        return all(isinstance(one, str) or whole(0).holds(one) for one in v)
    return whole(0).holds(v) or share.holds(v)


@record
class Training:
    """How long, by whom and where a federation is trained."""

    rounds: int = option("how many at most", whole(0), default=ROUNDS, kind="server")
    cohort: int | float | None = option(
        "clients in a round, a number or a share of them; by default all",
        positive._replace(words="a positive number of clients, or a fraction of them such as 0.1"),
        default=None,
        kind="server",
    )
    seed: int = option("of everything that is drawn", whole(0), default=0, kind="server")
    device: str = option('where to train: "cpu", "cuda", "cuda:1"', Check("text", _names_device), default="cpu")
    engine: str = option("how clients are run", name_in(ENGINES), default="auto")
    compile: str = option("whether steps are compiled", name_in(COMPILE), default="auto")
    at_once: int | None = option("clients trained side by side; by default as many as fit", at_least_one, default=None)
    recompute: bool | tuple[str, ...] = option(
        "computes activations again in the backward pass instead of holding them: those of the network's repeated "
        "blocks, or of modules by pattern",
        Check("true, false, or a list of patterns", lambda v: flag.holds(v) or patterns.holds(v)),
        default=False,
    )
    precision: str = option("of the numbers in training", name_in(PRECISIONS), default="float32")
    frozen: tuple[str, ...] = option("patterns of weights that are not trained", patterns, default=())
    adapters: Mapping[str, Any] = option(
        "low-rank changes of a frozen network's layers, such as {pattern = 'layer*', rank = 8}: only they and the last "
        "layer are trained",
        subtable,
        factory=dict,
    )
    class_weights: str | tuple[float, ...] | None = option(
        "how much a row counts in training by its class: `balanced`, or a number for each; by default all the same",
        Check("balanced, or a list of positive numbers", _names_weights),
        default=None,
    )
    augment: str | None = option("of training images", name_in(AUGMENTATIONS), default=None)
    dropout: float = option("share of a cohort that drops out of a round, at random", share, default=0.0)
    attack: str | None = option(
        "what some clients upload instead of the truth, in simulation", one_of(ATTACKS), default=None, kind="server"
    )
    attackers: float | tuple[int | str, ...] | None = option(
        "clients that attack: a share of all (0.2 by default) or a number, drawn at random, or a list of them",
        Check("a share in [0, 1), a number of clients, or a list of clients", _names_attackers),
        default=None,
        kind="server",
    )
    attack_strength: float | None = option(
        "of the attack, as it says itself; by default its own", not_negative, default=None, kind="server"
    )

    def __post_init__(self) -> None:
        check_values(self)


@record
class Bounding:
    """What one client may claim and move in a round."""

    cap_precision: float | None = option(
        "largest precision of a weight, as a multiple of the broadcast's; 0: none; by default none, and 10 on Flower "
        "under rules that weigh by precision",
        not_negative,
        default=None,
        kind="server",
    )
    clip_change: float | None = option(
        "largest size of a change: rms of (mean, log precision) in units of the broadcast, of points of the change "
        "itself; larger ones are made shorter",
        positive,
        default=None,
        kind="server",
    )
    clip_quantile: float | None = option(
        "the next round's clip_change is this quantile of the sizes of a round's changes; clip_change is the first's",
        up_to_one,
        default=None,
        kind="server",
    )
    cap_rows: int | None = option("rows for which a client counts at most", at_least_one, default=None, kind="server")

    def __post_init__(self) -> None:
        check_values(self)


@record
class Scheduling:
    """Whom a round waits for, and how long clients take in simulation."""

    schedule: str = option("whether a round waits for its cohort", name_in(SCHEDULES), default=SYNCHRONOUS)
    schedule_options: Mapping[str, Any] = option(
        "of a schedule that does not wait; there `cohort` are the clients on their way", subtable, factory=dict
    )
    delays: str | None = option(
        "how long clients take, in simulation; by default no time", name_in(DELAYS), default=None, kind="server"
    )
    delay_options: Mapping[str, Any] = option("of the delays", subtable, factory=dict, kind="server")

    def __post_init__(self) -> None:
        check_values(self)


@record
class Privacy:
    """What is kept private, and by which noise."""

    private: str | None = option(
        "whose part in a run nobody may learn, by differential privacy; by default nobody's",
        name_in(PRIVATE),
        default=None,
    )
    epsilon: float | None = option(
        "the budget: a run ends before it passes it; without noise_multiplier it chooses the noise for all rounds",
        positive,
        default=None,
        kind="server",
    )
    delta: float | None = option(
        "chance at which epsilon may not hold; by default 1e-5, or less where there are more to protect",
        number("in (0, 1)", lambda v: 0 < v < 1),
        default=None,
        kind="server",
    )
    noise_multiplier: float | None = option(
        "deviation of the noise, in terms of private_clip; by default what epsilon asks for",
        positive,
        default=None,
        kind="server",
    )
    private_clip: float = option(
        "largest length of what is protected: of a client's weighted change in units of the broadcast, or of the "
        "gradient of a row",
        positive,
        default=1.0,
        kind="server",
    )
    public_test: bool = option(
        "whether the test rows are nobody's secret: else a private run is not scored", flag, default=False
    )
    private_scores: float | None = option(
        "share of epsilon for which accuracy and NLL on the clients' rows are told, with noise, at each evaluated "
        "round; by default they are not",
        number("a share between 0 and 1", lambda v: 0 < v < 1),
        default=None,
        kind="server",
    )
    private_seed: int | None = option(
        "a seed for noise and cohorts in place of the system's randomness, for tests: such a run is NOT PRIVATE",
        whole(0),
        default=None,
        kind="server",
    )

    def __post_init__(self) -> None:
        check_values(self)


@record
class Judging:
    """When a federation is scored, and what stops it."""

    validation: float = option("share of each client's rows held out to choose the best round", share, default=0.0)
    patience: int | None = option("evaluations without a better one before training stops", at_least_one, default=None)
    monitor: str = option("validation score that chooses the best round", name_in(MONITORS), default="nll")
    evaluate_every: int = option("rounds between scores of the posterior", at_least_one, default=1, kind="server")
    personal_every: int = option(
        "rounds between scores of the personal models; 0: never",
        whole(0)._replace(words="a whole number of rounds, 0 for never"),
        default=0,
    )
    target_loss: float | None = option("stop when the training loss is as low", finite, default=None)
    target_accuracy: float | None = option(
        "stop when the accuracy on the test set is as high; scores that clients send over Flower stop nobody",
        up_to_one._replace(words="a share in (0, 1]"),
        default=None,
    )

    def __post_init__(self) -> None:
        check_values(self)
