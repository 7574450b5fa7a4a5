"""A data set and its spread over clients, as text."""

from __future__ import annotations

from fedbayes.study.build import clients_of
from fedbayes.study.experiment import Experiment

SHADES = " .:-=+*#%@"
SHOWN = 40


def spread_text(experiment: Experiment) -> str:
    """Rows of each client, and for classes how many of each label, darker for more."""
    clients = clients_of(experiment)
    lines = [repr(clients.data), repr(clients)]
    sizes = clients.sizes.tolist()
    counts = clients.label_counts().tolist() if clients.data.kind != "real" else [[] for _ in sizes]
    largest = max((max(row) for row in counts if row), default=1)
    for k, (size, row) in enumerate(zip(sizes[:SHOWN], counts)):
        shades = "".join(SHADES[-(-n * (len(SHADES) - 1) // largest)] for n in row[:80])
        lines.append(f"client {k:>4}  {size:>6} rows  {shades}".rstrip())
    if len(sizes) > SHOWN:
        lines.append(f"... and {len(sizes) - SHOWN} more clients")
    return "\n".join(lines)
