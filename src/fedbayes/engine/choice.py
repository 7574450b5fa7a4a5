"""Which engine and which execution a run gets: by device, network and length, decided before the first round."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbayes.clients.point import PointStep
from fedbayes.engine.asleep import sleep_while_waiting
from fedbayes.engine.batches import steps_in_epoch
from fedbayes.engine.fast import forms
from fedbayes.engine.fast.rowwise import compiler
from fedbayes.engine.heap import keep_memory
from fedbayes.engine.loop import Loop
from fedbayes.engine.stacked import Stacked, weights_of
from fedbayes.engine.steps import BY_HAND, CAPTURED, ROWWISE, Steps
from fedbayes.errors import InputError
from fedbayes.federation.program import Engine, Program, Store
from fedbayes.model.model import Model
from fedbayes.model.recomputation import recomputes
from fedbayes.noise import Tape

SOON = "soon"
COMPILE: dict[str, str | None] = {
    **{"auto": None, "off": "eager", CAPTURED: CAPTURED, "on": "compiled", "graph": "graph", SOON: "graph"}
}

# Compiling takes about half a minute; a stacked step saves 1 to 10 ms by it. So it pays from some 10^4 steps on.
STEPS_WORTH_COMPILING = {"cpu": 20_000, "cuda": 2_000}
SMALL = 1_000_000  # multiplications of a client's batch that one thread does as fast as several
TINY = 4096  # numbers of a batch of images whose convolutions cost less than the calls of them
FEW_TINY = 8  # clients at once where images are so small
LARGE = 500_000  # weights that a core's caches do not hold: clients side by side would wait for memory together
WORKERS = 8  # clients side by side that Python's lock leaves room for


def choose(
    program: Program,
    store: Store,
    *,
    seed: int | str,
    engine: str,
    compile: str,
    rounds: int,
    size: int,
    chunk: int | None = None,
    cohorts: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Engine, str]:
    """An engine for a run, and one line that says which and why. `size` is the rows of a typical client.

    `chunk` is how many clients are trained side by side; by default what fits, and is fast on this device.
    The choice depends on nothing measured, so that a run and its resumption make the same one.
    """
    device, again = store.x.device.type, recomputes(program.model.module)
    if device == "cpu":
        keep_memory()
        sleep_while_waiting()
    if engine == "loop":
        if chunk is not None and chunk > 1:
            raise InputError(f"at_once: the loop engine trains one client at a time, not {chunk}; use engine='stacked'")
        small = device == "cpu" and _is_small(program)
        return Loop(store, seed=seed, again=again, small=small), "engine loop, as asked"
    steps = rounds * sum(steps_in_epoch(size, phase) * phase.epochs for phase in program.client.phases)
    mode, why = _mode(compile, device, steps)
    if mode != "graph" and any(phase.private for phase in program.client.phases):
        mode, why = "eager", "samples of private steps differ in size"
    if compile == "auto" and mode == "compiled" and _are_points_of_images(program):
        mode, why = "eager", "points with convolutions: kernels lose more by their layout than they save"
    if device == "cpu" and not again:
        mode, why = _by_hand(program, compile) or (mode, why)
    way = Way(chunk)
    if device == "cpu":
        way, how = _on_cpu(program, store, mode, chunk, stacked=engine == "stacked" or chunk is not None)
        why += how
    if way.alone:
        return Loop(store, seed=seed, again=again, small=way.small), f"engine loop: {why}"
    if chunk is not None:
        why += f"; {chunk} client{'s' * (chunk > 1)} at once, as asked"
    soon = compile == SOON and mode in ("graph", "compiled")
    if soon:
        why += "; eagerly until a process beside the run has compiled them"
    steps_run = Steps(mode, again=again, soon=soon)
    shares: dict[str, Any] = {"chunk": way.chunk, "workers": way.workers, "small": way.small}
    chosen = Stacked(program, store, seed=seed, steps=steps_run, cohorts=cohorts, **shares)
    return chosen, f"engine stacked, steps {steps_run.mode}: {why}" + ("; activations are recomputed" if again else "")


class Way(NamedTuple):
    """How a round is cut into chunks, and who runs them."""

    chunk: int | None  # clients of a chunk; None: what fits
    workers: int = 1  # chunks side by side at most
    small: bool = False  # whether each has one of PyTorch's threads
    alone: bool = False  # client by client, by the loop engine


def _on_cpu(program: Program, store: Store, mode: str, chunk: int | None, *, stacked: bool) -> tuple[Way, str]:
    """Chunks of the clients on a CPU, and in words what is particular to them. `stacked`: as many at once as asked for.

    Stacked convolutions are slower than one after another, unless calls cost more than products. Compiled kernels hold
    Python's lock.
    """
    again, eager = recomputes(program.model.module), mode in ("eager", BY_HAND)
    small = _is_small(program) and (eager or (mode == "compiled" and _wakes_slowly()))
    if not program.model.convolves or stacked:
        free = eager and not again and not program.model.convolves
        return Way(chunk, WORKERS if free else 1, small), ""
    one_after_another = again or weights_of(program) > LARGE or _draws(program.model, store.x)
    if one_after_another:
        return Way(1, 1, small, alone=mode == "eager"), "; convolutions run client by client on a CPU"
    few = FEW_TINY if _is_tiny(program, store.x) else 1
    how = "client by client" if few == 1 else f"{few} clients at once"
    return Way(few, WORKERS, small), f"; convolutions run {how} on a CPU, side by side"


def _by_hand(program: Program, compile: str) -> tuple[str, str] | None:
    """Code of our own for the steps on a CPU, and why, where there is some."""
    phases = program.client.phases
    if compile != "off" and all(map(forms.rowwise, phases)) and compiler():
        return ROWWISE, "steps on single rows of a small network, in C"
    if compile in ("auto", "off") and all(map(forms.dense, phases)):
        return BY_HAND, "a chain of linear maps, its gradient by hand"
    return None


# f(inputs), which stays on the device and is asked for again under a key.
Carry = Callable[[tuple[Any, ...], Callable[[Any], Any], Any], Any]


def carry_of(engine: Engine) -> Carry:
    """How evaluations are run: as a graph where the steps of training are one, else each time anew."""
    return engine.steps.carry if isinstance(engine, Stacked) else lambda key, f, inputs: f(inputs)


def _is_small(program: Program) -> bool:
    """Whether a client's products are so short that a second thread costs more than it brings."""
    if program.model.convolves:  # each weight is in many products
        return False
    return weights_of(program) * max(phase.batch for phase in program.client.phases) <= SMALL


