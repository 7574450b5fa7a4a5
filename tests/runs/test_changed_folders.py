"""A run folder in which something was put in the place of something else is noticed, never trained on."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.runs.active import Active, resume_active, run_active
from fedbayes.runs.folder import resume, run
from fedbayes.runs.home import experiment_in
from fedbayes.runs.journal import LINES


@pytest.fixture
def folder(tiny, tmp_path):
    """A run whose clients keep state, with a checkpoint after every round."""
    run(tiny, tmp_path / "run")
    return tmp_path / "run"


def own_states(folder):
    loaded = fb.load(folder)
    return [loaded.own.get(k) for k in range(len(loaded.task.clients))]


def test_rows_of_two_clients_that_changed_places_are_noticed(folder):
    path = next(p for p in sorted((folder / "own").iterdir()) if _swap_rows(p))
    with pytest.raises(InputError, match=rf"can't be read from .*{path.name}.*checksum"):
        own_states(folder)


def _swap_rows(path) -> bool:
    """Swap the first two rows of a file, with their checksums: each is whole, and in the other's place."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entries = [e for name, e in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"]
    if entries[0]["shape"][0] < 2:
        return False
    for entry in entries:
        start, end = (8 + length + at for at in entry["data_offsets"])
        size = (end - start) // entry["shape"][0]
        one, two = data[start : start + size], data[start + size : start + 2 * size]
        data[start : start + 2 * size] = two + one
    path.write_bytes(bytes(data))
    return True


def test_a_file_of_rows_in_the_place_of_another_is_noticed(folder):
    first, *_, last = sorted((folder / "own").iterdir())
    shutil.copy(first, last)
    with pytest.raises(InputError, match="can't be read from"):
        own_states(folder)


def test_a_checkpoint_in_the_place_of_a_later_one_is_noticed(folder):
    before, last = sorted((folder / "checkpoints").iterdir())
    shutil.copy(before, last)
    for use in (fb.load, resume):
        with pytest.raises(InputError, match=r"round-000004\.safetensors holds round 3, not the round of its name"):
            use(folder)


@pytest.mark.parametrize("change", ["dropped", "doubled", "swapped"])
def test_journal_lines_that_are_not_in_their_places_are_noticed(folder, change):
    lines = (folder / LINES).read_text().splitlines()
    lines = {"dropped": lines[1:], "doubled": [lines[0], *lines], "swapped": [lines[1], lines[0], *lines[2:]]}[change]
    (folder / LINES).write_text("\n".join(lines) + "\n")
    for use in (fb.load, resume):
        with pytest.raises(InputError, match=r"rounds\.jsonl, line \d is not the record of round \d"):
            use(folder)


def test_an_empty_config_does_not_begin_another_experiment(folder):
    (folder / "config.toml").write_text("")
    with pytest.raises(InputError, match=r"config\.toml has lost its data"):
        experiment_in(folder)


def test_resume_of_a_comparison_with_an_empty_config_trains_nothing(tiny, tmp_path):
    """It began the experiment of all defaults here, which looked like a command that does not end."""
    run(replace(tiny, method="fedavg", methods=("fedavg", "fedprox"), rounds=1), tmp_path)
    (tmp_path / "config.toml").write_text("")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"config\.toml has lost its data"):
        resume(tmp_path)
    assert set(tmp_path.rglob("*")) == before


def test_a_comparison_that_lost_its_methods_does_not_begin_another_run(tiny, tmp_path):
    run(replace(tiny, method="fedavg", methods=("fedavg", "fedprox"), rounds=1), tmp_path)
    kept = [line for line in (tmp_path / "config.toml").read_text().splitlines() if not line.startswith("methods")]
    (tmp_path / "config.toml").write_text("\n".join(kept))
    with pytest.raises(InputError, match=r"holds a run of fedavg, which .* does not name"):
        resume(tmp_path)


def test_an_unfinished_run_says_so_when_it_is_loaded(folder):
    sorted((folder / "checkpoints").iterdir())[-1].unlink()
    with pytest.warns(UserWarning, match="not finished: this is round 3 of 4"):
        assert fb.load(folder).progress.state.round == 3


def test_arrays_of_another_shape_are_named_in_the_report(folder, tmp_path):
    from fedbayes.report import write

    with np.load(folder / "evaluation.npz") as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(folder / "evaluation.npz", **{**arrays, "labels": arrays["labels"][:3]})
    page = write([folder], tmp_path / "page.html").read_text()
    assert "which does not fit the rest" in page


def test_a_round_without_its_number_is_named_in_the_report(folder, tmp_path):
    from fedbayes.report import write

    first, *others = (folder / LINES).read_text().splitlines()
    record = {key: value for key, value in json.loads(first).items() if key != "round"}
    (folder / LINES).write_text("\n".join([json.dumps(record), *others]) + "\n")
    page = write([folder], tmp_path / "page.html").read_text()
    assert "rounds.jsonl, line 1 is not the record of round 1" in page


@pytest.mark.parametrize("file", ["active.json", "active.toml"])
def test_labels_that_were_asked_for_are_not_changed(tiny, tmp_path, file):
    experiment = replace(tiny, method="fedavg", rounds=1)
    run_active(experiment, Active("random", 4, 4, stages=2), tmp_path)
    path = tmp_path / file
    if file == "active.json":
        stages = json.loads(path.read_text())
        stages[0]["rows"][0][0] += 1
        path.write_text(json.dumps(stages))
    else:
        path.write_text(path.read_text().replace('"random"', '"entropy"'))
    with pytest.raises(InputError, match=r"stage 0 is not what was written"):
        resume_active(tmp_path)


def test_a_checkpoint_of_another_stage_is_noticed(tiny, tmp_path):
    experiment = replace(tiny, method="fedavg", rounds=1)
    run_active(experiment, Active("random", 4, 4, stages=2), tmp_path)
    first, second = (next((tmp_path / name / "checkpoints").iterdir()) for name in ("stage-00", "stage-01"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(InputError, match="was trained on other rows of the clients"):
        resume_active(tmp_path)
