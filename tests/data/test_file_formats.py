"""Readers against tiny files of the real formats, whole and damaged."""

import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_files as tiny
import torch

from fedbayes.data import formats, load, partition


def test_idx_family_loads_with_its_order_and_stays_bytes(home):
    tiny.write_mnist(home / "mnist")
    data = load("mnist")
    assert data.x.dtype == torch.uint8
    assert data.x.shape == (30, 1, 28, 28)
    assert data.test_x.shape == (10, 1, 28, 28)
    assert np.array_equal(data.x[:, 0].numpy(), tiny.images(30, (28, 28), 30))
    assert data.y.tolist() == tiny.labels(30, 10).tolist()
    assert float(data.prepare(data.x).max()) <= 1


def test_unpacked_idx_files_do_as_well(home):
    tiny.write_mnist(home / "fashion-mnist")
    for path in (home / "fashion-mnist").iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(load("fashion-mnist")) == 30


def test_a_test_part_alone_loads_and_says_so(home):
    tiny.write_mnist(home / "kmnist", parts=("t10k",))
    with pytest.warns(UserWarning, match="only the test part"):
        data = load("kmnist")
    assert (len(data), len(data.test_x)) == (0, 10)
    with pytest.raises(ValueError, match=r"no training rows to split\. only the test part"):
        data.split(partition.iid(), 2)


def test_emnist_stands_upright_and_counts_from_zero(home):
    x, y = tiny.images(52, (28, 28)), tiny.labels(52, 26) + 1
    for part in ("train", "test"):
        tiny.write_idx(home / f"emnist-letters/emnist-letters-{part}-images-idx3-ubyte.gz", x)
        tiny.write_idx(home / f"emnist-letters/emnist-letters-{part}-labels-idx1-ubyte.gz", y)
    data = load("emnist-letters")
    assert np.array_equal(data.x[3, 0].numpy(), x[3].T)
    assert data.y.tolist() == list(range(26)) * 2
    assert data.class_names[0] == "a"


def test_emnist_reads_the_official_archive(home):
    (home / "emnist").mkdir()
    with zipfile.ZipFile(home / "emnist/gzip.zip", "w") as archive:
        for part, n in (("train", 62), ("test", 4)):
            stem = f"gzip/emnist-byclass-{part}"
            images, labels = tiny.images(n, (28, 28)), tiny.labels(n, 62)
            archive.writestr(f"{stem}-images-idx3-ubyte.gz", gzip.compress(tiny.idx_bytes(images)))
            archive.writestr(f"{stem}-labels-idx1-ubyte.gz", gzip.compress(tiny.idx_bytes(labels)))
    data = load("emnist-byclass")
    assert (len(data), len(data.test_x), data.classes) == (62, 4, 62)
    assert data.class_names[10] == "A"


def write_cifar_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(f"folder/{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


def test_cifar10_is_the_same_from_all_its_forms(home, monkeypatch, tmp_path):
    x, y = tiny.images(12, (3, 32, 32)), tiny.labels(12, 10)
    batches = {f"data_batch_{i}": slice(2 * i - 2, 2 * i) for i in range(1, 6)} | {"test_batch": slice(10, 12)}
    for batch, rows in batches.items():
        tiny.write_med(home / f"cifar10/{batch}.med.xz", x[rows], y[rows])
    raw = {f"{batch}.bin": tiny.cifar_bytes(x[rows], y[rows]) for batch, rows in batches.items()}
    write_cifar_tar(tmp_path / "tar/cifar10/cifar-10-binary.tar.gz", {**raw, "readme.html": b"no batch"})
    (tmp_path / "bin/cifar10/cifar-10-batches-bin").mkdir(parents=True)
    for name, content in raw.items():
        (tmp_path / "bin/cifar10/cifar-10-batches-bin" / name).write_bytes(content)
    for folder in (home, tmp_path / "tar", tmp_path / "bin"):
        monkeypatch.setenv("FEDBAYES_DATA", str(folder))
        data = load("cifar10")
        assert np.array_equal(data.x.numpy(), x[:10])
        assert np.array_equal(data.test_x.numpy(), x[10:])
        assert data.y.tolist() == list(range(10))
        assert data.class_names[3] == "cat"


def test_cifar100_takes_the_fine_label(home):
    x, y, coarse = tiny.images(6, (3, 32, 32)), np.array([99, 1, 2, 3, 4, 5], np.uint8), tiny.labels(6, 20)
    raw = tiny.cifar_bytes(x, y, coarse)
    write_cifar_tar(home / "cifar100/cifar-100-binary.tar.gz", {"train.bin": raw, "test.bin": raw[:3074]})
    data = load("cifar100")
    assert data.y.tolist() == y.tolist()
    assert (len(data.test_x), data.classes) == (1, 100)


def test_packed_images_come_back_bit_for_bit():
    smooth = np.cumsum(tiny.images(3, (3, 32, 32)) % 5, axis=-1).astype(np.uint8)
    extreme = np.where(tiny.images(3, (3, 32, 32)) > 127, 255, 0).astype(np.uint8)
    for x in (smooth, extreme, tiny.images(2, (3, 32, 32))):
        y = tiny.labels(len(x), 10)
        images, labels = formats.med(tiny.med_bytes(x, y), "here")
        assert np.array_equal(images, x)
        assert labels.tolist() == y.tolist()


def test_svhn_mat_files(home):
    from scipy.io import savemat

    x, y = tiny.images(4, (3, 32, 32)), np.array([[1], [10], [9], [10]], np.uint8)
    (home / "svhn").mkdir()
    for part in ("train", "test"):
        savemat(home / f"svhn/{part}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": y})
    data = load("svhn")
    assert np.array_equal(data.x.numpy(), x)
    assert data.y.tolist() == [1, 0, 9, 0]


