"""Sites of a few rows each, and a small network in float64, for laws that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedbayes.data import Clients, from_clients


def few_rows(sizes: tuple[int, ...]) -> Clients:
    """Two classes of three numbers, at sites of these sizes."""
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=random), torch.randint(2, (n,), generator=random)) for n in sizes]
    return from_clients(pairs, pairs[0], classes=2)


def fallbacks(*records: Mapping[str, Any]) -> list[str]:
    """What engines note in records of a journal. A law may give all methods options that some have no use for."""
    return [note for record in records for note in record.get("notes", ()) if "changes nothing in" not in note]


def small_network() -> nn.Module:
    """With BatchNorm, whose statistics are pooled too."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
