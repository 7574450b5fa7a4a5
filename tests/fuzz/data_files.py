"""Files of data and of inputs to predict, damaged in every format that is read."""

import gzip
import json
import lzma
import os
import random
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import numpy as np
from damage import damage
from harness import Verdict, command, judge, prepared

HERE = Path(__file__).parent
PATIENCE = 25.0
RUN = """
data = "fuzz_code:blobs"
network = "fuzz_code:net"
clients = 2
rounds = 1
method = "fedavg"
engine = "loop"
"""


def trained() -> Path:
    """A run to predict with, made once."""
    return prepared("predicting", _train) / "run"


def _train(home: Path) -> None:
    _find_code()
    (home / "run.toml").write_text(RUN)
    reply = command("run", home / "run.toml", "--output", home / "run")
    assert reply.code == 0, reply


def _find_code() -> None:
    for place in (HERE, HERE.parent / "data"):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))


def inputs(folder: Path, rng: random.Random) -> tuple[Path, list[object]]:
    """A file of inputs, and the command that predicts them."""
    x = np.random.default_rng(rng.randrange(99)).normal(size=(5, 2)).astype(rng.choice(("f4", "f8", "i4", "u1", "?")))
    path = folder / f"x{rng.choice(('.npy', '.npz', '.csv'))}"
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        rng.choice((np.savez, np.savez_compressed))(path, x=x)
    else:
        lines = [",".join(map(str, row)) for row in x.astype(float)]
        path.write_text("\n".join(["a,b", *lines] if rng.random() < 0.5 else lines) + "\n")
    more = rng.choice(([], ["--output", folder / "out.csv"], ["--output", folder / "out.npz"], ["--ood"]))
    return path, ["predict", trained(), "--input", path, *more]


def table(folder: Path, rng: random.Random) -> tuple[Path, list[object]]:
    """A user's CSV table."""
    names = ("no", "yes") if rng.random() < 0.5 else ("0", "1")
    rows = [f"{i},{i * 0.5},{names[i % 2]},site{i % 3}" for i in range(12)]
    path = folder / "t.csv"
    path.write_text("\n".join(["a,b,target,site", *rows]) + "\n")
    settings = ["--set", f"data_options.path={path}", "--set", f"data_options.kind={rng.choice(('classes', 'real'))}"]
    return path, ["data", "show", "fuzz_code:table", "--clients", 2, *settings]


def arrays(folder: Path, rng: random.Random) -> tuple[Path, list[object]]:
    """A user's folder of arrays, in one piece or one of a client."""
    home = folder / "own"
    parts = {"x": np.ones((8, 3), np.float32), "y": np.arange(8) % 2}
    parts |= {"test_x": np.ones((4, 3), np.float32), "test_y": np.arange(4) % 2}
    files = []
    for client in ("", "a", "b")[: rng.choice((1, 3))]:
        for name, values in parts.items():
            if client and rng.random() < 0.5:
                files.append(home / f"{client}.npz")
                files[-1].parent.mkdir(parents=True, exist_ok=True)
                np.savez(files[-1], **parts)
                break
            files.append(home / client / f"{name}.npy")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            np.save(files[-1], values)
    setting = ["--set", f"data_options.path={home}"]
    return rng.choice(files), ["data", "show", "fuzz_code:folder", "--clients", 2, *setting]


def benchmark(folder: Path, rng: random.Random) -> tuple[Path, list[object]]:
    """The files of a set of the catalogue, tiny."""
    name = rng.choice(list(SETS))
    files = SETS[name]()
    for place, data in files.items():
        path = folder / "files" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "files" / rng.choice(list(files)), ["data", "show", name, "--clients", 2]


