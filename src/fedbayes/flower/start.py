"""A small Flower app for a user to edit: `fedbayes flower init`."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from fedbayes.errors import InputError

# What is written, and from which template.
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "experiment.toml": "experiment.toml.in",
    "README.md": "README.md.in",
    "secure.sh": "secure.sh.in",
    "users.sh": "users.sh.in",
    "superlink.sh": "superlink.sh.in",
    "supernode.sh": "supernode.sh.in",
    "rekey.sh": "rekey.sh.in",
    "systemd/NAME-server.service": "server.service.in",
    "systemd/NAME-node@.service": "node.service.in",
    "systemd/NAME-run.service": "run.service.in",
    "compose.yaml": "compose.yaml.in",
    "Dockerfile": "Dockerfile.in",
    ".dockerignore": "dockerignore.in",
    ".gitignore": "gitignore.in",
    "NAME/__init__.py": "package.py.in",
    "NAME/app.py": "app.py.in",
    "NAME/mine.py": "mine.py.in",
}


def init(folder: str | Path) -> list[Path]:
    """Write the app into a new folder, whose name becomes the app's; the files that were written."""
    folder = Path(folder)
    name = folder.resolve().name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InputError(f"{name!r} can't name a Python package: use small letters, digits and _, such as demo")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty; give a new folder")
    written = []
    for path, template in FILES.items():
        text = (files("fedbayes.flower") / "template" / template).read_text(encoding="utf-8")
        target = folder / path.replace("NAME", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("NAME", name), encoding="utf-8")
        written.append(target)
    return written
