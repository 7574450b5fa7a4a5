"""Data sets, and how they are spread over clients."""

from fedbayes.data import augment, partition, show
from fedbayes.data.agreement import agree_on, save_summaries
from fedbayes.data.catalogue import CATALOGUE, listing, load
from fedbayes.data.coding import Coding, read_coding
from fedbayes.data.dataset import Clients, Dataset
from fedbayes.data.fields import Fields
from fedbayes.data.own import from_arrays, from_clients, from_datasets, standardised
from fedbayes.data.preparation import Prepare, Scale, Standardise, TableColumns
from fedbayes.data.ragged import Ragged
from fedbayes.data.read import from_csv, from_folder
from fedbayes.data.site_tables import blank, from_tables, summary_of
from fedbayes.data.synthetic import scaled

__all__ = [
    "CATALOGUE",
    "Clients",
    "Coding",
    "Dataset",
    "Fields",
    "Prepare",
    "Ragged",
    "Scale",
    "Standardise",
    "TableColumns",
    "agree_on",
    "augment",
    "blank",
    "from_arrays",
    "from_clients",
    "from_csv",
    "from_datasets",
    "from_folder",
    "from_tables",
    "listing",
    "load",
    "partition",
    "read_coding",
    "save_summaries",
    "scaled",
    "show",
    "standardised",
    "summary_of",
]
