"""One self-contained page from run folders; reads files, needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbayes.files import write_atomically
from fedbayes.study.report.page import page


def write(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of run folders to an HTML file that needs nothing beside it."""
    write_atomically(path, page([Path(folder) for folder in folders]))
    return Path(path)
