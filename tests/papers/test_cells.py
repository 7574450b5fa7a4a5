"""Tables of trained cells: which are run, what is kept, what stands beside the published figures."""

import doctest
import json
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.networks.papers import network_named
from fedbayes.papers import cells, drawing, fedag, feduab, seeds
from fedbayes.papers import page as pages
from fedbayes.papers.cells import Cell, Request, Table, chosen, curves_of
from fedbayes.papers.rows import rows_of
from fedbayes.papers.tables import TABLES, run_published, seeds_of
from fedbayes.posterior import values as posterior
from fedbayes.runs.home import locked
from fedbayes.runs.recording import Recording

BASE = Experiment(data="digits", network="linear", clients=4, rounds=2, cohort=2, options={"lr": 0.1, "epochs": 1})


def table(**changes) -> Table:
    first = replace(BASE, method="fedavg", **changes)
    second = replace(BASE, method="feduab", options={**BASE.options, "draws": 2}, **changes)
    more = lambda run: {"double": 2 * run.journal[-1]["test"]["accuracy"]}  # noqa: E731
    both = [
        Cell("FedAvg", "IID", first, {"accuracy": 0.9, "nll": 0.5}, None, "digits"),
        Cell("FedUAB", "IID", second, {"accuracy": 0.1}, more, "digits"),
    ]
    metrics = {"accuracy": "test.accuracy", "nll": "test.nll", "double": "measured.double"}
    scales = {"paper": lambda x: x, "tiny": lambda x: replace(x, rounds=1)}
    return Table("Made up, table 1", lambda: both, metrics, scales, "made", seeds.SEEDS)


def train(table: Table, output, **request) -> None:
    table.source.train(table, output, Request(**request))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    train(table(), folder, seeds=[0, 1])
    return folder


def test_a_row_names_all_that_its_seeds_were_made_with(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "two")
    path = tmp_path / "two/cells/paper/made-digits-fedavg-iid-r2-s1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "NVIDIA H200", "commit": "abc"}))
    row = rows_of("made", table(), tmp_path / "two", "paper")[0]
    assert row["device"] == "cpu, NVIDIA H200"
    assert row["commit"].endswith("abc")
    legend = pages.provenance([row])
    assert "on NVIDIA H200, cpu" in legend
    assert "abc" in legend


def test_every_seed_is_a_file_with_curve_and_setting(trained):
    names = sorted(path.name for path in (trained / "cells/paper").iterdir())
    assert names == [f"made-digits-{m}-iid-r2-s{s}.json" for m in ("fedavg", "feduab") for s in (0, 1)]
    content = json.loads((trained / "cells/paper" / names[2]).read_text())
    assert content["experiment"]["method"] == "feduab"
    assert [point["round"] for point in content["curve"]] == [1, 2]
    assert content["curve"][-1]["accuracy"] == pytest.approx(content["test"]["accuracy"], abs=1e-5)
    assert content["oracle_best"]["nll"] <= content["test"]["nll"]
    assert content["measured"]["double"] == 2 * content["test"]["accuracy"]


def test_what_is_there_is_not_trained_again_and_seeds_may_be_added(trained, tmp_path):
    said = []
    train(table(), trained, seeds=[0, 1], say=said.append)
    assert said == []
    train(table(), tmp_path, only=["fedavg"], seeds=[1], keep=True)
    assert posterior.load(tmp_path / "cells/paper/made-digits-fedavg-iid-r2-s1.safetensors")["model"].mean.shape == (
        650,
    )
    alone = json.loads((tmp_path / "cells/paper/made-digits-fedavg-iid-r2-s1.json").read_text())
    together = json.loads((trained / "cells/paper/made-digits-fedavg-iid-r2-s1.json").read_text())
    assert alone["test"] == pytest.approx(together["test"], rel=1e-5)


def test_a_cell_that_was_cut_goes_on_from_its_checkpoint(trained, tmp_path, monkeypatch):
    seen, add = [], Recording.add

    def cut_after_the_first_round(self, progress, record):
        add(self, progress, record)
        seen.append((self.folder.name[-2:], record["round"]))
        if seen == [("s0", 1), ("s1", 1)]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "add", cut_after_the_first_round)
    every = replace(BASE, checkpoint_every=1)
    cell = Cell("FedAvg", "IID", replace(every, method="fedavg"), {}, None, "digits")
    first = table()._replace(cells=lambda: [cell])
    with pytest.raises(KeyboardInterrupt):
        train(first, tmp_path, seeds=[0, 1])
    assert not list((tmp_path / "cells/paper").glob("*.json"))
    train(first, tmp_path, seeds=[0, 1])
    assert seen[2:] == [("s0", 2), ("s1", 2)]
    assert not (tmp_path / "cells/paper/running").exists()
    for seed in (0, 1):
        name = f"cells/paper/made-digits-fedavg-iid-r2-s{seed}.json"
        cut, whole = (json.loads((folder / name).read_text()) for folder in (tmp_path, trained))
        assert cut["test"] == whole["test"]
        assert cut["curve"] == whole["curve"]


