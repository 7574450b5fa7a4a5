"""Training in memory, from the first round to the last: `fit` for users, `train` for a task that is prepared."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedbayes.data import Clients
from fedbayes.engine.clock import START, share
from fedbayes.errors import Diverged
from fedbayes.federation.attacks import Attack
from fedbayes.federation.program import Stage
from fedbayes.methods import Method
from fedbayes.model.likelihood import Likelihood
from fedbayes.posterior.values import Parts, Posterior
from fedbayes.training import influence
from fedbayes.training.callbacks import called_back
from fedbayes.training.prepare import naming_strays, prepare
from fedbayes.training.rounds import rounds as every_round
from fedbayes.training.run import Memory, Run
from fedbayes.training.showing import following
from fedbayes.training.task import OnRound, Task
from fedbayes.training.tested import Finished

OWNED = "owned"  # among the kinds of warnings: one client has most of the precision


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
    recompute: bool | str | Sequence[str] = False,
    precision: str = "float32",
    likelihood: Likelihood | str | None = None,
    frozen: tuple[str, ...] = (),
    adapters: Mapping[str, Any] | None = None,
    class_weights: str | Sequence[float] | np.ndarray | Tensor | None = None,
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
    - `engine`: "auto", "loop" or "stacked"; `compile`: "auto", "off", "captured", "on", "graph" or "soon" (beside the
      first rounds, which are not compiled meanwhile); `at_once`: clients trained side by side
    - `recompute`: True, or names of modules: activations of repeated blocks, or of these modules, are computed again in
      the backward pass instead of held
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
    for line in task.idle:
        warnings.warn(line, stacklevel=3)
    return train(task)


def train(task: Task) -> Run:
    """Train a task in memory, from its first round to its last."""
    last, own = task.begin(), Memory()
    journal: list[dict[str, Any]] = []
    kinds: set[str] = set()
    with following(task.method, task.rounds) as follow:
        for progress, record in called_back(task, every_round(task, last, own), journal, own):
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


def pretrained(task: Task) -> tuple[Parts, dict[str, Any]]:
    """Train a task in memory for another to begin with: its best posterior, its epochs and validation scores."""
    run = train(task)
    best = run.progress.best
    state = run.progress.state if best is None else best.state
    scores = run.journal[state.round - 1].get("validation", {}) if state.round else {}
    return state.broadcast, {"epochs": len(run.journal), "best": state.round, **scores}


def refuse_diverged(journal: Sequence[Mapping[str, Any]], remainder: str = "") -> None:
    """Raise where the last round of a journal had nobody left; `remainder` says what is left of the rounds before."""
    if journal and "diverged" in journal[-1]:
        raise Diverged(journal[-1]["diverged"] + remainder)
