"""A federation ready to train: everything is checked and bound before the first round."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedbayes.data import Clients, Dataset, Standardise, from_clients
from fedbayes.data.augment import AUGMENTATIONS
from fedbayes.engine.choice import choose
from fedbayes.engine.loop import Store
from fedbayes.engine.stacked import Stacked
from fedbayes.errors import InputError, unknown
from fedbayes.federation.own_stages import with_stages
from fedbayes.federation.program import FederationState, Order, Program, Stage
from fedbayes.federation.round import at_home, begin, cohort_of, cohort_size, gathering, open_round, restating
from fedbayes.methods import METHODS, Method, Setting, method_named
from fedbayes.model.model import LIKELIHOODS, Augment, Likelihood, in_precision_of
from fedbayes.noise import address
from fedbayes.options import options_of
from fedbayes.posterior.values import Parts, Posterior, check, map_tensors
from fedbayes.training.server import server_engine
from fedbayes.training.settings import Judging, Training

P = ParamSpec("P")
R = TypeVar("R")


class Best(NamedTuple):
    """The best validated posterior so far, by the score that is monitored."""

    score: float
    round: int
    broadcast: Parts


class Progress(NamedTuple):
    """All that a run carries from round to round, beside its clients' own state."""

    state: FederationState
    best: Best | None = None
    stopped: bool = False
    pretrained: Mapping[str, Any] = {}  # what to report of training before the first round


# Training at the server before the first round: the parts to begin with, and what to report of it.
Before = Callable[[], tuple[Parts, Mapping[str, Any]]]


@dataclass(frozen=True)
class Task:
    """A federation ready to train: a program, its clients' data on the device, and how many rounds of what."""

    program: Program
    clients: Clients
    validation: Tensor  # rows held out for early stopping, pooled over clients; empty without
    engine: Any
    choice: str  # which engine runs, and why
    precision: str
    rounds: int
    cohort: int
    seed: int
    dropout: float
    patience: int | None
    evaluate_every: int
    device: torch.device
    personal_every: int = 0  # rounds between evaluations of the personal models; 0: none
    personal: Any = None  # the engine that makes them
    gather: Any = None  # the engine that gathers what they need of one another; None: nothing
    restate: Any = None  # the engine that takes BatchNorm's statistics of the pooled network; None: they are averaged
    target_loss: float | None = None  # stop when the training loss is as low
    target_accuracy: float | None = None  # stop when the accuracy on the test set is as high
    monitor: str = "nll"  # the validation score by which the best round is chosen
    before: Before | None = None
    elsewhere: Callable[[Any], Iterator[tuple[int, Any]]] | None = None  # has personal models scored on other machines
    server: Any = None  # the engine that distils at the server
    method: str = ""  # its name
    validation_sizes: Tensor | None = None  # rows of each client among those held out; None: there are none

    def begin(self) -> Progress:
        """The progress before the first round, after the server's pre-training where there is one."""
        if self.before is None:
            return Progress(begin(self.program))
        parts, figures = self.before()
        start = self.program._replace(initial=_initial(self.program, parts, self.device))
        return Progress(begin(start), pretrained=figures)

    def take_notes(self) -> list[str]:
        """What its engines have to say since they were last asked."""
        engines = [engine for engine in (self.engine, self.server, self.personal) if engine is not None]
        return [note for engine in engines for note in engine.take_notes()]

    def widths(self) -> dict[str, tuple[int, int, int]]:
        """How many clients its stacked engines run at once by now: a run that is resumed goes on with it."""
        return {name: one.widths for name, one in self._stacked().items()}

    def go_on_with(self, widths: Mapping[str, Sequence[int]]) -> None:
        """Run as many clients at once as a run before, whatever memory is free now."""
        for name, one in self._stacked().items():
            if name in widths:
                first, second, third = widths[name]
                one.widths = (first, second, third)

    def _stacked(self) -> dict[str, Stacked]:
        names = ("engine", "personal", "gather", "restate", "server")
        return {name: one for name in names if isinstance(one := getattr(self, name), Stacked)}

    def done(self, progress: Progress) -> bool:
        return progress.stopped or progress.state.round >= self.rounds

    def members_of(self, number: int) -> tuple[int, ...]:
        """Who will take part in a round."""
        asked = cohort_of(number, clients=len(self.clients), cohort=self.cohort, seed=self.seed, dropout=self.dropout)
        return asked[0]

    def open(self, progress: Progress) -> Order:
        """The order of the next round."""
        return open_round(
            self.program,
            progress.state,
            clients=len(self.clients),
            cohort=self.cohort,
            seed=self.seed,
            dropout=self.dropout,
        )


