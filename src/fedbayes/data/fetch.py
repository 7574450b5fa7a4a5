"""Finding the files of a data set: FEDBAYES_DATA, then the user's cache, then a checked download."""

import hashlib
import http.client
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedbayes.data.cache import cache_folder
from fedbayes.data.sources import Files, Source, source_of

TRIES = 3
PAUSE = 1.0  # Seconds before the second try; doubled each time.


class DataFiles(NamedTuple):
    """Paths by their name in the table, and what is missing where only a part is at hand."""

    paths: dict[str, Path]
    missing: str = ""


def folders() -> list[Path]:
    """Where files are looked for, in order; downloads go to the last."""
    own = os.environ.get("FEDBAYES_DATA")
    return [*([Path(own).expanduser()] if own else []), cache_folder() / "files"]


def here(file: str) -> Path | None:
    """A file at hand, packed (.gz, .xz, .zip) or not."""
    plain = file.removesuffix(".gz").removesuffix(".xz").removesuffix(".zip")
    for folder in folders():
        for form in (file, plain):
            if (folder / form).is_file():
                return folder / form
    return None


def at_hand(files: Files) -> DataFiles | None:
    """The first alternative that is here in whole, else the first partial one, else None."""
    for alternatives, missing in ((files.full, ""), (files.part, files.missing)):
        for names in alternatives:
            paths = {name: path for name in names if (path := here(name))}
            if len(paths) == len(names):
                return DataFiles(paths, missing)
    return None


def find(files: Files) -> DataFiles:
    """What is at hand, else the official files, downloaded."""
    return at_hand(files) or DataFiles({name: here(name) or _fetch(name) for name in files.full[-1]})


def _fetch(file: str) -> Path:
    source = source_of(file)
    if source is None:
        tried = " or ".join(str(folder / file) for folder in folders())
        raise FileNotFoundError(f"{file} is not here and there is no address to download it from: put it at {tried}")
    target = folders()[-1] / file
    return download(source, target, folders()[0] / file)


def download(source: Source, target: Path, place: Path | None = None) -> Path:
    """Fetch a file from the first address that gives it whole and with the right digest; nothing partial stays behind.

    `place` is where the message tells the user to put the file when no address answers.
    """
    reasons = []
    for address in source.addresses:
        for attempt in range(TRIES):
            try:
                return _download(address, source.digest, target)
            except WrongDigest as error:
                reasons.append(f"{address}: {error}")
                break
            except (OSError, http.client.HTTPException) as error:
                reasons.append(f"{address}: {error}")
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break
                time.sleep(PAUSE * 2**attempt if attempt + 1 < TRIES else 0)
    where = place or target
    raise FileNotFoundError(
        f"could not download {target.name} ({'; '.join(dict.fromkeys(reasons))}). "
        f"Get it from {source.addresses[0]} on another machine and put it at {where}"
    )


class WrongDigest(ValueError):
    """A file came through whole but is not the one that was asked for."""


def _download(address: str, digest: str | None, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    kind, _, expected = (digest or "sha256:").partition(":")
    check = hashlib.new(kind, usedforsecurity=False)
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(address, timeout=30) as reply:
            length = int(reply.headers.get("Content-Length") or 0)
            received = 0
            with _progress() as bar:
                task = bar.add_task(target.name, total=length or None)
                while block := reply.read(1 << 20):
                    file.write(block)
                    check.update(block)
                    received += len(block)
                    bar.update(task, advance=len(block))
        if length and received != length:
            raise ConnectionError(f"the connection ended after {received} of {length} bytes")
        if expected and check.hexdigest() != expected:
            raise WrongDigest(f"{kind} is {check.hexdigest()}, expected {expected}")
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)
    return target


def _progress() -> Any:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
