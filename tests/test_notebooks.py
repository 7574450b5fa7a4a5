"""Pages as notebooks: well-formed, and their code is what the suite runs of the page, no more and no less."""

import importlib.util
import json
from pathlib import Path

import pytest

from test_tutorial import PAGES, blocks

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_has_the_code_that_is_run_of_its_page(name, tmp_path):
    assert f"docs/{name}.md" in PAGES  # so that its blocks are run
    (path,) = [path for path in notebooks.write(tmp_path) if path.stem == name]
    book = json.loads(path.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert code[1:] == [block.strip("\n") for _, block in blocks(f"docs/{name}.md")]
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    text = "".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
    assert ".md" not in text.replace("README.md", "")
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))
