"""Training from the first round to the last: `fit` in memory, and the generator of rounds that run folders use."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbayes.data import Clients
from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.clock import EVALUATION, FILES, PERSONAL, START, STEPS, SUM, share
from fedbayes.engine.stacked import run_all
from fedbayes.errors import Diverged, NotFinite
from fedbayes.federation.attacks import Attack
from fedbayes.federation.contributions import LEFT_OUT, as_told
from fedbayes.federation.influence import is_shown
from fedbayes.federation.program import Context, FederationState, Order, Outcome, Stage, nothing
from fedbayes.federation.round import close_round, message_bytes
from fedbayes.federation.schedule import Plan
from fedbayes.federation.staleness import closed_on
from fedbayes.methods import Method
from fedbayes.model.likelihood import Likelihood
from fedbayes.posterior.values import Parts, Posterior
from fedbayes.training import influence, scales
from fedbayes.training.callbacks import called_back
from fedbayes.training.personal import personal_scores
from fedbayes.training.prepare import naming_strays, prepare
from fedbayes.training.private_scores import noisy_scores
from fedbayes.training.run import Memory, OwnStore, Run, evaluate, observed, scores_on
from fedbayes.training.settings import MONITORS
from fedbayes.training.showing import following
from fedbayes.training.task import Best, Federation, OnRound, Progress, Task
from fedbayes.training.tested import Finished

OWNED = "owned"  # among the kinds of warnings: one client has most of the precision
MONITORED = {"nll": "NLL", "accuracy": "accuracy"}


def rounds(
    task: Task, progress: Progress, own: OwnStore, after_client: Callable[[], None] = lambda: None
) -> Iterator[tuple[Progress, dict[str, Any]]]:
    """Train round after round: yields the progress after each, and its record for the journal.

    Own state is put into the store before the round is yielded.
    """
    while not task.done(progress):
        started = time.perf_counter()
        plan = task.plan(progress)
        own.expect(task.scheduler.cohort(progress.state.round + 1))
        after = nothing if task.hides_cohorts else after_client
        with quick_cpu(), tensor_cores(task.precision):
            with share(STEPS):
                outcomes = _run_plans([task], [plan], [own], after)
            progress, record = close(task, progress, own, plan, outcomes[0])
            progress = judged(task, progress, own, record)
        if not task.hides_cohorts:  # which tell how many there were
            record["seconds"] = time.perf_counter() - started
        yield progress, record


def judged(task: Task, progress: Progress, own: OwnStore, record: dict[str, Any]) -> Progress:
    """The progress after what is looked at when a round is closed: personal models, and whether to stop."""
    _make_personal([task], [progress], [own], [record])
    return _stop(task, progress, record)


def rounds_together(
    tasks: Sequence[Task], starts: Sequence[Progress], owns: Sequence[OwnStore]
) -> Iterator[list[tuple[Progress, dict[str, Any]] | None]]:
    """Rounds of several federations as one program each: a sweep over seeds, splits and scalar options.

    Yields one entry per task and round, None where a task is done. All need the stacked engine, one network, one data
    set, and methods that differ in scalar options only.
    """
    progress = list(starts)
    while live := [m for m, task in enumerate(tasks) if not task.done(progress[m])]:
        started = time.perf_counter()
        lead = tasks[live[0]]
        plans = [tasks[m].plan(progress[m]) for m in live]
        for m in live:
            owns[m].expect(tasks[m].scheduler.cohort(progress[m].state.round + 1))
        entries: list[tuple[Progress, dict[str, Any]] | None] = [None] * len(tasks)
        with quick_cpu(), tensor_cores(lead.precision):
            with share(STEPS):
                outcomes = _run_plans([tasks[m] for m in live], plans, [owns[m] for m in live])
            for m, plan, outcome in zip(live, plans, outcomes):
                progress[m], record = close(tasks[m], progress[m], owns[m], plan, outcome)
                entries[m] = (progress[m], record)
            records = [entry[1] for entry in entries if entry is not None]
            _make_personal([tasks[m] for m in live], [progress[m] for m in live], [owns[m] for m in live], records)
            for m, record in zip(live, records):
                progress[m] = _stop(tasks[m], progress[m], record)
                entries[m] = (progress[m], record)
        seconds = (time.perf_counter() - started) / len(live)
        for task, entry in zip(tasks, entries):
            if entry is not None and not task.hides_cohorts:
                entry[1]["seconds"] = seconds
        yield entries


def _run_plans(
    tasks: Sequence[Task], plans: Sequence[Plan], owns: Sequence[OwnStore], after: Callable[[], None] = nothing
) -> list[Outcome]:
    """What each task's round is closed on; the orders of all, of whatever versions, are one program if they can be."""
    lines = [(m, order) for m, plan in enumerate(plans) for order in plan.orders]
    engines, programs = [tasks[m].engine for m, _ in lines], [tasks[m].program for m, _ in lines]
    brought = run_all(engines, programs, [order for _, order in lines], [owns[m].get for m, _ in lines], after)
    outcomes = []
    for m, (task, plan) in enumerate(zip(tasks, plans)):
        own = [outcome for (member, _), outcome in zip(lines, brought) if member == m]
        outcomes.append(closed_on(task.program, plan.orders, own, plan.closing, plan.discount))
    return outcomes


