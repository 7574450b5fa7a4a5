"""The benchmark scripts run, on the smallest of their cases; what they measure there says nothing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "adapters.py": ["digits", "test", "--small", "--only", "adapters, points"],
    "before.py": ["HEAD", "--case", "FedAvg MLP: auto", "--pairs", "1"],
    "bounds.py": ["--case", "FedAvg, MLP, 20 clients of 100 rows, one epoch", "--turns", "2"],
    "coverage.py": ["simulation", "--small"],
    "cpu.py": ["--only", "choice", "--case", "fedavg mlp, equal"],
    "hand.py": ["--job", "FedAvg, MLP 64", "--against", "eager", "--turns", "1"],
    "gpu_resnet.py": ["--device", "cpu", "--depth", "8", "--width", "2", "--rows", "32", "--only", "engines"],
    "ivon.py": ["--device", "cpu", "--rows", "20", "--only", "10 clients", "--times", "1", "--method", "FedIVON"],
    "kernels.py": ["--device", "cpu", "--small", "--only", "FedUAB-1 CNN", "--joined", "never"],
    "long.py": ["--data", "digits", "--rounds", "2", "--only", "FedAvg"],
    "start.py": ["--only", "mlp", "--compile", "off", "--rows", "20"],
    "student.py": ["--rows", "20"],
    "watch.py": ["quiet", "--small"],
}


@pytest.mark.parametrize("script", SMALL)
def test_it_writes_its_figures(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(SCRIPTS.parent)
    monkeypatch.setattr(sys, "argv", [script, *SMALL[script], "--output", str(output)])
    importlib.import_module(Path(script).stem).main()
    rows = json.loads(output.read_text())["rows"]
    assert rows
    assert all(row["what"] for row in rows)


def test_the_figure_of_scale_is_drawn_from_the_figures_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import scale_figures

    (tmp_path / "bench-scale.json").write_text((scale_figures.RESULTS / "bench-scale.json").read_text())
    monkeypatch.setattr(scale_figures, "RESULTS", tmp_path)
    scale_figures.main()
    assert "clients in all" in (tmp_path / "scale.svg").read_text()


def test_what_make_bench_runs_takes_no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every section and case is chosen by default."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import cpu

    importlib.reload(cpu)  # a choice of cases stays

    ran: list[tuple[str, int]] = []
    for name in ("speed", "beside", "choice"):
        monkeypatch.setattr(cpu, name, lambda figures, *way, name=name: ran.append((name, len(cpu.CHOICES))))
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--output", str(tmp_path / "figures.json")])
    cpu.main()
    assert [name for name, _ in ran] == ["speed", "beside", "choice", "choice"]
    assert ran[0][1] == 12