def _mnist() -> dict[str, bytes]:
    from tiny_files import idx_bytes, images, labels

    files = {}
    for part, n in (("train", 12), ("t10k", 6)):
        files[f"mnist/{part}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(images(n, (28, 28))))
        files[f"mnist/{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(labels(n, 10)))
    return files


def _emnist() -> dict[str, bytes]:
    from tiny_files import idx_bytes, images, labels

    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in ("train", "test"):
            stem = f"gzip/emnist-letters-{part}"
            archive.writestr(f"{stem}-images-idx3-ubyte.gz", gzip.compress(idx_bytes(images(6, (28, 28)))))
            archive.writestr(f"{stem}-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(1 + labels(6, 26))))
    return {"emnist/gzip.zip": file.getvalue()}


def _cifar(folder: str, names: list[str], label_bytes: int) -> dict[str, bytes]:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = 4 * (3072 + label_bytes)
            archive.addfile(member, BytesIO(bytes(member.size)))
    return {folder: file.getvalue()}


def _cifar10() -> dict[str, bytes]:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    return _cifar("cifar10/cifar-10-binary.tar.gz", names, 1)


def _cifar100() -> dict[str, bytes]:
    return _cifar("cifar100/cifar-100-binary.tar.gz", ["train.bin", "test.bin"], 2)


def _svhn() -> dict[str, bytes]:
    from scipy.io import savemat

    files = {}
    for part in ("train", "test"):
        file = BytesIO()
        savemat(file, {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.arange(1, 5)[:, None]}, do_compression=True)
        files[f"svhn/{part}_32x32.mat"] = file.getvalue()
    return files


def _dtd() -> dict[str, bytes]:
    return {"dtd-part/dtd_10classes_1200_32x32.med.xz": lzma.compress(bytes(3073 * 4))}


def _thucnews() -> dict[str, bytes]:
    lines = {part: lzma.compress("体育 新闻\t1\n财经a\t0\n新闻\t1\n".encode()) for part in ("train", "dev", "test")}
    return {"thucnews/class.txt": b"money\nsport\n"} | {f"thucnews/{p}.txt.xz": d for p, d in lines.items()}


def _cnews() -> dict[str, bytes]:
    return {f"cnews/cnews.{part}.txt": "体育\t球赛\n财经\t股票\n".encode() * 3 for part in ("train", "test")}


def _femnist() -> dict[str, bytes]:
    def users(rows: int) -> bytes:
        one = {"x": [[0.5] * 784] * rows, "y": list(range(rows))}
        return json.dumps({"users": ["u", "v"], "user_data": {"u": one, "v": one}}).encode()

    return {"femnist/train/a.json": users(3), "femnist/test/a.json": users(1)}


def _yacht() -> dict[str, bytes]:
    rows = "\n".join(f"{i} {i * 2} {i % 3} {i * 0.5}" for i in range(10))
    files = {"data": rows, "index_features": "0\n1\n2\n", "index_target": "3\n"}
    files |= {"index_train_0": "\n".join(map(str, range(8))), "index_test_0": "8\n9\n"}
    return {f"uci/yacht/{name}.txt": content.encode() for name, content in files.items()}


def _year() -> dict[str, bytes]:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("YearPredictionMSD.txt", "2001,1.0,2.0\n1999,3.0,5.0\n1998,1.5,2.5\n")
    return {"uci/year/YearPredictionMSD.txt.zip": file.getvalue()}


SETS = {
    "mnist": _mnist,
    "emnist-letters": _emnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "dtd": _dtd,
    "thucnews": _thucnews,
    "cnews": _cnews,
    "femnist": _femnist,
    "yacht": _yacht,
    "year": _year,
}


def case(seed: int, folder: Path) -> Verdict:
    """Write a file, damage it, and have it read."""
    rng = random.Random(f"data {seed}")
    _find_code()
    path, words = rng.choice((inputs, inputs, table, arrays, benchmark, benchmark))(folder, rng)
    if rng.random() < 0.97:
        damage(path, rng)
    homes = {"FEDBAYES_DATA": str(folder / "files"), "FEDBAYES_CACHE": str(folder / "cache")}
    os.chdir(folder)
    alone = patch("urllib.request.urlopen", side_effect=OSError("no network here"))
    with patch.dict(os.environ, homes), alone, patch("fedbayes.data.fetch.PAUSE", 0.0):
        return judge(command(*words, patience=PATIENCE))
