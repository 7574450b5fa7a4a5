"""The statistical-aggregation study made smaller: shorter schedules, and digits for a laptop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fedbayes.experiments.experiment import Experiment


def shortened(rounds: int, silent: int, decay: float) -> Callable[[Experiment], Experiment]:
    """Fewer rounds of E = 1, proportionally fewer of E = 5, .4 of the clients' and the server's epochs in table 4."""

    def short(x: Experiment) -> Experiment:
        epochs = x.options["epochs"]
        if x.rounds == 1:
            pretrain = {**x.pretrain, "epochs": 40} if x.pretrain else {}
            return replace(x, pretrain=pretrain, options={**x.options, "epochs": 160})
        share = 2 if epochs > 1 else 1
        options = {**x.options, "lr_silent": silent // share, "lr_decay": decay**share}
        return replace(x, rounds=rounds // share, evaluate_every=max(5, rounds // share // 10), options=options)

    return short


def small(x: Experiment) -> Experiment:
    """A narrow ResNet-8 on 8 x 8 digits, eight rounds: minutes on a laptop."""
    epochs = x.options["epochs"]
    options = {**x.options, "lr": 1e-2, "lr_silent": 10}
    if "test_draws" in options:
        options["test_draws"] = 10
    rounds = 8 if epochs == 1 else 4
    pretrain = dict(x.pretrain)
    if x.rounds == 1:
        rounds, options["epochs"] = 1, 40
        if "norm_passes" in options:
            options["norm_passes"] = 10  # a client has five batches
        pretrain = {**pretrain, "epochs": 30} if pretrain else {}
    partition, settings = x.partition, x.partition_options
    if partition == "shards":  # classes of unequal size
        partition, settings = "labels_per_client", {"k": 2}
    return replace(
        x,
        data="digits",
        network_options={**x.network_options, "depth": 8, "width": 4},
        augment=None,
        precision="float32",
        partition=partition,
        partition_options=settings,
        rounds=rounds,
        evaluate_every=2 if rounds > 1 else 1,
        options=options,
        pretrain=pretrain,
        compile="off",
    )


SCALES: Mapping[str, Callable[[Experiment], Experiment]] = {
    "paper": lambda x: x,
    "short": shortened(80, 10, 0.96),
    "shorter": shortened(30, 6, 0.9),
    "small": small,
}
