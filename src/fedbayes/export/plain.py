"""The text of a Python file that computes a prediction from tensors with PyTorch alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

TEMPLATE = '''"""A prediction in plain PyTorch, written by `fedbayes export`; needs torch and safetensors, nothing else.

    from model import load

    predict = load()      # reads {tensors} beside this file
    prediction = predict(x)  # inputs as the training data came, [N, ...]: see model.json
    prediction.keys()
"""

from math import inf, nan
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, device

KIND = {kind!r}
NAMES = {names!r}


{member}


{summary}

class Predictor(torch.nn.Module):
    """Every member's prediction, and what they say together."""

    def __init__(self, tensors):
        super().__init__()
        for i, name in enumerate(NAMES):
            self.register_buffer(f"tensor{{i}}", tensors[name])
        for name in ("shift", "scale", "noise"):
            self.register_buffer(name, tensors.get(f".{{name}}"))  # no weight's name begins with a dot

    def forward(self, x):
        stacked = [getattr(self, f"tensor{{i}}") for i in range(len(NAMES))]
        members = max(t.shape[0] for t in stacked)  # what all members share is there once
        said = [member(*(t[z % t.shape[0]] for t in stacked), x=x) for z in range(members)]
        units = None if self.shift is None else (self.shift, self.scale)
        return summary(torch.stack([m for m, _ in said]), torch.stack([v for _, v in said]), KIND, units, self.noise)


def load(folder=Path(__file__).parent):
    """The predictor with the tensors of a folder."""
    return Predictor(load_file(Path(folder) / {tensors!r})).eval()
'''


def plain_file(code: str, order: Sequence[str | None], summary: str, kind: str, tensors: str) -> str:
    """The file: `code` is a traced member's forward, whose arguments are `order` (None stands for the input)."""
    head = re.search(r"def forward\(self, ([^)]*)\)[^:]*:", code)
    assert head is not None
    arguments = [argument.split(":")[0].strip() for argument in head[1].split(",")]
    names = [name for name in order if name is not None]
    x = next(argument for argument, name in zip(arguments, order) if name is None)
    weights = [argument for argument, name in zip(arguments, order) if name is not None]
    # Left out: checks that hold the inputs to the CPU, and the letting go of each value after its last use.
    lines = [line for line in code[head.end() :].splitlines() if line.strip() and "_assert_tensor_metadata" not in line]
    body = "\n".join(re.sub(r";  [\w = ]+ = None$", "", line.rstrip()) for line in lines)
    first = "" if x == "x" else f"    {x} = x\n"
    member = f"def member({', '.join(weights)}, *, x):\n{first}{body}"
    return TEMPLATE.format(kind=kind, names=names, member=member, summary=summary, tensors=tensors)
