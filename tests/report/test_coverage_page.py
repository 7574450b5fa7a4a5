"""The panel of promises: a dot for each site, red below what chance allows, from files alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from fedbayes.report.coverage import coverage
from fedbayes.report.drawing import svg
from fedbayes.report.material import Figure, gather


def folder_of(place: Path, hits: list[int], size: float = 1.5) -> Path:
    place.mkdir()
    (place / "config.toml").write_text('data = "digits"\nmethod = "fedavg"\n')
    head = {"kind": "classes", "score": "adaptive", "way": "label_shift", "coverage": 0.9}
    many = len(hits)
    np.savez(
        place / "calibration.npz",
        sites=np.array([f"site {k}" for k in range(many)]),
        thresholds=np.ones((many, 3)),
        everywhere=np.ones(3),
        counts=np.ones((3, 5)),
        edges=np.arange(4.0),
        mix=np.full((many, 3), 1 / 3),
        spread=np.ones(1),
        head=np.array(json.dumps(head)),
        judged_rows=np.full(many, 100),
        judged_hits=np.array(hits),
        judged_size=np.full(many, size),
    )
    return place


def test_sites_are_dots_around_the_promised_level(tmp_path):
    section = coverage(gather([folder_of(tmp_path / "run", [90, 88, 70, 97])]))
    assert section is not None
    figure = next(part for part in section.body if isinstance(part, Figure))
    drawn = svg(figure.drawing)
    assert drawn.count("<title>") == 4
    assert "site 2: 0.700 of 100 rows, size 1.5" in drawn
    assert "s-wrong" in drawn
    table = next(part for part in section.body if isinstance(part, str))
    assert "0.700 (site 2)" in table
    assert "3 of 4" in table
    assert "label shift" in table


def test_kept_promises_have_no_red_dot_and_runs_without_calibration_no_panel(tmp_path):
    section = coverage(gather([folder_of(tmp_path / "run", [90, 92, 89])]))
    assert section is not None
    assert "s-wrong" not in svg(section.body[0].drawing)
    (tmp_path / "run" / "calibration.npz").unlink()
    assert coverage(gather([tmp_path / "run"])) is None


def test_sizes_that_are_not_told_are_left_out(tmp_path):
    section = coverage(gather([folder_of(tmp_path / "run", [90, 88], size=np.nan)]))
    assert section is not None
    drawn, table = svg(section.body[0].drawing), section.body[1]
    assert "site 1: 0.880 of 100 rows<" in drawn
    assert "nan" not in drawn + table
    assert ">not told</td>" in table


def test_a_damaged_calibration_is_named_and_left_out(tmp_path):
    folder = folder_of(tmp_path / "run", [90])
    (folder / "calibration.npz").write_bytes(b"nothing")
    material = gather([folder])
    assert coverage(material) is None
    assert any("calibration.npz" in note for note in material.missing)


def test_pages_are_written_without_torch():
    code = "import sys, fedbayes.report, fedbayes.report.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
