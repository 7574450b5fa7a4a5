"""Trackers: the journal's numbers, as they happen, at TensorBoard and MLflow."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.runs import journal, trackers
from fedbayes.runs.folder import Watch, run

CLIENTS = fb.data.from_clients([(torch.eye(4), torch.tensor([0, 1, 0, 1]))] * 2, test=(torch.eye(4), [0, 1, 0, 1]))


class Writer:
    """Stands in for TensorBoard's: keeps what it is given."""

    made: dict = {}  # noqa: RUF012

    def __init__(self, folder, purge_step=None):
        self.rows, self.closed, self.purge = [], False, purge_step
        Writer.made[folder] = self

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Server:
    """Stands in for MLflow's client and its server."""

    def __init__(self):
        self.runs = {}

    def __call__(self, uri):
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return name

    def create_run(self, key, run_name, tags):
        name = f"run{len(self.runs)}"
        self.runs[name] = {"name": run_name, "params": {}, "metrics": [], "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_param(self, run_id, key, value):
        self.runs[run_id]["params"][key] = value

    def log_batch(self, run_id, metrics):
        self.runs[run_id]["metrics"] += metrics

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


@pytest.fixture
def server(monkeypatch):
    server = Server()
    module = SimpleNamespace(MlflowClient=server, entities=SimpleNamespace(Metric=Metric))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return server


class Desk:
    """Stands in for Weights & Biases: keeps what each run is given."""

    def __init__(self):
        self.runs = {}

    def init(self, *, project, name, config, reinit, id=None, resume=None):
        key = id or f"id{len(self.runs)}"
        row = self.runs.setdefault(key, {"name": name, "config": config, "rows": [], "exit": None})
        assert (resume == "allow") == (id is not None)
        row["exit"] = None
        return SimpleNamespace(
            id=key,
            log=lambda values, step: row["rows"].append((step, values)),
            finish=lambda exit_code: row.update(exit=exit_code),
        )


@pytest.fixture
def desk(monkeypatch):
    desk = Desk()
    monkeypatch.setitem(sys.modules, "wandb", desk)
    return desk


@pytest.fixture
def writers(monkeypatch):
    monkeypatch.setattr(Writer, "made", {})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return Writer.made


def test_events_are_the_journals_numbers_as_they_happen(tiny, tmp_path, writers):
    when = []
    seen = Watch(round=lambda record: when.append(sum(len(book.rows) for book in writers.values())))
    home = tmp_path / "run"
    run(replace(tiny, rounds=3), home, trackers.with_events(seen, home))
    ((folder, book),) = writers.items()
    assert folder == str(home / "tensorboard" / "momentum_at_home")
    assert book.closed
    each = len(book.rows) // 3
    assert when == [each, 2 * each, 3 * each]
    accuracy = [(step, value) for name, value, step in book.rows if name == "test/accuracy"]
    assert accuracy == [(record["round"], record["test"]["accuracy"]) for record in journal.read(home)]


def test_mlflow_gets_the_journal_and_a_run_that_goes_on_is_the_same_there(tiny, tmp_path, server):
    home = tmp_path / "run"

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(replace(tiny, rounds=3, checkpoint_every=1), home, trackers.with_mlflow(Watch(round=stop), home, None))
    run(replace(tiny, rounds=3, checkpoint_every=1), home, trackers.with_mlflow(Watch(), home, None))
    ((_, kept),) = server.runs.items()
    assert kept["status"] == "FINISHED"
    assert kept["params"]["clients"] == str(tiny.clients)
    by_step = {m.step: m.value for m in kept["metrics"] if m.key == "test/nll"}
    assert by_step == {record["round"]: record["test"]["nll"] for record in journal.read(home)}


def test_weights_and_biases_gets_the_journal_and_a_run_that_goes_on_is_the_same_there(tiny, tmp_path, desk):
    home = tmp_path / "run"

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(replace(tiny, rounds=3, checkpoint_every=1), home, trackers.with_wandb(Watch(round=stop), home, "p"))
    run(replace(tiny, rounds=3, checkpoint_every=1), home, trackers.with_wandb(Watch(), home, "p"))
    (kept,) = desk.runs.values()
    assert (kept["exit"], kept["config"]["clients"]) == (0, tiny.clients)
    by_step = {step: values["test/nll"] for step, values in kept["rows"]}
    assert by_step == {record["round"]: record["test"]["nll"] for record in journal.read(home)}


def test_fit_takes_trackers_as_callbacks(server, writers, desk, tmp_path):
    all_three = [fb.trackers.mlflow(), fb.trackers.tensorboard(tmp_path / "events"), fb.trackers.wandb("p")]
    made = fb.fit(nn.Linear(4, 2), CLIENTS, method="fedavg", rounds=2, on_round=all_three)
    nll = [record["test"]["nll"] for record in made.journal]
    (row,) = desk.runs.values()
    assert [values["test/nll"] for _, values in row["rows"]] == nll
    assert (row["exit"], row["config"]["method"]) == (0, "fedavg")
    (kept,) = server.runs.values()
    assert [m.value for m in kept["metrics"] if m.key == "test/nll"] == nll
    assert (kept["status"], kept["params"]["method"]) == ("FINISHED", "fedavg")
    (book,) = writers.values()
    assert [value for name, value, _ in book.rows if name == "test/nll"] == nll
    assert book.closed


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_said_before_the_first_round(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'fedbayes\[{name}\]'"):
        getattr(fb.trackers, name)(tmp_path / "events")


def test_event_files_are_written(tiny, tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs fedbayes[tensorboard]"
    )
    home = tmp_path / "run"
    run(replace(tiny, rounds=3), home, trackers.with_events(Watch(), home))
    events = reader.EventAccumulator(str(home / "tensorboard" / "momentum_at_home"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/nll")] == [1, 2, 3]


OFFLINE = """
import sys, torch, fedbayes as fb
clients = fb.data.from_clients([(torch.eye(4), torch.tensor([0, 1, 0, 1]))] * 2, test=(torch.eye(4), [0, 1, 0, 1]))
run = fb.fit("linear", clients, method="fedavg", rounds=3, on_round=fb.trackers.wandb("offline"))
print(*(record["test"]["nll"] for record in run.journal))
"""


def written(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file: a head of 7 bytes, then blocks of 32 KiB with pieces (checksum, length, kind)."""
    assert content.startswith(b":W&B")
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # too little room for a piece: the block's end is empty
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_weights_and_biases_itself_offline(tmp_path):
    pytest.importorskip("wandb", reason="needs fedbayes[wandb]")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    surroundings = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=surroundings, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (path,) = tmp_path.rglob("*.wandb")
    rows = []
    for data in written(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    values = [row["test/nll"] for row in rows if "test/nll" in row]
    assert values == [float(word) for word in done.stdout.split()]
