"""Partitions: how a data set is spread over clients, as frozen values that deal row numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data import deal
from fedbayes.data.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Shares:
    """Rows of each client, and rows kept at the server; no row is in both."""

    rows: Ragged
    server: Tensor


@dataclass(frozen=True)
class Partition:
    """A way to spread rows over clients: `partition(labels, clients, rng)` gives `Shares`.

    `by` says what it looks at: "label" (one class per row), "owner" (who the row came from) or "row" (nothing).
    """

    name: str
    deal: Callable[..., deal.Dealt]
    settings: tuple[tuple[str, Any], ...] = ()
    by: str = "label"
    server: float = 0

    @property
    def options(self) -> dict[str, Any]:
        return {**dict(self.settings), "server": self.server}

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Shares:
        labels = np.asarray(labels)
        if self.by != "row" and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
            raise ValueError(f"{self.name} needs one whole-number {self.by} per row; for other targets use iid()")
        if clients < 1:
            raise ValueError(f"clients must be at least 1, not {clients}")
        at_server = int(self.server) if self.server >= 1 else round(self.server * len(labels))
        if len(labels) - at_server < clients:
            raise ValueError(
                f"{len(labels)} rows with {at_server} at the server cannot serve {clients} clients: "
                "lower clients or server"
            )
        order = rng.permutation(len(labels)) if at_server else np.arange(len(labels))
        server, rest = np.sort(order[:at_server]), np.sort(order[at_server:])
        flat, sizes = self.deal(labels[rest], clients, rng, **dict(self.settings))
        if sizes.min() < 1:
            empty = np.flatnonzero(sizes < 1)
            raise ValueError(
                f"{self.name} leaves {len(empty)} of {clients} clients without a row (first: client {empty[0]}): "
                "lower clients, or raise volume or alpha"
            )
        return Shares(Ragged.of_sizes(rest[flat], sizes), torch.from_numpy(server))

    def __str__(self) -> str:
        options = {**dict(self.settings), "server": self.server or None}
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in options.items() if value is not None)})"


_WHOLE = ("volume", "owners_each", "least", "k", "per_client", "main")


def iid(*, volume: int | None = None, server: float = 0) -> Partition:
    """Equal random shares (sizes differ by at most one), or `volume` rows each. Covers all rows without volume."""
    return _partition(deal.iid, by="row", server=server, volume=volume)


def natural(*, owners_each: int = 1, some: bool = False, server: float = 0) -> Partition:
    """A client holds the rows of `owners_each` writers, devices or files, as they came.

    All owners must find a place; with `some` as many as the clients need are drawn, and the others left out.
    """
    return _partition(deal.natural, by="owner", server=server, owners_each=owners_each, some=some)


def dirichlet(alpha: float, *, least: int = 1, server: float = 0) -> Partition:
    """Each label's rows are spread over the clients by Dir(alpha); volumes differ (Hsu et al., 2019). Covers all rows.

    A client left with fewer than `least` rows is topped up, row by row, from the largest.
    """
    return _partition(deal.dirichlet, server=server, alpha=alpha, least=least)


def dirichlet_equal(alpha: float, *, volume: int | None = None, server: float = 0) -> Partition:
    """Each client's label mix is drawn from Dir(alpha), equal volumes, no row twice.

    Where a class has run out the client takes more of its other classes.
    """
    return _partition(deal.dirichlet_equal, server=server, alpha=alpha, volume=volume)


def dirichlet_own(low: float = 0.0, high: float = 0.5, *, volume: int | None = None, server: float = 0) -> Partition:
    """FedUAB: client k's label mix is drawn from Dir(eta_k), eta_k on an even grid in (low, high], equal volumes.

    Rows are used again when a class has run out, so clients may overlap.
    """
    if not 0 <= low < high:
        raise ValueError(f"dirichlet_own needs 0 <= low < high, not low={low}, high={high}")
    return _partition(deal.dirichlet_own, server=server, low=low, high=high, volume=volume)


def labels_per_client(k: int = 2, *, volume: int | None = None, server: float = 0) -> Partition:
    """Each client holds exactly k labels in equal parts.

    With `volume` that many rows each; without, all rows of a class are cut evenly among its holders
    (as many as its size asks for), so that all rows are dealt when clients * k >= classes and volumes are near equal.
    """
    if volume is not None and volume < k:
        raise ValueError(f"volume {volume} cannot hold {k} labels: raise volume")
    return _partition(deal.labels_per_client, server=server, k=k, volume=volume)


def shards(per_client: int = 2, *, volume: int | None = None, server: float = 0) -> Partition:
    """Rows sorted by label and cut into equal shards; a client gets `per_client` of different classes.

    McMahan et al. (2017), Li et al. (2022). Shards at a class boundary hold two classes when sizes don't divide.
    """
    return _partition(deal.shards, server=server, per_client=per_client, volume=volume)


def main_classes(main: int = 2, p: float = 0.2, *, volume: int | None = None, server: float = 0) -> Partition:
    """A part p of each client's rows is spread evenly over all classes, the rest evenly over its main classes.

    Equal volumes; without `volume` the largest that the classes allow.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is a share in [0, 1], not {p}")
    return _partition(deal.main_classes, server=server, main=main, p=p, volume=volume)


