"""Bytes over which the parsers of known formats fall, one case for each error that they raise: refused in one line."""

import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import data_files
import numpy as np
import pytest
from harness import Reply, command, judge


def header(text: str) -> bytes:
    """A .npy file with this text in the place of its header, and 64 bytes of numbers."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(line)) + line + bytes(64)


def packed_by(method: int) -> bytes:
    """A .npz file that says it was packed by a method of this number."""
    file = io.BytesIO()
    np.savez(file, x=np.zeros((4, 2), np.float32))
    content = bytearray(file.getvalue())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = content.find(mark) + place
        content[at : at + 2] = struct.pack("<H", method)
    return bytes(content)


def of_other_bytes() -> bytes:
    """A .npz file whose numbers are not those of its checksum."""
    file = io.BytesIO()
    np.savez(file, x=np.full((4, 2), 7, np.uint8))
    return file.getvalue().replace(bytes([7] * 8), bytes([8] * 8))


def of_links() -> bytes:
    """The archive of CIFAR-100 with a link to nothing in the place of each file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in ("train.bin", "test.bin"):
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "nothing"
            archive.addfile(member)
    return file.getvalue()


def of_tables(method: int) -> bytes:
    """The archive of the year data, whose member says it was packed by a method of this number."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("YearPredictionMSD.txt", "2001,1.0,2.0\n")
    content = bytearray(file.getvalue())
    at = content.find(b"PK\x01\x02") + 10
    content[at : at + 2] = struct.pack("<H", method)
    return bytes(content)


TIB_14 = "{'descr': '<f4', 'fortran_order': False, 'shape': (1924145348608, 2), }"
INPUTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "TokenError": ("x.npy", lambda: header("'''")),
    "MemoryError of 14 TiB": ("x.npy", lambda: header(TIB_14)),
    "NotImplementedError": ("x.npz", lambda: packed_by(99)),
    "csv.Error": ("x.csv", lambda: b"a,b\n1," + b"2" * 200_000 + b"\n"),
}
SETS: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "KeyError of a link": ("cifar100", "cifar100/cifar-100-binary.tar.gz", of_links),
    "NotImplementedError of a set": ("year", "uci/year/YearPredictionMSD.txt.zip", lambda: of_tables(99)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that predicts two numbers a row."""
    home = tmp_path_factory.mktemp("predicting")
    (home / "run.toml").write_text(data_files.RUN)
    data_files._find_code()
    reply = command("run", home / "run.toml", "--output", home / "run", patience=300)
    assert reply.code == 0, reply
    return home / "run"


def refused(reply: Reply, name: str) -> None:
    verdict = judge(reply)
    assert verdict.kind == "refused", verdict
    assert name in verdict.about


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_to_predict_are_refused_in_one_line(run: Path, tmp_path: Path, kind: str) -> None:
    name, content = INPUTS[kind]
    (tmp_path / name).write_bytes(content())
    refused(command("predict", run, "--input", tmp_path / name, patience=60), name)


def test_arrays_of_a_client_are_refused_in_one_line(tmp_path: Path) -> None:
    """BadZipFile: their checksum is another's."""
    data_files._find_code()
    (tmp_path / "own").mkdir()
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / "own" / name, x=np.zeros((8, 3), np.float32), y=np.arange(8) % 2)
    (tmp_path / "own" / "b.npz").write_bytes(of_other_bytes())
    path = ["--set", f"data_options.path={tmp_path / 'own'}"]
    refused(command("data", "show", "fuzz_code:folder", "--clients", 2, *path, patience=60), "b.npz")


@pytest.mark.parametrize("kind", SETS)
def test_files_of_a_set_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    data, place, content = SETS[kind]
    path = tmp_path / "files" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(content())
    homes = {"FEDBAYES_DATA": str(tmp_path / "files"), "FEDBAYES_CACHE": str(tmp_path / "cache")}
    nobody = patch("urllib.request.urlopen", side_effect=OSError("no network here"))
    with patch.dict(os.environ, homes), nobody, patch("fedbayes.data.fetch.PAUSE", 0.0):
        refused(command("data", "show", data, "--clients", 2, patience=60), path.name)
