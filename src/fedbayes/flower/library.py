"""All that is imported from Flower: where another version moves or renames something, it is mended here.

What else is Flower's: its HTTP paths (gate.py), its commands and their words (driver.py, watchdog.py, template/).
"""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.primitives.asymmetric import sign_message, verify_signature

__all__ = [
    "Array", "ArrayRecord", "ClientApp", "ConfigRecord", "Context", "Grid", "Message", "RecordDict", "ServerApp",
    "combine_shares", "create_shares", "decrypt", "encrypt", "generate_shared_key", "run_simulation", "sign_message",
    "verify_signature",
]  # fmt: skip


def run_simulation(*apps: Any, **settings: Any) -> None:
    """Flower's local simulation, loaded when it is used: a node needs no Ray, and starts a process for each message."""
    from flwr.simulation import run_simulation as simulate

    simulate(*apps, **settings)
