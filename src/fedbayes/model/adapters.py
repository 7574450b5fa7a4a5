"""The options of low-rank adapters, as a record. Knows no torch."""

from __future__ import annotations

from typing import Any

from fedbayes.options import Check, check_values, flag, option, patterns, positive, record, text, whole


def _names(v: Any) -> bool:
    return (isinstance(v, str) and v != "") or (patterns.holds(v) and len(v) > 0)


@record
class Adapters:
    """Low-rank changes W + B A of a frozen network's layers: A is drawn once and shared, B is trained."""

    pattern: str | tuple[str, ...] = option(
        "names of the layers that are adapted (linear, convolution, embedding, attention), one pattern or a list",
        Check("a pattern or a list of them", _names),
        default="*",
    )
    rank: int = option(
        "of the change, at most a layer's inputs; 0: no layer is adapted, only `full` is trained", whole(0), default=8
    )
    full: tuple[str, ...] | None = option(
        "patterns of weights trained in full beside the adapters; by default the last layer's", patterns, default=None
    )
    both: bool = option(
        "train A too: what federated LoRA does. Averages of B and of A are not the average of B A: for comparison",
        flag,
        default=False,
    )
    scale: float = option("of A, whose entries are normals of variance scale^2 / rank", positive, default=1.0)
    path: str | None = option(
        "a folder of adapters in PEFT's format to go on from: its layers, ranks and A are taken, not those of "
        "`pattern`, `rank`, `scale` and `seed`; modules that it saved whole are trained in full",
        text,
        default=None,
    )
    seed: int = option("of A, whatever the run's seed: members of a sweep share it", whole(0), default=0)

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)