def naming_strays(train: Callable[P, R]) -> Callable[P, R]:
    """The function, which answers an argument that it has not by saying where it belongs."""
    known = list(inspect.signature(train).parameters)

    @functools.wraps(train)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in known:
                method = options.get("method", inspect.signature(train).parameters["method"].default)
                raise _stray(name, method if isinstance(method, str) else getattr(method, "name", ""), known)
        return train(*args, **options)

    return checked


def _stray(name: str, method: str, known: list[str]) -> InputError:
    if method in METHODS and name in options_of(METHODS[method]):
        return InputError(
            f"{name} is an option of the method: give it there, method=fedbayes.methods.{method}({name}=...)"
        )
    return unknown("argument", name, known)


@naming_strays
def prepare(
    network: nn.Module,
    clients: Clients | list[Any],
    *,
    method: str | Method = "feduab",
    rounds: int = 50,
    cohort: int | float | None = None,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    compile: str = "auto",
    at_once: int | None = None,
    precision: str = "float32",
    likelihood: Likelihood | None = None,
    frozen: tuple[str, ...] = (),
    augment: str | None = None,
    dropout: float = 0.0,
    validation: float = 0.0,
    patience: int | None = None,
    evaluate_every: int = 1,
    personal_every: int = 0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    monitor: str = "nll",
    stages: Sequence[Stage] = (),
    server_data: Any = None,
    init: Mapping[str, Posterior] | None = None,
) -> Task:
    """Check everything that can be checked before the first round, and bind the method to the network and the data.

    Arguments as in `fit`.
    """
    given = locals()
    for group in (Training, Judging):
        group(**{name: given[name] for name in options_of(group)})
    if not isinstance(clients, Clients):
        clients = from_clients(clients)
    if isinstance(method, str):
        method = method_named(method)
    if patience is not None and not validation:
        raise InputError("patience: early stopping needs a validation share too, such as validation=0.1")
    if monitor == "accuracy" and clients.data.kind == "real":
        raise InputError(f"monitor: {clients.data.name} is a regression, it has no accuracy; use nll")
    size = cohort_size(cohort, len(clients))
    held, sizes = torch.zeros(0, dtype=torch.int64), None
    if validation:
        clients, rows = clients.holdout(validation, seed)
        held, sizes = torch.cat(rows), torch.tensor([len(own) for own in rows])
        if not len(held):
            raise InputError(f"validation: a share of {validation} leaves no client a row to hold out; raise it")
    where = _device(device)
    data = clients.data
    scale = data.target_scale
    setting = Setting(
        copy.deepcopy(network).to(where),
        likelihood or LIKELIHOODS[data.kind](),
        data.x[:1].to(where),
        frozen,
        data.prepare.on(where) if isinstance(data.prepare, Standardise) else data.prepare,
        None if scale is None else (scale.mean, scale.std),
        precision == "bf16",
        _augmentation(augment, data),
        seed,
        rounds,
        data.y[:1].to(where),
        int(clients.sizes.max()),
        size,
    )
    _try_network(setting, clients)
    program = with_stages(method.build(setting), stages)
    if init is not None:
        program = program._replace(initial=_initial(program, init, where))
    store = Store(*_on_device(data, where), clients.train_rows)
    if program.server.client is not None and program.server.targets is None:
        server_data = clients.server if server_data is None else server_data
        if not len(server_data):
            raise InputError("server_data: this method trains at the server and needs rows there; there are none")
        store = store._replace(server=server_data)
    typical = int(clients.sizes.max())
    made, line = choose(
        program,
        store,
        seed=seed,
        engine=engine,
        compile=compile,
        chunk=at_once,
        rounds=rounds,
        size=typical,
        cohorts=lambda number: cohort_of(number, clients=len(clients), cohort=size, seed=seed, dropout=dropout)[0],
    )
    if not program.prediction.whole and validation:
        raise InputError(f"validation: {method.name} has no global model to validate; set validation=0")
    task = Task(
        program,
        clients,
        held,
        made,
        line,
        precision,
        rounds,
        size,
        seed,
        dropout,
        patience,
        evaluate_every,
        where,
        personal_every,
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        monitor=monitor,
        server=None if program.server.targets is None else server_engine(program, made, clients, server_data, seed),
        method=method.name,
        validation_sizes=sizes,
    )
    return with_program(task, program)


