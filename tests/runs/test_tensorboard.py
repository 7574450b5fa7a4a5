"""TensorBoard events: the journal's numbers, as they happen, and a clear line where the package is missing."""

import sys
from dataclasses import replace

import pytest

from fedbayes.errors import InputError
from fedbayes.runs import journal
from fedbayes.runs import tensorboard as ours
from fedbayes.runs.folder import Watch, run


class Notebook:
    """Stands in for a writer: keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_events_are_the_journals_numbers_as_they_happen(tiny, tmp_path, monkeypatch):
    made = {}
    monkeypatch.setattr(ours, "_writer", lambda: None)
    monkeypatch.setattr(ours, "open_writer", lambda folder, after: made.setdefault(folder, Notebook()))
    when = []
    seen = Watch(round=lambda record: when.append(sum(len(book.rows) for book in made.values())))
    home = tmp_path / "run"
    run(replace(tiny, rounds=3), home, ours.with_events(seen, home))
    (folder, book), *others = made.items()
    assert not others
    assert folder == home / "tensorboard" / "momentum_at_home"
    assert book.closed
    each = len(book.rows) // 3
    assert when == [0, each, 2 * each]
    accuracy = [(step, value) for name, value, step in book.rows if name == "test/accuracy"]
    assert accuracy == [(record["round"], record["test"]["accuracy"]) for record in journal.read(home)]


def test_a_missing_package_is_said_before_the_first_round(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fedbayes\[tensorboard\]'"):
        ours.with_events(Watch(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_event_files_are_written_and_a_resumed_run_adds_to_them(tiny, tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs fedbayes[tensorboard]"
    )
    home = tmp_path / "run"
    run(replace(tiny, rounds=3), home, ours.with_events(Watch(), home))
    events = reader.EventAccumulator(str(home / "tensorboard" / "momentum_at_home"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/nll")] == [1, 2, 3]
