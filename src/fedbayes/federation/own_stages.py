"""Stages of the user's own behind those of a method, each held to what the next round counts on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbayes.errors import InputError, shown
from fedbayes.federation.program import Context, Program, Stage
from fedbayes.posterior.values import Parts


def with_stages(program: Program, stages: Sequence[Stage]) -> Program:
    """The program with more stages after its own. Their names must differ: a stage's state is kept under its name."""
    names = [stage.name for stage in program.stages]
    for stage in stages:
        if not isinstance(stage, Stage):
            raise InputError(f"stages: {shown(stage)} is no fedbayes.federation.program.Stage; give Stage(name, ...)")
        if stage.name in names:
            raise InputError(f"stages: two are called {stage.name!r}; give each a name of its own")
        names.append(stage.name)
    return program._replace(stages=(*program.stages, *map(_checked, stages)))


def _checked(stage: Stage) -> Stage:
    """The stage, which must give parts of the kind and size that it was given."""

    def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
        answer: Any = stage.apply(context, state, parts)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise InputError(f"stage {stage.name!r} must give (parts, state, numbers for the journal)")
        new, state, numbers = answer
        if not isinstance(new, dict) or set(new) != set(parts):
            raise InputError(f"stage {stage.name!r} must give the parts that it was given: {', '.join(parts)}")
        for part, q in parts.items():
            if type(new[part]) is not type(q) or new[part].mean.shape != q.mean.shape:
                kind = f"{type(q).__name__} over {q.mean.shape[-1]} weights"
                raise InputError(f"stage {stage.name!r}: part {part!r} must stay a {kind}")
        return new, state, numbers

    return stage._replace(apply=apply)
