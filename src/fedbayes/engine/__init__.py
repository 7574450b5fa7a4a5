"""Engines carry a round to its clients and bring the sum back; on the same seed they agree."""

from typing import Any

from fedbayes.engine.loop import Loop
from fedbayes.engine.stacked import Stacked

ENGINES: dict[str, Any] = {"loop": Loop, "stacked": Stacked}