def close(
    task: Task, progress: Progress, own: OwnStore, plan: Plan, outcome: Outcome
) -> tuple[Progress, dict[str, Any]]:
    """Close a round: pool, follow the program's stages, evaluate when due.

    Of a private round only what is released goes further, and it is no longer known who took part.
    """
    order, privacy = plan.closing, task.privacy
    took_part = order.cohort
    if privacy is not None:
        with share(SUM):
            order, outcome = privacy.release(task.program, order, outcome)
        progress = progress._replace(accounts=privacy.after(progress.accounts, took_part))
    with share(FILES):
        own.put(order.round, outcome.own)
    with share(SUM):
        outcome = as_told(task.program, order, outcome)
        state, report = close_round(Context(task.program, order, outcome, task.engine, own.get), progress.state)
        state = state._replace(flight=plan.flight)
    due = _due(task, state.round, task.evaluate_every)
    if due or _due(task, state.round, task.personal_every):
        with share(EVALUATION):
            state = observed(task, state)
    record = {**_record(task, order, outcome, report), **plan.told}
    if progress.pretrained:
        record["pretrained"] = dict(progress.pretrained)
    before, progress = progress.state, progress._replace(state=state, pretrained={})
    if due:
        _follow_scales(task, before.broadcast, state, record)
    if due and task.program.prediction.whole and (privacy is None or privacy.public_test):
        with share(EVALUATION):
            try:
                record["test"] = evaluate(task, state)
                progress = _validate(task, progress, record)
            except NotFinite:
                what = "what the posterior predicts is not finite; training diverged: try a smaller lr"
                record["diverged"] = f"round {state.round}: {what}"
                progress = progress._replace(state=before._replace(round=state.round, flight=plan.flight))
    if privacy is not None:
        scores = {}
        if due and privacy.scoring is not None:
            with share(EVALUATION):
                scores = noisy_scores(task, privacy, state)
            progress = progress._replace(accounts=privacy.after_scores(progress.accounts))
        record = privacy.public(record, outcome, progress.accounts, due)
        record["train"] = scores
    return progress, record


def _follow_scales(task: Task, before: Parts, state: FederationState, record: dict[str, Any]) -> None:
    """How far scales have moved, for the journal; a note after the last round where that should be known."""
    figures = scales.moves(task.program, before, state.broadcast)
    if figures:
        record["scales"] = figures
    words = scales.note(figures, state.round, task.rounds, task.optimiser)
    if words:
        record["notes"] = [*record.get("notes", ()), words]


def _due(task: Task, number: int, every: int) -> bool:
    return every > 0 and (number % every == 0 or number == task.rounds)


