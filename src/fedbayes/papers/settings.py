"""Where two experiments differ: a kept cell and its table, a scale and the printed schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedbayes.experiments.experiment import Experiment, table_of
from fedbayes.methods import METHODS, method_named
from fedbayes.options import options_of

EVALUATED = ("seed", "evaluate_every")
BESIDE = ("rounds", *EVALUATED)  # written beside a cell's figures
# Defaults of the time when files named only the options that were given; now they name all.
FORMER: dict[str, dict[str, Any]] = {
    "fedvi": {
        **{"optimiser": "sgd", "lr": 0.05, "lr_within": "constant", "train_draws": 1, "kl": "constant"},
        **{"kl_weight": 0.0001, "prior_scale": 1.0, "prior": "broadcast", "weighting": "size"},
    },
    "fedivon": {
        **{"lr": 0.05, "lr_within": "constant", "curvature_memory": 10.0, "prior_step": "explicit"},
        "estimator": "weight",
    },
    "pvi": {"optimiser": "sgd", "train_draws": 1, "prior_step": "explicit"},
    "bayes_admm": {"train_draws": 1, "prior_step": "explicit"},
}
EXECUTION = ("device", "engine", "compile", "at_once", "recompute")  # how it was executed, which is no part of a cell


def setting_of(experiment: Experiment) -> dict[str, Any]:
    """An experiment's table as a cell's file keeps it: with all options, for defaults may change."""
    table = {key: value for key, value in table_of(experiment).items() if key not in EXECUTION}
    return {**table, "options": _plain(_options(experiment.method, experiment.options))}


def otherwise(content: Mapping[str, Any], current: Experiment) -> str:
    """Where a cell's file was made with another setting than its table has: `options.server_lr 0.001 (now 0.0001)`.

    What a file does not name had its default of then; an option that there is no more can't be compared. Rounds and
    seed are written elsewhere. A file may say itself, under `otherwise`, what the code did at its time.
    """
    before = content["experiment"]
    former = FORMER.get(before.get("method", ""), {})
    kept = {**before, "options": {**former, **before.get("options", {})}}
    unlike = _unlike(kept, table_of(current), (*BESIDE, *EXECUTION))
    settings = [f"{name} {a} (now {b})" for name, (a, b) in unlike.items()]
    return ", ".join([*settings, *([content["otherwise"]] if "otherwise" in content else [])])


def scaled(trained: Experiment, published: Experiment) -> list[str]:
    """Where a cell is trained with less than is printed: `rounds 30 for 400`."""
    unlike = _unlike(table_of(trained), table_of(published), (*EVALUATED, *EXECUTION))
    return [f"{name.removeprefix('options.')} {a} for {b}" for name, (a, b) in unlike.items()]


def _unlike(table: Mapping[str, Any], other: Mapping[str, Any], but: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """The settings that two tables of experiments do not share, but those of some keys."""
    a, b = _settings(table), _settings(other)
    names = [name for name in b | a if name.partition(".")[0] not in but]
    pairs = {name: (_text(a.get(name)), _text(b.get(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _text(value: Any) -> Any:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else value


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an experiment's table by name, with defaults in place of what it does not name."""
    whole = {**vars(Experiment()), **table}
    known = options_of(METHODS[whole["method"]])
    # A default is left unsaid: in a file a tuple is a list, which a method would take for another value.
    options = {
        name: v for name, v in whole["options"].items() if name in known and _plain(v) != _plain(known[name].default)
    }
    whole["options"] = _options(whole["method"], options)
    flat = {name: v for name, v in whole.items() if not isinstance(v, Mapping)}
    flat |= {f"{name}.{k}": v for name, inner in whole.items() if isinstance(inner, Mapping) for k, v in inner.items()}
    return _plain(flat)


def _options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method, defaults included; what is imported stays as its name, package.module:name."""
    known = options_of(METHODS[method])
    imported = {n: v for n, v in options.items() if known[n].metadata["importable"] and isinstance(v, str) and ":" in v}
    given = {name: v for name, v in options.items() if name not in imported}
    return {**method_named(method, given).options, **imported}


def _plain(value: Any) -> Any:
    """As a file has it."""
    return json.loads(json.dumps(value, default=str))
