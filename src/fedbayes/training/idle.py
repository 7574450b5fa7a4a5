"""Options that were set and change nothing here, one line for each: what it is, of which method, and the mend."""

from __future__ import annotations

from typing import Any

from fedbayes.federation.bounds import counts_rows
from fedbayes.federation.program import Program
from fedbayes.methods import Method
from fedbayes.options import options_of


def idle_options(method: Method, program: Program, cap_rows: int | None, server_data: Any = None) -> tuple[str, ...]:
    """The lines for a run. Options that several methods of a comparison share are no error for those without a use."""
    known = options_of(method)
    lines = [
        f"{name} changes nothing in {method.name}: {why}"
        for name, why in method.idle(program).items()
        if getattr(method, name) != known[name].default
    ]
    if cap_rows is not None and not counts_rows(program):
        mend = ', or set weighting = "size"' if "weighting" in known and "weighting" not in method.fixed else ""
        lines.append(f"cap_rows changes nothing in {method.name}: no client counts by its rows; leave it out{mend}")
    if server_data is not None and all(stage.server is None for stage in program.stages):
        lines.append(
            f"server_data changes nothing in {method.name}: nothing is trained at the server; leave it out, or take "
            "fedbe or fedppd_distill"
        )
    return tuple(lines)
