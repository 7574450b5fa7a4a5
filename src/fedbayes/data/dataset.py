"""A data set and its spread over clients: the arrays are held once, a client is row numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.coding import Coding
from fedbayes.data.deal import apportion, by_counts
from fedbayes.data.fields import Fields
from fedbayes.data.partition import Partition, Shares, natural
from fedbayes.data.preparation import AS_STORED, Preparation, Scale
from fedbayes.data.ragged import Ragged
from fedbayes.data.survival import check_targets
from fedbayes.errors import InputError

Dealer = Partition | Callable[[np.ndarray, int, np.random.Generator], Any]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test arrays, stored as they came (uint8, int64, float32; float64 where they are standardised).

    `prepare` makes of a stored batch what the network sees; it is part of the model, so all that predicts takes stored
    rows.
    `kind` is "classes" (y int64 [n]), "labels" (y 0/1 float32 [n, C]), "real" (y float32 [n, D]) or "survival"
    (y float32 [n, 2]: a time, and 1 where the event was seen at it, 0 where not until then); `classes` is C, D or 1.
    `times` are where predicted survival curves are cut.
    `owner` says whom a row came from where that is known, `owner_names` what these are called, `columns` what the
    inputs of a table are called; `note` what is missing from a partial set. `coding` says how tables become
    stored rows.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    kind: str
    classes: int
    prepare: Preparation = AS_STORED
    class_names: tuple[str, ...] = ()
    target_scale: Scale | None = None
    vocabulary: tuple[str, ...] = field(default=(), repr=False)
    owner: Tensor | None = field(default=None, repr=False)
    test_owner: Tensor | None = field(default=None, repr=False)
    owner_names: tuple[str, ...] = field(default=(), repr=False)
    columns: tuple[str, ...] = field(default=(), repr=False)
    note: str = ""
    times: tuple[float, ...] = field(default=(), repr=False)
    coding: Coding | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """Shape of what the network sees of one input."""
        seen = self.prepare(self.x[:1])
        return tuple(seen.shape[1:]) if isinstance(seen, Tensor) else self.shape

    def unusable(self, x: Tensor) -> bool:
        """Whether inputs hold values that no network can take; with a coding a missing one (nan) is filled."""
        if not x.is_floating_point():
            return False
        return bool((x.isinf() if self.coding is not None else ~x.isfinite()).any())

    @property
    def owners(self) -> int:
        """How many writers, devices or files the training rows came from; 0 where that is not known."""
        return 0 if self.owner is None else int(self.owner.max()) + 1

    def as_seen(self) -> "Dataset":
        """The same data with inputs as the network sees them, for code that takes no model."""
        if isinstance(self.prepare, Fields):
            raise ValueError(f"{self.name}: rows of several tensors are seen by a network alone")
        x, test_x = (self.prepare(part).float() for part in (self.x, self.test_x))
        return replace(self, x=x, test_x=test_x, prepare=AS_STORED)

    def __repr__(self) -> str:
        what = self.kind if self.kind == "survival" else f"{self.classes} {self.kind}"
        rows = f"{len(self.x)} + {len(self.test_x)} of {list(self.shape)} {str(self.x.dtype).removeprefix('torch.')}"
        return f"Dataset({self.name}: {rows}, {what}{', ' + self.note if self.note else ''})"

    def sites(self) -> "Clients":
        """One client for each owner of rows: the federation as the data came."""
        return self.split(natural(), clients=max(self.owners, 1))

    def split(self, partition: Dealer, clients: int, seed: int = 0, *, test_per_client: int | None = None) -> "Clients":
        """Spread the training rows over clients by a partition, and give each test rows of its own label mix.

        Without `test_per_client` a client gets its share of the test set, at least 100 rows where there are so many.
        Test rows of two clients overlap only when a class of the test set has run out. Owners that brought test rows
        keep their own.
        """
        by = getattr(partition, "by", "label" if self.kind == "classes" else "row")
        if len(self) == 0:
            raise ValueError(f"{self.name} has no training rows to split. {self.note}".rstrip())
        if by == "label" and self.kind != "classes":
            raise ValueError(f"{partition} deals by label, but {self.name} has {self.kind} targets: use iid()")
        if by == "owner" and self.owner is None:
            raise ValueError(f"{partition} deals by owner, but nobody owns the rows of {self.name}: use from_clients")
        train_seed, test_seed = np.random.SeedSequence(seed).spawn(2)
        keys = self.owner if by == "owner" and self.owner is not None else self.y
        dealt = partition(keys.numpy(), clients, np.random.default_rng(train_seed))
        shares = dealt if isinstance(dealt, Shares) else Shares(Ragged.of_lists(dealt), torch.zeros(0).long())
        _check_rows(shares, clients, len(self))
        if by == "owner" and self.test_owner is not None:
            test = _own_test_rows(self, shares.rows)
        else:
            test = _test_rows(self, shares.rows, test_per_client, np.random.default_rng(test_seed))
        names = _site_names(self, shares.rows) if by == "owner" else ()
        return Clients(self, shares.rows, test, shares.server, names)


@dataclass(frozen=True, eq=False)
class Clients:
    """Who holds which rows of a data set; `server` are rows of `data.x` that no client has.

    `names` are what the clients are called, where that is known.
    """

    data: Dataset
    train: Ragged
    test: Ragged
    server: Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), int(self.sizes.max())
        server = f", {len(self.server)} at the server" if len(self.server) else ""
        rows = f"{low} to {high}" if low < high else f"{low}"
        who = f": {', '.join(self.names)}" if 0 < len(self.names) <= 6 else ""
        return f"Clients({len(self)} of {self.data.name}{who}, {rows} rows each{server})"

    def name(self, k: int) -> str:
        """What client k is called: its name where it has one, else its number."""
        return self.names[k] if self.names else str(k)

    @property
    def sizes(self) -> Tensor:
        """Training rows of each client, int64 [K]."""
        return self.train.sizes

    def train_rows(self, k: int) -> Tensor:
        return self.train[k]

    def test_rows(self, k: int) -> Tensor:
        return self.test[k]

    def label_counts(self) -> Tensor:
        """How many training rows of each label a client holds, int64 [K, C]."""
        return _label_counts(self.data.y, self.train, self.data)

    def test_label_counts(self) -> Tensor:
        return _label_counts(self.data.test_y, self.test, self.data)

    def pooled(self) -> "Clients":
        """One client that holds the rows of all, each once: training without a federation."""
        return self._one(self.train.flat.unique())

    def without(self, client: int | str) -> "Clients":
        """The others alone, tested on all rows of one client that does not take part; a number or a name."""
        k = place_of(client, self.names, len(self))
        if len(self) < 2:
            raise ValueError("leaving out the only client leaves nobody to train: there must be at least two")
        data, own, tested = self.data, self.train[k], self.test[k]
        data = replace(
            data,
            test_x=torch.cat([data.x[own], data.test_x[tested]]),
            test_y=torch.cat([data.y[own], data.test_y[tested]]),
            test_owner=None,
        )
        rest = [i for i in range(len(self)) if i != k]
        nothing = Ragged.of_sizes(np.zeros(0, np.int64), np.zeros(len(rest), np.int64))
        names = tuple(self.names[i] for i in rest) if self.names else ()
        return replace(self, data=data, train=Ragged.of_lists([self.train[i] for i in rest]), test=nothing, names=names)

    def at_server(self) -> "Clients":
        """One client that holds the server's rows, and no test rows: training before the federation begins."""
        if not len(self.server):
            raise ValueError("the server has no rows of its own: give the partition a share for it, such as server=0.1")
        data = replace(self.data, test_x=self.data.test_x[:0], test_y=self.data.test_y[:0], test_owner=None)
        return replace(self, data=data)._one(self.server)

    def _one(self, rows: Tensor) -> "Clients":
        tested = torch.arange(len(self.data.test_x))
        return replace(self, train=Ragged.of_lists([rows]), test=Ragged.of_lists([tested]), names=())

    def holdout(self, fraction: float, seed: int = 0) -> tuple["Clients", list[Tensor]]:
        """Cut a random share off each client's training rows for validation; every client keeps at least one row."""
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction must be in [0, 1), not {fraction}")
        rng = np.random.default_rng(seed)
        owners, sizes = self.train.owners().numpy(), self.sizes.numpy()
        flat = self.train.flat.numpy()[np.argsort(owners + rng.random(len(owners)))]
        cut = np.minimum(np.rint(sizes * fraction).astype(np.int64), np.maximum(sizes - 1, 0))
        place = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        out = place < np.repeat(cut, sizes)
        rest = replace(self, train=Ragged.of_sizes(flat[~out], sizes - cut))
        return rest, list(Ragged.of_sizes(flat[out], cut))