def _wakes_slowly() -> bool:
    """Two x86 cores: by the time that a thread which waited asleep is awake, the other could have done its part."""
    return torch.get_num_threads() == 2 and platform.machine() in ("x86_64", "AMD64")


def _are_points_of_images(program: Program) -> bool:
    """Whether weights without noise go through convolutions of images, which PyTorch runs with channels last."""
    points = all(isinstance(phase.step, PointStep) for phase in program.client.phases)
    return points and any(isinstance(layer, nn.Conv2d) for layer in program.model.module.modules())


def _is_tiny(program: Program, x: Tensor) -> bool:
    return x[:1].numel() * max(phase.batch for phase in program.client.phases) <= TINY


def _draws(model: Model, x: Tensor) -> bool:
    """Whether the network reads PyTorch's own generator in training, as attention's dropout does."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        model.train_output(model.weights(model.initial()), x[:1].expand(2, *x.shape[1:]), Tape(), None)
        return not torch.equal(before, torch.get_rng_state())


def _mode(compile: str, device: str, steps: int) -> tuple[str, str]:
    mode = COMPILE[compile]
    if mode == CAPTURED and device != "cuda":
        return "eager", "CUDA graphs need a CUDA device"
    if mode == "graph" and device != "cuda":
        return "compiled", "as asked" if compile == SOON else "CUDA graphs need a CUDA device"
    if mode is not None:
        return mode, "as asked"
    enough = STEPS_WORTH_COMPILING.get(device, 20_000)
    about = f"about {steps:,} steps, compiling pays from {enough:,}"
    if steps < enough:
        return "eager", about
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "eager", f"{about}, but there is no C++ compiler (g++ or clang++)"
    return ("graph" if device == "cuda" else "compiled"), f"{about}; compile=soon would not wait for the compiler"


@contextmanager
def tensor_cores(precision: str) -> Iterator[None]:
    """Matrix products and convolutions of float32 in TF32 where asked for; PyTorch's convolutions would be unasked."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def quick_cpu() -> Iterator[None]:
    """oneDNN is several times slower than the plain kernels for the small products of federated clients on ARM."""
    if platform.machine() not in ("aarch64", "arm64") or not torch.backends.mkldnn.is_available():
        yield
        return
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
