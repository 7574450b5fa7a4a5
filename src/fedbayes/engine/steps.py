"""How the steps of stacked clients are executed: eagerly, compiled, or compiled and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedbayes.clients.client import Batch, Info, Phase, only_if
from fedbayes.clients.ivon import IvonStep
from fedbayes.clients.variational import TILT
from fedbayes.engine.batches import taken
from fedbayes.engine.clock import COMPILE, share
from fedbayes.engine.compiled import Compiled
from fedbayes.engine.fast import dense, drawn, forms, fused, rowwise
from fedbayes.engine.graphs import Captured, Graph
from fedbayes.engine.room import shortage
from fedbayes.engine.together import Clients, NotStackable, apart, first_words, joined
from fedbayes.engine.work import Work
from fedbayes.model.convolution import compiled
from fedbayes.model.model import Model
from fedbayes.model.trees import mapped
from fedbayes.noise import Tape


def stacked_step(phase: Phase, together: Clients, masked: bool) -> Callable[..., Any]:
    """One step of every client on batches [clients, batches, B, ...]: the client's own step, under vmap."""
    axes = together.info

    def step(state: Any, xs: Tensor, ys: Tensor, live: Tensor | None, noise: Tensor, at: Tensor, info: Info) -> Any:
        def one(state: Any, xs: Tensor, ys: Tensor, live: Tensor | None, noise: Tensor, own: Any) -> Any:
            known = joined(own, info, axes)
            masks = [None] * phase.batches if live is None else list(live.unbind(0))
            batches = tuple(Batch(a, b, mask, at) for a, b, mask in zip(xs.unbind(0), ys.unbind(0), masks))
            new = phase.step(state, batches[0] if phase.batches == 1 else batches, Tape(noise), known)
            # A client whose steps are over waits for the others unchanged.
            return new if live is None else only_if(live.any(), new, state)

        dims = (0, 0, 0, 0 if masked else None, 0, axes)
        return together.over(one, dims)(state, xs, ys, live, noise, apart(info, axes))

    return step


MODES = ("graph", "compiled", "eager")  # from the fastest down; each falls back on the next
ROWWISE = "rowwise"  # code of our own for steps on single rows, see rowwise.py; falls back on eager
CAPTURED = "captured"  # steps that are not compiled as a CUDA graph; falls back on eager
FEWEST = 10  # steps of a phase that are worth such a capture, which costs four
TRACED = "traced"  # operations recorded once and run one by one, activations computed again; falls back on eager
BY_HAND = "by hand"  # a backward pass of our own for chains of linear maps, see dense.py; falls back on eager


REFUSED = object()  # in place of a graph that could not be made
SMALL = 2**24  # numbers: of more, what is done once a round takes the device longer than the calls
DEEP = 40  # weights and biases of a network whose step is compiled by several processes


