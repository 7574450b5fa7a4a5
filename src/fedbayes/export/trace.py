"""What torch.export makes of a module: a program, and the same as the text of a Python function with its tensors."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from fedbayes.errors import InputError


class Untraceable(InputError):
    """A network of which torch.export makes no program."""


class Function(NamedTuple):
    """A traced module as a function of one tensor x [rows, ...]: its text, and what it takes beside x."""

    text: str
    tensors: dict[str, str]  # where the module has each, by the name of the argument


def program_of(module: nn.Module, x: Tensor, what: str = "this network") -> ExportedProgram:
    """The program of a module that takes x [rows, ...], for any number of rows."""
    try:
        with torch.no_grad(), _quietly():
            return torch.export.export(module, (x,), dynamic_shapes=({0: Dim("rows")},), strict=False)
    except Exception as error:  # what can't be traced fails in many ways
        first = str(error).strip().splitlines()[0]
        raise Untraceable(f"torch.export can't trace {what} ({type(error).__name__}: {first})") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch.export tells of its own code: pages where it fails."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def function_of(program: ExportedProgram, name: str) -> Function | None:
    """The program as a Python function; None where it has control flow, which plain code would not have."""
    if any(node.op in ("get_attr", "call_module") for node in program.graph.nodes):
        return None
    code = program.graph_module.graph.python_code("self").src
    head = re.search(r"def forward\(self, ([^)]*)\)[^:]*:", code)
    assert head is not None
    arguments = [argument.split(":")[0].strip() for argument in head[1].split(",")]
    given = dict(zip(arguments, program.graph_signature.input_specs))
    tensors = {n: str(spec.target) for n, spec in given.items() if spec.kind != InputKind.USER_INPUT}
    x = next(n for n in given if n not in tensors)
    # Left out: checks that hold the inputs to the CPU, and the letting go of each value after its last use.
    lines = [line for line in code[head.end() :].splitlines() if line.strip() and "_assert_tensor_metadata" not in line]
    body = "\n".join(re.sub(r";  [\w = ]+ = None$", "", line.rstrip()) for line in lines)
    first = "" if x == "x" else f"    {x} = x\n"
    return Function(f"def {name}({', '.join([*tensors, '*', 'x'])}):\n{first}{body}", tensors)


def tensor_of(module: nn.Module, program: ExportedProgram, target: str) -> Tensor:
    """The tensor that a program takes from its module, of a module like that one."""
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return (own[target] if target in own else program.constants[target]).detach()


def stacked(each: list[Tensor]) -> Tensor:
    """A tensor of all members, stacked; where it is one and the same it is there once."""
    same = all(t.data_ptr() == each[0].data_ptr() for t in each)
    return each[0][None].clone() if same else torch.stack(each).contiguous()
