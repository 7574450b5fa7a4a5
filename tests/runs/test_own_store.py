"""The store of own state: what is put is got, whatever is superseded, compacted, swept or opened again."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbayes.errors import InputError
from fedbayes.federation.cohorts import cohort_of
from fedbayes.posterior.values import Gaussian
from fedbayes.runs import own as own_module
from fedbayes.runs import rows
from fedbayes.runs.own import Index, OwnFiles, rows_on_disk
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

CPU = torch.device("cpu")


@pytest.fixture
def nothing_held(monkeypatch):
    """As where a cohort's rows are too large for memory: each is on disk once it is put."""
    monkeypatch.setattr(own_module, "HELD", -1)


def own_of(client: int, visit: int) -> dict:
    values = torch.arange(5.0) + 100 * client + visit
    return {"q": Gaussian(values, values.abs() + 1), "visits": torch.tensor(visit), "note": "kept"}


def is_own(own: dict | None, client: int, visit: int) -> bool:
    expected = own_of(client, visit)
    return (
        own is not None
        and torch.equal(own["q"].mean, expected["q"].mean)
        and torch.equal(own["q"].scale, expected["q"].scale)
        and own["visits"].shape == ()
        and int(own["visits"]) == visit
        and own["note"] == "kept"
    )


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cohorts=st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=6), min_size=1, max_size=12),
    commits=st.sets(st.integers(0, 11)),
    again=st.booleans(),
    held=st.booleans(),
)
def test_the_last_row_of_each_client_is_got(tmp_path_factory, cohorts, commits, again, held):
    store, last = OwnFiles(tmp_path_factory.mktemp("own"), CPU), {}
    kept = [frozenset()]
    for number, cohort in enumerate(cohorts):
        with pytest.MonkeyPatch.context() as patch:
            if not held:
                patch.setattr(own_module, "HELD", -1)
            store.put(number, {k: own_of(k, number) for k in cohort})
        last |= dict.fromkeys(cohort, number)
        assert all(is_own(store.get(k), k, number) for k, number in last.items())
        if number in commits:
            store.write()
            kept = [kept[-1], store.index.files]
            store.sweep(kept)
            if again:
                store = OwnFiles(store.folder, CPU, Index(store.index.as_tensors()))
                store.sweep_strays(kept)
        store.compact()
    store.settle()
    store.write()
    store = OwnFiles(store.folder, CPU, Index(store.index.as_tensors()))
    assert store.index.clients == sorted(last)
    assert len(store.index) == len(last)
    assert all(is_own(store.get(k), k, number) for k, number in last.items())
    assert store.get(16) is None


