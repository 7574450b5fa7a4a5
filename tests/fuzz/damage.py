"""Ways to damage the bytes of a file: any file, and by its format."""

import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

Damage = Callable[[bytes, random.Random], bytes]
_ZEROS = bytes(16 << 20)
_BOMBS: dict[str, bytes] = {}


def bomb(kind: str) -> bytes:
    """A few MB that unpack to some GB: many packed pieces of zeros, one after another."""
    if kind not in _BOMBS:
        piece = gzip.compress(_ZEROS) if kind == "gz" else lzma.compress(_ZEROS)
        _BOMBS[kind] = piece * 300
    return _BOMBS[kind]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip(data: bytes, rng: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if content:
            content[rng.randrange(min(len(content), rng.choice((16, 200, len(content)))))] = rng.randrange(256)
    return bytes(content)


def splice(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + rng.choice((data[a:b] * 2, b"", bytes(b - a), b"\xff" * 8)) + data[b:]


ANY: tuple[Damage, ...] = (
    cut,
    cut,
    flip,
    flip,
    flip,
    splice,
    lambda d, r: b"",
    lambda d, r: d * 2,
    lambda d, r: b"<html>not found</html>",
    lambda d, r: d + b"\0" * 100,
    lambda d, r: r.randbytes(300),
)


def npy(data: bytes, rng: random.Random) -> bytes:
    """Another header over the same numbers: shapes of TiB, pickles, kinds of numbers that none are."""
    shape = rng.choice(
        ("(1000000000000, 2)", "(-1, 2)", "(2,)", "()", "(3, 0)", "(2**70,)", "(10**40,)", "[2]", "((2,),)")
    )
    kind = rng.choice(("'<f8'", "'|O'", "'<U5'", "'<c16'", "'<M8[s]'", "[('a', '<f8')]", "'<f16'", "'|S0'", "(", "nan"))
    fortran = rng.choice(("True", "False", "2", "None"))
    text = rng.choice(
        (
            f"{{'descr': {kind}, 'fortran_order': {fortran}, 'shape': (4, 2), }}",
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}",
            f"{{'descr': '|u1', 'fortran_order': {fortran}, 'shape': {shape}, }}",
            "{" * 500,
            "'''",
            "__import__('os')",
        )
    )
    head = text.encode() + b" " * 20 + b"\n"
    length = rng.choice((len(head), len(head), len(head) * 2, 60000))
    magic = rng.choice((b"\x93NUMPY\x01\0", b"\x93NUMPY\x01\0", b"\x93NUMPY\x02\0", b"\x93NUMPY\x03\0"))
    size = struct.pack("<H", length) if magic[6] == 1 else struct.pack("<I", length)
    return magic + size + head + data[-64:]


def pickled(data: bytes, rng: random.Random) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}, "x", None], dtype=object), allow_pickle=True)
    return file.getvalue()


def npz(data: bytes, rng: random.Random) -> bytes:
    """Members of another kind, damaged, or packed so that they grow to GB."""
    file = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    plain = io.BytesIO()
    np.save(plain, np.zeros((4, 2), np.float32))
    with zipfile.ZipFile(file, "w", method) as archive:
        for name in rng.sample(["x.npy", "y.npy", "z.txt", "x.npy", "../x.npy", "a/"], rng.randrange(4)):
            way = rng.random()
            inner = npy(plain.getvalue(), rng) if way < 0.5 else plain.getvalue() if way < 0.8 else rng.randbytes(50)
            archive.writestr(name, inner)
        if rng.random() < 0.1:
            with archive.open("big.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (len(_ZEROS) * 12,)}
                )
                for _ in range(12):
                    member.write(_ZEROS)
    return zipped(file.getvalue(), rng) if rng.random() < 0.5 else file.getvalue()


def zipped(data: bytes, rng: random.Random) -> bytes:
    """A zip archive with other numbers in its records: method, flags, sizes, checksums."""
    content = bytearray(data)
    for mark, places in ((b"PK\x01\x02", ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (42, 4))),):
        at = content.find(mark)
        while at >= 0 and at + 46 <= len(content):
            if rng.random() < 0.7:
                place, size = rng.choice(places)
                value = rng.choice((0, 1, 8, 9, 99, 0xFFFF, 0xFFFFFFFF, rng.randrange(1 << 16)))
                content[at + place : at + place + size] = (value & (256**size - 1)).to_bytes(size, "little")
            at = content.find(mark, at + 4)
    return bytes(content)


