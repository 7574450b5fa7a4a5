"""The road of a file: folder, cache, download; and the cache of decoded arrays. The only server is on this machine."""

import hashlib
import http.server
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_files as tiny

from fedbayes.data import cache, fetch, load, sources
from fedbayes.data.sources import SOURCES, Files, Source, source_of

CONTENT = bytes(range(256)) * 9000
SHA = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """/good gives the file; /cut half of it; /busy-twice 503 two times; /none is not there; /other another file."""

    def do_GET(self) -> None:
        asked = self.server.asked
        asked.append(self.path)
        leaf = self.path.rsplit("/", 1)[-1]
        if leaf == "none" or (leaf == "busy-twice" and asked.count(self.path) <= 2):
            self.send_error(404 if leaf == "none" else 503)
            return
        content = CONTENT[::-1] if leaf == "other" else CONTENT
        cut = leaf == "cut" or (leaf == "cut-once" and asked.count(self.path) == 1)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE", 0.001)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.asked = []
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    web.address = f"http://127.0.0.1:{web.server_port}"
    yield web
    web.shutdown()
    web.server_close()
    thread.join()


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize("leaf", ["good", "cut-once", "busy-twice"])
def test_a_file_is_fetched_whole_in_spite_of_a_bad_moment(server, tmp_path, leaf):
    target = tmp_path / "there/file"
    assert fetch.download(Source((f"{server.address}/{leaf}",), SHA), target) == target
    assert target.read_bytes() == CONTENT
    assert leftovers(tmp_path) == [target]


def test_md5_and_no_digest_do_as_well(server, tmp_path):
    md5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
    for digest in (md5, None):
        fetch.download(Source((f"{server.address}/good",), digest), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("leaf", "tries", "says"),
    [("cut", 3, "ended after 1152000 of 2304000 bytes"), ("none", 1, "404"), ("other", 1, "sha256 is .* expected")],
)
def test_what_cannot_be_had_leaves_nothing_behind(server, tmp_path, leaf, tries, says):
    with pytest.raises(FileNotFoundError, match=says) as caught:
        fetch.download(Source((f"{server.address}/{leaf}",), SHA), tmp_path / "there/file", Path("/put/it/here"))
    assert len(server.asked) == tries
    assert leftovers(tmp_path) == []
    for part in ("file", f"{server.address}/{leaf}", "put it at /put/it/here"):
        assert part in str(caught.value)


def test_the_second_address_helps_when_the_first_fails(server, tmp_path):
    source = Source((f"{server.address}/other", f"{server.address}/none", f"{server.address}/good"), SHA)
    assert fetch.download(source, tmp_path / "file").read_bytes() == CONTENT


def test_an_address_where_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    with pytest.raises(FileNotFoundError, match="put it at"):
        fetch.download(Source(("http://127.0.0.1:9/file",), None), tmp_path / "file")


def test_folder_then_cache_then_download(server, home, tmp_path, monkeypatch):
    files = Files((("set/good",),))
    monkeypatch.setitem(sources.SOURCES, "set/good", Source((f"{server.address}/good",), SHA))
    assert fetch.at_hand(files) is None
    cached = tmp_path / "cache/files/set/good"
    assert fetch.find(files).paths == {"set/good": cached}
    assert fetch.find(files).paths == {"set/good": cached}
    assert len(server.asked) == 1
    (home / "set").mkdir()
    (home / "set/good").write_bytes(b"the user's own")
    assert fetch.find(files).paths == {"set/good": home / "set/good"}
    assert leftovers(home) == [home / "set/good"]


def test_a_whole_set_is_loaded_over_the_net(server, home, tmp_path, monkeypatch):
    tiny.write_mnist(tmp_path / "web/mnist")
    monkeypatch.setattr(Handler, "do_GET", http.server.SimpleHTTPRequestHandler.do_GET)
    files = http.server.SimpleHTTPRequestHandler
    server.RequestHandlerClass = lambda *args: files(*args, directory=str(tmp_path / "web"))
    monkeypatch.setattr(files, "log_message", lambda *args: None)
    for file in sources.FILES["mnist"].full[0]:
        digest = "sha256:" + hashlib.sha256((tmp_path / "web" / file).read_bytes()).hexdigest()
        monkeypatch.setitem(sources.SOURCES, file, Source((f"{server.address}/{file}",), digest))
    assert len(load("mnist")) == 30
    assert len(list((tmp_path / "cache/files/mnist").iterdir())) == 4


def test_without_an_address_the_message_says_where_to_put_the_file(home):
    with pytest.raises(FileNotFoundError, match=f"put it at {home / 'thucnews/train.txt.xz'}"):
        load("thucnews")


def test_addresses_and_digests_are_well_formed():
    for file in [*SOURCES, "uci/yacht/data.txt"]:
        source = source_of(file)
        assert all(a.startswith("http") and a.endswith(file.rsplit("/", 1)[1]) for a in source.addresses)
        if source.digest:
            kind, _, value = source.digest.partition(":")
            assert len(bytes.fromhex(value)) == {"sha256": 32, "md5": 16}[kind]
    assert source_of("uci/yacht/index_train_0.txt").digest is None
    assert source_of("nowhere/file") is None


def arrays():
    return {"x": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([1, 2]), "none": np.zeros((0, 3))}


def test_decoded_arrays_are_made_once(tmp_path):
    file = tmp_path / "source"
    file.write_bytes(b"1")
    made = []

    def make():
        made.append(1)
        return arrays()

    for _ in range(3):
        got = cache.decoded("set", [file], make)
        assert all(np.array_equal(got[k], v) and got[k].dtype == v.dtype for k, v in arrays().items())
    assert len(made) == 1
    file.write_bytes(b"23")  # Another file, other arrays.
    cache.decoded("set", [file], make)
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "index"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    file = tmp_path / "source"
    file.write_bytes(b"1")
    cache.decoded("set", [file], arrays)
    [folder] = (tmp_path / "cache/decoded").iterdir()
    x = folder / "x.npy"
    if damage == "flip":
        raw = bytearray(x.read_bytes())
        raw[-1] ^= 1
        x.write_bytes(raw)
    elif damage == "truncate":
        x.write_bytes(x.read_bytes()[:-3])
    elif damage == "remove":
        x.unlink()
    else:
        (folder / "index.json").write_text(json.dumps({"x": "0"})[:-2])
    made = []
    got = cache.decoded("set", [file], lambda: made.append(1) or arrays())
    assert made == [1]
    assert np.array_equal(got["x"], arrays()["x"])
    assert cache.decoded("set", [file], dict)["y"].tolist() == [1, 2]  # Whole again.
    assert [p.name for p in (tmp_path / "cache/decoded").iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"1")
    (tmp_path / "a-file").write_bytes(b"")
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "a-file"))
    assert cache.decoded("set", [tmp_path / "source"], arrays)["y"].tolist() == [1, 2]


def test_the_cache_is_where_the_user_says(monkeypatch):
    monkeypatch.delenv("FEDBAYES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/fedbayes")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache/fedbayes"


def test_nothing_is_written_into_the_data_folder(home):
    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        tiny.write_med(home / f"cifar10/{batch}.med.xz", tiny.images(1, (3, 32, 32)), tiny.labels(1, 10))
    before = {p: p.stat().st_mtime_ns for p in home.rglob("*")}
    time.sleep(0.01)
    load("cifar10")
    assert {p: p.stat().st_mtime_ns for p in home.rglob("*")} == before