def test_the_command_shows_rounds_says_how_to_go_on_and_does(tmp_path, monkeypatch):
    every = replace(BASE, method="fedavg", checkpoint_every=1)
    cell = Cell("FedAvg", "IID", every, {"accuracy": 0.9}, None, "digits")
    monkeypatch.setitem(TABLES, "made-1", table()._replace(cells=lambda: [cell]))
    asked = ["table", "made-1", "--output", str(tmp_path)]
    add = Recording.add

    def cut(self, progress, record):
        add(self, progress, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "add", cut)
        stopped = CliRunner().invoke(app, asked)
    assert stopped.exit_code == 130
    assert "stopped; the same command goes on" in stopped.output
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "going on from round 1" in done.output
    assert "digits FedAvg IID round 2/2  accuracy" in done.output
    assert "digits FedAvg IID seed 0: accuracy" in done.output
    assert "# Made up, table 1" in done.output


def test_a_cell_that_another_process_trains_is_left_to_it(tmp_path):
    here = tmp_path / "cells/paper/running/made-digits-fedavg-iid-r2-s0"
    with locked(here), pytest.raises(InputError, match="made-digits-fedavg-iid-r2-s0 is in use by another process"):
        train(table(), tmp_path, only=["fedavg"])
    train(table(), tmp_path, only=["fedavg"])
    assert [path.name for path in (tmp_path / "cells/paper").iterdir()] == ["made-digits-fedavg-iid-r2-s0.json"]


def test_rows_stand_beside_the_published_figures(trained):
    rows = rows_of("made-1", table(), trained, "paper")
    row = next(r for r in rows if (r["row"], r["metric"]) == ("FedAvg", "accuracy"))
    files = [json.loads((trained / f"cells/paper/made-digits-fedavg-iid-r2-s{s}.json").read_text()) for s in (0, 1)]
    a, b = (content["test"]["accuracy"] for content in files)
    assert row["ours"] == pytest.approx((a + b) / 2)
    assert row["error"] == pytest.approx(abs(a - b) / 2)
    assert (row["published"], row["seeds"], row["rounds"]) == (0.9, [0, 1], 2)
    assert not [r for r in rows if (r["row"], r["metric"]) == ("FedAvg", "double")]
    text = pages.markdown(table(), rows)
    assert f"{50 * (a + b):.2f}" in text
    assert "/ 90.00" in text
    page = pages.page(table(), rows, trained, "paper")
    assert "<svg" in page
    assert "src=" not in page
    assert "@import" not in page
    assert set(curves_of(table(), trained, "paper", table().cells())) == {"FedAvg", "FedUAB"}


def test_a_row_with_a_change_has_its_base_rows_colour():
    rows = ["a", "b", "b with more", *(f"row {n}" for n in range(20))]
    a, b, changed, *others = drawing.looks(rows)
    assert a["color"] != b["color"] == changed["color"]
    assert (b["linestyle"], changed["linestyle"]) == ("-", "--")
    lines = [tuple(look.values()) for look in (a, b, *others)]
    assert len(set(lines)) == len(lines)
    assert len(drawing.looks(map(str, range(100)))) == 100


def test_a_cell_of_other_settings_than_the_table_has_now_is_kept_and_named(trained):
    said = []
    first, second = table(dropout=0.1).cells()
    options = {"lr": 0.2, "epochs": 1, "momentum": 0.9}
    other = replace(first.experiment, dropout=0.0, options=options, device="cuda")
    changed_table = table()._replace(cells=lambda: [first._replace(experiment=other), second])
    rows = rows_of("made-1", changed_table, trained, "paper")
    found = {row["row"]: row["otherwise"] for row in rows}
    changed = "options.lr 0.1 (now 0.2), options.momentum 0 (now 0.9)"
    assert found == {"FedAvg": changed, "FedUAB": "dropout 0 (now 0.1)"}
    text = pages.markdown(changed_table, rows)
    assert (
        f"other settings than the table has now:\n\n- digits FedAvg IID: {changed}\n- digits FedUAB IID: dropout"
        in text
    )
    assert f"<li>digits FedAvg IID: {changed}</li>" in pages.page(changed_table, rows, trained, "paper")
    assert "other settings" not in pages.markdown(table(), rows_of("made-1", table(), trained, "paper"))
    train(changed_table, trained, only=["fedavg"], say=said.append)
    path = trained / "cells/paper/made-digits-fedavg-iid-r2-s0.json"
    assert said == [f"digits FedAvg IID: kept, though made with {changed}; without {path} it is trained anew"]


def test_a_page_says_what_was_scaled_down(trained):
    longer = [cell._replace(experiment=replace(cell.experiment, rounds=9)) for cell in table().cells()]
    options = {**longer[0].experiment.options, "lr": 0.2}
    longer[0] = longer[0]._replace(experiment=replace(longer[0].experiment, options=options))
    less = table()._replace(
        cells=lambda: longer,
        scales={"paper": lambda x: replace(x, options={**x.options, "lr": 0.1}) if x.method == "fedavg" else x},
    )
    rows = rows_of("made-1", less, trained, "paper")
    assert {row["row"]: row["scaled"] for row in rows} == {
        "FedAvg": ["rounds 2 for 9", "lr 0.1 for 0.2"],
        "FedUAB": ["rounds 2 for 9"],
    }
    assert "Scaled down: rounds 2 for 9, lr 0.1 for 0.2." in pages.markdown(less, rows)
    assert "Scaled down" not in pages.markdown(table(), rows_of("made-1", table(), trained, "paper"))