def tarred(data: bytes, rng: random.Random) -> bytes:
    """A tar of the wanted names as links, folders, devices, or files of a size that is a lie."""
    file = io.BytesIO()
    names = ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin", "train.bin", "test.bin"]
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(rng.choice(("", "a/", "../")) + name)
            member.type = rng.choice((b"0", b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"x", b"g", b"Z"))
            member.linkname = rng.choice(("nothing", "train.bin", name, "/etc/passwd"))
            member.size = rng.choice((0, 3073, 3074, 512)) if member.type in (b"0", b"7") else 0
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    content = bytearray(file.getvalue())
    if rng.random() < 0.5:
        at = 512 * rng.randrange(len(content) // 512)
        content[at + 124 : at + 136] = rng.choice(
            (b"77777777777\0", b"\x80" + b"\xff" * 11, b"-0000000001\0", bytes(12))
        )
    return gzip.compress(bytes(content))


def text(data: bytes, rng: random.Random) -> bytes:
    """A table or lines of text with odd characters, fields and numbers."""
    lines = data.split(b"\n")
    odd = (
        *(b"\0", b'"', b'"' + b"x" * 200_000, b"x" * 200_000, b"1e999", b"nan", b"inf", b"\xff\xfe", b"\xef\xbb\xbf"),
        *(
            "²".encode(),
            "١".encode(),
            b"1_0",
            b" ",
            b",,,",
            b"\t",
            b"\r",
            b"-",
            b"0x10",
            b"9" * 5000,
            b"\x1a",
            b"1,2,3,4,5",
        ),
    )
    at = rng.randrange(len(lines))
    way = rng.random()
    if way < 0.6:
        place = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:place] + rng.choice(odd) + lines[at][place + rng.randrange(3) :]
    elif way < 0.7:
        lines.insert(at, rng.choice(odd))
    elif way < 0.8:
        del lines[at]
    elif way < 0.9:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "latin-1", "utf-7")), "replace")
    else:
        lines = lines[: 1 + at]
    return b"\n".join(lines)


def repacked(inner: Damage, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]) -> Damage:
    """Damage inside a packed file, which is then whole again outside."""
    return lambda d, r: pack(inner(unpack(d), r))


BY_SUFFIX: dict[str, tuple[Damage, ...]] = {
    ".npy": (npy, npy, pickled),
    ".npz": (npz, npz, zipped, pickled),
    ".csv": (text, text),
    ".txt": (text, text),
    ".json": (text, text, lambda d, r: b"[" * 100_000, lambda d, r: d.replace(b"[", b"{", 1)),
    ".gz": (
        repacked(flip, gzip.compress, gzip.decompress),
        repacked(cut, gzip.compress, gzip.decompress),
        tarred,
        lambda d, r: bomb("gz"),
    ),
    ".xz": (
        repacked(flip, lzma.compress, lzma.decompress),
        repacked(text, lzma.compress, lzma.decompress),
        lambda d, r: bomb("xz"),
    ),
    ".zip": (zipped, zipped, lambda d, r: npz(d, r)),
    ".mat": (flip, flip, cut),
}


def damage(path: Path, rng: random.Random) -> None:
    """Damage a file in one way or two, or put something else in its place."""
    if rng.random() < 0.04:
        return replace(path, rng)
    data = path.read_bytes()
    own = BY_SUFFIX.get(path.suffix, (flip,))
    data = rng.choice(own if rng.random() < 0.6 else ANY)(data, rng)
    if rng.random() < 0.1 and len(data) < 1 << 20:
        data = rng.choice(ANY)(data, rng)
    path.write_bytes(data)
    return None


def replace(path: Path, rng: random.Random) -> None:
    """A folder, a pipe, a link in a circle, a device or a file with a hole of a TiB in the file's place."""
    path.unlink()
    way = rng.choice(("folder", "pipe", "circle", "device", "hole", "gone"))
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "circle":
        path.symlink_to(path)
    elif way == "device":
        path.symlink_to("/dev/zero")
    elif way == "hole":
        with path.open("wb") as file:
            file.truncate(1 << 40)
