"""The Langevin client: draws of a teacher's weights from its posterior, distilled online into a student (FedPPD)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload, only_if
from fedbayes.clients.optimisers import Optimiser
from fedbayes.clients.samplers import Sampler
from fedbayes.clients.schedules import Rate
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.model.soft_targets import cross_entropy, mean_over_live, soft_targets
from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts, Point

Vectors = dict[str, Tensor]


class State(NamedTuple):
    """The chain of the teacher, the student, and the draw of highest density so far with its energy U."""

    teacher: Learner  # its `optimiser` is the sampler's state
    student: Learner
    best: tuple[Vectors, Vectors]
    energy: Tensor  # of the best draw
    measured: Tensor  # sum of the NLL over the rows seen in a pass that measures a draw


COOLING: dict[str, Callable[[Info], Tensor]] = {
    "constant": lambda info: info.options["temperature"],
    "1/n": lambda info: info.options["temperature"] / info.n,
}


def langevin(
    teacher: Model,
    student: Model,
    *,
    sampler: Sampler,
    optimiser: Optimiser,
    epochs: int,
    batch: int,
    burn_in: int = 0,
    thin: int = 1,
    schedule: str = "interleaved",
    upload: str = "map",
    cooling: str = "constant",
    within: str = "constant",
    student_within: str = "constant",
    dropout: bool = False,
) -> Client:
    """Bayesian dark knowledge (Korattikara et al., 2015) on a client, as in FedPPD's supplement, algorithm 1.

    The teacher moves by the sampler on U = mean NLL + weight_decay / 2 |theta|^2 at temperature T; after each `thin`
    draws the student takes a step on the cross-entropy to the newest draw's prediction + weight_decay / 2 |w|^2, on
    rows of its own with N(0, input_noise^2) added. In `burn_in` epochs nothing is taught. `schedule` "epochs": a
    student's epoch against the last draw follows each `thin` epochs of the teacher. `upload` "map": of the draws at
    the ends of epochs the one of highest density on all of the client's rows is sent, which costs a forward pass over
    them each; "last": the last one. `dropout`: the teacher's stays on while it teaches. Scalar options: `lr`,
    `student_lr`, `temperature`, `weight_decay`, `input_noise`, and `lr_drop`, `lr_drop_every` of "steps".
    """
    lessons = (epochs - burn_in) // thin
    draw = _draw(teacher, sampler, Rate("lr", within, epochs), cooling)
    teach = _teach(teacher, student, optimiser, Rate("student_lr", student_within, lessons), dropout)

    def both(state: State, batches: tuple[Batch, ...], tape: Tape, info: Info) -> State:
        for b in batches[:-1]:
            state = draw(state, b, tape, info)
        return teach(state, batches[-1], tape, info)

    def start(own: Own, info: Info) -> State:
        begun = _begun(teacher, info, sampler.init)
        zero = begun.loss
        return State(begun, _begun(student, info, optimiser.init), begun[:2], zero + torch.inf, zero)

    def finish(state: State, info: Info) -> Upload:
        vectors, static = state.best if upload == "map" else state.teacher[:2]
        parts: Parts = {part: Point(v, teacher.layouts[part]) for part, v in {**vectors, **static}.items()}
        taught = {**state.student.vectors, **state.student.static}
        parts |= {part: Point(v, student.layouts[part]) for part, v in taught.items()}
        losses = {"loss": state.teacher, "student_loss": state.student}
        return Upload(parts, {}, {name: at.loss / at.steps.clamp(min=1) for name, at in losses.items()})

    alone = (Phase(draw, 1, batch),)
    lesson = {
        "interleaved": (Phase(both, 1, batch, batches=thin + 1),),
        "epochs": (Phase(draw, thin, batch), Phase(teach, 1, batch)),
    }[schedule]
    judged = (Phase(_measure(teacher), 1, batch),) if upload == "map" else ()
    return Client(start, burn_in * alone + lessons * (lesson + judged), finish)


SCHEDULES = ("interleaved", "epochs")
UPLOADS = ("map", "last")
Step = Callable[[State, Batch, Tape, Info], State]


def _begun(model: Model, info: Info, init: Callable[[Vectors], Any]) -> Learner:
    vectors = {part: info.broadcast[part].mean for part in model.trainable}
    zero = next(iter(vectors.values())).new_zeros(())
    return Learner(vectors, {p: info.broadcast[p].mean for p in model.static}, init(vectors), zero, zero)


def _unchanged(model: Model, at: Learner, info: Info) -> dict[str, Any]:
    """What a network's step does not differentiate: buffers, and frozen weights."""
    return {**at.static, **model.frozen_in(info.constants)}