def _label_counts(y: Tensor, rows: Ragged, data: Dataset) -> Tensor:
    if data.kind in ("real", "survival"):
        raise ValueError(f"{data.name} has {data.kind} targets, so no labels to count: see sizes")
    if data.kind == "classes":
        cell = rows.owners() * data.classes + y[rows.flat]
        return torch.bincount(cell, minlength=len(rows) * data.classes).reshape(len(rows), data.classes)
    counts = torch.zeros(len(rows), data.classes, dtype=torch.int64)
    return counts.index_add_(0, rows.owners(), y[rows.flat].long())


def _check_rows(shares: Shares, clients: int, n: int) -> None:
    """A user's own partition function is held to the same promises as ours."""
    rows = shares.rows
    if len(rows) != clients:
        raise ValueError(f"the partition gave rows for {len(rows)} clients, {clients} were asked for")
    if int(rows.sizes.min()) < 1:
        raise ValueError(f"the partition leaves client {int(rows.sizes.argmin())} without a row: lower clients")
    if int(rows.flat.min()) < 0 or int(rows.flat.max()) >= n:
        raise ValueError(f"the partition names rows outside 0..{n - 1}")


def _test_rows(data: Dataset, rows: Ragged, each: int | None, rng: np.random.Generator) -> Ragged:
    n, clients = len(data.test_x), len(rows)
    if each is not None and not 0 <= each <= n:
        raise ValueError(f"test_per_client must be between 0 and the {n} test rows of {data.name}, not {each}")
    want = each if each is not None else max(n // clients, min(100, n))
    if n == 0 or want == 0:
        return Ragged.of_sizes(np.zeros(0, np.int64), np.zeros(clients, np.int64))
    if data.kind != "classes":
        counts, labels = np.full((clients, 1), want), np.zeros(n, np.int64)
        return Ragged.of_sizes(*by_counts(labels, counts, rng, reuse=True))
    counts_at_home = _label_counts(data.y, rows, data).numpy()
    counts = apportion(counts_at_home / counts_at_home.sum(1, keepdims=True), want, rng)
    labels = data.test_y.numpy()
    have = np.bincount(labels, minlength=data.classes)
    short = np.argwhere(counts > have)
    if each is not None and len(short):
        k, c = short[0]
        raise ValueError(
            f"test_per_client={each}: client {k}'s mix asks for {counts[k, c]} test rows of class {c}, "
            f"{data.name} has {have[c]}: lower test_per_client"
        )
    counts = np.minimum(counts, have)[:, np.unique(labels)]
    return Ragged.of_sizes(*by_counts(labels, counts, rng, reuse=True))


def _site_names(data: Dataset, rows: Ragged) -> tuple[str, ...]:
    """What clients that hold the rows of owners are called, after those owners."""
    if data.owner is None or not data.owner_names:
        return ()
    return tuple("+".join(data.owner_names[i] for i in data.owner[own].unique().tolist()) for own in rows)


def _own_test_rows(data: Dataset, rows: Ragged) -> Ragged:
    assert data.owner is not None
    assert data.test_owner is not None
    client_of = torch.full((1 + max(int(data.owner.max()), int(data.test_owner.max())),), -1)
    client_of[data.owner[rows.flat]] = rows.owners()
    home = client_of[data.test_owner]
    rows_with_home = (home >= 0).nonzero().flatten()
    flat = rows_with_home[home[rows_with_home].argsort(stable=True)]
    return Ragged.of_sizes(flat.numpy(), torch.bincount(home[rows_with_home], minlength=len(rows)).numpy())


def place_of(client: int | str, names: Sequence[str], count: int) -> int:
    """The number of a client to leave out, given by number or name: 1 is the second, "1" the one of that name."""
    if isinstance(client, str) and client in names:
        return list(names).index(client)
    if not str(client).isdecimal() or int(client) >= count:
        known = f", or one of {', '.join(names[:8])}" if names else ""
        raise InputError(f"no client {client!r} to leave out: give a number from 0 to {count - 1}{known}")
    return int(client)


def check_arrays(x: Tensor, y: Tensor, kind: str, classes: int, where: str) -> None:
    """Raise a ValueError that names the place and the mend unless x and y fit together and are finite."""
    if len(x) != len(y):
        raise ValueError(f"{where}: {len(x)} inputs but {len(y)} targets: give one target per input")
    for what, values in (("x", x), ("y", y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = (~torch.isfinite(values.reshape(len(values), -1))).any(1).nonzero().flatten()
            raise ValueError(
                f"{where}: {what} is not finite in {len(bad)} of {len(values)} rows (first: row {int(bad[0])}): "
                "drop those rows or fill them in"
            )
    if kind == "classes" and len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        row = int(((y < 0) | (y >= classes)).nonzero()[0])
        raise ValueError(
            f"{where}: label {int(y[row])} at row {row} is outside 0..{classes - 1}: "
            "number the classes from 0, or raise classes"
        )
    if kind == "labels" and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"{where}: labels must be 0 or 1")
    if kind == "survival":
        check_targets(y, where)
    elif kind != "classes" and y.shape[1:] != (classes,):
        raise ValueError(f"{where}: y has shape {list(y.shape)}, expected [n, {classes}]")
