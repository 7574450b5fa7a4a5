"""IVON's steps by one draw of the weights: a gradient, and a kernel that moves all clients.

The kernel makes a step's noise by a counter, and makes it again instead of keeping it; it draws the weights of the next
step while means and precisions are at hand. So a step reads or writes ten numbers for each weight of a client: the
gradient reads the weights and writes one, the kernel reads four and writes four. On any network the gradient is
compiled; on small chains of linear maps it is made by the kernels of fused.py. Written in Triton, for a GPU; equal to
the client's own step up to rounding, on the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients import ivon
from fedbayes.clients.client import Batch, Info, Learner, Phase, falling_rate, only_if
from fedbayes.clients.variational import KL_WEIGHTS
from fedbayes.engine.fast import fused
from fedbayes.engine.fast.forms import Bayes
from fedbayes.engine.together import Clients, apart, joined
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.layout import Layout

FEWEST = 2**22  # weights of all clients from which memory is what a step waits for
OWN = 2**16  # weights of a tensor that is a piece of its own: its gradient is read where its product wrote it
WARPS = 8  # of a program, which has four weights for each of their threads

Program = Callable[..., tuple[tuple[Tensor, ...], Any, Tensor, Tensor]]


def fits(step: ivon.IvonStep, clients: int) -> bool:
    """Whether there is a compiler of the kernel, and enough for it to gain."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return clients * step.model.layouts["model"].size >= FEWEST


class Piece(NamedTuple):
    """Tensors that stand side by side in the vector, from `begin` on."""

    begin: int
    layout: Layout

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The piece's vector as named tensors."""
        if len(self.layout.names) > 1:
            return self.layout.split(vector)
        return {
            self.layout.names[0]: vector.reshape(self.layout.shapes[0])
        }  # without a split, whose gradient is a copy


def pieces_of(layout: Layout) -> list[Piece]:
    """Large tensors each by itself, what stands between them together."""
    pieces: list[Piece] = []
    begin, before = 0, OWN
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes):
        if before < OWN and size < OWN:
            at, (names, shapes) = pieces[-1].begin, (pieces[-1].layout.names, pieces[-1].layout.shapes)
            pieces[-1] = Piece(at, Layout((*names, name), (*shapes, shape)))
        else:
            pieces.append(Piece(begin, Layout((name,), (shape,))))
        begin, before = begin + size, size
    return pieces


def by_piece(pieces: list[Piece], weights: Tensor) -> tuple[Tensor, ...]:
    """The memory of weights [K, P] as one tensor [K, size] for each piece, one after another."""
    clients, flat = len(weights), weights.view(-1)
    ends = [(clients * piece.begin, clients * (piece.begin + piece.layout.size)) for piece in pieces]
    return tuple(flat[begin:end].view(clients, -1) for begin, end in ends)


def slopes(phase: Phase, together: Clients, masked: bool) -> Program:
    """The gradient of every client at its weights (`by_piece`), what else of the state a step changes, and `_numbers`.

    To be compiled; its arguments are a step's, with the weights in the place of the noise.
    """
    step: Any = phase.step
    axes, pieces = together.info, pieces_of(step.model.layouts["model"])

    def program(
        state: Learner, xs: Tensor, ys: Tensor, live: Tensor | None, weights: Tensor, at: Tensor, info: Info
    ) -> tuple[tuple[Tensor, ...], Any, Tensor, Tensor]:
        def one(
            state: Learner, xs: Tensor, ys: Tensor, live: Tensor | None, drawn: tuple[Tensor, ...], own: Any
        ) -> Any:
            known, b = joined(own, info, axes), Batch(xs[0], ys[0], None if live is None else live[0], at)
            vectors, frozen = {str(n): w for n, w in enumerate(drawn)}, step.model.frozen_in(known.constants)
            g, (static, nll) = gradients(_nll, vectors, step.model, pieces, state.static, b, frozen)
            slope = tuple(g.values())
            count = state.optimiser["count"]
            new: Any = (static, count + 1, state.loss + nll, state.steps + 1)
            if live is not None:  # a client whose steps are over waits for the others unchanged
                new = only_if(live.any(), new, (state.static, count, state.loss, state.steps))
            said = _said(step, pieces, slope, drawn, state, b, known)
            moves = torch.ones_like(count) if live is None else live.any().to(count)
            return slope, new, _numbers(step, count, b, known, said, moves), _begun(step, state, b, known)

        dims = (0, 0, 0, 0 if masked else None, 0, axes)
        return together.over(one, dims)(state, xs, ys, live, by_piece(pieces, weights), apart(info, axes))

    return program


