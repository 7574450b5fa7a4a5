"""Pages as notebooks: the same text and the same code, cell by cell. `python docs/notebooks.py FOLDER` writes them.

As a hook of mkdocs it puts them into the site and links them from their pages. The suite runs the code of these pages.
"""

import json
import re
import sys
from pathlib import Path

HOME = Path(__file__).parent
PAGES = ("tutorial", "hospitals", "images", "text", "regression", "survival", "pretrained", "ood", "compare", "following")
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$\n?", re.M | re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")


def cells(page: str) -> list[dict]:
    """A page as cells: its Python blocks are code, all between them is text, without links that lead nowhere here."""
    made, at = [], 0
    for block in FENCED.finditer(page):
        if block[1] == "python" and "..." not in block[2]:
            made += [_cell("markdown", page[at : block.start()]), _cell("code", block[2])]
            at = block.end()
    return [cell for cell in [*made, _cell("markdown", page[at:])] if cell["source"]]


def _cell(kind: str, text: str) -> dict:
    text = text.strip("\n")
    if kind == "markdown":
        text = LINK.sub(lambda link: "" if link[0].startswith("!") else link[1], text)
    cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(page: str) -> str:
    """The notebook's file."""
    first = _cell("code", "# %pip install fedbayes  # where it is not installed yet")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    head = {"kernelspec": kernel, "language_info": {"name": "python"}}
    numbered = [{"id": f"cell-{i}", **cell} for i, cell in enumerate([first, *cells(page)])]
    return json.dumps({"cells": numbered, "metadata": head, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def write(folder: Path) -> list[Path]:
    """Write all notebooks into a folder; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.ipynb" for name in PAGES]
    for name, path in zip(PAGES, paths):
        path.write_text(notebook((HOME / f"{name}.md").read_text(encoding="utf-8")), encoding="utf-8")
    return paths


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs: a link to the notebook under the title of its page."""
    name = page.file.src_uri.removesuffix(".md")
    if name not in PAGES:
        return markdown
    link = f'<a href="notebooks/{name}.ipynb" download>This page as a notebook</a>'
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n{link}\n{rest}"


def on_post_build(config, **_) -> None:
    """mkdocs: the notebooks as files of the site."""
    write(Path(config["site_dir"]) / "notebooks")


if __name__ == "__main__":
    print(*write(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks")), sep="\n")
