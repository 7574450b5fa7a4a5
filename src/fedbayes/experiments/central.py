"""Training in one place: an experiment on the pooled rows of its clients, and the server's before the federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import Pretraining
from fedbayes.federation.waiting import SYNCHRONOUS
from fedbayes.methods import Method
from fedbayes.noise import address
from fedbayes.options import options_of, record_of
from fedbayes.training.settings import Bounding

UNBOUNDED: dict[str, Any] = dict.fromkeys(options_of(Bounding))

HONEST: dict[str, Any] = {"attack": None, "attackers": None, "attack_strength": None}

WAITING: dict[str, Any] = {"schedule": SYNCHRONOUS, "schedule_options": {}, "delays": None, "delay_options": {}}


def centralised(x: Experiment, methods: Mapping[str, Method]) -> Experiment:
    """The experiment without a federation: one client holds all rows, and a round is one epoch over them.

    There are as many epochs as a client of the federation has.
    """
    epochs = {method.options.get("epochs", 1) for method in methods.values()}
    if len(epochs) > 1:
        raise InputError(f"--central: the methods differ in epochs ({sorted(epochs)}); give them the same, or run one")
    (each,) = epochs
    options: dict[str, Any] = {
        k: {**_undealt(v), **({"epochs": 1} if "epochs" in v else {})} if isinstance(v, Mapping) else v
        for k, v in _undealt(x.options).items()
    }
    if any("epochs" in method.options for method in methods.values()):
        options["epochs"] = 1
    # Nothing is pooled, and nobody waits.
    plain = replace(x, cohort=None, dropout=0.0, pretrain={}, stages=(), **HONEST, **UNBOUNDED, **WAITING)
    return replace(plain, central=True, rounds=x.rounds * each, options=options)


def at_server(x: Experiment, method: Method) -> Experiment:
    """The experiment's method trained on the server's rows alone, one epoch per round, stopped early.

    A prior that would be replaced each round is fixed: there is no posterior yet that could be one.
    """
    pretraining = record_of(Pretraining, x.pretrain, "pretrain")
    options = {**_undealt(x.options_of(x.method)), **pretraining.options, "epochs": 1}
    if "prior" in method.options:
        options["prior"] = "fixed"
    if "lr_silent" in method.options:
        options |= {"lr_silent": 0, "lr_decay": 1.0, "lr_across": "constant"}
    return replace(
        x,
        **{**UNBOUNDED, "cap_precision": 0.0},  # nobody is a stranger there
        pretrain={},
        stages=(),
        options=options,
        rounds=pretraining.epochs,
        patience=pretraining.patience,
        validation=pretraining.validation,
        monitor="accuracy",
        seed=address(x.seed, "pretrain"),
        cohort=None,
        dropout=0.0,
        **HONEST,
        **WAITING,
        evaluate_every=1,
        personal_every=0,
        target_loss=None,
        target_accuracy=None,
        on_round=(),  # the user's own are of the federation's rounds
    )


def _undealt(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the buckets to which clients are dealt: there is one client."""
    return {name: v for name, v in options.items() if name != "buckets"}
