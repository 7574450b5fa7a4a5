"""The Python blocks of the tutorial and the README are run as they stand, in order, in one namespace a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[int, str]]:
    """Line number and code of each Python block; one with `...` stands for something else and is not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(text[: match.start()].count("\n") + 2, match[1]) for match in BLOCK.finditer(text)]
    return [(line, code) for line, code in found if "..." not in code]


@pytest.mark.parametrize(("page", "least"), [("docs/tutorial.md", 10), ("README.md", 3)])
def test_the_code_of_a_page_runs(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = blocks(page)
    assert len(found) >= least
    names: dict[str, object] = {"__name__": "tutorial"}
    for line, code in found:
        # Empty lines before it, so that an error names the page's own line.
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), names)
    assert capsys.readouterr().out