def write_femnist(home: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    users = {f"writer{i}": (tiny.images(i + 2, (784,), i), (np.arange(i + 2) * 9) % 62) for i in range(4)}
    for file, names in (("a", ("writer0", "writer1")), ("b", ("writer2", "writer3"))):
        tiny.write_leaf(home / f"femnist/train/{file}.json", {u: users[u] for u in names})
        tiny.write_leaf(home / f"femnist/test/{file}.json", {u: tuple(v[:1] for v in users[u]) for u in names})
    return users


def test_leaf_femnist_belongs_to_its_writers(home):
    users = write_femnist(home)
    data = load("femnist")
    clients = data.split(partition.natural(), data.owners)
    assert clients.sizes.tolist() == [2, 3, 4, 5]
    assert clients.test.sizes.tolist() == [1] * 4
    for k, (x, y) in enumerate(users.values()):
        assert np.array_equal(data.x[clients.train_rows(k)].reshape(-1, 784).numpy(), x)
        assert data.y[clients.train_rows(k)].tolist() == y.tolist()
    some = data.split(partition.natural(owners_each=2), 2)
    assert sorted(some.sizes.tolist()) == [5, 9]
    assert some.test.sizes.tolist() == [2, 2]


def test_femnist_without_digits(home):
    write_femnist(home)
    letters = load("femnist", digits=False)
    # Writers 0 and 1 wrote 0, 9 and 0, 9, 18: the first has no letter.
    assert letters.owners == 3
    assert letters.y.tolist() == [8, 8, 17, 8, 17, 26]
    assert len(letters.test_x) == 0


def test_femnist_that_is_not_there_says_where_to_put_it(home):
    with pytest.raises(FileNotFoundError, match=str(home / "femnist")):
        load("femnist")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def other_length(path: Path) -> None:
    tiny.write_idx(path.with_name("train-labels-idx1-ubyte.gz"), tiny.labels(29, 10))


def not_idx(path: Path) -> None:
    path.write_bytes(gzip.compress(b"hello, this is text"))


def shorter_inside(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


def html(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


def label_out_of_range(path: Path) -> None:
    tiny.write_idx(path.with_name("train-labels-idx1-ubyte.gz"), tiny.labels(30, 11))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "truncated or damaged.*fetch it again"),
        (html, "truncated or damaged"),
        (other_length, "30 images but 29 labels"),
        (not_idx, "is not an IDX file"),
        (shorter_inside, "should hold 23520 bytes"),
        (label_out_of_range, r"label 10 at row 10 is outside 0\.\.9"),
    ],
)
def test_damaged_idx_files(home, damage, says):
    tiny.write_mnist(home / "mnist")
    damage(home / "mnist/train-images-idx3-ubyte.gz")
    with pytest.raises(ValueError, match=says):
        load("mnist")


def test_other_damaged_files(home):
    with pytest.raises(ValueError, match="not a multiple of 3073"):
        formats.cifar(bytes(3072), 1, "batch")
    with pytest.raises(ValueError, match="not a multiple of 3073"):
        formats.med(bytes(100), "packed")
    (home / "dtd-part").mkdir()
    path = home / "dtd-part/dtd_10classes_1200_32x32.med.xz"
    path.write_bytes(lzma.compress(bytes(9000))[:40])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load("dtd")
    path = home / "cifar100/cifar-100-binary.tar.gz"
    write_cifar_tar(path, {"train.bin": bytes(3074)})
    with pytest.raises(ValueError, match=r"has no test\.bin"):
        load("cifar100")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load("cifar100")
    (home / "emnist").mkdir()
    (home / "emnist/gzip.zip").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match=r"gzip\.zip is truncated or damaged"):
        load("emnist-letters")
    (home / "svhn").mkdir()
    for part in ("train", "test"):
        (home / f"svhn/{part}_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(ValueError, match="truncated or damaged"):
        load("svhn")
    (home / "femnist/train").mkdir(parents=True)
    (home / "femnist/train/a.json").write_text('{"users": ["a"], "user_data": {"a": {"x": [[0.1')
    with pytest.raises(ValueError, match="not a whole LEAF file"):
        load("femnist")
