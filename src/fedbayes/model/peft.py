"""Adapters in the files of PEFT (Hugging Face): `adapter_config.json` and `adapter_model.safetensors`.

There a layer computes W x + (lora_alpha / r) B A x, and both factors are learned. A file written here has
lora_alpha = r, and the A that all clients shared. Of a file that is read, lora_alpha / r goes into A, which is frozen
from there on; B and the modules that were saved whole are where training begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as pack
from torch import Tensor, nn

from fedbayes.errors import InputError, one_line
from fedbayes.files import FAULTS, new_folder, size_of, text_of, write_atomically
from fedbayes.model.adapted_layers import EMBEDDING, GIVEN, TRANSPOSED, A, B, kind_of
from fedbayes.version import __version__

CONFIG, TENSORS, SCALES = "adapter_config.json", "adapter_model.safetensors", "adapter_scales.safetensors"
BEFORE = "base_model.model."
MEND = "give a folder that PEFT's save_pretrained wrote"


class Factors(NamedTuple):
    """What a folder holds: A (with lora_alpha / r in it) and B by layer, and weights that were saved whole."""

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]


def read(folder: str | Path) -> Factors:
    """The adapters in a folder; an InputError says what can't be used."""
    folder = Path(folder)
    try:
        config = json.loads(text_of(folder / CONFIG))
        size_of(folder / TENSORS)
        tensors = load_file(folder / TENSORS)
    except InputError:
        raise
    except (SafetensorError, *FAULTS) as error:
        raise InputError(f"adapters: {folder} can't be read ({one_line(error)}); {MEND}") from error
    if not isinstance(config, Mapping) or not isinstance(config.get("alpha_pattern") or {}, Mapping):
        raise InputError(f"adapters: {folder / CONFIG} is no table of options; {MEND}")
    if str(config.get("peft_type")).upper() != "LORA":
        raise InputError(f"adapters: {folder / CONFIG} is of no LoRA adapters; {MEND}")
    for key in ("use_dora", "alora_invocation_tokens"):
        if config.get(key):
            raise InputError(f"adapters: {folder} has {key}, which is not W + B A; save it without")
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(BEFORE).replace(".base_layer", "")
        layer, _, rest = name.rpartition(".lora_")
        if not layer:
            whole[name.replace(".modules_to_save.default", "")] = tensor
            continue
        factor = rest.removeprefix("embedding_").removesuffix(".weight")
        if factor not in ("A", "B"):
            raise InputError(f"adapters: {folder} holds {key}, which is no factor of W + B A; {MEND}")
        if tensor.dim() < 2 or not tensor.numel():
            raise InputError(f"adapters: {folder} holds {key} of shape {list(tensor.shape)}, no factor; {MEND}")
        (a if factor == "A" else b)[layer] = tensor
    if {*a} != {*b} or not a:
        raise InputError(f"adapters: {folder} lacks a factor of some layer; {MEND}")
    return Factors({layer: t * _scaling(config, layer, len(t)) for layer, t in a.items()}, b, whole)


def _scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    alpha = (config.get("alpha_pattern") or {}).get(layer, config.get("lora_alpha", rank))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise InputError(f"adapters: lora_alpha is {alpha!r}, not a number; {MEND}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def write(folder: str | Path, network: nn.Module, scales: Mapping[str, Tensor], base: str = "") -> list[Path]:
    """Write the adapters of a network, and what is trained in full beside them; gives the files.

    `scales` are a posterior's by name: they lie in a file of their own, which PEFT does not read.
    """
    folder = new_folder(folder)
    layers = {name: layer for name, layer in network.named_modules() if GIVEN in layer.__dict__}
    ours = {f"{name}.{factor}".removeprefix(".") for name in layers for factor in (A, B)}
    owners = {n.rpartition(".")[0] for n, p in network.named_parameters() if p.requires_grad and n not in ours}
    inside = {
        f"{name}.out_proj".removeprefix("."): name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.MultiheadAttention)
    }
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        place = f"{inside[name]}.base_layer.out_proj".removeprefix(".") if name in inside else name
        form = "lora_embedding_{}" if kind_of(name, layer) is EMBEDDING else "lora_{}.weight"
        for factor in (A, B):
            tensors[f"{BEFORE}{place}.{form.format(factor[-1])}"] = _plain(layer.get_parameter(factor))
    for owner in owners:
        for name, tensor in network.get_submodule(owner).state_dict().items():
            if f"{owner}.{name}".removeprefix(".") not in ours:
                tensors[f"{BEFORE}{owner}.{name}" if owner else BEFORE + name] = _plain(tensor)
    ranks = {name: len(layer.get_parameter(A)) for name, layer in layers.items()}
    rank = max(ranks.values(), default=0)
    for projection, name in inside.items():
        _complete(tensors, network.get_submodule(name), name, {name, projection} & {*layers}, rank)
    targets = {inside.get(name, name) for name in layers}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: r for name, r in ranks.items() if r != rank},
        "target_modules": sorted(targets),
        "modules_to_save": sorted(owner for owner in owners if owner) or None,
        "fan_in_fan_out": any(kind_of(name, layer) is TRANSPOSED for name, layer in layers.items()),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    write_atomically(folder / CONFIG, json.dumps(config, indent=1))
    write_atomically(
        folder / TENSORS, pack(tensors, metadata={"format": "pt", "written_by": f"fedbayes {__version__}"})
    )
    paths = [folder / CONFIG, folder / TENSORS]
    if scales:
        write_atomically(folder / SCALES, pack({n: t.detach().cpu().contiguous() for n, t in scales.items()}))
        paths.append(folder / SCALES)
    return paths


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _complete(tensors: dict[str, Tensor], layer: Any, name: str, adapted: set[str], rank: int) -> None:
    """Zeros for one projection of attention where only the other is adapted: PEFT knows both or neither."""
    if not adapted or len(adapted) == 2:
        return
    width, at = layer.embed_dim, f"{BEFORE}{name}." if name else BEFORE
    missing, out = (f"{at}base_layer.out_proj.", width) if name in adapted else (at, 3 * width)
    tensors[f"{missing}lora_A.weight"] = torch.zeros(rank, width)
    tensors[f"{missing}lora_B.weight"] = torch.zeros(out, rank)
