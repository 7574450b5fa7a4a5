"""Laws of partitions: rows dealt once, exact volumes, mixes as asked for, one split a seed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import from_arrays, partition, ragged
from fedbayes.data.deal import apportion
from fedbayes.data.partition import PARTITIONS, RECIPES
from fedbayes.data.ragged import Ragged

WAYS = {
    "iid": partition.iid(),
    "iid of volume": partition.iid(volume=4),
    "natural": partition.natural(),
    "dirichlet": partition.dirichlet(0.3),
    "dirichlet of at least 2": partition.dirichlet(0.1, least=2),
    "dirichlet_equal": partition.dirichlet_equal(0.3),
    "dirichlet_equal of volume": partition.dirichlet_equal(0.3, volume=5),
    "dirichlet_own": partition.dirichlet_own(),
    "dirichlet_own of volume": partition.dirichlet_own(volume=7),
    "labels_per_client": partition.labels_per_client(2),
    "labels_per_client of volume": partition.labels_per_client(2, volume=4),
    "shards": partition.shards(2),
    "shards of volume": partition.shards(2, volume=6),
    "main_classes": partition.main_classes(2, 0.2),
    "main_classes of volume": partition.main_classes(1, 0.5, volume=5),
    "with a server": partition.dirichlet(1.0, server=0.2),
    "with ten at the server": partition.iid(server=10),
}
REUSES = {"dirichlet_own"}
COVERS = {"iid", "dirichlet", "shards", "natural"}


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    classes = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(1, 60), min_size=classes, max_size=classes))
    labels = np.repeat(np.arange(classes), sizes)
    seed = draw(st.integers(0, 2**32 - 1))
    np.random.default_rng(seed).shuffle(labels)
    return labels, draw(st.integers(1, 12)), seed


def attempt(cut, labels, clients, seed):
    try:
        return cut(labels, clients, np.random.default_rng(seed)), ""
    except ValueError as error:
        return None, str(error)


def test_every_partition_is_held_to_the_laws():
    assert {way.name for way in WAYS.values()} == set(PARTITIONS)


@pytest.mark.parametrize("way", WAYS, ids=str)
@settings(max_examples=40)
@given(problem=problems())
def test_laws(way, problem):
    labels, clients, seed = problem
    cut = WAYS[way]
    if cut.by == "owner":
        clients = min(clients, len(np.unique(labels)))
    shares, refusal = attempt(cut, labels, clients, seed)
    if shares is None:
        assert any(mend in refusal for mend in ("lower", "raise", "use ")), refusal
        return
    rows, sizes = shares.rows.flat.numpy(), shares.rows.sizes.numpy()
    assert len(shares.rows) == clients
    assert sizes.min() >= 1
    assert rows.min() >= 0
    assert rows.max() < len(labels)
    assert not np.isin(rows, shares.server.numpy()).any()
    if cut.name not in REUSES:
        assert len(np.unique(rows)) == len(rows)
    if cut.name in COVERS and cut.options.get("volume") is None and (cut.by != "owner" or clients == labels.max() + 1):
        assert len(rows) + len(shares.server) == len(labels)
    if volume := cut.options.get("volume"):
        assert (sizes == volume).all()
    if cut.name in ("iid", "shards"):
        assert sizes.max() - sizes.min() <= 2
    if cut.name in ("dirichlet_equal", "dirichlet_own", "main_classes"):
        assert len(set(sizes)) == 1
    again = cut(labels, clients, np.random.default_rng(seed))
    assert torch.equal(again.rows.flat, shares.rows.flat)
    assert torch.equal(again.server, shares.server)


@pytest.fixture(scope="module")
def even():
    """Ten classes of 120 rows."""
    rng = np.random.default_rng(1)
    return rng.permutation(np.repeat(np.arange(10), 120))


def counts(shares, labels):
    return np.stack([np.bincount(labels[rows.numpy()], minlength=labels.max() + 1) for rows in shares.rows])


def deal(cut, labels, clients, seed=0):
    return counts(cut(labels, clients, np.random.default_rng(seed)), labels)


def test_another_seed_gives_another_split(even):
    for way, cut in WAYS.items():
        first, second = (cut(even, 10, np.random.default_rng(seed)).rows for seed in (0, 1))
        if way != "natural":  # All owners, as they came.
            assert not torch.equal(first.flat, second.flat), way


def test_labels_per_client_gives_exactly_k_in_equal_parts(even):
    for k in (1, 2, 3, 10):
        held = deal(partition.labels_per_client(k, volume=30), even, 20)
        assert ((held > 0).sum(1) == k).all()
        assert (np.ptp(np.where(held > 0, held, 30 // k), axis=1) <= 1).all()


def test_labels_per_client_without_volume_deals_every_row(even):
    held = deal(partition.labels_per_client(2), even, 20)
    assert held.sum() == len(even)
    assert (held.sum(0) == 120).all()
    assert ((held > 0).sum(1) == 2).all()


def test_label_pairs_are_not_always_the_same(even):
    held = deal(partition.labels_per_client(2), even, 100)
    assert len({tuple(np.flatnonzero(row)) for row in held}) > 15


def test_shards_are_of_different_classes(even):
    held = deal(partition.shards(2), even, 10)
    assert (np.sort(held, axis=1)[:, -2:] == 60).all()
    assert (held.sum(1) == 120).all()


def test_a_class_that_fills_most_shards_is_refused():
    with pytest.raises(ValueError, match="class 0 fills"):
        partition.shards(2)(np.repeat([0, 1], [90, 10]), 5, np.random.default_rng(0))


def test_main_classes_have_the_mix_of_the_paper(even):
    held = deal(partition.main_classes(2, 0.2, volume=50), even, 20)
    assert (np.sort(held, axis=1) == [1] * 8 + [21] * 2).all()
    assert ((held == 21).sum(0) == 4).all()  # Every class is main for as many clients.


def test_main_classes_without_volume_take_all_that_even_classes_allow(even):
    assert (deal(partition.main_classes(2, 0.5), even, 10).sum(1) == 120).all()
    assert (deal(partition.main_classes(2, 0.2), even, 10).sum(1) >= 116).all()  # 2.4 of a class each: rounding costs.


def test_dirichlet_shares_have_the_right_mean_and_variance():
    labels = np.repeat([0, 1], 40_000)
    share = deal(partition.dirichlet(0.5), labels, 400) / 40_000
    # A share of Dir(a) over K clients has mean 1/K and variance (1/K) (1 - 1/K) / (a K + 1).
    assert share.mean() == pytest.approx(1 / 400)
    assert share.var() == pytest.approx(1 / 400 * (1 - 1 / 400) / 201, rel=0.25)


def test_dirichlet_own_has_the_concentrations_of_the_grid(even):
    share = deal(partition.dirichlet_own(volume=1000), np.tile(even, 10), 2000) / 1000
    eta = 0.5 * np.arange(1, 2001) / 2000
    # E[sum p^2] of Dir(eta) over C labels is (eta + 1) / (C eta + 1).
    for part in np.split(np.arange(2000), 4):
        expected = ((eta + 1) / (10 * eta + 1))[part].mean()
        assert (share[part] ** 2).sum(1).mean() == pytest.approx(expected, rel=0.05)


def test_dirichlet_own_uses_rows_again_only_when_a_class_has_run_out():
    labels = np.repeat([0, 1, 2], 1000)
    shares = partition.dirichlet_own(volume=5)(labels, 20, np.random.default_rng(0))
    assert len(torch.unique(shares.rows.flat)) == 100
    shares = partition.dirichlet_own(volume=500)(labels, 20, np.random.default_rng(0))
    assert len(torch.unique(shares.rows.flat)) < 10_000
    assert all(len(torch.unique(rows)) == 500 for rows in shares.rows)


def test_small_concentrations_stay_finite(even):
    assert deal(partition.dirichlet(1e-5), even, 10).sum() == len(even)
    assert (deal(partition.dirichlet_own(high=1e-6, volume=20), even, 10).max(1) == 20).all()


def test_natural_clients_are_owners():
    owners = np.array([2, 0, 1, 0, 2, 2, 3, 3])
    rows = partition.natural()(owners, 4, np.random.default_rng(0)).rows
    assert [r.tolist() for r in rows] == [[1, 3], [2], [0, 4, 5], [6, 7]]
    joined = partition.natural(owners_each=2)(owners, 2, np.random.default_rng(0)).rows
    assert [r.tolist() for r in joined] == [[1, 2, 3], [0, 4, 5, 6, 7]]


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda s: sum(s) > 1e-3),
    total=st.integers(0, 1000),
)
def test_apportioned_numbers_add_up_and_stay_within_one(shares, total):
    share = np.array(shares) / sum(shares)
    whole = apportion(share, total, np.random.default_rng(0))
    assert whole.sum() == total
    assert (np.abs(whole - share * total) <= 1 + 1e-6).all()


MNIST_LIKE = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
CIFAR_LIKE = np.repeat(np.arange(10), 5000)


@pytest.mark.parametrize("name", RECIPES, ids=str)
def test_recipes_fit_the_sets_that_they_were_written_for(name):
    recipe = RECIPES[name]
    labels = np.repeat(np.arange(100), 500) if "100" in name else CIFAR_LIKE
    if name in ("pfedpf", "fedppd-mnist") or name.startswith("feduab"):
        labels = MNIST_LIKE
    shares = recipe.partition(labels, recipe.clients, np.random.default_rng(0))
    held = counts(shares, labels)
    assert len(held) == recipe.clients
    expected = {"feduab-all-": 600, "feduab-small-": 50, "pfedpf": 1500, "fedppd-mnist": 420}
    for start, volume in {**expected, "fedppd-cifar10": 2100, "fedppd-cifar100": 2200}.items():
        if name == start or (start.endswith("-") and name.startswith(start)):
            # Two labels a client over unequal classes cannot be both equal and complete.
            assert np.abs(held.sum(1) - volume).max() <= (15 if name == "feduab-all-only2" else 0)
    if name.startswith("fedppd") and name != "fedppd-active":
        assert len(shares.server) == 10_000
    if name == "aggregation-2class":
        assert (np.sort(held, axis=1)[:, -2:] == 2500).all()
    if name.endswith("only2") or name.startswith("aggregation-2class"):
        assert ((held > 0).sum(1) == 2).all()


@pytest.mark.parametrize(
    ("make", "clients", "says"),
    [
        (lambda: partition.dirichlet(0), 2, "alpha must be positive"),
        (lambda: partition.dirichlet(float("nan")), 2, "alpha must be positive"),
        (lambda: partition.dirichlet_own(0.5, 0.1), 2, "low < high"),
        (lambda: partition.iid(volume=0), 2, "volume must be a whole number"),
        (lambda: partition.iid(server=-1), 2, "server is a share"),
        (lambda: partition.iid(server=2.5), 2, "server is a share"),
        (lambda: partition.main_classes(p=1.5), 2, "share in"),
        (lambda: partition.labels_per_client(3, volume=2), 2, "raise volume"),
        (lambda: partition.iid(), 0, "clients must be at least 1"),
        (lambda: partition.iid(), 100, "lower clients"),
        (lambda: partition.iid(volume=50), 10, "lower volume or clients"),
        (lambda: partition.iid(server=39), 2, "lower clients or server"),
        (lambda: partition.labels_per_client(5), 2, "lower k"),
        (lambda: partition.labels_per_client(2, volume=18), 3, "class 0 has 20 rows, the partition needs 27"),
        (lambda: partition.main_classes(3), 2, "lower main"),
        (lambda: partition.dirichlet(1.0, least=30), 2, "lower clients"),
        (lambda: partition.natural(), 3, "lower clients"),
    ],
)
def test_errors_name_the_quantity_and_the_mend(make, clients, says):
    labels = np.repeat([0, 1], 20)
    with pytest.raises(ValueError, match=says):
        make()(labels, clients, np.random.default_rng(0))


def test_partitions_by_label_refuse_real_targets_and_label_sets():
    real = from_arrays(np.zeros((20, 2), np.float32), np.linspace(0, 1, 20, dtype=np.float32))
    many = from_arrays(np.zeros((20, 2), np.float32), np.ones((20, 3), np.int64))
    for data in (real, many):
        with pytest.raises(ValueError, match=r"use iid\(\)"):
            data.split(partition.dirichlet(1.0), 2)
        assert data.split(partition.iid(), 4).sizes.tolist() == [5] * 4


def test_partitions_are_values():
    assert partition.iid(volume=3).options == {"volume": 3, "server": 0}
    assert partition.iid(volume=3) == partition.iid(volume=3) != partition.iid(volume=4)
    assert len({partition.dirichlet(0.3), partition.dirichlet(0.3), partition.dirichlet(0.4)}) == 2
    cut = pickle.loads(pickle.dumps(partition.dirichlet(0.3)))
    assert cut == partition.dirichlet(0.3)
    assert (cut.name, cut.options) == ("dirichlet", {"alpha": 0.3, "least": 1, "server": 0})
    assert str(partition.main_classes(2, 0.0, server=5)) == "main_classes(main=2, p=0.0, server=5)"
    assert str(partition.main_classes(2, 0.2, volume=9)) == "main_classes(main=2, p=0.2, volume=9)"


def test_a_table_of_many_rows_is_a_file_that_is_mapped(monkeypatch):
    sizes = np.random.default_rng(0).integers(1, 9, 300)
    flat = np.random.default_rng(1).integers(0, 50, sizes.sum())
    plain = Ragged.of_sizes(flat, sizes)
    monkeypatch.setattr(ragged, "MANY", 100)
    mapped = Ragged.of_sizes(flat, sizes)
    assert torch.equal(mapped.flat, plain.flat)
    assert all(torch.equal(mapped[k], plain[k]) for k in (0, 7, 299))
    again = pickle.loads(pickle.dumps(mapped))
    assert torch.equal(again.flat, plain.flat)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert any(
            f"{mapped.flat.data_ptr():x}-" in line and "deleted" in line for line in maps.read_text().split("\n")
        )


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's account of mapped pages")
def test_pages_of_a_mapped_table_are_let_go():
    clients = 300_000
    table = Ragged.of_sizes(np.arange(4 * clients), np.full(clients, 4))

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split("\n")
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{table.flat.data_ptr():x}-"))
        return next(int(line.split()[1]) * 1024 for line in lines[start:] if line.startswith("Rss:"))

    chosen = np.random.default_rng(0).integers(0, clients, 2_000).tolist()
    rows = [table[k] for k in chosen]  # rows that were let go are still there
    assert resident() < 0.2 * table.flat.nbytes
    assert [r.tolist() for r in rows] == [[4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in chosen]
    assert int(table.flat.sum()) == 4 * clients * (4 * clients - 1) // 2
    assert resident() >= table.flat.nbytes
    assert table.sizes.tolist() == [4] * clients
    assert resident() < 0.2 * table.flat.nbytes
