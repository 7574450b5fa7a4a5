"""Own tables by name: as an experiment file or a setting on the command line names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedbayes.data.agreement import class_by_value
from fedbayes.data.holdings import Holdings, holdings
from fedbayes.data.reading import Reading
from fedbayes.data.site_tables import summary_of
from fedbayes.errors import InputError, unknown
from fedbayes.experiments.experiment import Experiment, parse, read
from fedbayes.experiments.keys import TABLES
from fedbayes.experiments.own_code import naming

# Of the options of tables, those that a look needs; that sites differ in whose they are is no news.
LOOKED_AT = (*(name for name in Reading._fields if name != "site_effects"), "kinds", "labels", "kind")


def look(name: str, target: str | None, settings: Iterable[str] = ()) -> Holdings:
    """What the sites of a folder, a pattern or an experiment file hold; settings are options of `from_tables`."""
    options: dict[str, Any] = {"sites": name}
    if name.endswith(".toml"):
        experiment = read(name)
        if experiment.data != TABLES:
            raise InputError(f"{name}: data is {experiment.data!r}, not own tables; give its name to `data show`")
        options = dict(experiment.data_options)
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or key.strip() not in LOOKED_AT:
            raise unknown("option of tables in --set", key.strip(), LOOKED_AT)
        options[key.strip()] = parse(text.strip(), key.strip())
    if target is not None:
        options["target"] = target
    sites = options.pop("sites", None)
    looked_at = {key: value for key, value in options.items() if key in LOOKED_AT}
    with naming("data"):
        by_value, _ = class_by_value(options.get("labels"))
        return holdings(summary_of(sites, **{"target": None, **looked_at}, test=0.0, seed=None), by_value)


def check_spread(x: Experiment) -> None:
    """Refuse what would spread rows over clients: whose they are is said by the tables."""
    if x.data != TABLES:
        return
    usual = Experiment()
    for key in ("clients", "partition", "partition_options", "test_per_client"):
        value = getattr(x, key)
        if value != getattr(usual, key) and (key, value) != ("partition", "natural"):
            raise InputError(f"{key}: each site of the tables is a client, with test rows of its own; leave {key} out")
