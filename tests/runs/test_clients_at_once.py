"""How many clients run at once is a matter of memory and history; a resumed run goes on with it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_content import content, same

from fedbayes.engine.steps import Steps
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.folder import load, resume, run

FAST = Experiment(
    data="digits",
    clients=9,
    cohort=6,
    rounds=4,
    network_options={"hidden": [4]},
    method="feduab",
    options={"epochs": 1, "batch": 50, "test_draws": 2},
    engine="stacked",
    compile="off",
    personal_every=2,
    checkpoint_every=1,
)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The clients at once of every chunk that is run."""
    whole, seen = Steps.run, []

    def watched(self: Steps, work, state):
        seen.append(work.together.size)
        return whole(self, work, state)

    monkeypatch.setattr(Steps, "run", watched)
    return seen


def cut_in_half(x: Experiment, folder: Path) -> None:
    """Two of four rounds, in a folder that goes on with the others."""
    run(replace(x, rounds=2), folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    watched = Steps.run

    def small(self: Steps, work, state):
        if work.together.size > most:
            raise torch.OutOfMemoryError("out of memory")
        return watched(self, work, state)

    monkeypatch.setattr(Steps, "run", small)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_run_that_memory_was_once_too_short_for_goes_on_in_small_chunks(device, sizes, tmp_path, monkeypatch) -> None:
    x = replace(FAST, device=device)
    with monkeypatch.context() as patch:
        short_of_memory(patch, 3)
        run(x, tmp_path / "whole")
        cut_in_half(x, tmp_path / "cut")
    sizes.clear()
    went_on = resume(tmp_path / "cut")["feduab"]  # there is memory enough by now
    assert max(sizes) == 3
    again = load(tmp_path / "cut").task.engine.widths
    assert went_on.task.engine.widths["train"] == again["train"] == (3, 0, 1)
    assert same(content(tmp_path / "cut"), content(tmp_path / "whole"))


def test_a_compiled_program_keeps_the_seats_that_it_had(sizes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)
    # Who drops out is drawn by round: the first cohort is larger than those after the cut.
    x = replace(FAST, compile="on", dropout=0.5, seed=8, personal_every=0)
    whole = run(x, tmp_path / "whole")["feduab"]
    cohorts = [record["cohort"] for record in whole.journal]
    assert max(cohorts[2:]) < max(cohorts[:2]), "the test needs another seed"
    after = sizes[-2:]
    cut_in_half(x, tmp_path / "cut")
    sizes.clear()
    resume(tmp_path / "cut")
    assert sizes == after == [max(cohorts[:2])] * 2
    assert same(content(tmp_path / "cut"), content(tmp_path / "whole"))


def test_a_run_that_is_told_another_number_begins_with_that(sizes, tmp_path) -> None:
    cut_in_half(FAST, tmp_path)
    config = tmp_path / "config.toml"
    config.write_text("at_once = 2\n" + config.read_text())
    sizes.clear()
    resume(tmp_path)
    assert max(sizes) == 2
