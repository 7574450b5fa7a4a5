"""From an experiment's names to a task that can train: the data, the network, the method, the likelihood."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import Field, replace
from typing import Any

import torch
from torch import nn

from fedbayes.data import Clients, Dataset, from_clients, from_tables
from fedbayes.data import load as load_data
from fedbayes.data.dataset import Dealer
from fedbayes.data.partition import PARTITIONS
from fedbayes.errors import InputError, unknown
from fedbayes.experiments.central import at_server, centralised
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import FLOWER, TABLED, TABLES
from fedbayes.experiments.own_code import called, imported, in_one_line, naming, parameters, users_code
from fedbayes.experiments.own_pieces import dealing, stages_of
from fedbayes.experiments.sites import alone, asks_for_client, everybody
from fedbayes.federation.bounds import mildly_bounded
from fedbayes.methods import METHODS, Method, method_named
from fedbayes.model.class_weights import BALANCED
from fedbayes.model.likelihood import LIKELIHOODS, Likelihood, name_and_options
from fedbayes.networks.dropout import with_dropout
from fedbayes.networks.papers import network_named
from fedbayes.noise import seeded
from fedbayes.options import options_of
from fedbayes.training.defaults import default_likelihood, options_by
from fedbayes.training.fit import pretrained
from fedbayes.training.idle import idle_options
from fedbayes.training.personal import Federation
from fedbayes.training.prepare import prepare
from fedbayes.training.settings import ROWS
from fedbayes.training.task import Task


def build(experiment: Experiment, *, network: nn.Module | None = None, clients: Clients | None = None) -> Task:
    """Check the experiment against the tables and bind it; `network` and `clients` stand in for those it names."""
    x = experiment
    if x.engine == FLOWER and x.attack is not None:
        raise InputError("attack: attacks are simulated in one process; leave attack out on Flower, or set engine=auto")
    if x.engine == FLOWER and x.private_scores is not None:
        raise InputError("private_scores: on Flower the server has no rows to score; leave it out, or set engine=auto")
    if x.engine == FLOWER and x.private == ROWS:
        raise InputError(
            "private: on Flower a site that starts again would forget the account of its rows; "
            "use private = 'clients', or set engine=auto"
        )
    if x.engine == FLOWER and x.leave_out is not None:
        raise InputError("leave_out: on Flower a site is left out by not starting its node; set engine=auto to try it")
    if x.engine == FLOWER and x.class_weights == BALANCED and keeps_apart(x):
        raise InputError("class_weights: a machine knows its own rows alone and can't balance; give a number for each")
    with naming("options"):
        method = method_of(x)
    if clients is None:
        clients = clients_of(x)
    likelihood = likelihood_of(x, clients.data)
    if network is None:
        network = network_of(x, clients.data, likelihood.width)
    with naming("experiment"):
        task = prepare(
            network,
            clients,
            method=method,
            rounds=x.rounds,
            cohort=x.cohort,
            seed=x.seed,
            device=x.device,
            engine="loop" if x.engine == FLOWER else x.engine,  # what stands on each machine
            compile=x.compile,
            at_once=x.at_once,
            recompute=x.recompute,
            precision=x.precision,
            likelihood=likelihood,
            frozen=x.frozen,
            adapters=x.adapters,
            class_weights=x.class_weights,
            augment=x.augment,
            dropout=x.dropout,
            schedule=x.schedule,
            schedule_options=x.schedule_options,
            delays=x.delays,
            delay_options=x.delay_options,
            attack=x.attack,
            attackers=x.attackers,
            attack_strength=x.attack_strength,
            cap_precision=x.cap_precision,
            clip_change=x.clip_change,
            clip_quantile=x.clip_quantile,
            cap_rows=x.cap_rows,
            private=x.private,
            epsilon=x.epsilon,
            delta=x.delta,
            noise_multiplier=x.noise_multiplier,
            private_clip=x.private_clip,
            public_test=x.public_test,
            private_scores=x.private_scores,
            private_seed=x.private_seed,
            validation=x.validation,
            patience=x.patience,
            evaluate_every=x.evaluate_every,
            personal_every=x.personal_every,
            target_loss=x.target_loss,
            target_accuracy=x.target_accuracy,
            monitor=x.monitor,
            stages=stages_of(x.stages),
            init=x.init,
            on_round=[in_one_line(imported(path, "on_round"), "on_round", path) for path in x.on_round],
        )
    if x.engine == FLOWER:
        program = task.program if x.cap_precision is not None else mildly_bounded(task.program)
        idle = idle_options(method, program, x.cap_rows)
        task = replace(task, program=program, elsewhere=_with_the_clients, idle=idle)
    if not x.pretrain:
        return task
    with naming("pretrain"):
        first = build(at_server(x, method), network=network, clients=clients.at_server())
    return replace(task, before=lambda: pretrained(first))


def _with_the_clients(federation: Federation) -> Iterator[tuple[int, Any]]:
    raise InputError("personal models of a run on Flower stay with the clients, who score them while it trains")


def without_federation(x: Experiment) -> Experiment:
    """The experiment trained in one place, on the rows of all its clients."""
    with naming("options"):
        return centralised(x, {method: method_of(x.only(method)) for method in x.all_methods})


def check_tables(x: Experiment) -> None:
    """Refuse a table of options under a name that is no method."""
    for key, v in x.options.items():
        if isinstance(v, Mapping) and key not in METHODS and key not in TABLED and ":" not in key:
            raise unknown("method with a table in options", key, METHODS)


def method_of(x: Experiment) -> Method:
    """The experiment's method, of the table or the user's own, with its options."""
    options = with_own_objects(x)
    if ":" not in x.method:
        return method_named(x.method, options)
    source = imported(x.method, "method")
    if isinstance(source, Method):
        if options:
            raise InputError(f"options: {x.method} is a finished method and takes none; name a function that makes it")
        return source
    with users_code("method", x.method):
        method = source(**options)
    if not isinstance(method, Method):
        raise InputError(f"method {x.method} gave a {type(method).__name__}; it must give a fedbayes.methods.Method")
    return method


def records_of(method: str) -> dict[str, Field[Any]]:
    """The records of a method's options, the library's or the user's own; none for an unknown method."""
    source = imported(method, "method") if ":" in method else METHODS.get(method)
    return options_of(source) if inspect.isclass(source) and issubclass(source, Method) else {}