def _nll(vectors: dict[str, Tensor], model: Model, pieces: list[Piece], static: Any, b: Batch, frozen: Any) -> Any:
    """The loss at these weights, as `Expectation.nll` has it, without a vector of all of them."""
    weights = model.weights({**static, **frozen})
    for piece, vector in zip(pieces, vectors.values()):
        weights |= piece.named(vector)
    silence = next(iter(vectors.values()))[:0]
    output, static = model.train_output(weights, b.x, Tape(silence), b.mask)
    nll = model.nll(output, b.y, b.mask, weights)
    return nll, (static, nll.detach())


def _numbers(step: ivon.IvonStep, count: Tensor, b: Batch, info: Info, said: Tensor, moves: Tensor) -> Tensor:
    """What the kernel reads of a client, in this order."""
    options, weight = info.options, KL_WEIGHTS[step.kl](b, info)
    rate = falling_rate(b, info, step.epochs) if step.falling else options["lr"]
    decay = options["beta1"].log()
    whole, before = -torch.expm1((count + 1) * decay), -torch.expm1(count.clamp(min=1) * decay)
    values = [weight, rate, step.share(b, info), 1 / whole, options["beta1"], options["least_curvature"]]
    values += [1 / before, said, moves]
    return torch.stack([value.float() for value in values])


def _begun(step: ivon.IvonStep, state: Learner, b: Batch, info: Info) -> Tensor:
    """What is added to the prior's precision where nothing is known of the curvature yet; below 0: it is known."""
    begins = step.begins(state, info)
    if begins is None:
        return torch.full_like(state.steps, -1.0)
    return torch.where(begins, info.options["least_curvature"] / KL_WEIGHTS[step.kl](b, info), -1.0)


def _said(
    step: ivon.IvonStep,
    pieces: list[Piece],
    slope: tuple[Tensor, ...],
    drawn: tuple[Tensor, ...],
    state: Learner,
    b: Batch,
    info: Info,
) -> Tensor:
    """What a sample of all weights says of the first curvature, as `IvonStep._first` has it; 0 where it is not read."""
    total = torch.zeros_like(state.steps)
    if step.remembers:
        return total
    mean, size = state.vectors["mean"], step.model.layouts["model"].size
    each, held = max(1, size // ivon.SAMPLE), step.prior_of(info).scale.square().reciprocal()
    begun = _begun(step, state, b, info)
    for piece, g, w in zip(pieces, slope, drawn):
        first, end = -piece.begin % each, piece.begin + piece.layout.size
        if first < piece.layout.size:
            at = slice(piece.begin + first, end, each)
            total = total + (g[first::each] * (w[first::each] - mean[at]) * (held[at] + begun)).abs().sum()
    return total / -(-size // each)


def stepping(phase: Phase, together: Clients, program: Program) -> Callable[..., Learner]:
    """Several steps of every client on batches [steps, clients, 1, B, ...]. They change the state's own memory.

    Noise is [steps, clients, P], or of no normals: then it is made by a counter, its seeds by the device's generator.
    """
    step: Any = phase.step
    axes, pieces = together.info, pieces_of(step.model.layouts["model"])

    def begun_at(state: Learner, at: Tensor, info: Info) -> Tensor:
        def one(state: Learner, own: Any) -> Tensor:
            return _begun(step, state, Batch(at, at, None, at), joined(own, info, axes))

        return together.over(one, (0, axes))(state, apart(info, axes))

    def several(state: Learner, xs: Tensor, ys: Tensor, flags: Any, noise: Tensor, at: Tensor, info: Info) -> Learner:
        mean = state.vectors["mean"]
        weights = torch.empty_like(mean)
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(xs),), device=mean.device)

        def move(s: int, slope: tuple[Tensor, ...], numbers: Tensor, begun: Tensor, **how: bool) -> None:
            for piece, g, drawn in zip(pieces, slope, by_piece(pieces, weights), strict=True):
                _launch(step, piece, state, g, drawn, noise, seeds, numbers, begun, info, s, how)

        # By what `program` gives for each step: the first weights need `begun` before there is a gradient.
        begun = state.steps if step.remembers else begun_at(state, at[0], info)
        move(-1, by_piece(pieces, weights), begun, begun, MOVES=False, DRAWS=True)
        for s in range(len(xs)):
            slope, new, numbers, begun = program(state, xs[s], ys[s], flags[s], weights, at[s], info)
            move(s, slope, numbers, begun, MOVES=True, DRAWS=s + 1 < len(xs))
            static, count, loss, steps = new
            state = Learner(state.vectors, static, {**state.optimiser, "count": count}, loss, steps)
        return state

    return several


