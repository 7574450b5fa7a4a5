"""Models on the Hugging Face Hub: `run.push("owner/name")` and `fb.load("hf://owner/name")`, by huggingface_hub.

A token is what `hf auth login` or HF_TOKEN gave to huggingface_hub; this library never sees one.
"""

from __future__ import annotations

import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fedbayes.errors import InputError, one_line
from fedbayes.files import memory, size_text
from fedbayes.training import published
from fedbayes.training.task import Progress, Task
from fedbayes.training.tested import Finished

SCHEME = "hf://"
MENDS = {
    None: ": is the Hub within reach?",
    401: ": log in by `hf auth login`, or set HF_TOKEN",
    403: ": is the owner you, or an organisation of yours, and may the token write?",
    404: ": is the name right? What is private needs `hf auth login`",
}
PLACE = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(@(?P<revision>[\w./-]{1,200}))?")


def push(
    run: Finished, place: str, *, network: str | None = None, private: bool = True, message: str | None = None
) -> str:
    """Upload a run's model and card; gives its address. Where there is no repository it is made, private by default."""
    repo, revision = place_of(place)
    place, hub = place.removeprefix(SCHEME), _package()
    with tempfile.TemporaryDirectory() as home:
        published.write(run, Path(home), repo, network)
        try:
            api = hub.HfApi()
            api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo,
                folder_path=home,
                revision=revision,
                commit_message=message or f"{run.task.method}, round {run.progress.state.round}",
            )
        except Exception as error:  # of the network, of rights, of the service: many kinds
            raise InputError(f"{SCHEME}{place} could not be written ({one_line(error)}){_mend(error)}") from error
    return SCHEME + place


def fetch(place: str, network: nn.Module | str | None = None, device: str = "cpu") -> tuple[Task, Progress]:
    """What a model on the Hub predicts with. Files are fetched after their sizes were checked; none of them is code."""
    repo, revision = place_of(place)
    place, hub = place.removeprefix(SCHEME), _package()
    try:
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
    except Exception as error:
        raise InputError(f"{SCHEME}{place} could not be found ({one_line(error)}){_mend(error)}") from error
    names = [published.ABOUT, published.POSTERIOR, *([published.FROZEN] if published.FROZEN in sizes else [])]
    for name in names:
        most = published.LONGEST if name == published.ABOUT else memory()
        if name not in sizes:
            raise InputError(f"{SCHEME}{place} has no {name}: it is no model that run.push has written")
        if sizes[name] is None or sizes[name] > most:
            told = "does not say" if sizes[name] is None else size_text(sizes[name])
            raise InputError(f"{SCHEME}{place}: {name} has {told}, the most is {size_text(most)}")
    try:
        paths = [Path(hub.hf_hub_download(repo, name, revision=info.sha or revision)) for name in names]
    except Exception as error:
        raise InputError(f"{SCHEME}{place} could not be read ({one_line(error)}){_mend(error)}") from error
    return published.read(paths[0].parent, network, device, name=SCHEME + place)


def place_of(place: str) -> tuple[str, str | None]:
    """owner/name, and the revision where one is given after @."""
    match = PLACE.fullmatch(place.removeprefix(SCHEME))
    if match is None or ".." in place:
        raise InputError(f"{place} is no place on the Hub: give owner/name, or owner/name@revision")
    return match["repo"], match["revision"]


def _mend(error: Exception) -> str:
    """What to do about an answer of the Hub, by its status; of an error without one, nothing was answered."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return MENDS.get(status, "")


def _package() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise InputError(
            "this needs the package huggingface_hub, which is not installed; "
            "install it with: pip install 'fedbayes[hf]'"
        ) from error
