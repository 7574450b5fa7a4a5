"""The text of Python files that compute a prediction from tensors with PyTorch alone."""

from __future__ import annotations

import inspect

from fedbayes.export.trace import Function
from fedbayes.model.call import LOGITS, tensor_in

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

AROUND = '''"""A prediction in plain PyTorch, written by `fedbayes export`; needs torch, safetensors and your network.

    from model import load

    predict = load(network)  # the nn.Module that was trained; its weights are read from {tensors} beside this file
    prediction = predict(x)  # inputs as the training data came, [N, ...]: see model.json
    prediction.keys()

torch.export can't trace this network, so that its own code is not in here: what comes before and after it is.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, device

KIND = {kind!r}
FIELDS = {fields!r}  # by which names the network takes its inputs; none: in this order
NAMES = {names!r}  # of the network's own tensors
BEFORE, AFTER = {before!r}, {after!r}  # of those that its inputs are made with, and what is made of its outputs
LOGITS = {logits!r}


{inputs}


{moments}


{tensor_in}

{summary}

class Predictor(torch.nn.Module):
    """Every member's prediction, and what they say together."""

    def __init__(self, network, tensors):
        super().__init__()
        self.network = copy.deepcopy(network).eval()
        own = dict([*self.network.named_parameters(), *self.network.named_buffers()])
        for name in NAMES:
            if name not in own or own[name].shape != tensors[name].shape[1:]:
                shape = list(tensors[name].shape[1:])
                raise ValueError(f"network: it has no {{name}} of shape {{shape}}; give the network that was trained")
        for i, name in enumerate((*NAMES, *BEFORE, *AFTER)):
            self.register_buffer(f"tensor{{i}}", tensors[name])
        for name in ("shift", "scale", "noise"):
            self.register_buffer(name, tensors.get(f".{{name}}"))  # no weight's name begins with a dot

    def forward(self, x):
        names = (*NAMES, *BEFORE, *AFTER)
        stacked = {{name: getattr(self, f"tensor{{i}}") for i, name in enumerate(names)}}
        members = max(t.shape[0] for t in stacked.values())  # what all members share is there once
        said = [self.member({{name: t[z % t.shape[0]] for name, t in stacked.items()}}, x) for z in range(members)]
        units = None if self.shift is None else (self.shift, self.scale)
        return summary(torch.stack([m for m, _ in said]), torch.stack([v for _, v in said]), KIND, units, self.noise)

    def member(self, tensors, x):
        seen = inputs(*(tensors[name] for name in BEFORE), x=x)
        args, named = ((), dict(zip(FIELDS, seen))) if FIELDS else (tuple(seen), {{}})
        weights = {{name: tensors[name] for name in NAMES}}
        output = tensor_in(torch.func.functional_call(self.network, weights, args, named))
        return moments(*(tensors[name] for name in AFTER), x=output)


def load(network, folder=Path(__file__).parent):
    """The predictor with the tensors of a folder, around the network."""
    return Predictor(network, load_file(Path(folder) / {tensors!r})).eval()
'''


def plain_file(member: Function, names: list[str], summary: str, kind: str, tensors: str) -> str:
    """The file of a traced member; `names` are those of its tensors in their file."""
    return TEMPLATE.format(kind=kind, names=names, member=member.text, summary=summary, tensors=tensors)


def around_file(
    inputs: Function, moments: Function, names: dict[str, list[str]], summary: str, kind: str, tensors: str
) -> str:
    """The file of a network that is given to it: what its inputs are made by, and what is made of its outputs."""
    return AROUND.format(
        **{
            "kind": kind,
            "summary": summary,
            "tensors": tensors,
            "inputs": inputs.text,
            "moments": moments.text,
            **names,
        },
        tensor_in=inspect.getsource(tensor_in),
        logits=LOGITS,
    )
