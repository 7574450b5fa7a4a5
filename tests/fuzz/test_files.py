"""The door for files: what is larger than it says, or grows without end, is refused before memory is."""

import gzip
import io
import os
import tarfile
import zipfile

import numpy as np
import pytest
from damage import bomb

from fedbayes.data import formats
from fedbayes.data.formats import svhn_mat, tar_members, unpacked, zip_members
from fedbayes.errors import InputError
from fedbayes.files import array_in, arrays_in, grown, most_unpacked, size_of


def written_header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "?", "U3"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_as_numpy_wrote_them(tmp_path, dtype, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4).astype(dtype), order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "b.npz", a=array, empty=array[:0], one=np.array(3))
    assert np.array_equal(array_in(tmp_path / "a.npy"), array)
    both = arrays_in(tmp_path / "b.npz")
    assert np.array_equal(both["a"], array)
    assert both["empty"].shape == (0, 3, 4)
    assert both["one"] == 3


@pytest.mark.parametrize("shape", [(1 << 42,), (10**12, 4), (2**62, 2**62)])
def test_a_shape_of_terabytes_is_refused_unread(tmp_path, shape):
    (tmp_path / "x.npy").write_bytes(written_header(shape) + bytes(64))
    with pytest.raises(InputError, match=r"x\.npy can't be read \(its header promises .*TiB, the file holds 64 bytes"):
        array_in(tmp_path / "x.npy")


def test_a_file_with_a_hole_of_a_terabyte_is_refused_unread(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(InputError, match=r"has 4 TiB, the most is"):
        array_in(tmp_path / "x.npy")


def test_a_zip_says_how_large_it_is_before_it_is_unpacked(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as member,
    ):
        member.write(written_header((100 << 20,), "|u1"))
        for _ in range(100):
            member.write(bytes(1 << 20))
    with pytest.raises(InputError, match=r"says that it unpacks to 100 MiB, the most is 64 MiB"):
        arrays_in(tmp_path / "x.npz")
    with pytest.raises(InputError, match="unpacks to"):
        zip_members(tmp_path / "x.npz")


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_bomb_is_stopped_while_it_grows(tmp_path, monkeypatch, kind):
    path, read = tmp_path / f"images.{kind}", []

    class Watched:
        def __init__(self, stream):
            self.stream = stream

        def read(self, most):
            read.append(self.stream.read(most))
            return read[-1]

    path.write_bytes(bomb(kind))
    monkeypatch.setattr(formats, "grown", lambda stream, *more: grown(Watched(stream), *more))
    with pytest.raises(InputError, match=r"unpacks to more than \d+"):
        unpacked(path)
    assert sum(map(len, read)) < 2 * most_unpacked(path.stat().st_size) < 300 * (16 << 20)  # of the 4.7 GiB it holds


def test_links_in_a_tar_are_not_followed(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "nothing")):
            member = tarfile.TarInfo("train.bin")
            member.type, member.linkname = kind, target
            archive.addfile(member)
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(file.getvalue()))
    with pytest.raises(InputError, match=r"c\.tar\.gz is truncated or damaged \(it has no train\.bin\)"):
        tar_members(tmp_path / "c.tar.gz", ["train.bin"])


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    for path in (tmp_path / "pipe.npy", tmp_path):
        with pytest.raises(InputError, match="no regular file"):
            size_of(path)
        with pytest.raises(InputError, match="no regular file"):
            array_in(path)
    with pytest.raises(InputError, match="no regular file"):
        svhn_mat(tmp_path / "pipe.npy")
