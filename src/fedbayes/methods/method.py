"""What a method is: a record of options that composes a program for a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.federation.program import Program, Stage
from fedbayes.model.likelihood import Likelihood
from fedbayes.model.model import Augment
from fedbayes.model.parts import is_static
from fedbayes.options import check_names, check_values, options_of, record
from fedbayes.posterior.layout import matches


@dataclass(frozen=True)
class Setting:
    """What a method is built for: a network, a likelihood, a batch of inputs, and how inputs and targets are read."""

    network: nn.Module
    likelihood: Likelihood
    x: Tensor
    frozen: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Any] | None = None
    units: tuple[Tensor, Tensor] | None = None
    bfloat16: bool = False
    augment: Augment | None = None
    seed: int = 0
    rounds: int = 1
    y: Tensor | None = None  # a target
    most: int = 0  # rows of the largest client
    cohort: int = 1  # clients of a round
    clients: int = 1  # of the federation
    stale: bool = False  # whether answers to older broadcasts are added
    private_rows: bool = False  # whether clients' steps must be private
    other: Tensor | None = None  # one more batch of inputs, of another row where there is one


@record
class Method:
    """A named composition: its fields are its options, and `compose(setting)` binds it to a network.

    Fields are checked by name and value when a method is made. `fixed` are options that others have and this method
    does not leave open, each with the reason.
    """

    name: ClassVar[str] = "method"
    fixed: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, **options: Any) -> Method:
        known = options_of(cls)
        for name, why in cls.fixed.items():
            if name in options and (name not in known or options[name] is not known[name].default):
                raise InputError(f"{name} is fixed in {cls.name}: {why}")
        check_names(cls.name, options, [f.name for f in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        self.check()

    def check(self) -> None:
        """Refuse options that do not go together."""

    def needs_last_rounds(self, rounds: int) -> str:
        """Why a run of so many rounds must not stop early, where it must not."""
        return ""

    def idle(self, program: Program) -> dict[str, str]:
        """Options that change nothing in this program, each with the reason and the mend."""
        return {}

    @property
    def options(self) -> dict[str, Any]:
        """All options by name, defaults included."""
        return {name: getattr(self, name) for name in options_of(self)}

    def scalars(self) -> dict[str, float]:
        """The numbers that clients read in a round."""
        numbers = {n: f for n, f in options_of(self).items() if f.metadata["kind"] in ("scalar", "switch")}
        return {name: getattr(self, name) for name in numbers if getattr(self, name) is not None}

    def build(self, setting: Setting) -> Program:
        """The method bound to a network."""
        program = self.wrapped(self.compose(setting), setting)
        _check_composed(self.name, program, setting)
        return program._replace(stages=(*program.stages, *self.last_stages(program)))

    def wrapped(self, program: Program, setting: Setting) -> Program:
        """What its options make of the program that it composes."""
        return program

    def last_stages(self, program: Program) -> tuple[Stage, ...]:
        """Stages after all others, which need the whole program."""
        return ()

    def compose(self, setting: Setting) -> Program:
        """The method for a network, before what its options add to any method; each has its own."""
        raise InputError(
            f"method {self.name} has no compose(self, setting) -> Program; docs/tutorial.md has one to begin with"
        )


def _check_composed(name: str, program: Program, setting: Setting) -> None:
    """Refuse a program that leaves out what the user asked for: a method of the user's own may forget to hand it on."""
    model = program.model
    trained = [n for part, layout in model.layouts.items() if not is_static(part) for n in layout.names]
    if stray := [n for n in trained if matches(n, setting.frozen)]:
        raise InputError(f"frozen: {name} trains {stray[0]} all the same; hand frozen=setting.frozen on to Model.of")
    for option in ("augment", "bfloat16"):
        if getattr(setting, option) and not getattr(model, option):
            asked = 'precision = "bf16"' if option == "bfloat16" else option
            raise InputError(f"{asked}: {name} leaves it out; hand {option}=setting.{option} on to Model.of")
    lacking = [part for part in model.layouts if part not in program.initial]
    if lacking and program.prediction.whole:  # personal models may have them at home
        raise InputError(f"{name} begins without {lacking[0]!r} of the network, which model.initial() has; add it")


@record
class Composed(Method):
    """A composition by hand: `program(setting)` gives it."""

    name: ClassVar[str] = "composed"
    program: Callable[[Setting], Program]

    def compose(self, setting: Setting) -> Program:
        return self.program(setting)
