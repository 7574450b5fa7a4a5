"""The real benchmark files: counts, shapes, ranges and label order as published."""

import hashlib
import warnings
from functools import cache

import numpy as np
import pytest
import torch

from fedbayes.data import CATALOGUE, listing, load, partition
from fedbayes.data.fetch import at_hand
from fedbayes.data.partition import RECIPES
from fedbayes.data.sources import FILES, UCI_FOLDS, source_of, uci_files

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("real")]


def loaded(name, **options):
    """The set in whole or in part; skip where it is not among the files."""
    files = FILES.get(name) or uci_files(name, options.get("fold", 0))
    if at_hand(files) is None:
        pytest.skip(f"{name} is not in FEDBAYES_DATA")
    return read_once(name, **options)


@cache
def read_once(name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load(name, **options)


@pytest.mark.parametrize(
    ("name", "train", "test", "shape", "first", "mean"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28), [7, 2, 1, 0, 4], 0.1307),
        ("fashion-mnist", 60_000, 10_000, (1, 28, 28), [9, 2, 1, 1, 6], 0.2860),
        ("kmnist", 0, 10_000, (1, 28, 28), [2, 9, 3, 8, 3], None),
        ("emnist-letters", 0, 20_800, (1, 28, 28), [0, 0, 0, 0, 0], None),
        pytest.param("cifar10", 50_000, 10_000, (3, 32, 32), [3, 8, 8, 0, 6], 0.4734, marks=pytest.mark.slow),
        ("cifar100", 486, 916, (3, 32, 32), [49, 33, 72, 51, 71], None),
        ("svhn", 288, 10_000, (3, 32, 32), [5, 2, 1, 0, 6], None),
        ("dtd", 0, 1200, (3, 32, 32), [0, 0, 0, 0, 0], None),
    ],
)
def test_image_sets(name, train, test, shape, first, mean):
    data = loaded(name)
    if data.note or name in ("mnist", "fashion-mnist", "cifar10", "dtd"):
        assert (len(data), len(data.test_x)) == (train, test)
    assert data.x.dtype == torch.uint8
    assert data.shape == shape
    assert data.test_y[:5].tolist() == first
    assert int(data.test_x.max()) == 255
    assert len(data.class_names) == data.classes == CATALOGUE[name].classes
    if mean:
        assert float(data.x.sum(dtype=torch.float64) / data.x.numel() / 255) == pytest.approx(mean, abs=1e-4)


def test_label_order_of_the_training_parts():
    assert loaded("mnist").y[:5].tolist() == [5, 0, 4, 1, 9]
    assert loaded("fashion-mnist").y[:5].tolist() == [9, 0, 0, 3, 0]


@pytest.mark.slow  # 60,000 photographs are unpacked; those of cifar100 above are read by the same code
def test_cifar10_is_in_order_and_normalised_for_the_network():
    data = loaded("cifar10")
    assert data.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(data.y).tolist() == [5000] * 10
    seen = data.prepare(data.x[:5000])
    np.testing.assert_allclose(seen.mean((0, 2, 3)), 0, atol=0.05)
    np.testing.assert_allclose(seen.std((0, 2, 3)), 1, atol=0.05)


def test_emnist_letters_are_upright():
    data = loaded("emnist-letters")
    assert torch.bincount(data.test_y).tolist() == [800] * 26
    ink = data.test_x[data.test_y == 11].double().mean((0, 1))  # An upright "l" is taller than it is wide.
    place = torch.arange(28.0, dtype=torch.float64)
    height, width = (torch.cov(place[None], aweights=ink.sum(axis)) for axis in (1, 0))
    assert height > 1.2 * width


@pytest.mark.parametrize("name", UCI_FOLDS, ids=str)
def test_uci_tables(name):
    data = loaded(name, fold=UCI_FOLDS[name] - 1)
    entry = CATALOGUE[name]
    assert (len(data), len(data.test_x), data.classes) == (entry.train, entry.test, 1)
    assert data.shape == (int(entry.about.split()[0]),)
    assert torch.isfinite(data.x).all()
    assert float(data.y.mean()) == pytest.approx(0, abs=1e-4)
    assert float(data.y.std()) == pytest.approx(1, abs=1e-2)


def test_texts():
    data = loaded("thucnews")
    assert (len(data), len(data.test_x), data.shape) == (33_590, 10_000, (32,))
    assert torch.bincount(data.test_y).tolist() == [1000] * 10
    assert data.class_names[:3] == ("finance", "realty", "stocks")
    assert int(data.x.max()) < len(data.vocabulary) < 6000
    long = loaded("cnews", tokens="word", size=50_000)
    assert (len(long) + len(long.test_x), long.shape) == (1000, (600,))
    assert len(long.vocabulary) == 50_000


def test_files_have_the_digests_of_the_table():
    checked = 0
    tables = [uci_files(name, 0) for name in UCI_FOLDS]
    for found in filter(None, map(at_hand, [*FILES.values(), *tables])):
        for file, path in found.paths.items():
            source = source_of(file)
            if source and source.digest and path.name == file.rsplit("/", 1)[1]:
                kind, _, value = source.digest.partition(":")
                assert hashlib.new(kind, path.read_bytes()).hexdigest() == value, file
                checked += 1
    if not checked:
        pytest.skip("none of the downloadable files is in FEDBAYES_DATA")


def test_the_papers_splits_of_the_real_sets():
    data = loaded("mnist")
    recipe = RECIPES["pfedpf"]
    clients = data.split(recipe.partition, recipe.clients, test_per_client=recipe.test_per_client)
    assert clients.sizes.tolist() == [1500] * 20
    assert clients.test.sizes.tolist() == [500] * 20
    assert (clients.label_counts().sort(1)[0] == torch.tensor([30] * 8 + [630] * 2)).all()
    assert (clients.test_label_counts().sort(1)[0] == torch.tensor([10] * 8 + [210] * 2)).all()
    hundred = data.split(partition.iid(), 100)
    assert hundred.data.x.untyped_storage().nbytes() == 60_000 * 784  # Once, as bytes.


def test_the_listing_finds_them():
    present = {row.name for row in listing() if row.present}
    assert {"digits", "diabetes", "cubic"} < present


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_standardised_pixels_have_mean_0_and_deviation_1(name):
    data = loaded(name, standardised=True)
    seen = data.prepare(data.x)
    assert float(seen.mean()) == pytest.approx(0, abs=1e-3)
    assert float(seen.std()) == pytest.approx(1, abs=1e-3)
    assert torch.equal(data.x, loaded(name).x)
