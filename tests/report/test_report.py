"""The report: one page that parses, holds what it should, needs no torch, and says what is missing."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import fedbayes as fb
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.report import write, write_figures
from fedbayes.runs.folder import run

VOID = {"meta", "link", "img", "input"}
FIGURES = (
    *("learning-accuracy", "learning-nll", "learning-ece", "retention-entropy", "retention-aleatoric"),
    *("retention-epistemic", "retention-mutual_information", "roc-noise-entropy", "clients-spread", "clients-0"),
    *("influence-share", "influence-change", "clients-nll", "clients-ece", "clients-entropy", "clients-epistemic"),
    *("confusion-0-fedavg", "confusion-1-feduab", "roc-classes"),
    *("cost-bytes", "cost-time", "reliability-0-fedavg", "reliability-1-feduab", "plane-0-fedavg", "plane-1-feduab"),
    "ood-noise-epistemic-1-feduab",
)
SECTIONS = (
    *("Scores on the test set", "Learning curves", "Three predictions", "Reliability", "Retention"),
    *(
        "Out of distribution",
        "The uncertainty plane",
        "Gallery",
        "Clients",
        "Who moved the model",
        "Communication and time",
    ),
)


class Tags(HTMLParser):
    """Counts tags and holds them to be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def add_ood(folder) -> None:
    """An ood.npz as `fedbayes evaluate` writes it."""
    random = np.random.default_rng(0)
    arrays = {"thumbs/noise": random.integers(0, 255, (4, 8, 8)).astype(np.uint8), "meta": json.dumps({})}
    for score in ("entropy", "epistemic"):
        arrays[f"inside/{score}"] = random.random(50).astype(np.float32)
        arrays[f"outside/noise/{score}"] = (0.4 + random.random(60)).astype(np.float32)
    np.savez(folder / "ood.npz", **arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison on digits, as the quick start is, but of two rounds; one method has OOD data."""
    x = Experiment(network="linear", clients=8, cohort=3, rounds=2, methods=("fedavg", "feduab"), options={"epochs": 1})
    home = tmp_path_factory.mktemp("report") / "small"
    run(x, home)
    add_ood(home / "feduab")
    return home


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the folder to break."""
    return shutil.copytree(folder, tmp_path / "copy")


def page_of(*folders) -> str:
    """The report of folders, held to parse."""
    page = write(folders, folders[0] / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return page


def test_the_page_parses_and_needs_nothing_beside_it(folder):
    page = page_of(folder)
    tags = Tags()
    tags.feed(page)
    assert all(address.startswith(("data:", "#")) for address in tags.addresses)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert "script" not in tags.seen
    assert len(page.encode()) < 5e6
    for title in SECTIONS:
        assert f">{title}</a></h2>" in page
    for name in FIGURES:
        assert f'data-name="{name}"' in page
    assert "8 clients" in page
    for words in ("Most certain", "Most aleatoric", "Most epistemic", "Most wrong"):
        assert words in page


def test_each_method_has_one_colour_everywhere(folder):
    page = page_of(folder)
    groups = re.findall(r'<g class="r(\d)">(.*?)</g>', page, re.S)
    assert groups
    for number, marks in groups:
        assert set(re.findall(r"[fs]-(c\d)", marks)) == {f"c{number}"}


def test_runs_of_one_method_in_two_folders_are_told_apart(folder, copied):
    page = page_of(folder, copied)
    for name in ("small/fedavg", "copy/fedavg"):
        assert f"</svg>{name}</label>" in page
    assert 'stroke-dasharray="7 3"' in page


def test_a_page_of_many_runs_stays_small(folder, tmp_path):
    homes = [shutil.copytree(folder, tmp_path / f"run{i}") for i in range(20)]
    page = page_of(*homes)
    assert page.count('type="checkbox"') == 40
    assert len(page.encode()) < 5e6


def test_a_report_is_written_without_torch(folder):
    program = """import sys; sys.modules['torch'] = None
from fedbayes.report import write, write_figures
write(sys.argv[1:], sys.argv[1] + '/plain.html')"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert (folder / "plain.html").read_text() == write([folder], folder / "report.html").read_text()


def test_figures_are_saved_as_svg_and_png(folder, tmp_path):
    made = write_figures([folder], tmp_path / "figures")
    names = {path.name for path in made}
    for name in (*FIGURES, "gallery-wrong-1-feduab"):
        assert {f"{name}.svg", f"{name}.png"} <= names
    for path in made:
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start.startswith(b"<svg")
    curves = (tmp_path / "figures" / "learning-nll.svg").read_text()
    assert "feduab</text>" in curves  # a key of its own: the page's is not there


def test_a_method_without_ood_data_is_named(folder):
    page = page_of(folder)
    assert "fedavg has no out-of-distribution scores" in page
    assert "feduab has no out-of-distribution scores" not in page


def test_runs_that_were_tested_on_other_rows_are_told(folder, copied):
    words = "Not all runs were tested on the same rows"
    assert words not in page_of(folder)
    path = copied / "feduab" / "evaluation.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "labels": arrays["labels"][::-1]})
    assert words in page_of(copied)


def test_an_unfinished_run_makes_a_page(folder, tiny, tmp_path):
    run(replace(tiny, rounds=2), tmp_path / "other")
    (tmp_path / "other" / "evaluation.npz").unlink()
    page = page_of(folder, tmp_path / "other")
    assert "small/fedavg" in page
    assert "other is not finished: round 2 of 2" in page


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("feduab/evaluation.npz", "evaluation.npz can&#x27;t be read"),
        ("feduab/ood.npz", "ood.npz can&#x27;t be read"),
        ("samples.npz", "samples.npz can&#x27;t be read"),
    ],
)
def test_a_file_that_is_cut_short_is_named(copied, file, words):
    whole = (copied / file).read_bytes()
    (copied / file).write_bytes(whole[: len(whole) // 2])
    assert words.replace("&#x27;", "'") in page_of(copied)


@pytest.mark.parametrize("file", ["feduab/rounds.jsonl", "feduab/evaluation.npz", "samples.npz", "feduab/ood.npz"])
def test_a_file_that_is_missing_leaves_its_section_out(copied, file):
    (copied / file).unlink()
    page = page_of(copied)
    assert "Scores on the test set" in page
    assert "fedavg" in page


def test_a_method_that_has_not_begun_is_named(copied):
    shutil.rmtree(copied / "feduab")
    assert "feduab has not begun" in page_of(copied)


def test_arrays_of_an_older_version_make_a_page(copied):
    path = copied / "feduab" / "evaluation.npz"
    with np.load(path) as file:
        few = {name: file[name] for name in ("probs", "labels", "aleatoric", "epistemic")}
    np.savez(path, **few)
    page = page_of(copied)
    assert "evaluation.npz has no entropy, mutual_information, client_scores, client_sizes" in page
    assert 'data-name="plane-1-feduab"' in page


def test_settings_of_another_version_make_a_page(copied):
    path = copied / "config.toml"
    path.write_text('colour = "blue"\n' + path.read_text())
    page = page_of(copied)
    assert "unknown key in" in page
    assert 'data-name="learning-nll"' in page


def test_a_journal_alone_makes_a_page(copied):
    (copied / "feduab" / "config.toml").unlink()
    page = page_of(copied / "feduab")
    assert "what was run is not known" in page


def test_a_broken_journal_is_named(copied):
    path = copied / "feduab" / "rounds.jsonl"
    path.write_text("{not json\n" + path.read_text())
    assert "line 1 is not JSON" in page_of(copied)


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(InputError, match="is no run folder"):
        write([tmp_path], tmp_path / "x.html")


@pytest.mark.parametrize("shape", ["regression", "no_test_rows"])
def test_other_kinds_get_what_fits(tmp_path, shape, tiny):
    if shape == "regression":
        x = Experiment(data="diabetes", network="linear", clients=4, rounds=2, options={"epochs": 1})
    else:
        x = replace(tiny, rounds=1, data_options={"test": 0})
    run(x, tmp_path / shape)
    page = page_of(tmp_path / shape)
    assert ('data-name="coverage"' in page) == (shape == "regression")
    assert ('data-name="predicted-0-feduab"' in page) == (shape == "regression")
    assert "Gallery" not in page
    assert ("has no predictions" in page) == (shape == "no_test_rows")


def test_every_target_is_drawn_and_own_sites_are_counted(tmp_path, monkeypatch):
    (tmp_path / "two_wards.py").write_text(
        "import torch, fedbayes as fb\n"
        "def wards():\n"
        "    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))\n"
        "    sites = {name: (x[i:], x[i:, :2]) for i, name in enumerate(('north', 'south'))}\n"
        "    return fb.data.from_clients(sites, test=sites, kind='real')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    x = Experiment(data="two_wards:wards", network="linear", rounds=1, method="fedavg", options={"epochs": 1})
    run(x, tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert [f'data-name="predicted-0-fedavg-{d}"' in page for d in (1, 2, 3)] == [True, True, False]
    assert "fedavg, target 2 of 2" in page
    assert "two_wards:wards over its 2 sites, all a round" in page


def test_rows_of_several_labels_are_kept_by_exact_match(tmp_path):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    clients = from_arrays(x[:30], x[:30] > 0, x[30:], x[30:] > 0.5, kind="labels").split(fb.partition.iid(), clients=3)
    fitted = fb.fit("linear", clients, method=fb.methods.fedavg(epochs=1), rounds=1)
    page = page_of(fb.save(fitted, tmp_path / "run", network="linear"))
    assert "exact match of the kept" in page
    assert "Mean exact match over all shares kept" in page
    assert "accuracy of the kept" not in page
    assert "% have the label" in page  # a bar at .1 is not of rows that are right in one case of ten
    assert "% right" not in page


def test_a_config_beyond_all_size_is_named_and_not_read(tmp_path):
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n')
    with (tmp_path / "config.toml").open("wb") as file:
        file.truncate(2**40)
    assert "config.toml" in write([tmp_path], tmp_path / "page.html").read_text()
