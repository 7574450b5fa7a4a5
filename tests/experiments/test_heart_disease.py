"""Heart disease from four raw files to a report, by the block of the docs page: at most ten lines of Python."""

import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/hospitals.md"
HOME = Path(os.environ.get("FEDBAYES_DATA", ".")) / "heart-disease"


@pytest.mark.data
@pytest.mark.skipif(not list(HOME.glob("*.data")), reason="needs heart-disease in the folder named by FEDBAYES_DATA")
@pytest.mark.filterwarnings("ignore:site switzerland")
def test_ten_lines_from_raw_files_to_a_report(tmp_path, monkeypatch, capsys):
    code = re.search(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "heart-disease").symlink_to(HOME.resolve())
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    shown = capsys.readouterr().out
    scores = names["run"].scores(by="site")
    assert scores.sites == ("cleveland", "hungarian", "switzerland", "va")
    assert all(site in shown for site in scores.sites)
    assert scores.all["nll"].value < 0.5
    assert scores.all["auroc"].value > 0.8
    page = (tmp_path / "runs/heart/report.html").read_text()
    assert "scores by site" in page
    assert "tables of 4 sites" in page
