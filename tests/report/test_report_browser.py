"""The page in a browser: nothing sticks out, every figure is drawn, switches work, the console stays silent."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from fedbayes.experiments.experiment import Experiment
from fedbayes.report import write
from fedbayes.runs.folder import run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --dump-dom"
)
# Drives the page as a reader would, and leaves what it finds in the document.
PROBE = """<script>addEventListener("load", () => {
  const all = q => [...document.querySelectorAll(q)];
  const seen = e => e.getBoundingClientRect().width > 40 && e.getBoundingClientRect().height > 40;
  const back = () => getComputedStyle(document.body).backgroundColor;
  const found = {fits: document.documentElement.scrollWidth <= innerWidth, back: back(),
    figures: all("figure").length, drawn: all("figure svg").every(seen), pictures: all("article img").every(seen),
    cards: all("details[open] .samples svg").filter(seen).length};
  const hidden = () => all(".r0").filter(e => e.closest("main")).every(e => getComputedStyle(e).display == "none");
  document.getElementById("run0").click();
  found.hides = hidden();
  found.others = all("figure.r1").every(seen);
  document.getElementById("run0").click();
  found.shows = !hidden();
  document.getElementById("scheme-light").click(); found.light = back();
  document.getElementById("scheme-dark").click(); found.dark = back();
  all("details").forEach(e => { e.open = true; });
  const reach = all("a, input, summary, [tabindex='0']");
  found.keys = reach.filter(e => { e.focus(); return document.activeElement == e; }).length == reach.length;
  found.scrolls = all(".wide").every(e => e.tabIndex == 0);
  found.tables = innerWidth > 560 || all(".rows").every(e => e.scrollWidth <= e.parentElement.clientWidth + 1
    && [...e.querySelectorAll("td")].every(td => td.dataset.title));
  found.links = all("nav a").every(a => document.getElementById(a.hash.slice(1)));
  document.body.dataset.found = JSON.stringify(found); });</script>"""

# A browser's window is never narrower than 500 pixels: a frame is.
FRAME = """<!doctype html><html style="color-scheme: light dark"><body><iframe width={width} height=900 srcdoc="{page}"
onload="document.body.dataset.found = this.contentDocument.body.dataset.found"></iframe></body></html>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser) -> str:
    """The report of two runs with a probe in it."""
    x = Experiment(network="linear", clients=8, cohort=3, rounds=2, methods=("fedavg", "feduab"), options={"epochs": 1})
    home = tmp_path_factory.mktemp("browser") / "small"
    run(x, home)
    return write([home], home / "report.html").read_text().replace("</body>", PROBE + "</body>")


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_the_page_works_in_a_browser(page, browser, tmp_path, scheme, width):
    (tmp_path / "page.html").write_text(FRAME.format(width=width, page=escape(page)))
    prefers = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    command = [browser, *OPTIONS.split(), prefers, "--window-size=1300,1000"]
    made = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}"],
        capture_output=True,
        text=True,
        timeout=1000,
        check=True,
    )
    found = json.loads(unescape(re.search(r'<body data-found="([^"]*)"', made.stdout)[1]))
    assert found["figures"] == 24
    assert found["cards"] == 24
    assert found["back"] == found[scheme] != found["light" if scheme == "dark" else "dark"]
    for what in ("fits", "drawn", "pictures", "hides", "others", "shows", "keys", "scrolls", "tables", "links"):
        assert found[what], what
    assert "CONSOLE" not in made.stderr
