"""The report: one page that parses, holds what it should, needs no torch, and opens in a browser."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fedbayes.errors import InputError
from fedbayes.study.experiment import Experiment
from fedbayes.study.report import write
from fedbayes.study.report.charts import Curve, line_chart, ticks
from fedbayes.study.run import run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "link", "img"}


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

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison on digits, as the quick start is, but of two rounds."""
    x = Experiment(network="linear", clients=8, cohort=3, rounds=2, methods=("fedavg", "feduab"), options={"epochs": 1})
    home = tmp_path_factory.mktemp("report") / "small"
    run(x, home)
    return home


def test_the_page_parses_and_needs_nothing_beside_it(folder):
    page = write([folder], folder / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(address.startswith("data:") for address in tags.addresses)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert tags.seen.count("polyline") == 6  # three scores of two methods
    assert tags.seen.count("img") == 3
    for title in ("Scores on the test set", "Learning curves", "Three predictions", "Labels of the clients"):
        assert title in page
    assert "8 clients" in page


def test_several_folders_and_an_unfinished_run_make_a_page(folder, tiny, tmp_path):
    run(replace(tiny, rounds=2), tmp_path / "other")
    (tmp_path / "other" / "evaluation.npz").unlink()
    page = write([folder, tmp_path / "other"], tmp_path / "x.html").read_text()
    assert "small/fedavg" in page
    assert "other is not finished: round 2 of 2" in page


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(InputError, match="is no run folder"):
        write([tmp_path], tmp_path / "x.html")


def test_a_report_is_written_without_torch(folder):
    program = """import sys; sys.modules['torch'] = None
from fedbayes.study.report import write
write(sys.argv[1:], sys.argv[1] + '/plain.html')"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert (folder / "plain.html").read_text() == write([folder], folder / "report.html").read_text()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.2, 0.21), (-3, 5), (1, 60), (2, 2), (1e-7, 3e-7)])
def test_ticks_cover_the_range_with_round_steps(low, high):
    made = ticks(low, high)
    assert made[0] <= low
    assert made[-1] >= high
    assert 2 <= len(made) <= 8


def test_a_chart_leaves_out_what_is_not_finite():
    chart = line_chart("NLL", [Curve("a <b>", 0, [1, 2, 3], [0.5, float("nan"), 0.1])])
    assert "nan" not in chart
    assert "a &lt;b&gt;" in chart
    assert line_chart("NLL", [Curve("a", 0, [1], [float("inf")])]) == ""


@pytest.mark.browser
def test_the_page_opens_in_a_browser(folder, tmp_path):
    """At phone width nothing sticks out, every figure is drawn, and the console stays silent."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}")
    page = write([folder], folder / "report.html").read_text()
    probe = """<script>addEventListener("load", () => {
      const box = [...document.querySelectorAll("svg, img")].map(e => e.getBoundingClientRect());
      document.body.dataset.found = [document.documentElement.scrollWidth <= innerWidth,
        box.length, box.every(b => b.width > 40 && b.height > 40)].join(" "); });</script>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe + "</body>"))
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    options += (
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --dump-dom --window-size=500,900"
    )
    made = subprocess.run(
        [browser, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.search(r'data-found="([^"]*)"', made.stdout)[1] == "true 7 true"
    assert "CONSOLE" not in made.stderr