class Steps:
    """Executes the steps of a phase in a mode; where one fails, the next takes over for good and a note says why.

    `soon`: steps that are not compiled yet are run as they are meanwhile, and compiled in a process beside this one,
    which is asked in the second round: the first does not wait for the trace.
    """

    def __init__(self, mode: str = "eager", *, again: bool = False, soon: bool = False) -> None:
        self.again = again  # whether activations are computed again
        self.mode = TRACED if again and mode not in ("graph", "compiled", CAPTURED) else mode
        self.fused = True  # whether steps with kernels of their own are run by them
        self.notes: list[str] = []
        self._cache: dict[Any, Any] = {}
        self.soon = soon
        self._meanwhile = Steps(CAPTURED if mode == "graph" else "eager", again=again) if soon else None
        self._there: set[Any] = set()  # of which work the steps are compiled
        self._rounds = 0  # that have begun

    def run(self, work: Work, state: Any) -> Any:
        """The state after all steps of the work's table."""
        while True:
            try:
                arguments = (*work.table, work.store.x, work.store.y, work.info, state)
                if self.mode == ROWWISE and (single := forms.rowwise(work.phase)) is not None:
                    return rowwise.run(single, *arguments)
                if self.mode == BY_HAND and (form := forms.dense(work.phase)) is not None:
                    return dense.run(form, *arguments, work.noise)
                if self._meanwhile is not None and not self._is_there(work, state):
                    return self._run_meanwhile(self._meanwhile, work, state)
                with compiled(self.mode in ("graph", "compiled"), stacked=work.together.size > 1):
                    return self._replay(work, state) if self._captures(work) else self._run(work, state)
            except torch.OutOfMemoryError as error:
                raise shortage(*self._once(work, state), work.together.size, self.again, error) from None
            except NotStackable:
                raise
            except Exception as error:
                if self.mode == "eager":
                    raise
                self._stop()
                self._cache.clear()
                if self._form(work) is not None:
                    self.fused = False
                    self.notes.append(f"steps are compiled instead of fused: {first_words(error)}")
                    continue
                lower = MODES[MODES.index(self.mode) + 1] if self.mode in MODES else "eager"
                lower = TRACED if self.again and lower == "eager" and self.mode != TRACED else lower
                lost = ", so that nothing is recomputed" if self.mode == TRACED else ""
                self.notes.append(f"steps run {lower} instead of {self.mode}{lost}: {first_words(error)}")
                self.mode = lower

    def look(self, number: int) -> None:
        """Before a round begins: use what has been compiled beside the last ones, once all of it is there."""
        self._rounds += 1
        steps = [step for step in self._cache.values() if isinstance(step, Compiled) and step.beside]
        if not steps or not all(beside.done for step in steps for _, beside in step.beside.values()):
            return
        try:
            for step in steps:
                step.take()
        except Exception as error:
            self.end()
            self.notes.append(f"steps stay eager, they can't be compiled beside the run: {first_words(error)}")
        else:
            if self._meanwhile is not None:
                self._meanwhile._cache.clear()  # graphs hold memory
            how = "compiled and captured" if self.mode == "graph" else "compiled"
            self.notes.append(f"steps run {how} from round {number} on, eagerly before: the same to rounding only")

    def end(self) -> None:
        """Stop what is compiled beside the run; what was not compiled in time stays eager."""
        self.soon = False
        self._stop()

    def _stop(self) -> None:
        for step in self._cache.values():
            if isinstance(step, Compiled):
                step.end()

    @property
    def captures(self) -> bool:
        """Whether steps, and what can be done like them, are graphs."""
        return self.mode in ("graph", CAPTURED)

    def carry(self, key: tuple[Any, ...], f: Callable[[Any], Any], inputs: Any, what: str = "evaluation") -> Any:
        """f(inputs); where steps are graphs captured at the first call of a key and replayed from then on."""
        shapes = tuple((t.shape, t.dtype) for t in tree_leaves(inputs))
        key = ("carry", key, shapes, torch.get_float32_matmul_precision())
        if not self.captures or self._cache.get(key) is REFUSED:
            return f(inputs)
        try:
            if key not in self._cache:
                self._cache[key] = Captured(f, inputs)
            return self._cache[key](inputs)
        except Exception as error:
            self._cache[key] = REFUSED
            self.notes.append(f"{what} runs without a graph: {first_words(error)}")
            return f(inputs)

    def around(
        self, f: Callable[[Any, Info], Any], together: Clients, own: Any, info: Info, known_by: object = None
    ) -> Any:
        """f(own, info) of every client: what is done once a round, before and after the steps.

        Where steps are graphs it is one too, from its second call on, if it is small and draws nothing. `known_by`:
        what it is known by, if f is made anew every time.
        """
        each = together.over(f, (0, together.info))
        if not self.captures or not _is_small((own, info)):
            return each(own, info)
        known_by = known_by or f
        key = ("around", id(known_by), repr(together))
        if key not in self._cache:
            before = _generator(info.n.device)
            made = each(own, info)
            still = torch.equal(before, _generator(info.n.device))
            self._cache[key] = known_by if still else REFUSED  # kept, so that nothing else gets its number
            return made
        if self._cache[key] is REFUSED:
            return each(own, info)
        return self.carry(key, lambda inputs: each(*inputs), (own, info), "what is done once a round")

    def _run_meanwhile(self, steps: Steps, work: Work, state: Any) -> Any:
        try:
            return steps.run(work, state)
        finally:
            self.notes += steps.notes
            steps.notes.clear()

    def _is_there(self, work: Work, state: Any) -> bool:
        """Whether the steps of this work are compiled; if not, a process beside this one begins to."""
        key = (id(work.phase.step), repr(work.together), work.table.live is None, work.table.rows.shape[-1])
        if key not in self._there:
            ask = self.soon and self._rounds > 1
            with compiled(stacked=work.together.size > 1):
                step = self._step(work)
                if isinstance(step, Compiled) and not step.there(*self._once(work, state)[1], ask=ask):
                    return False
            self._there.add(key)
        return True

    def _once(self, work: Work, state: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The first step of a phase, and its arguments."""
        x, y, (rows, live) = work.store.x, work.store.y, work.table
        at, first = torch.zeros((), dtype=torch.int64, device=x.device), rows[0].to(x.device)
        flags = None if live is None else live[0].to(x.device)
        step = stacked_step(work.phase, work.together, live is not None)
        return step, (state, x[first], y[first], flags, work.noise(0, 1)[0], at, work.info)

    def _captures(self, work: Work) -> bool:
        return self.mode == "graph" or (self.mode == CAPTURED and len(work.table.rows) >= FEWEST)

    def _run(self, work: Work, state: Any) -> Any:
        x, y = work.store.x, work.store.y
        if x.device.type == "cuda":
            torch.cuda.manual_seed(work.seed)
        if work.together.size == 1 and self.mode in ("eager", BY_HAND):
            return _one_client(work, state)
        rows = work.table.rows.to(x.device)
        flags = [None] * len(rows) if work.table.live is None else work.table.live.to(x.device).unbind(0)
        step = self._step(work)
        numbers = torch.arange(len(rows), device=x.device)
        for s, (r, live, at) in enumerate(zip(rows.unbind(0), flags, numbers.unbind(0))):
            state = step(state, taken(x, r), taken(y, r), live, work.noise(s, 1)[0], at, work.info)
        return state

    def _step(self, work: Work) -> Callable[..., Any]:
        masked, form = work.table.live is not None, self._form(work)
        if isinstance(form, forms.Bayes):
            return drawn.on_chain(form, work.phase) if form.drawn else fused.stepping(form)
        if self.mode in ("eager", ROWWISE, BY_HAND) or (self.mode == CAPTURED and not self.again):
            return stacked_step(work.phase, work.together, masked)
        key = (id(work.phase.step), repr(work.together), masked, form is not None)
        if key not in self._cache:
            made = stacked_step if form is None else drawn.slopes
            step, kernels = made(work.phase, work.together, masked), self.mode not in (TRACED, CAPTURED)
            deep = kernels and not self.again and tensors_of(work.phase.step) >= DEEP
            self._cache[key] = Compiled(step, kernels=kernels, again=self.again, deep=deep)
        return self._cache[key]

    def _form(self, work: Work) -> forms.Bayes | IvonStep | None:
        """The form of a step that has kernels of its own within a graph."""
        if self.mode != "graph" or not self.fused:
            return None
        phase, tilted = work.phase, TILT in work.info.constants
        form = forms.bayes(phase) or forms.points(phase) or (None if tilted else forms.drawn_chain(phase))
        if form is not None and fused.available() and fused.fits(form, phase.batch):
            return form
        step = None if tilted else forms.drawn(phase)
        return step if step is not None and drawn.fits(step, work.together.size) else None

    def _replay(self, work: Work, state: Any) -> Any:
        shape = len(work.table.rows), work.table.rows.shape[-1]
        key = ("graph", id(work.phase.step), repr(work.together), work.table.live is None, shape)
        if key not in self._cache:
            with share(COMPILE):
                many, step, form = Graph.UNROLL if self.mode == "graph" else 1, self._step(work), self._form(work)
                if isinstance(form, IvonStep):
                    step = drawn.stepping(work.phase, work.together, step)
                elif form is None or not form.drawn:
                    step = one_by_one(step)
                if isinstance(form, IvonStep) or (form and form.drawn):  # noise is made where it is read
                    work = work._replace(noise=work.silence)
                self._cache[key] = Graph(step, work, state, many)
        return self._cache[key](work, state)


def tensors_of(step: Any) -> int:
    """How many tensors the weights of a step's network are; 0 for a step without one."""
    model = getattr(step, "model", None)
    return sum(len(layout.names) for layout in model.layouts.values()) if isinstance(model, Model) else 0


def _is_small(inputs: Any) -> bool:
    """Whether they are tensors, and few numbers."""
    leaves = tree_leaves(inputs)
    return all(isinstance(t, Tensor) for t in leaves) and sum(map(Tensor.numel, leaves)) <= SMALL


def _generator(device: torch.device) -> Tensor:
    """The state of PyTorch's generator on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def one_by_one(step: Callable[..., Any]) -> Callable[..., Any]:
    """Several steps, [steps, ...] of what each reads, by one after another."""

    def several(state: Any, xs: Tensor, ys: Tensor, flags: Any, noise: Tensor, at: Tensor, info: Info) -> Any:
        for s in range(len(xs)):
            state = step(state, xs[s], ys[s], flags[s], noise[s], at[s], info)
        return state

    return several


def _one_client(work: Work, state: Any) -> Any:
    """The steps of a chunk of one, without an axis of clients between them."""
    store, phase, info = work.store, work.phase, work.together.first(work.info)
    rows = work.table.rows[:, 0].to(store.x.device)
    live = None if work.table.live is None else work.table.live[:, 0]
    full = [True] * len(rows) if live is None else live.flatten(1).all(1).tolist()
    state, silence = mapped(lambda t: t[0], state), work.noise(0, 1)[0, 0]
    pieces, several = rows.flatten(0, 1).unbind(0), phase.batches
    for s, (at, whole) in enumerate(zip(torch.arange(len(rows), device=rows.device).unbind(0), full)):
        masks = [None] * several if whole or live is None else list(live[s].to(rows.device))
        pairs = [(taken(store.x, r), taken(store.y, r)) for r in pieces[s * several :][:several]]
        batches = tuple(Batch(x, y, mask, at) for (x, y), mask in zip(pairs, masks))
        tape = Tape(work.noise(s, 1)[0, 0] if len(silence) else silence)
        state = phase.step(state, batches[0] if several == 1 else batches, tape, info)
    return mapped(lambda t: t[None], state)
