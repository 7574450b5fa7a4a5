"""Figures as files."""

from matplotlib.figure import Figure

from fedbayes.papers.drawing import save


def test_the_same_figure_is_the_same_file(tmp_path):
    for name in ("one", "two"):
        figure = Figure()
        figure.subplots().plot([0, 1], [1, 0])
        save(figure, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