def on_chain(form: Bayes, phase: Phase) -> Callable[..., Learner]:
    """As `stepping`, where `fused.fits`: the gradient by its kernels, and all weights as one piece."""
    step: Any = phase.step
    slopes_of, whole = fused.slopes(form), Piece(0, step.model.layouts["model"])

    def several(state: Learner, xs: Tensor, ys: Tensor, flags: Any, noise: Tensor, at: Tensor, info: Info) -> Learner:
        mean = state.vectors["mean"]
        weights, slope = torch.empty_like(mean), torch.empty_like(mean)
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(xs),), device=mean.device)
        live = None if flags[0] is None else torch.stack(list(flags)).flatten(2).any(-1)
        numbers, begun = fused.numbers(form, state, at, live, info)

        def move(s: int, **how: bool) -> None:
            now = max(s, 0)
            _launch(step, whole, state, slope, weights, noise, seeds, numbers[now], begun[now], info, s, how)

        move(-1, MOVES=False, DRAWS=True)
        for s in range(len(xs)):
            slopes_of(state, xs[s], ys[s], flags[s], noise[s], at[s], info, weights, slope)
            if not step.remembers:
                _say(step, mean, weights, slope, numbers[s], begun[s], info)
            move(s, MOVES=True, DRAWS=s + 1 < len(xs))
        return state

    return several


def _say(
    step: ivon.IvonStep, mean: Tensor, weights: Tensor, slope: Tensor, numbers: Tensor, begun: Tensor, info: Info
) -> None:
    """What a sample of all weights says of the first curvature, as `_said` has it, into the numbers."""
    size = mean.shape[1]
    each = max(1, size // ivon.SAMPLE)
    count = -(-size // each)
    _, scale, stride = _prior(step, mean, info)
    _kernels().said[(len(mean),)](
        mean, weights, slope, scale, numbers, begun, stride, P=size, EACH=each, COUNT=count,
        PLACES=1 << (count - 1).bit_length(), FIXED=step.prior != "broadcast", num_warps=WARPS,
    )  # fmt: skip


def _prior(step: ivon.IvonStep, mean: Tensor, info: Info) -> tuple[Tensor, Tensor, int]:
    """The prior's means (of a fixed one any) and scales, and how far one client's are from the next one's."""
    q: Any = info.broadcast["model"]
    centre, scale = (mean, info.options["prior_scale"]) if step.prior != "broadcast" else (q.mean, q.scale)
    centre, scale = centre.contiguous(), scale.contiguous()
    own = scale.dim() == (1 if step.prior != "broadcast" else 2)
    return centre, scale, scale.stride(0) if own else 0


def _launch(
    step: ivon.IvonStep,
    piece: Piece,
    state: Learner,
    slope: Tensor,
    drawn: Tensor,
    noise: Tensor,
    seeds: Tensor,
    numbers: Tensor,
    begun: Tensor,
    info: Info,
    s: int,
    how: dict[str, bool],
) -> None:
    mean, size = state.vectors["mean"], piece.layout.size
    vectors = [mean, state.vectors["precision"], state.optimiser["first"]["mean"], drawn]
    if not all(t.is_contiguous() for t in (*vectors, noise)):
        raise ValueError("weights of clients do not lie side by side")
    centre, scale, stride = _prior(step, mean, info)
    counts, given = 32 * WARPS, noise.shape[-1] > 0  # each thread counts once, by which it has four normals
    grid = (-(-size // (4 * counts)), len(mean))
    _kernels().moved[grid](
        *vectors, slope.contiguous(), centre, scale, noise if given else mean, seeds,
        numbers.contiguous(), begun.contiguous(), stride, s,
        K=len(mean), P=mean.shape[1], BEGIN=piece.begin, SIZE=size, COUNTS=counts, FIXED=step.prior != "broadcast",
        REMEMBERS=step.remembers, AVERAGE=step.curvature == "average", IMPLICIT=step.implicit,
        FARTHEST=ivon.FARTHEST, GIVEN=given, num_warps=WARPS, **how,
    )  # fmt: skip


@cache
def _kernels() -> Any:
    from fedbayes.engine.fast import drawn_kernel

    return drawn_kernel
