"""Which node's key speaks for which client: by the name it is registered under, else by who came first; kept in a file.

Flower shows the server each node's public key and the name that the operator gave it (`flwr supernode register
--name client-3`). A key that has a client's place keeps it, whenever its node is gone, until the operator frees it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from fedbayes.errors import InputError, shown
from fedbayes.files import reading, text_of, write_atomically
from fedbayes.flower.wire import Refused

FILE = "places.json"  # in the run folder: for each client the key that speaks for it
LARGEST = 64 << 20  # bytes of that file
NAMED = re.compile(r"client-(\d{1,9})")
RULES = {
    "keys": "a client's number belongs to who is registered under its name (client-3), else to the first key to come",
    "names": "a client's number belongs to who is registered under its name (client-3), and to nobody else",
    "free": "whoever comes may speak for any client: for nodes without keys of their own",
}


class Who(NamedTuple):
    """A node as Flower knows it: a hash of its public key, and the name under which it was registered."""

    key: str = ""  # empty: it has none, as in a simulation
    name: str = ""

    @property
    def registered(self) -> int | None:
        """The client whose name it is registered under."""
        match = NAMED.fullmatch(self.name)
        return int(match[1]) if match else None


class Places:
    """The keys of clients, in a file of each run folder that shares them; read anew each time, for it may be edited."""

    def __init__(self, rule: str = "keys") -> None:
        self.rule = rule
        self.files: list[Path] = []

    def keep_in(self, folder: Path) -> None:
        """Keep places in a folder too; those that it holds already are taken over."""
        if folder / FILE not in self.files:
            before = self._keys()
            self.files.append(folder / FILE)
            self._keep({**read(folder / FILE), **before})

    def take(self, client: int, who: Who) -> str | None:
        """Give a client's place to a node, if it is its own; a note where another key had it. Refused else."""
        if self.rule == "free" or (not who.key and self.rule == "keys"):
            return None
        if who.registered is not None and who.registered != client:
            raise Refused(f"it speaks for client {client}, but is registered as client-{who.registered}")
        if self.rule == "names" and who.registered is None:
            raise Refused(f"it is not registered by name: flwr supernode register KEY.pub --name client-{client}")
        keys = self._keys()
        holder = keys.get(client)
        if holder == who.key:
            return None
        if who.registered is None:
            self._check_unnamed(client, who, keys)
        self._keep({**{k: key for k, key in keys.items() if key != who.key}, client: who.key})
        return None if holder is None else f"client {client} has another key now, registered under its name"

    def _check_unnamed(self, client: int, who: Who, keys: dict[int, str]) -> None:
        mend = "fedbayes flower release RUN {} frees it"
        if client in keys:
            raise Refused(f"the place of client {client} belongs to another key: {mend.format(client)}")
        for k, key in keys.items():
            if key == who.key:
                raise Refused(f"its key belongs to client {k}, not {client}: {mend.format(k)}")

    def _keys(self) -> dict[int, str]:
        return read(self.files[0]) if self.files else {}

    def _keep(self, keys: dict[int, str]) -> None:
        for file in self.files:
            if read(file) != keys:
                write(file, keys)


def read(file: Path) -> dict[int, str]:
    """The keys of a file by client; nobody's where there is none."""
    if not file.exists():
        return {}
    with reading(file, "delete it, and the next nodes to come take the places"):
        table = json.loads(text_of(file, LARGEST))
        if not isinstance(table, dict) or not all(k.isdecimal() and isinstance(v, str) for k, v in table.items()):
            raise ValueError(f"it must be a table of keys by client, not {shown(table)}")
        return {int(k): v for k, v in table.items()}


def write(file: Path, keys: dict[int, str]) -> None:
    """Write keys by client into a file."""
    write_atomically(file, json.dumps({str(k): keys[k] for k in sorted(keys)}, indent=1) + "\n")


def release(folder: Path, client: int) -> list[Path]:
    """Free a client's place in a run folder, or in those of a comparison; the files that were changed."""
    changed = []
    for file in [folder / FILE, *sorted(folder.glob(f"*/{FILE}"))]:
        keys = read(file)
        if client in keys:
            write(file, {k: key for k, key in keys.items() if k != client})
            changed.append(file)
    if not changed:
        raise InputError(f"no key has the place of client {client} in {folder}; give a run folder of a federation")
    return changed