def _draw(teacher: Model, sampler: Sampler, rate: Rate, cooling: str) -> Step:
    """The step that makes the next draw of the teacher's weights."""

    def nll(vectors: Vectors, static: dict[str, Any], b: Batch, tape: Tape) -> Any:
        weights = teacher.weights({**vectors, **static})
        output, static = teacher.train_output(weights, b.x, tape, b.mask)
        value = teacher.nll(output, b.y, b.mask, weights)
        return value, (static, value.detach())

    def draw(state: State, b: Batch, tape: Tape, info: Info) -> State:
        at = state.teacher
        slopes, (static, loss) = gradients(nll, at.vectors, _unchanged(teacher, at, info), b, tape)
        slopes = {p: g + info.options["weight_decay"] * at.vectors[p] for p, g in slopes.items()}
        normals = {p: tape(v) for p, v in at.vectors.items()}
        heat = COOLING[cooling](info) / info.n
        moved, vectors = sampler.update(at.optimiser, at.vectors, slopes, normals, rate(at, info), heat)
        return state._replace(teacher=Learner(vectors, static, moved, at.loss + loss, at.steps + 1))

    return draw


def _teach(teacher: Model, student: Model, optimiser: Optimiser, rate: Rate, dropout: bool) -> Step:
    """The student's step towards what the newest draw says of noisy inputs."""
    # Both see the same noisy inputs, so that neither must prepare or augment them again.
    says, learns = (replace(model.as_seen, augment=None) for model in (teacher, student))

    def imitation(vectors: Vectors, static: dict[str, Any], x: Tensor, targets: Tensor, mask: Any, tape: Tape) -> Any:
        weights = student.weights({**vectors, **static})
        output, static = learns.train_output(weights, x, tape, mask)
        value = mean_over_live(cross_entropy(student.likelihood, output, weights, targets), mask)
        return value, (static, value.detach())

    def teach(state: State, b: Batch, tape: Tape, info: Info) -> State:
        at, x = state.student, teacher.inputs(teacher.augmented(b.x, tape))
        if x.is_floating_point():
            x = x + info.options["input_noise"] * tape(x)
        weights = teacher.weights({**state.teacher.vectors, **_unchanged(teacher, state.teacher, info)})
        outputs = says.output(weights, x, tape if dropout else None)
        targets = soft_targets(teacher.likelihood, outputs, weights).detach()
        fixed = _unchanged(student, at, info)
        slopes, (static, loss) = gradients(imitation, at.vectors, fixed, x, targets, b.mask, tape)
        slopes = {p: g + info.options["weight_decay"] * at.vectors[p] for p, g in slopes.items()}
        moved, vectors = optimiser.update(at.optimiser, at.vectors, slopes, rate(at, info))
        return state._replace(student=Learner(vectors, static, moved, at.loss + loss, at.steps + 1))

    return teach


def _measure(teacher: Model) -> Step:
    """One step of a pass over the client's rows that finds the newest draw's energy, and keeps the least."""

    def measure(state: State, b: Batch, tape: Tape, info: Info) -> State:
        vectors, static = state.teacher[:2]
        weights = teacher.weights({**vectors, **_unchanged(teacher, state.teacher, info)})
        rows = -teacher.log_prob(teacher.output(weights, b.x), b.y, b.mask, weights)
        live = rows if b.mask is None else torch.where(b.mask, rows, 0)
        total = torch.where(b.step == 0, 0, state.measured) + live.sum()
        square = torch.stack([v.square().sum() for v in vectors.values()]).sum()
        energy = total / info.n + 0.5 * info.options["weight_decay"] * square
        better = (b.step == info.batches[0] - 1) & (energy < state.energy)
        best, least = only_if(better, ((vectors, static), energy), (state.best, state.energy))
        return state._replace(best=best, energy=least, measured=total)

    return measure
