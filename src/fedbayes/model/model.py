"""A network and a likelihood as functions of flat vectors."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from fedbayes.model.call import call, shared_copy, tensor_in
from fedbayes.model.convolution import FEW, few
from fedbayes.model.inputs import as_it_is, first_of, to_float
from fedbayes.model.interception import Handler, Interception, batch_norm, ours, training_handlers
from fedbayes.model.likelihood import Likelihood, Weights, log_prob_of_classes
from fedbayes.model.order import Direct, Straight, straight
from fedbayes.model.parts import FROZEN, STATIC, is_static, parameters_of, refuse_strays, travels
from fedbayes.model.still_norm import hold_norms_still
from fedbayes.model.tracing import alone, asks_whether_traced, said_to_be_traced
from fedbayes.model.trees import mapped
from fedbayes.noise import Tape
from fedbayes.posterior.layout import Layout

Augment = Callable[[Tensor, Tensor], Tensor]  # stored inputs [B, ...] and three standard normals for each


@dataclass(frozen=True, eq=False)
class Model:
    """A module used as a function: weights come in as named tensors, its own values are only the starting point.

    `layouts` says which part holds which tensors; parts named `buffers` and `counters` hold what training does not
    differentiate. Where two networks live in one method, one has a name of its own before its parts' names: `student`,
    `student.buffers`. Frozen weights are in no part: `frozen` holds the module's own values, under the name `frozen` or
    `student.frozen`. Clients pass them in, as runs that share a client may differ in them (`frozen_in`); who does
    not gets the module's own. `still` and `dropping` are the same module in evaluation mode, without and with active
    dropout; modes are never switched during a run.
    """

    module: nn.Module
    still: nn.Module
    dropping: nn.Module
    likelihood: Likelihood
    layouts: dict[str, Layout]
    unusual: bool  # whether it may call dropout or BatchNorm, which are then done our way
    convolves: bool  # whether it has convolutions, which a CPU runs faster one after another than stacked
    prepare: Callable[[Tensor], Any]  # one tensor, or several: by name or in order
    units: tuple[Tensor, Tensor] | None  # shift and scale from standardised targets back to the original units
    dtype: torch.dtype  # of its weights
    bfloat16: bool  # products and convolutions in bfloat16 (autocast); weights and posteriors stay as they are
    recast: Mapping[str, torch.dtype] = field(default_factory=dict)  # buffers of another type than their vector
    augment: Augment | None = None  # of stored inputs, in training
    writes: bool = False  # whether it writes into what it is given, as a first layer in place does
    tiled: frozenset[int] = frozenset()  # calls of BatchNorm to which rows come once for each place, see `trial.py`
    channels_last: bool = True  # whether it takes images, filters and outputs of convolutions in that layout
    frozen: Mapping[str, Weights] = field(default_factory=dict)  # by one name; empty where nothing is frozen

    @classmethod
    def of(
        cls,
        module: nn.Module,
        likelihood: Likelihood,
        *,
        parts: Mapping[str, Iterable[str]] | None = None,
        frozen: Iterable[str] = (),
        prepare: Callable[[Tensor], Any] | None = None,
        units: tuple[Tensor, Tensor] | None = None,
        bfloat16: bool = False,
        augment: Augment | None = None,
        name: str = "",
    ) -> Model:
        """Cut the trainable weights into parts by pattern; each weight goes to the first part that matches it.

        By default all are one part, `model`, or the network's `name`. Weights that do not require a gradient are
        frozen too.
        """
        frozen = list(frozen)
        weights = parameters_of(module, likelihood)
        refuse_strays(frozen, weights, "frozen")
        rest = Layout.of(weights, frozen=[*frozen, *(n for n, p in module.named_parameters() if not p.requires_grad)])
        # Weights that are never trained are held once: a body may be large.
        held = {id(p): p for p in module.parameters() if not p.requires_grad}
        module = copy.deepcopy(module, held)
        hold_norms_still(module, {*rest.names})
        layouts = {}
        for part, patterns in (parts or {name or "model": ("*",)}).items():
            layouts[part] = rest.select(*patterns)
            rest = rest.without(*patterns)
        if rest.names:
            raise ValueError(f"{len(rest.names)} weights are in no part, first {rest.names[0]!r}; add a part with '*'")
        buffers = {n: b for n, b in module.named_buffers() if travels(b)}
        recast: dict[str, torch.dtype] = {}
        for kind, real in zip(STATIC, (True, False)):
            part = f"{name}.{kind}" if name else kind
            layouts[part] = Layout.of({n: b for n, b in buffers.items() if b.is_floating_point() == real})
            together = layouts[part].join(buffers).dtype
            recast |= {n: buffers[n].dtype for n in layouts[part].names if buffers[n].dtype != together}
        layouts = {part: layout for part, layout in layouts.items() if layout.names}
        if all(is_static(part) for part in layouts):
            raise ValueError("the network has no trainable weights; check the pattern of frozen ones")
        module = straight(module).requires_grad_(False).train()
        still, dropping = shared_copy(module).eval(), shared_copy(module).eval()
        for layer in dropping.modules():
            layer.training = isinstance(layer, nn.modules.dropout._DropoutNd)
        unusual = any(type(layer) not in PLAIN for layer in module.modules())
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules())
        trained = {n for layout in layouts.values() for n in layout.names}
        ordered = sorted(module.named_parameters(), key=lambda row: row[0] not in trained)
        dtype = ordered[0][1].dtype  # of what is trained; a body may be in half precision
        constants = {n: p.detach() for n, p in module.named_parameters() if n not in trained}
        return cls(
            module,
            still,
            dropping,
            likelihood,
            layouts,
            unusual,
            convolves,
            prepare or to_float,
            units,
            dtype,
            bfloat16,
            recast,
            augment,
            frozen={f"{name}.{FROZEN}" if name else FROZEN: constants} if constants else {},
        )

    @cached_property
    def trainable(self) -> dict[str, Layout]:
        return {part: layout for part, layout in self.layouts.items() if not is_static(part)}

    @property
    def exact(self) -> Model:
        """The same network in the precision of its weights: bfloat16 would round away what narrow draws differ by."""
        return replace(self, bfloat16=False)

    @property
    def as_seen(self) -> Model:
        """The same network for inputs that are prepared already."""
        return replace(self, prepare=as_it_is)

    @cached_property
    def static(self) -> tuple[str, ...]:
        """Its parts that training does not differentiate."""
        return tuple(part for part in self.layouts if is_static(part))

    def initial(self) -> dict[str, Tensor]:
        """The module's own values, one vector for each part."""
        tensors = {**parameters_of(self.module, self.likelihood), **dict(self.module.named_buffers())}
        return {part: layout.join(tensors).detach().clone() for part, layout in self.layouts.items()}

    def inputs(self, x: Any) -> Any:
        """What the network sees of stored inputs, in its own precision; tokens stay whole numbers."""
        seen = self.prepare(x)
        seen = self._as_seen(seen) if isinstance(seen, Tensor) else mapped(self._as_seen, seen)
        return mapped(Tensor.clone, seen) if self.writes else seen

    def _as_seen(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype and x.is_floating_point():
            x = x.to(self.dtype)
        # Convolutions on a CPU are faster with channels last, but for those of few channels, which oneDNN alone reads.
        last = self.channels_last and x.dim() == 4 and x.is_cpu and alone() and not few(x)
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def augmented(self, x: Tensor, tape: Tape) -> Tensor:
        """Stored inputs as training sees them."""
        return x if self.augment is None else self.augment(x, tape(x.new_empty(0, dtype=self.dtype), (len(x), 3)))

    def frozen_in(self, constants: Mapping[str, Any]) -> dict[str, Any]:
        """The frozen weights among a run's constants, to be handed to `weights` beside the vectors."""
        return {name: constants[name] for name in self.frozen if name in constants}

    @cached_property
    def asks(self) -> bool:
        """Whether the network asks if it is traced before it looks at the values of a mask."""
        return asks_whether_traced(self.module)

    @cached_property
    def body(self) -> str:
        """A short hash of the frozen weights as their author gave them; empty where nothing is frozen."""
        drawn = [f"{n}.lora_A".removeprefix(".") for n, m in self.module.named_modules() if DRAWN in m.__dict__]
        names = [n for weights in self.frozen.values() for n in weights if n not in drawn]
        digest = hashlib.blake2b(digest_size=8)
        for name in names:
            weight = self.module.get_parameter(name)
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest() if names else ""

    def weights(self, vectors: Mapping[str, Any]) -> dict[str, Tensor]:
        """Vectors of parts as named tensors; frozen weights are named already."""
        tensors: dict[str, Tensor] = {}
        for part, vector in vectors.items():
            tensors |= vector if part in self.frozen else self.layouts[part].split(vector)
        return tensors | {n: tensors[n].to(kind) for n, kind in self.recast.items() if n in tensors}

    @cached_property
    def filters(self) -> tuple[str, ...]:
        """The weights of two-dimensional convolutions, but for few channels: oneDNN reads those as they are."""
        named = self.module.named_modules() if self.channels_last else ()
        layers = [n for n, m in named if isinstance(m, nn.Conv2d) and m.weight.shape[1] > FEW]
        return tuple(f"{n}.weight".removeprefix(".") for n in layers)

    def as_read(self, tensors: Weights) -> dict[str, Tensor]:
        """Named tensors, filters with channels last on a CPU: each convolution would do so, and its gradient again."""
        ours = [n for n in self.filters if n in tensors and tensors[n].device.type == "cpu"] if alone() else []
        return {**tensors, **{n: tensors[n].contiguous(memory_format=torch.channels_last) for n in ours}}

    def train_output(
        self,
        weights: Weights,
        x: Tensor,
        tape: Tape,
        mask: Tensor | None,
        handlers: Mapping[Any, Handler] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output in training mode, and the buffer vectors after it."""
        if not handlers and self._calls_directly(x):
            return self._directly(weights, self.augmented(x, tape)), {}
        replacements = {**(training_handlers(tape, mask, self.tiled) if self.unusual else {}), **(handlers or {})}
        replacements = {**self._usual(x), **replacements}
        # Buffers are written in place, so each is a copy of its own: a view would be missed under vmap.
        names = [n for part in self.static for n in self.layouts[part].names]
        weights = {**weights, **{n: weights[n].clone() for n in names}}
        x = self.augmented(x, tape)
        with Interception(replacements) if replacements else nullcontext():
            output = self._call(self.module, weights, x, names)
        return output, {part: self.layouts[part].join(weights) for part in self.static}

    def output(self, weights: Weights, x: Tensor, tape: Tape | None = None) -> Tensor:
        """Output in evaluation mode; with a tape, dropout stays on and reads it (MC dropout)."""
        if tape is None and self._calls_directly(x):
            return self._directly(weights, x)
        if tape is None:
            replacements: dict[Any, Handler] = {F.batch_norm: batch_norm()} if self.bfloat16 else {}
            replacements |= self._usual(x)
            with Interception(replacements) if replacements else nullcontext():
                return self._call(self.still, weights, x)
        with Interception({**ours(first_of(x), self.channels_last), **training_handlers(tape, None)}):
            return self._call(self.dropping, weights, x)

    @cached_property
    def _direct(self) -> Direct | None:
        return Direct.of(self.module)

    def _calls_directly(self, x: Tensor) -> bool:
        """Whether it is run without modules: its layers do all our way by themselves, and nobody looks at them."""
        return self._direct is not None and alone() and not has_torch_function((x,))

    def _directly(self, weights: Weights, x: Tensor) -> Tensor:
        assert self._direct is not None
        with torch.autocast(first_of(x).device.type, torch.bfloat16) if self.bfloat16 else nullcontext():
            return self._direct(self.as_read(weights), self.inputs(x)).to(self.dtype)

    def _usual(self, x: Tensor) -> dict[Any, Handler]:
        """What is done our way in every call."""
        return ours(first_of(x), self.channels_last) if self.convolves else {}

    def _call(self, module: nn.Module, weights: Weights, x: Tensor, moving: Iterable[str] = ()) -> Tensor:
        tensors, seen = self.as_read(_of_module(weights)), self.inputs(x)
        half = torch.autocast(first_of(x).device.type, torch.bfloat16) if self.bfloat16 else nullcontext()
        with half, said_to_be_traced() if self.asks and not alone() else nullcontext():
            output = tensor_in(call(module, tensors, seen, moving))
        return output.to(self.dtype)

    def log_prob(self, output: Tensor, y: Tensor, mask: Tensor | None, weights: Weights) -> Tensor:
        """Log-likelihoods of the rows of a batch; those of rows that are not live mean nothing."""
        absent = self.likelihood.absent
        if mask is not None and absent is not None:
            y = torch.stack([torch.where(mask, y[..., i], value) for i, value in enumerate(absent)], -1)
        return self.likelihood.log_prob(output, y, weights)

    def moments(self, output: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target, not in half precision: of its probabilities three digits would be left."""
        half = output.dtype in (torch.bfloat16, torch.float16)
        return self.likelihood.moments(output.float() if half else output, weights)

    def nll(self, output: Tensor, y: Tensor, mask: Tensor | None, weights: Weights) -> Tensor:
        """Mean negative log-likelihood over the live rows of a batch."""
        if mask is None and self.likelihood.log_prob is log_prob_of_classes and output.dim() == 2 and alone():
            return F.cross_entropy(output, y)  # a third of the calls; slower where clients are stacked
        rows = -self.log_prob(output, y, mask, weights)
        if mask is None:
            return rows.mean()
        live = mask.to(rows.dtype)
        # where, not a product: a padded row may be inf or nan, and 0 * inf is nan.
        return torch.where(mask, rows, 0).sum() / live.sum().clamp(min=1)


# Layers that call neither dropout nor BatchNorm; in any other module the user's own forward may.
PLAIN = {
    nn.Sequential,
    Straight,
    nn.Flatten,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.LayerNorm,
    nn.GroupNorm,
}


DRAWN = "has_drawn_factor"  # of a layer whose A has an address instead of an author; machines may round it otherwise


def _of_module(weights: Weights) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if not n.startswith("likelihood.")}
