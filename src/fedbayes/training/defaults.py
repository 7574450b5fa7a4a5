"""What is taken where the user says nothing: a method, a number of rounds and a likelihood, by the kind of data."""

from __future__ import annotations

from torch import nn

from fedbayes.data import Dataset
from fedbayes.errors import InputError
from fedbayes.methods import Method, method_named
from fedbayes.model.class_weights import class_weights as weights_of
from fedbayes.model.class_weights import weighted
from fedbayes.model.likelihood import LIKELIHOODS, Likelihood, likelihood_for
from fedbayes.networks.papers import network_named
from fedbayes.training.settings import FOR_TABLES, METHOD, ROUNDS


def default_method(data: Dataset) -> Method:
    """`feduab`; for tables `pvi` with steps that end in seconds on a few hundred rows per site."""
    return method_named(METHOD) if data.coding is None else method_named(FOR_TABLES.method, FOR_TABLES.options)


def default_rounds(data: Dataset) -> int:
    """50; fewer for tables."""
    return ROUNDS if data.coding is None else FOR_TABLES.rounds


def default_likelihood(data: Dataset) -> Likelihood:
    """What the kind of target asks for; of a table's real targets the noise is learned."""
    if data.coding is not None and data.kind == "real":
        return LIKELIHOODS["real"](learn=True)
    return likelihood_for(data)


def options_by(data: Dataset, network: str) -> dict[str, int]:
    """Options of a named network that the data decide: how many sites a row's last columns tell apart."""
    known = data.coding is not None and data.coding.site_effects
    return {"sites": len(data.coding.sites)} if network == "by_site" and known and data.coding else {}


def network_for(network: nn.Module | str, data: Dataset, likelihood: Likelihood, seed: int) -> nn.Module:
    """The user's network, or one of the library's by its name, made for these data."""
    if isinstance(network, str):
        options = options_by(data, network)
        return network_named(network, data.seen_shape, data.classes * likelihood.width, seed=seed, **options)
    if not isinstance(network, nn.Module):
        raise InputError(f"network must be a torch.nn.Module or a name such as linear, not a {type(network).__name__}")
    return network


def with_class_weights(
    likelihood: Likelihood, given: str | tuple[float, ...] | None, data: Dataset, device: object
) -> Likelihood:
    """The likelihood with weights of classes, by the counts of all training rows where they are to be balanced."""
    if given is None:
        return likelihood
    if data.kind != "classes":
        raise InputError(f"class_weights: {data.name} has {data.kind} targets, no classes; leave it out")
    counts = data.y.bincount(minlength=data.classes)
    return weighted(likelihood, weights_of(given, counts).to(device))  # type: ignore[call-overload]