def with_program(task: Task, program: Program) -> Task:
    """The task with engines that make the personal models of a program; what trains is not changed."""
    program = program._replace(personal=program.personal._replace(client=program.tuned))
    asked, again, made = gathering(program), restating(program), task.engine
    return replace(
        task,
        program=program,
        personal=made.beside(at_home(program), address(task.seed, "personal")),
        gather=None if asked is None else made.beside(asked, address(task.seed, "gather")),
        restate=None if again is None else made.beside(again, address(task.seed, "statistics"), often=True),
    )


def _augmentation(name: str | None, data: Dataset) -> Augment | None:
    if name is None:
        return None
    if len(data.shape) != 3:
        raise InputError(f"augment: {name} is for images [C, H, W]; {data.name} has inputs {list(data.shape)}")
    return AUGMENTATIONS[name]


_PLACED: WeakKeyDictionary[Dataset, dict[torch.device, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def _on_device(data: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    """Training inputs and targets on a device, held there once for all runs on the same data."""
    placed = _PLACED.setdefault(data, {})
    if device not in placed:
        placed[device] = data.x.to(device), data.y.to(device)
    return placed[device]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device {name!r} is not one that PyTorch knows; use cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return device


def _try_network(setting: Setting, clients: Clients) -> None:
    """One batch through the network, so that a wrong shape is a clear message and not a failure in round 1."""
    data = clients.data
    assert setting.prepare is not None
    x = in_precision_of(setting.network, setting.prepare(setting.x)).expand(2, *setting.x.shape[1:])
    modes = {layer: layer.training for layer in setting.network.modules()}
    try:
        with torch.no_grad():
            output = setting.network.eval()(x)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"the network can't take inputs of shape {list(data.shape)} ({x.dtype}): {first}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    needed = data.classes * setting.likelihood.width
    if not isinstance(output, Tensor) or tuple(output.shape) != (2, needed):
        got = list(output.shape)[1:] if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"the network gives {got} for each input; {data.name} ({data.kind}) needs [{needed}]")


def _initial(program: Program, init: Mapping[str, Posterior], device: torch.device) -> Parts:
    parts = dict(program.initial)
    for part, q in init.items():
        if part not in parts:
            raise unknown("part of init", part, parts)
        ours = parts[part]
        if type(q) is not type(ours) or q.mean.shape != ours.mean.shape:
            raise InputError(
                f"init: part {part!r} must be a {type(ours).__name__} over {ours.mean.shape[-1]} weights, "
                f"not a {type(q).__name__} over {q.mean.shape[-1]}; is it of another network?"
            )
        if q.layout is not None and ours.layout is not None and q.layout.fingerprint != ours.layout.fingerprint:
            raise InputError(f"init: part {part!r} was made for another network (layouts differ)")
        check(q, f"init: part {part!r}")
        parts[part] = map_tensors(q, lambda t: t.to(device))
    return parts
