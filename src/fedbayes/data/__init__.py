"""Data sets, and how they are spread over clients."""

from fedbayes.data import partition
from fedbayes.data.catalogue import load
from fedbayes.data.dataset import Clients, Dataset, Prepare, Scale
from fedbayes.data.own import from_arrays, from_clients, standardised
from fedbayes.data.ragged import Ragged

__all__ = [
    "Clients",
    "Dataset",
    "Prepare",
    "Ragged",
    "Scale",
    "from_arrays",
    "from_clients",
    "load",
    "partition",
    "standardised",
]