def test_the_rows_of_one_cohort_are_in_memory_and_written_when_it_must_be(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    for number in range(5):
        store.put(number, {k: own_of(k, number) for k in range(4)})
    assert list(tmp_path.iterdir()) == []
    assert is_own(store.get(3), 3, 4)
    store.write()
    store.write()
    assert [path.name for path in tmp_path.iterdir()] == ["rows-000001.safetensors"]
    store.path(1).write_bytes(b"")
    assert is_own(store.get(3), 3, 4), "what was written is still at hand"
    store.put(5, {k: own_of(k, 5) for k in (3, 7)})
    assert store.index.clients == [0, 1, 2, 3], "others' rows had been written"
    store.put(6, {8: own_of(8, 6)})
    assert store.index.clients == [0, 1, 2, 3, 7]
    assert store.index.place(3) == (2, 0)
    with pytest.raises(InputError, match="client 0 can't be read"):
        store.get(0)


@pytest.mark.usefixtures("nothing_held")
def test_disk_use_is_known_beforehand(tmp_path):
    cohorts = [cohort_of(r, clients=60, cohort=8, seed=1, dropout=0.0)[0] for r in range(40)]
    store, kept, used = OwnFiles(tmp_path, CPU), [frozenset()], []
    for number, cohort in enumerate(cohorts):
        store.put(number, {k: own_of(k, number) for k in cohort})
        kept = [kept[-1], store.index.files]
        store.sweep(kept)
        used.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        store.compact()
    store.settle()
    row, planned = rows.Row.of(own_of(1, 1)).size, list(rows_on_disk(cohorts))
    assert row == 2 * 5 * 4 + 8 + 16
    header = [path.stat().st_size - n * row for n, path in ((store.index.rows[f], store.path(f)) for f in kept[-1])]
    assert max(header) < 1000
    # What is on disk is the planned rows, and a header a file.
    for bytes_used, count in zip(used, planned):
        assert count * row < bytes_used <= count * row + max(header) * len(list(tmp_path.iterdir())) * 2
    # Live rows twice at most, what was put or moved since the checkpoint before the last, and files not yet taken.
    assert max(planned) <= 2 * 60 + 6 * 8
    assert planned[-1] < 40 * 8 / 2, "superseded rows go"


@pytest.mark.usefixtures("nothing_held")
def test_half_empty_files_are_written_anew_and_others_are_not(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    store.put(0, {k: own_of(k, 0) for k in range(8)})
    store.put(1, {k: own_of(k, 1) for k in range(3)})
    store.compact()
    store.settle()
    assert store.index.place(7) == (1, 7)
    store.put(2, {3: own_of(3, 2)})
    store.compact()
    store.settle()
    assert {store.index.place(k) for k in (4, 5, 6, 7)} == {(4, 0), (4, 1), (4, 2), (4, 3)}
    store.sweep([store.index.files])
    assert not store.path(1).exists()
    assert is_own(store.get(7), 7, 0)


@pytest.mark.usefixtures("nothing_held")
def test_rows_of_several_kinds_lie_in_files_of_their_own(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    store.put(0, {0: {"a": torch.ones(2)}, 1: {"a": torch.ones(3)}, 2: {"b": torch.ones(2), "n": 3}, 3: {}})
    store.put(1, {1: {"a": torch.zeros(3)}})
    assert [store.index.place(k) for k in range(4)] == [(1, 0), (4, 0), (3, 0), None]
    assert store.get(2)["n"] == 3
    assert torch.equal(store.get(1)["a"], torch.zeros(3))


@pytest.mark.usefixtures("nothing_held")
def test_a_row_costs_its_own_bytes_and_a_flipped_bit_is_seen(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    store.put(0, {k: {"a": torch.full((64,), float(k))} for k in range(4)})
    data = bytearray(store.path(1).read_bytes())
    at = bytes(data).index(torch.full((1,), 2.0).numpy().tobytes() * 64)
    data[at] ^= 1
    store.path(1).write_bytes(bytes(data))
    assert float(store.get(1)["a"][0]) == 1.0
    with pytest.raises(InputError, match=r"client 2 can't be read .* checksum"):
        store.get(2)


@pytest.mark.parametrize("dtype", rows.DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path, dtype):
    values = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.zeros(0, 2, dtype=dtype)]
    own = {"a": values, "t": (values[0].t(), 1.5, None)}
    rows.write(tmp_path / "x", [rows.Row.of({**own, "n": torch.tensor(n)}) for n in range(3)])
    for n, row in zip((2, 0), rows.read(tmp_path / "x", [2, 0])):
        back = rows.value(row)
        assert int(back["n"]) == n
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(back["a"], values))
        assert torch.equal(back["t"][0], values[0].t())


@pytest.mark.usefixtures("nothing_held")
def test_a_failed_compaction_is_told(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    store.put(0, {k: own_of(k, 0) for k in range(4)})
    store.put(1, {k: own_of(k, 1) for k in range(3)})
    store.path(1).write_bytes(b"")
    store.compact()
    with pytest.raises(InputError, match="can't be compacted"):
        store.put(2, {0: own_of(0, 2)})


def test_an_index_of_an_earlier_kind_is_refused():
    columns = {"clients": torch.tensor([1]), "rounds": torch.tensor([1])}
    with pytest.raises(InputError, match="earlier fedbayes"):
        Index(columns)
    assert len(Index({"clients": torch.zeros(0), "rounds": torch.zeros(0)})) == 0


def test_the_plan_counts_files_not_rounds(tmp_path: Path):
    assert list(rows_on_disk([range(4), range(4, 8), range(4)])) == [4, 8, 12]


@pytest.mark.usefixtures("nothing_held")
def test_what_is_expected_need_not_be_there(tmp_path):
    store = OwnFiles(tmp_path, CPU)
    store.put(0, {k: own_of(k, 0) for k in range(3)})
    store.put(1, {7: own_of(7, 1)})
    store.expect([0, 2, 5, 7, 900])
    store.path(2).unlink()
    store.path(1).write_bytes(store.path(1).read_bytes()[:20])
    store.expect([0, 7])
    with pytest.raises(InputError, match="client 0 can't be read"):
        store.get(0)


@pytest.mark.parametrize("kept", [0, 4, 8, 30, 400, -1])
def test_a_file_that_is_cut_short_is_told(tmp_path, kept):
    path = tmp_path / "rows.safetensors"
    rows.write(path, [rows.Row.of(own_of(k, 0)) for k in range(3)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cut short|checksum"):
        rows.read(path, [2])


def test_a_file_of_a_newer_version_is_told(tmp_path, monkeypatch):
    path = tmp_path / "rows.safetensors"
    monkeypatch.setattr(rows, "VERSION", 9)
    rows.write(path, [rows.Row.of(own_of(0, 0))])
    monkeypatch.undo()
    with pytest.raises(InputError, match="newer fedbayes"):
        rows.read(path, [0])


def test_a_round_has_the_next_cohorts_rows_loaded():
    class Store(Memory):
        asked: ClassVar[list[tuple[int, ...]]] = []

        def expect(self, clients):
            self.asked.append(tuple(clients))

    sites = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(6)]
    task = prepare(nn.Linear(3, 2), sites, method="pfedbayes", rounds=3, cohort=2, compile="off")
    records = list(rounds(task, task.begin(), Store()))
    assert len(records) == 3
    assert Store.asked == [task.scheduler.cohort(number) for number in (1, 2, 3)]