def with_own_objects(x: Experiment) -> dict[str, Any]:
    """The method's options with the user's own rule, weighting and client, named there as package.module:name."""
    options = x.options_of(x.method)
    importable = {name for name, f in records_of(x.method).items() if f.metadata["importable"]}
    named = {name: v for name, v in options.items() if name in importable and isinstance(v, str) and ":" in v}
    own = {name: imported(path, name) for name, path in named.items()}
    if callable(own.get("client")):
        own["client"] = in_one_line(own["client"], "client", named["client"])
    return {**options, **own}


def options_of_method(method: str) -> list[str]:
    """The names of the options that a method takes; none for an unknown method."""
    source = imported(method, "method") if ":" in method else METHODS.get(method)
    return [] if source is None or isinstance(source, Method) else list(inspect.signature(source).parameters)


def data_of(x: Experiment) -> Any:
    """The experiment's data as its loader gives it: a Dataset, Clients, or a list of clients."""
    with naming("data"):
        if x.data == TABLES:
            left_out = {} if x.leave_out is None else {"left_out": x.leave_out}
            return called(from_tables, {**left_out, **x.data_options}, "data tables")
        data: Any = imported(x.data, "data") if ":" in x.data else load_data(x.data, **x.data_options)
        if asks_for_client(data):
            return (alone if x.engine == FLOWER else everybody)(data, x.data_options, x.clients)
        with users_code("data", x.data):
            return data(**x.data_options) if callable(data) else data


def keeps_apart(x: Experiment) -> bool:
    """Whether each machine has its own rows alone: so with a data function that gives one client at a time."""
    return ":" in x.data and asks_for_client(imported(x.data, "data"))


def side_of(x: Experiment, client: int) -> Clients:
    """The clients as client k's machine knows them; where rows are not kept apart, all of them."""
    if not keeps_apart(x):
        return clients_of(x)
    with naming("data"):
        return alone(imported(x.data, "data"), x.data_options, x.clients, client)