def _make_personal(
    tasks: Sequence[Task], progress: Sequence[Progress], owns: Sequence[OwnStore], records: Sequence[dict[str, Any]]
) -> None:
    """Evaluate personal models where they are due; without a global model they are all that is tested."""
    due = []
    for m, (task, at) in enumerate(zip(tasks, progress)):
        instead = not task.program.prediction.whole and _due(task, at.state.round, task.evaluate_every)
        if instead or _due(task, at.state.round, task.personal_every):
            due.append(m)
    # Federations of one sweep are evaluated together where they are at the same round.
    for number in sorted({progress[m].state.round for m in due}):
        group = [m for m in due if progress[m].state.round == number]
        homes = [Federation(tasks[m], progress[m].state, owns[m].get) for m in group]
        with share(PERSONAL):
            by_member = personal_scores(homes)
        for m, scores in zip(group, by_member):
            records[m]["personal"] = scores
            if not tasks[m].program.prediction.whole:
                records[m]["test"] = {name: v for name, v in scores.items() if not name.startswith("clients")}
            if notes := tasks[m].engine.take_notes():
                records[m]["notes"] = [*records[m].get("notes", ()), *notes]


def _stop(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Stop where the loss is low enough, or the accuracy high enough (FedUAB, algorithm 1), or where nobody is left."""
    loss, accuracy = record["train"].get("loss"), record.get("test", {}).get("accuracy")
    why = record.get("diverged")
    if task.target_loss is not None and loss is not None and loss <= task.target_loss:
        why = f"the training loss is {loss:.4f}, asked for {task.target_loss}"
    if task.target_accuracy is not None and accuracy is not None and accuracy >= task.target_accuracy:
        why = f"the accuracy is {accuracy:.4f}, asked for {task.target_accuracy}"
    if record["cohort"] and list(record["left_out"].values()) == [LEFT_OUT] * record["cohort"]:
        why = record["diverged"] = (
            f"round {record['round']}: nobody is left, the uploads of all {record['cohort']} clients were not finite; "
            "training diverged: try a smaller lr"
        )
    left = task.rounds - progress.state.round
    if task.privacy is not None and left and not task.privacy.rounds_left(progress.accounts, left):
        spent = task.privacy.epsilon(progress.accounts)
        record["epsilon"], record["delta"] = spent, task.privacy.delta
        why = f"epsilon is {spent:.4g}, and one more round would pass the budget of {task.privacy.budget:g}"
    if why is None:
        return progress
    record["stopped"] = why
    return progress._replace(state=observed(task, progress.state), stopped=True)


def _record(task: Task, order: Order, outcome: Outcome, report: dict[str, Any]) -> dict[str, Any]:
    names = task.clients.names
    down = {part: order.broadcast[part] for part in task.program.pooling.rules}
    came = task.cohort if task.hides_cohorts else len(order.cohort)
    moved = {
        "bytes_down": message_bytes(down) * (came + len(order.dropped)),
        "bytes_up": message_bytes(task.program.pooling.uploaded(down)) * came,
    }
    rows = report.pop("influence", None)
    attacked = task.program.pooling.attacked
    lied = [] if attacked is None else [k for k in order.cohort if k in attacked.clients]
    return {
        "round": order.round + 1,
        "cohort": len(order.cohort),
        "dropped": [names[k] if names else k for k in order.dropped],
        "left_out": {task.clients.name(k): why for k, why in outcome.left_out.items()},
        **(
            {} if attacked is None else {"attack": attacked.name, "attackers": [names[k] if names else k for k in lied]}
        ),
        "train": {name: total / outcome.counted for name, total in outcome.metrics.items() if outcome.counted},
        **_influence(task, outcome, rows),
        **report,
        **{name: count + int(report.get(name, 0)) for name, count in moved.items()},  # stages may have moved more
        **({"notes": notes} if (notes := task.engine.take_notes()) else {}),
    }


def _influence(task: Task, outcome: Outcome, rows: Mapping[int, influence.Row] | None) -> dict[str, Any]:
    """Who moved the model in a round, for its journal."""
    program = task.program
    if not outcome.counted or not is_shown(program):
        return {}
    if rows is None:
        return {"influence": {"hidden": influence.HIDDEN}}
    sure = program.pooling.rules[program.prediction.part].weighs_precision and not program.pooling.buckets
    named = {task.clients.name(k): row for k, row in rows.items()}
    return {"influence": influence.record_of(named, influence.PRECISION if sure else influence.WEIGHT)}


def pretrained(task: Task) -> tuple[Parts, dict[str, Any]]:
    """Train a task in memory for another to begin with: its best posterior, its epochs and validation scores."""
    run = train(task)
    best = run.progress.best
    state = run.progress.state if best is None else best.state
    scores = run.journal[state.round - 1].get("validation", {}) if state.round else {}
    return state.broadcast, {"epochs": len(run.journal), "best": state.round, **scores}


def _validate(task: Task, progress: Progress, record: dict[str, Any]) -> Progress:
    """Keep the best posterior by a validation score; stop after `patience` evaluations without a better one."""
    if not len(task.validation):
        return progress
    data, state = task.clients.data, progress.state
    scores = scores_on(task, state, data.x[task.validation], data.y[task.validation], "validation")
    record["validation"] = scores
    best = progress.best
    score, sign = scores[task.monitor], MONITORS[task.monitor]
    if best is None or sign * score < sign * best.score or math.isnan(best.score):
        return progress._replace(best=Best(score, state.round, state.broadcast, state.kept))
    waited = (state.round - best.round) // task.evaluate_every
    stopped = task.patience is not None and waited >= task.patience
    if stopped:
        record["stopped"] = (
            f"no better validation {MONITORED[task.monitor]} than {best.score:.4f} (round {best.round}) "
            f"for {waited} evaluations"
        )
    return progress._replace(stopped=stopped)


@naming_strays
def fit(
    network: nn.Module | str,
    clients: Clients | Sequence[Any] | Mapping[str, Any],
    *,
    method: str | Method | None = None,
    rounds: int | None = None,
    cohort: int | float | None = None,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    compile: str = "auto",
    at_once: int | None = None,
    precision: str = "float32",
    likelihood: Likelihood | str | None = None,
    frozen: tuple[str, ...] = (),
    adapters: Mapping[str, Any] | None = None,
    class_weights: str | Sequence[float] | None = None,
    augment: str | None = None,
    dropout: float = 0.0,
    schedule: str = "synchronous",
    schedule_options: Mapping[str, Any] | None = None,
    delays: str | None = None,
    delay_options: Mapping[str, Any] | None = None,
    attack: str | Attack | None = None,
    attackers: float | Sequence[int | str] | None = None,
    attack_strength: float | None = None,
    cap_precision: float | None = None,
    clip_change: float | None = None,
    clip_quantile: float | None = None,
    cap_rows: int | None = None,
    private: str | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    private_clip: float = 1.0,
    public_test: bool = False,
    private_scores: float | None = None,
    private_seed: int | None = None,
    validation: float = 0.0,
    patience: int | None = None,
    evaluate_every: int = 1,
    personal_every: int = 0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    monitor: str = "nll",
    stages: Sequence[Stage] = (),
    server_data: Any = None,
    init: Finished | Mapping[str, Posterior] | Mapping[str, Tensor] | str | Path | None = None,
    on_round: OnRound | Sequence[OnRound] = (),
) -> Run:
    """Train a network across clients and return the run.

    `network` is a module, or the name of one of the library's, such as "linear" or "mlp". `clients` is a data set
    spread over clients, or a list of (x, y), one for each. The method's own options, such as
    `lr`, go into the method: `method=fb.methods.feduab(lr=0.1)`. Clients that diverge are left out with a warning; a
    round in which nobody is left is an error.

    - `method`: its name, or what a function of `fb.methods` gives; by default `feduab`, for tables
      (`fb.data.from_tables`) `pvi` with options that suit them
    - `rounds`: how many at most (50, for tables 20); `cohort`: clients in a round, a number or a share (all by default)
    - `seed`: of everything that is drawn
    - `device`: "cpu", "cuda", "cuda:1"; `precision`: "float32", "tf32" or "bf16"
    - `engine`: "auto", "loop" or "stacked"; `compile`: "auto", "off", "on" or "graph"; `at_once`: clients trained side
      by side
    - `likelihood`: of the targets, or its name; by their kind by default
    - `frozen`: patterns of weights that are not trained; `adapters`: low-rank changes of a frozen network's layers,
      such as `{"pattern": "layer*", "rank": 8}`: only they and the last layer are trained
    - `class_weights`: how much a row counts in training by its class: "balanced", or a number for each
    - `augment`: of images, by name; `dropout`: the share of a cohort that drops out of a round, at random
    - `schedule`: "synchronous", or "buffered": `cohort` clients are on their way, and a round is closed on the first
      that answer; `schedule_options`: its `buffer`, `staleness`, `max_staleness`, `timeout`
    - `delays`: how long clients take, in simulation: "constant", "lognormal", "pareto", "devices" or "labels";
      `delay_options`: their numbers, such as `compute`, and `awake`, the share of the day in which a client is
    - `attack`: what some clients do instead of telling the truth, one of `fb.attacks.ATTACKS`; `attackers`: a share
      or a number of clients, drawn at random, or a list of them (a fifth by default); `attack_strength`: as the attack
      says
    - `cap_precision`: how sure a client may be of a weight, as a multiple of the broadcast's precision; `clip_change`:
      how far it may move, by the rms of its change in units of the broadcast, or `clip_quantile` of the changes of the
      round before; `cap_rows`: for how many rows it counts
    - `private`: "clients" or "rows", whose part nobody may learn; `epsilon`, `delta`: its budget, which chooses the
      noise, or `noise_multiplier`; `private_clip`: the length that noise is in terms of; `public_test`: whether test
      rows are nobody's secret and may be scored; `private_scores`: the share of epsilon for which accuracy and
      NLL on the clients' rows are told, with noise; `private_seed`: for tests, NOT PRIVATE
    - `validation`: the share of each client's rows held out to choose the best round by `monitor` ("nll" or
      "accuracy"); `patience`: evaluations without a better one before training stops
    - `evaluate_every`, `personal_every`: rounds between scores of the posterior, and of personal models (0: never)
    - `target_loss`, `target_accuracy`: stop when they are reached
    - `stages`: what the server does with the pooled parts after the method's own stages, each a `Stage`
    - `server_data`: inputs of the server, for methods that distil there
    - `init`: what to begin with: another run, a network's state dict, a .safetensors file of one, or posteriors by part
    - `on_round`: called after each round with the run so far and the round's record, one function or several; what
      gives True or a reason stops the run. `fb.trackers` has some for MLflow and TensorBoard

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits").split(fb.partition.dirichlet(0.3), clients=20, seed=0)
    >>> run = fb.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), clients, method="feduab", rounds=1, cohort=2)
    >>> run.predict(clients.data.test_x[:3]).probs.shape
    torch.Size([3, 10])
    """
    arguments = dict(locals())
    with share(START):
        task = prepare(**arguments)
    return train(task)


def train(task: Task) -> Run:
    """Train a task in memory, from its first round to its last."""
    last, own = task.begin(), Memory()
    journal: list[dict[str, Any]] = []
    kinds: set[str] = set()
    with following(task.method, task.rounds) as follow:
        for progress, record in called_back(task, rounds(task, last, own), journal, own):
            last = progress
            journal.append(record)
            _warn(record, kinds)
            follow(record)
    refuse_diverged(journal)
    return Run(task, last, journal, own)


def _warn(record: dict[str, Any], kinds: set[str]) -> None:
    """Warn of clients that were left out, once for each reason, and of one that has most of the precision."""
    for why in sorted(set(record["left_out"].values()) - kinds):
        who = [name for name, reason in record["left_out"].items() if reason == why]
        count = f"{len(who)} of {record['cohort']} clients left out (first: client {who[0]})"
        warnings.warn(
            f"round {record['round']}: {count}: {why}; this warning comes once, run.journal names all",
            stacklevel=5,
        )
        kinds.add(why)
    owner = influence.owner(record)
    if owner is not None and OWNED not in kinds:
        words = (
            f"round {record['round']}: {influence.warning(*owner)}; this warning comes once, run.influence() names all"
        )
        warnings.warn(words, stacklevel=5)
        kinds.add(OWNED)


def refuse_diverged(journal: Sequence[Mapping[str, Any]], remainder: str = "") -> None:
    """Raise where the last round of a journal had nobody left; `remainder` says what is left of the rounds before."""
    if journal and "diverged" in journal[-1]:
        raise Diverged(journal[-1]["diverged"] + remainder)
