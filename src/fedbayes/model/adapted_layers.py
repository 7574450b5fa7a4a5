"""Layers with a low-rank change beside their frozen weight: W x + B (A x), never W + B A.

So one frozen W serves all clients, and what differs between them is of rank r. Each layer keeps its class and the names
of its weights; `lora_A` and `lora_B` are parameters beside them. Only attention, which reads its projections' weights
instead of calling layers, is given a class of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError

A, B = "lora_A", "lora_B"
GIVEN = "has_given_factors"  # of a layer that has them from here: its author may have some by these names


class Kind(NamedTuple):
    """How a kind of layer is adapted: shapes of A and B for a rank, the change of its output, that of its weight."""

    weight: str
    shapes: Callable[[Any, int], tuple[tuple[int, ...], tuple[int, ...]]]
    change: Callable[[Any, Tensor], Tensor] | None  # (layer, input) -> what is added to the output; None: by its class
    delta: Callable[[Any, Tensor, Tensor], Tensor]  # (layer, A, B) -> what W gains


def low_rank(layer: Any, x: Tensor) -> Tensor:
    """B (A x), in the precision of B."""
    return F.linear(F.linear(x.to(layer.lora_A.dtype), layer.lora_A), layer.lora_B)


def _convolved(layer: Any, x: Tensor) -> Tensor:
    """A convolution with A's few filters, stride and padding as the layer's, then B at each position."""
    narrow = layer._conv_forward(x.to(layer.lora_A.dtype), layer.lora_A, None)
    return CONVOLUTIONS[type(layer)](narrow, layer.lora_B)


def _looked_up(layer: Any, x: Tensor) -> Tensor:
    return F.linear(F.embedding(x, layer.lora_A.T), layer.lora_B)


def _product(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    return b.flatten(1) @ a.flatten(1)


CONVOLUTIONS: dict[type, Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
LINEAR = Kind("weight", lambda m, r: ((r, m.in_features), (m.out_features, r)), low_rank, _product)
CONVOLUTION = Kind(
    "weight",
    lambda m, r: ((r, m.in_channels, *m.kernel_size), (m.out_channels, r, *(1 for _ in m.kernel_size))),
    _convolved,
    lambda m, a, b: _product(m, a, b).reshape(m.weight.shape),
)
EMBEDDING = Kind(
    "weight",
    lambda m, r: ((r, m.num_embeddings), (m.embedding_dim, r)),
    _looked_up,
    lambda m, a, b: _product(m, a, b).T,
)
# The linear map of GPT-2 in transformers, whose weight is [inputs, outputs].
TRANSPOSED = Kind(
    "weight", lambda m, r: ((r, m.weight.shape[0]), (m.weight.shape[1], r)), low_rank, lambda m, a, b: (b @ a).T
)
ATTENTION = Kind("in_proj_weight", lambda m, r: ((r, m.embed_dim), (3 * m.embed_dim, r)), None, _product)


def kind_of(name: str, layer: nn.Module) -> Kind | None:
    """How a layer is adapted; None where it is no layer that can be."""
    if isinstance(layer, nn.MultiheadAttention):
        usual = type(layer) in (nn.MultiheadAttention, AdaptedAttention)
        if not usual or layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise InputError(
                f"adapters: attention {name} is not the usual one (a class of its own, keys of another width, "
                "or keys that it adds); leave it out of pattern"
            )
        return ATTENTION
    if isinstance(layer, nn.Linear):  # with a forward of its own it may be no linear map
        return LINEAR if type(layer).forward is nn.Linear.forward else None
    if type(layer) in CONVOLUTIONS:
        if layer.groups != 1:
            raise InputError(f"adapters: convolution {name} has {layer.groups} groups; leave it out of pattern")
        return CONVOLUTION
    if type(layer) is nn.Embedding:
        return EMBEDDING
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):
        return TRANSPOSED
    return None


def give(layer: Any, kind: Kind, a: Tensor, *, train_a: bool) -> None:
    """Put A and B = 0 into a layer, and what adds their change to its output."""
    weight = getattr(layer, kind.weight)
    dtype = trained_dtype(weight.dtype)
    b = torch.zeros(kind.shapes(layer, len(a))[1])
    layer.register_parameter(A, nn.Parameter(a.to(weight.device, dtype), requires_grad=train_a))
    layer.register_parameter(B, nn.Parameter(b.to(weight.device, dtype)))
    layer.__dict__[GIVEN] = True
    if kind.change is not None:
        layer.register_forward_hook(_add)


def _add(layer: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    # By the layer that is called, not the one that was hooked: copies of a network have weights of their own.
    kind = kind_of("", layer)
    assert kind is not None
    assert kind.change is not None
    return output + kind.change(layer, inputs[0]).to(output.dtype)


def trained_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of what is trained beside a frozen weight: half precision is for what does not move."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class AdaptedAttention(nn.MultiheadAttention):
    """PyTorch's attention over projections that are called, so that their changes are of low rank too."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        alone, first = query.dim() == 2, self.batch_first or query.dim() == 2
        same = query is key and key is value
        query, key, value = (self._rows(x, first) for x in (query, key, value))
        q, k, v = (self._heads(x) for x in self._projected(query, key, value, same))
        bias = _mask(key_padding_mask, attn_mask, q, k)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights or rate:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            weights = F.dropout((scores if bias is None else scores + bias).softmax(-1), rate, bool(rate))
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, bias)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if alone:
            out = out[0]
        elif not first:
            out = out.transpose(0, 1)
        if not need_weights or weights is None:
            return out, None
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights[0] if alone else weights

    def _rows(self, x: Tensor, first: bool) -> Tensor:
        """[N, L, E]."""
        return x[None] if x.dim() == 2 else x if first else x.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, ...]:
        if same:
            out = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return (out + low_rank(self, query).to(out.dtype) if hasattr(self, B) else out).chunk(3, -1)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        outs = [F.linear(x, w, b) for x, w, b in zip((query, key, value), self.in_proj_weight.chunk(3), biases)]
        if hasattr(self, B):
            a, b = self.get_parameter(A), self.get_parameter(B)
            narrow = [F.linear(x.to(a.dtype), a) for x in (query, key, value)]
            outs = [out + F.linear(x, part).to(out.dtype) for out, x, part in zip(outs, narrow, b.chunk(3))]
        return tuple(outs)


def _mask(padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores [N, H, L, S]: a bool mask is true where nothing may be seen."""
    terms = []
    if mask is not None:
        terms.append(mask.unflatten(0, q.shape[:2]) if mask.dim() == 3 else mask)
    if padding is not None:
        terms.append(padding.reshape(q.shape[0], 1, 1, k.shape[-2]))
    total = None
    for term in terms:
        if term.dtype == torch.bool:
            term = torch.zeros_like(term, dtype=q.dtype).masked_fill(term, -torch.inf)
        total = term.to(q.dtype) if total is None else total + term.to(q.dtype)
    return total