def test_variants_of_a_run_are_rows_of_their_own(trained):
    metrics = {"nll": "test.nll", "twice nll": "measured.double"}
    twice = table()._replace(metrics=metrics, variants={"twice": "-twice"})
    rows = rows_of("made-1", twice, trained, "paper")
    assert [(r["row"], r["metric"]) for r in rows] == [("FedAvg", "nll"), ("FedUAB", "nll"), ("FedUAB-twice", "nll")]
    assert "| FedUAB-twice |" in pages.markdown(twice, rows)


def test_words_choose_cells_by_group_row_and_column():
    made = TABLES["feduab-7"].cells()
    assert {(c.group, c.row) for c in chosen(made, ["mnist", "FedUAB-5", "FedAvg"])} == {
        ("MNIST", "FedUAB-5"),
        ("MNIST", "FedAvg"),
    }
    assert len(chosen(made, ["mnist", "small-iid", "fedavg"])) == 1
    with pytest.raises(InputError, match="fedavgg"):
        chosen(made, ["fedavgg"])


def test_another_number_of_rounds_is_another_file_and_the_longest_counts(trained, tmp_path):
    train(table(), tmp_path, only=["fedavg"], seeds=[0], changes={"rounds": 1})
    assert rows_of("made-1", table(), tmp_path, "paper")[0]["rounds"] == 1
    train(table(), tmp_path, only=["fedavg"], seeds=[0])
    assert rows_of("made-1", table(), tmp_path, "paper")[0]["rounds"] == 2


def test_a_table_of_another_scale_is_pointed_at(trained, monkeypatch):
    monkeypatch.setitem(TABLES, "made-1", table())
    with pytest.raises(InputError, match="at scale tiny: there are some of --scale paper"):
        run_published("made-1", trained, Request(scale="tiny"), train=False)


@pytest.mark.parametrize("name", ["feduab-6", "fedag-2"])
def test_a_table_that_was_never_run_or_is_unknown_says_so(tmp_path, name):
    with pytest.raises(InputError, match=f"{name} has been run at scale paper: run fedbayes table {name}"):
        run_published(name, tmp_path, Request(), train=False)
    with pytest.raises(InputError, match="did you mean"):
        run_published(f"{name}{name[-1]}", tmp_path, Request())
    for choice in (True, False):
        with pytest.raises(InputError, match="unknown scale 'huge'"):
            run_published(name, tmp_path, Request(scale="huge"), train=choice)
    assert not list(tmp_path.iterdir())


def test_seeds_are_a_range_or_a_list():
    assert (seeds_of("0..2"), seeds_of("3, 5")) == ([0, 1, 2], [3, 5])
    for text in ("one", "", "0,x", "-1..1"):
        with pytest.raises(InputError, match=r"seeds: .* write 0\.\.2 or 0,3"):
            seeds_of(text)


@pytest.mark.parametrize("name", TABLES)
def test_every_place_of_a_table_has_its_own_cell_and_file(name):
    made = TABLES[name].cells()
    places = [(cell.group, cell.row, cell.column) for cell in made]
    assert len(set(places)) == len(places) > 0
    if TABLES[name].source is seeds.SEEDS:
        names = [seeds.file_name(TABLES[name].family, c, c.experiment) for c in made]
        assert len(set(names)) == len(names)
    assert "paper" in TABLES[name].scales


def test_examples_hold():
    for module in (cells, fedag):
        outcome = doctest.testmod(module)
        assert outcome.attempted > outcome.failed == 0


def test_feduabs_networks_have_the_published_numbers_of_weights():
    shapes = {"mlp": (1, 28, 28), "cnn": (3, 32, 32), "text_cnn": (32,)}
    counts = {n: sum(p.numel() for p in network_named(n, s, 10).parameters()) for n, s in shapes.items()}
    assert counts == {"mlp": 42_310, "cnn": 52_874, "text_cnn": 801_780}


def test_z_of_the_paper_sets_both_numbers_of_draws():
    x = feduab.experiment_of("MNIST", "FedUAB-5", "Small-IID")
    from fedbayes.experiments.build import method_of

    options = method_of(x).options
    assert (options["train_draws"], options["test_draws"], options["division"]) == (5, 5, 2.0)


def test_of_many_cells_a_few_are_named(tmp_path):
    first, *_ = table().cells()
    many = [first._replace(column=f"split {k}", experiment=replace(first.experiment, seed=k)) for k in range(6)]
    said = []
    train(table()._replace(cells=lambda: many), tmp_path, say=said.append, scale="tiny")
    named = ", ".join(f"digits FedAvg split {k}" for k in range(3))
    assert said[0] == "6 runs to train, those of one program together (1)"
    assert said[1] == f"{named}, 3 more: 6 runs of 1 rounds"