def clients_of(x: Experiment, data: Any = None) -> Clients:
    """The experiment's data, spread over its clients; `data` is what `data_of` gave, where it is at hand."""
    data = data_of(x) if data is None else data
    if isinstance(data, list):
        data = from_clients(data)
    if isinstance(data, Clients):
        return _taking_part(x, data)
    if not isinstance(data, Dataset):
        raise InputError(f"data {x.data} gave a {type(data).__name__}; it must give a Dataset or Clients")
    with naming("partition"):
        partition = partition_of(x, data)
        clients = data.split(partition, clients=x.clients, seed=x.seed, test_per_client=x.test_per_client)
    return _taking_part(x, clients)


def _taking_part(x: Experiment, clients: Clients) -> Clients:
    """The clients but the one that is left out; all as one where training is central."""
    if x.leave_out is not None:
        with naming("leave_out"):
            clients = clients.without(x.leave_out)
    return clients.pooled() if x.central else clients


def partition_of(x: Experiment, data: Dataset) -> Dealer:
    """How rows are spread: by the table, or by the user's own Partition or function (see `dealing`)."""
    if ":" in x.partition:
        return dealing(x.partition, x.partition_options, data)
    if x.partition not in PARTITIONS:
        raise unknown("partition", x.partition, PARTITIONS)
    return called(PARTITIONS[x.partition], x.partition_options, f"partition {x.partition}")


def network_of(x: Experiment, data: Dataset, width: int = 1) -> nn.Module:
    """The experiment's network with weights that depend on the seed alone; `width` outputs for each of the targets'.

    The user's own object is a module, or is called with the shape of an input and the number of outputs, or with
    nothing where it takes no such arguments. Option `dropout` is a rate of dropout after every linear map and
    convolution, save the layers that match `undropped`.
    """
    dropout_options = {k: v for k, v in x.network_options.items() if k in ("dropout", "undropped")}
    if dropout_options and not _takes_dropout(x.network):
        if "dropout" not in dropout_options:
            raise InputError("network: undropped spares layers from dropout, but none is given; set dropout = 0.2")
        options = {k: v for k, v in x.network_options.items() if k not in dropout_options}
        with naming("network"):
            plain = network_of(replace(x, network_options=options), data, width)
            return with_dropout(plain, dropout_options["dropout"], but=dropout_options.get("undropped", ()))
    with naming("network"):
        if ":" not in x.network:
            options = {**options_by(data, x.network), **x.network_options}
            return network_named(x.network, data.seen_shape, data.classes * width, seed=x.seed, **options)
        source = imported(x.network, "network")
        if isinstance(source, nn.Module):
            return source
        where = torch.device("cuda") if torch.cuda.is_available() else None  # a user's network may be made there
        with seeded(x.seed, "network", x.network, device=where), users_code("network", x.network):
            needed = [p for p in parameters(source) if p.default is p.empty and p.name not in x.network_options]
            network = source(*(data.seen_shape, data.classes * width)[: len(needed)], **x.network_options)
    if not isinstance(network, nn.Module):
        raise InputError(f"network {x.network} gave a {type(network).__name__}; it must give a torch.nn.Module")
    return network


def _takes_dropout(network: str) -> bool:
    """Whether the user's own function has an option `dropout` of its own."""
    source = imported(network, "network") if ":" in network else None
    return callable(source) and not isinstance(source, nn.Module) and "dropout" in {p.name for p in parameters(source)}


def likelihood_of(x: Experiment, data: Dataset) -> Likelihood:
    """The named likelihood, or the one that the data's targets ask for."""
    name = x.likelihood
    with naming("likelihood"):
        if name is not None and ":" in name:
            source = imported(name, "likelihood")
            with users_code("likelihood", name):
                likelihood = source if isinstance(source, Likelihood) else source(**x.likelihood_options)
            if not isinstance(likelihood, Likelihood):
                raise InputError(f"likelihood {name} gave a {type(likelihood).__name__}; it must give a Likelihood")
            return likelihood
        if name is None and not x.likelihood_options:
            return default_likelihood(data)
        name, options = name_and_options(data, name, x.likelihood_options)
        return called(LIKELIHOODS[name], options, f"likelihood {name}")
