"""Data sets, and how they are spread over clients."""

from fedbayes.data import augment, partition, show
from fedbayes.data.catalogue import CATALOGUE, listing, load
from fedbayes.data.dataset import Clients, Dataset
from fedbayes.data.own import from_arrays, from_clients, from_datasets, standardised
from fedbayes.data.preparation import Prepare, Scale, Standardise
from fedbayes.data.ragged import Ragged
from fedbayes.data.read import from_csv, from_folder
from fedbayes.data.synthetic import scaled

__all__ = [
    "CATALOGUE",
    "Clients",
    "Dataset",
    "Prepare",
    "Ragged",
    "Scale",
    "Standardise",
    "augment",
    "from_arrays",
    "from_clients",
    "from_csv",
    "from_datasets",
    "from_folder",
    "listing",
    "load",
    "partition",
    "scaled",
    "show",
    "standardised",
]
