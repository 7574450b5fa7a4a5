"""Runs an unmodified module with some of its operations done our way: dropout, BatchNorm, sampled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedbayes.model.convolution import replaced, side_by_side
from fedbayes.model.pools import pools
from fedbayes.model.tracing import alone, takes_own_functions
from fedbayes.noise import Tape

Handler = Callable[..., Any]


class Interception(TorchFunctionMode):
    """While active, calls of the functions in `handlers` go to the handler, with the call's own arguments."""

    def __init__(self, handlers: Mapping[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self.handlers.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(*args, **(kwargs or {}))


def ours(x: Tensor, channels_last: bool = True) -> dict[Any, Handler]:
    """What is done our way in every call of a network on this input's device; its convolutions give channels last."""
    return {**(replaced(x) if channels_last else {}), **pools(x)}


def training_handlers(tape: Tape, mask: Tensor | None, tiled: frozenset[int] = frozenset()) -> dict[Any, Handler]:
    """Dropout that reads the tape, attention's too; BatchNorm that sees no padded rows (mask [B], None: all live).

    `tiled` are the numbers of the calls of BatchNorm that see all rows anew for each place of an axis folded into rows.
    """
    handlers: dict[Any, Handler] = {f: _dropout(tape, axes) for f, axes in DROPOUTS.items()}
    return {**handlers, F.batch_norm: batch_norm(mask, tiled), F.scaled_dot_product_attention: _attention(tape)}


# How many leading axes have a mask of their own: all (elementwise), or batch and channel.
DROPOUTS: dict[Any, int | None] = {F.dropout: None, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2}


def _dropout(tape: Tape, axes: int | None, images: bool = True) -> Handler:
    """By masks of `axes` leading axes, or all; of `images` [B, C, H, W] normals are read in the order of memory."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        shape = [n if axes is None or i < axes else 1 for i, n in enumerate(input.shape)]
        if images and len(shape) == 4:  # where channels lie last
            keep = tape.at_least(p, input, [shape[0], *shape[2:], shape[1]]).permute(0, 3, 1, 2)
        else:
            keep = tape.at_least(p, input, shape)
        return input * keep / (1 - p) if p < 1 else torch.zeros_like(input)

    return dropout


def _attention(tape: Tape) -> Handler:
    """Attention whose dropout reads the tape; of stacked clients as products, as PyTorch's has no rule for them."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not dropout_p and alone():
            options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)  # type: ignore[arg-type]
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None:
            seen = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if seen else scores + attn_mask
            blind = (scores == -torch.inf).all(-1, keepdim=True)  # queries that may attend to nothing: they get 0
            shares = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        else:
            shares = scores.softmax(-1)
        return _dropout(tape, None, images=False)(shares, dropout_p, dropout_p > 0) @ value

    return attention


def batch_norm(mask: Tensor | None = None, tiled: frozenset[int] = frozenset()) -> Handler:
    """BatchNorm in the precision of its statistics that does not see padded rows.

    PyTorch's own where all rows are live and inputs are of that precision: in bfloat16 vmap can't take it. Nor
    can it on a GPU where channels lie last, as after stacked convolutions: there it is plain operations, to be fused.
    In training on a GPU it is `LiveNorm`, in fewer passes over memory.
    """
    numbers = count()

    def call(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        tile, exact = next(numbers) in tiled, running_mean is None or running_mean.dtype == input.dtype
        if exact and (mask is None or not training) and not side_by_side(input):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        live = None if mask is None else _of_rows(mask, input.shape[0], tile)
        if training and few_passes(input):
            return _live_norm(input, live, running_mean, running_var, weight, bias, momentum, eps)
        dtype, x = input.dtype, input if running_mean is None else input.to(running_mean.dtype)
        column = [1, -1] + [1] * (x.dim() - 2)
        if training:
            centred, variance = _statistics(x, live, running_mean, running_var, momentum)
        else:
            assert running_mean is not None
            assert running_var is not None
            centred, variance = x - running_mean.reshape(column), running_var
        out = centred * (variance + eps).rsqrt().reshape(column)
        if weight is not None:
            out = out * weight.reshape(column)
        return (out if bias is None else out + bias.reshape(column)).to(dtype)

    return call


def few_passes(x: Tensor) -> bool:
    """Whether what counts is how often memory is read, and a function may have a gradient of its own."""
    return x.is_cuda and takes_own_functions()


def _live_norm(
    x: Tensor,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """BatchNorm in training by `LiveNorm`; the running statistics move towards those of live rows, in place."""
    dtype = x.dtype if running_mean is None else running_mean.dtype
    live = x.new_ones(x.shape[0], dtype=dtype) if mask is None else mask.to(dtype)
    one, zero = (x.new_full((x.shape[1],), value, dtype=dtype) for value in (1.0, 0.0))
    out, mean, variance = LiveNorm.apply(
        x.flatten(2) if x.dim() > 2 else x[..., None],
        live,
        one if weight is None else weight,
        zero if bias is None else bias,
        eps,
    )
    count = live.sum() * x[:1, :1].numel()
    _follow(running_mean, running_var, mean, variance, count, momentum)
    return out.reshape(x.shape)


class LiveNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias of [B, C, P], with the statistics of live rows; and these.

    In the precision of `live`. Three passes over the input forward and eight backward, two and two where they are
    fused. Statistics of rows and channels are joined as those of parts of a sample are (Chan, Golub & LeVeque, 1979).
    No gradient goes through the statistics that are returned.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, live: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        given, x = x.dtype, x.to(live.dtype)
        variances, means = torch.var_mean(x, -1, correction=0)
        flags, rows = live[:, None], live.sum().clamp(min=1)
        mean = (means * flags).sum(0) / rows
        variance = ((variances + (means - mean).square()) * flags).sum(0) / rows
        scale = weight * (variance + eps).rsqrt()
        return torch.addcmul((bias - mean * scale)[:, None], x, scale[:, None]).to(given), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, live, weight, _, ctx.eps = inputs
        ctx.save_for_backward(x, live, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        given, live, weight, mean, variance = ctx.saved_tensors
        x, slope = given.to(live.dtype), slope.to(live.dtype)
        narrow = (variance + ctx.eps).rsqrt()
        scale, count = weight * narrow, live.sum().clamp(min=1) * x.shape[-1]
        total = slope.sum((0, -1))
        along = narrow * ((slope * x).sum((0, -1)) - mean * total)  # of the slope and the normalised input
        by_x = -scale * narrow * along / count
        constant = -scale * total / count - by_x * mean
        flags = live[:, None]
        pulled = torch.addcmul((flags * constant)[..., None], x, (flags * by_x)[..., None])
        return torch.addcmul(pulled, slope, scale[:, None]).to(given.dtype), None, along, total, None


def _of_rows(mask: Tensor, rows: int, tile: bool) -> Tensor:
    """A flag for each row of a network that may fold other axes into rows: row by row, or all rows for each place."""
    share = rows // mask.shape[0]
    if share == 1:
        return mask
    return mask.repeat(share) if tile else mask.repeat_interleave(share)


def _follow(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    momentum: float,
) -> None:
    """Running statistics move towards those of a batch. Without a live row there is no mean, and of one value no
    variance: what is not known stays as it is."""
    if running_mean is None or running_var is None:
        return
    some, several = (count > 0).to(mean.dtype), (count > 1).to(mean.dtype)
    unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
    running_mean.copy_(running_mean + momentum * some * (mean.detach() - running_mean))
    running_var.copy_(running_var + momentum * several * (unbiased - running_var))


def _statistics(
    x: Tensor, mask: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """The centred input and its variance over the live rows; the running statistics move towards theirs, in place."""
    axes = [i for i in range(x.dim()) if i != 1]
    column = [1, -1] + [1] * (x.dim() - 2)
    if mask is None:  # by one operation, whose gradient takes one pass
        count = x.new_full((), float(x.numel() // x.shape[1]))
        variance, mean = torch.var_mean(x, axes, correction=0)
        centred = x - mean.reshape(column)
    else:
        live = mask.to(x.dtype)
        rows = live.reshape([-1] + [1] * (x.dim() - 1))
        count = live.sum() * x[:1, :1].numel()
        mean = (x * rows).sum(axes) / count.clamp(min=1)
        centred = x - mean.reshape(column)
        variance = (centred.square() * rows).sum(axes) / count.clamp(min=1)
    _follow(running_mean, running_var, mean, variance, count, momentum)
    return centred, variance