def _partition(way: Callable[..., deal.Dealt], *, server: float, by: str = "label", **settings: Any) -> Partition:
    if server < 0 or (server > 1 and server != int(server)):
        raise ValueError(f"server is a share below 1 or a number of rows, not {server}")
    for key, value in settings.items():
        if key == "alpha" and not 0 < value <= 1e9:
            raise ValueError(f"alpha must be positive and at most 1e9, not {value}")
        if key in _WHOLE and value is not None and (value != int(value) or value < 1):
            raise ValueError(f"{key} must be a whole number of at least 1, not {value}")
    return Partition(way.__name__, way, tuple(settings.items()), by, server)


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "natural": natural,
    "dirichlet": dirichlet,
    "dirichlet_equal": dirichlet_equal,
    "dirichlet_own": dirichlet_own,
    "labels_per_client": labels_per_client,
    "shards": shards,
    "main_classes": main_classes,
}


@dataclass(frozen=True)
class Recipe:
    """A paper's split: how many clients, which partition, how many test rows each."""

    clients: int
    partition: Partition
    test_per_client: int | None = None


RECIPES: dict[str, Recipe] = {
    # FedUAB, table 5: 100 clients of equal volume; "all" is 600 (MNIST) or 500 each, "small" is 50.
    "feduab-all-iid": Recipe(100, iid()),
    "feduab-all-dirichlet": Recipe(100, dirichlet_own()),
    "feduab-all-only2": Recipe(100, labels_per_client(2)),
    "feduab-small-iid": Recipe(100, iid(volume=50)),
    "feduab-small-dirichlet": Recipe(100, dirichlet_own(volume=50)),
    "feduab-small-only2": Recipe(100, labels_per_client(2, volume=50)),
    # Statistical aggregation, section 3.1; "pretrained" keeps a tenth of the rows at the server.
    "aggregation-iid": Recipe(10, iid()),
    "aggregation-2class": Recipe(10, shards(2)),
    "aggregation-dirichlet-0.5": Recipe(10, dirichlet(0.5)),
    "aggregation-dirichlet-5": Recipe(10, dirichlet(5.0)),
    "aggregation-equal-0.5": Recipe(10, dirichlet_equal(0.5)),  # The text says equal volumes: the other reading.
    "aggregation-equal-5": Recipe(10, dirichlet_equal(5.0)),
    "aggregation-iid-pretrained": Recipe(10, iid(server=0.1)),
    # What the server takes leaves unequal classes, which shards would straddle.
    "aggregation-2class-pretrained": Recipe(10, labels_per_client(2, server=0.1)),
    "aggregation-dirichlet-0.5-pretrained": Recipe(10, dirichlet(0.5, server=0.1)),
    "aggregation-dirichlet-5-pretrained": Recipe(10, dirichlet(5.0, server=0.1)),
    "fedag": Recipe(10, iid()),
    "pfedpf": Recipe(20, main_classes(2, 0.2, volume=1500), test_per_client=500),
    # FedPPD: "at most 2 major classes", and by its code 10 rows of every class (CIFAR-100: 2) beside them.
    "fedppd-mnist": Recipe(10, main_classes(2, 0.24, volume=420, server=10_000)),
    "fedppd-cifar10": Recipe(10, main_classes(2, 0.05, volume=2100, server=10_000)),
    "fedppd-cifar100": Recipe(10, main_classes(20, 0.09, volume=2200, server=10_000)),
    "fedppd-iid": Recipe(10, iid(volume=4000, server=10_000)),
    "fedppd-active": Recipe(10, main_classes(2, 0.05, volume=3600)),  # 400 labelled and a pool of 3200.
}
