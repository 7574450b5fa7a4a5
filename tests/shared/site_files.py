"""Tables of sites as files, and a data function of which each machine reads its own."""

from pathlib import Path

import fedbayes as fb
from fedbayes.data import Dataset


def write(folder: Path, **sites: list[str]) -> Path:
    """A file for each site, of these lines."""
    for name, lines in sites.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def at_site(client: int | None, folder: str) -> Dataset:
    """A user's data function, as on Flower: each machine has the coding, and its own rows alone."""
    if client is None:
        return fb.data.blank(f"{folder}/coding.json")
    site = ("aachen", "basel")[client]
    return fb.data.from_tables(f"{folder}/sites/{site}.csv", coding=f"{folder}/coding.json").data
