"""All that is imported from Flower: where another version moves or renames something, it is mended here.

What else is Flower's: its HTTP paths (gate.py), its commands and their words (driver.py, watchdog.py, template/).
"""

import sys
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import (
    HEAD_BODY_DIVIDER,
    ObjectPullError,
    ObjectUnavailableError,
    pull_objects,
)
from flwr.supercore.primitives.asymmetric import sign_message, verify_signature

__all__ = [
    "Array", "ArrayRecord", "ClientApp", "ConfigRecord", "Context", "Grid", "Message", "ObjectPullError",
    "ObjectUnavailableError", "RecordDict", "ServerApp", "combine_shares", "create_shares", "decrypt", "encrypt",
    "generate_shared_key", "object_parts", "pull_by", "pull_objects", "run_simulation", "sign_message",
    "verify_signature",
]  # fmt: skip


def run_simulation(*apps: Any, **settings: Any) -> None:
    """Flower's local simulation, loaded when it is used: a node needs no Ray, and starts a process for each message."""
    from flwr.simulation import run_simulation as simulate

    simulate(*apps, **settings)


def pull_by(grid: Grid, pull: Callable[..., dict[str, bytes]]) -> None:
    """Let a grid pull the objects of a message by this function; that of a simulation has messages whole."""
    names = vars(sys.modules[type(grid).__module__])
    if "pull_objects" in names:
        names["pull_objects"] = pull


def object_parts(content: bytes) -> tuple[str, list[str], bytes]:
    """An object as it travels: its kind, the names of those that it is of, and its body."""
    kind, children, _ = get_object_head_values_from_object_content(content)
    return kind, children, content.partition(HEAD_BODY_DIVIDER)[2]
