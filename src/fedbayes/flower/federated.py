"""An experiment into a run folder, its rounds carried to clients behind a post."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fedbayes.engine.choice import carry_of
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import FLOWER
from fedbayes.federation.program import BY_MEMBERS, STATISTICS, Program
from fedbayes.flower.aloft import rounds_aloft
from fedbayes.flower.border import Unusable
from fedbayes.flower.measured import Deadline, Measured
from fedbayes.flower.metrics import Metrics
from fedbayes.flower.places import Places
from fedbayes.flower.post import Post
from fedbayes.flower.remote import Remote
from fedbayes.flower.roll import Roll
from fedbayes.flower.settings import Settings, settings_of
from fedbayes.flower.shown import LEAST
from fedbayes.flower.status import Sign
from fedbayes.flower.unmasking import Unmasking
from fedbayes.flower.wire import HALF, head_of, layouts_of
from fedbayes.posterior.values import FullGaussian
from fedbayes.runs.folder import Carrier, Run, Step, Watch
from fedbayes.runs.folder import run as run_into
from fedbayes.runs.recording import write_once
from fedbayes.training.rounds import rounds
from fedbayes.training.run import OwnStore
from fedbayes.training.task import Progress, Task

TOKEN = "federation"  # the file that names a run to its clients, so that they tell it from others


def carried(experiment: Experiment) -> Experiment:
    """The experiment as it is carried by Flower: a checkpoint after every round."""
    return replace(experiment, engine=FLOWER, checkpoint_every=1)


def run(experiment: Experiment, folder: str | Path, post: Post, watch: Watch | None = None) -> dict[str, Run]:
    """Train into a folder on the clients behind a post; where the folder holds this experiment already, go on."""
    return run_into(carried(experiment), folder, watch, carrier=federated(post))


def check_sums(method: str, program: Program) -> None:
    """Refuse a method for secure sums unless its uploads only add."""
    if any(rule.robust for rule in program.pooling.rules.values()):
        raise InputError(
            f"flower: the rule of {method} compares the clients' posteriors, which a secure sum hides; set buckets, "
            "each of which is a secure sum of its own, or secure = false"
        )
    if program.needs_uploads:
        raise InputError(
            f"flower: {method} needs every client's posterior at the server, which a secure sum hides; "
            "set secure = false, or use a method whose uploads only add"
        )
    own = [part for part, rule in program.pooling.rules.items() if not rule.adds]
    if own:
        raise InputError(
            f"flower: a secure sum can only add, part {own[0]!r} is combined by a rule with an `add` of its own; "
            "set secure = false, or take another rule"
        )


def check_precision(method: str, program: Program, dtype: str) -> None:
    """Refuse half precision where uploads are roots of whole covariances, whose inverses are added."""
    roots = any(rule.takes == (FullGaussian,) and rule.weighs_precision for rule in program.pooling.rules.values())
    if roots and dtype in HALF:
        raise InputError(
            f"flower: {method} adds inverses of whole covariances, of which {dtype} leaves too few digits; "
            "set dtype = 'float32', or leave it out"
        )


def check_buffered(experiment: Experiment, task: Task, settings: Settings) -> None:
    """Refuse what would wait for all clients where rounds do not wait."""
    reasons = {
        "secure: masks are agreed on by the clients of one round, who would wait for one another; set secure = false": (
            settings.secure
        ),
        "client_scores: scores on the clients' rows wait for all of them; set client_scores = false": bool(
            settings.client_scores
        ),
        "personal_every: scores of personal models wait for all clients; set it to 0": experiment.personal_every > 0,
        f"{experiment.method} has no global model, and scores of personal ones wait for all clients": (
            not task.program.prediction.whole
        ),
        "delays: they are of a simulation; leave them out": experiment.delays is not None,
    }
    for why, holds in reasons.items():
        if holds:
            raise InputError(f'flower: schedule = "buffered": {why}')


def check_private(experiment: Experiment, settings: Settings) -> None:
    """Refuse what would tell of private clients."""
    if settings.client_scores and not experiment.public_test:
        raise InputError("flower: client_scores: scores of the clients' rows have no noise; leave it out")
    least = max(LEAST, settings.min_clients)
    if settings.colluding >= least:
        raise InputError(
            f"flower: colluding is {settings.colluding}, and a sum may be of {least} clients; raise min_clients, "
            "so that others are left who add noise"
        )


def check_sizes(buckets: int, cohort: int) -> None:
    """Refuse buckets that have too few clients to hide one another in a secure sum."""
    if buckets and cohort // buckets < LEAST:
        raise InputError(
            f"flower: a secure sum needs at least {LEAST} clients, and {buckets} buckets of a cohort of {cohort} have "
            f"{cohort // buckets}; set at most {cohort // LEAST} buckets, with outliers as they allow"
        )


def federated(post: Post) -> Carrier:
    """The way to clients behind a post, for `runs.folder`: rounds go there, and into a run folder as any others."""

    clock = Measured(post, Deadline())
    rolls: list[Roll] = []
    books: list[Metrics] = []

    def bind(experiment: Experiment, task: Task, folder: Path) -> Task:
        settings = settings_of(experiment.flower, task.cohort)
        if task.program.prediction.noise in BY_MEMBERS and not int(task.clients.sizes.max()):
            raise InputError('noise: the server has no rows to judge it by; set noise = "likelihood" or "none"')
        if task.program.personal.gather is not None:
            raise InputError('laplace: on Flower posteriors travel with the rounds; set laplace = "every"')
        if any(stage.name == STATISTICS for stage in task.program.stages):
            raise InputError("norm_passes: on Flower a round is one exchange; set it to 0")
        check_precision(experiment.method, task.program, settings.dtype)
        if task.hides_cohorts:
            check_private(experiment, settings)
        if task.scheduler.waiting is not None:
            check_buffered(experiment, task, settings)
        if settings.secure:
            check_sums(experiment.method, task.program)
            check_sizes(task.program.pooling.buckets, task.cohort)
        write_once(folder / TOKEN, secrets.token_hex(8))
        head = {
            **head_of(experiment, layouts_of(task.program.initial), task.program.model.body),
            "run": (folder / TOKEN).read_text(encoding="utf-8"),
        }
        if not rolls:  # nodes are asked who they are once for all methods of a comparison
            least = max(settings.min_clients, 3 if settings.secure else 1)  # below three a sum says too much of one
            clock.deadline = Deadline(settings.quorum, settings.slack, least)
            sizes = [*zip(task.clients.sizes.tolist(), task.clients.test.sizes.tolist())]
            rolls.append(Roll(clock, head, sizes, settings, Places(settings.places)))
        rolls[0].places.keep_in(folder)
        engine = Remote(task, rolls[0], settings, head)
        engine.asking.unmasking = Unmasking(folder)
        clock.sign = Sign(folder, names=not task.hides_cohorts)
        books.append(Metrics(folder, task.rounds))
        choice = "engine flower: clients elsewhere"
        return replace(task, engine=engine, carry=carry_of(engine), choice=choice, elsewhere=engine.personal)

    def steps(task: Task, progress: Progress, own: OwnStore, after: Callable[[], None]) -> Iterator[Step]:
        assert clock.sign is not None
        clock.sign.round = progress.state.round
        for made, record in _rounds(task, progress, own, after):
            phases, clients = clock.take_times()
            if not task.hides_cohorts:
                record["phases"] = {**phases, "server": max(0.0, record["seconds"] - sum(phases.values()))}
                record["client_seconds"] = {task.clients.name(k): seconds for k, seconds in sorted(clients.items())}
            books[-1].add(record)
            clock.sign.round = made.state.round
            yield made, record

    return Carrier(bind, steps)


def _rounds(task: Task, progress: Progress, own: OwnStore, after: Callable[[], None]) -> Iterator[Step]:
    """Rounds whose records say what really moved, and how the posterior does on the clients' own test rows."""
    engine = task.engine
    assert isinstance(engine, Remote)
    asks = engine.settings.client_scores
    if asks is None:
        asks = not len(task.clients.data.test_x) and task.scheduler.waiting is None
    for made, record in _steady(task, progress, own, after):
        if asks and task.program.prediction.whole and "test" in record:
            started = time.perf_counter()
            scores = engine.scores(made.state)
            record["test_clients" if record["test"] else "test"] = scores
            if not task.hides_cohorts:
                record["seconds"] += time.perf_counter() - started
        names, moved = task.clients.names, engine.take_bytes()
        if not task.hides_cohorts:  # who came, and what they sent
            record["took_part"] = [names[k] if names else k for k in engine.asking.took_part]
            record |= moved
        if late := engine.take_notes():
            record["notes"] = [*record.get("notes", []), *late]
        yield made, record


def _steady(task: Task, progress: Progress, own: OwnStore, after: Callable[[], None]) -> Iterator[Step]:
    """Rounds, of which one is taken back after whose secure sum most clients can't train; a few times, not for ever.

    Under masks a client may spoil a sum unseen, and nobody knows who did: the posterior before it is trained on.
    """
    engine, before, taken_back = task.engine, progress, 0
    carry = rounds if task.scheduler.waiting is None else rounds_aloft
    assert isinstance(engine, Remote)
    while True:
        try:
            for made, record in carry(task, progress, own, after):
                before, progress = progress, made
                yield made, record
            return
        except Unusable as error:
            if before is progress or taken_back == engine.settings.attempts:
                raise
            taken_back += 1
            number = progress.state.round
            engine.asking.notes.append(
                f"round {number} was taken back, and trained on from the posterior before it: {error}"
            )
            before = progress = progress._replace(state=before.state._replace(round=number))
