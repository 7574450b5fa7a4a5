"""A client of the user's own in the place of a method's: built with the method's options, tried on a batch, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from fedbayes.clients.client import Batch, Client, Info, Upload
from fedbayes.clients.schedules import scheduled
from fedbayes.errors import InputError, one_line, unknown
from fedbayes.federation.program import Program
from fedbayes.methods.method import Method, Setting
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.options import Check, option, options_of, record, subtable

builder = Check("a function (model, ...) that gives a Client, in a file package.module:name", callable)


@record
class OwnClient(Method):
    """A method whose client may be the user's own.

    `client(model, ...)` gives a `fedbayes.clients.client.Client` that uploads what the method's own would: a `Point` or
    a `Gaussian` for each part. It is given those options of the method that are named in its signature and fixed for a
    run (`epochs`, `batch`, ...), and `client_options`. What may differ from round to round, such as `lr`, it reads from
    `info.options`.
    """

    work: ClassVar[tuple[str, ...]] = ("epochs", "batch", "optimiser", "momentum")  # what only a client reads
    client: Callable[..., Client] | None = option(
        "builder of the clients' work; None: the method's own", builder, default=None, importable=True, rare=True
    )
    client_options: Mapping[str, Any] = option("of that builder", subtable, factory=dict, rare=True)

    def check(self) -> None:
        super().check()
        if self.client_options and self.client is None:
            raise InputError("client_options are of a client of your own: set client too, or leave them out")

    def with_client(self, program: Program, setting: Setting) -> Program:
        """The program with the user's client in the place of its own."""
        if self.client is None:
            return program
        client = self._built(self.client, program.model)
        within = getattr(self, "lr_within", "constant")
        if within != "constant":
            if len(client.phases) > 1 or client.phases[0].batches > 1:
                raise InputError(f'lr_within = "{within}" needs a client of one phase with one batch; leave it out')
            client = scheduled(client, within)
        program = program._replace(client=client)
        _check_upload(_trial(program, setting), program)
        return program

    def _built(self, build: Callable[..., Client], model: Model) -> Client:
        parameters = inspect.signature(build).parameters.values()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)][1:]
        known = options_of(self)
        arguments = dict(self.client_options)
        for p in named:
            if p.name in known and p.name not in arguments:
                if known[p.name].metadata["kind"] != "program":
                    raise InputError(
                        f"client: {p.name} may change from round to round; read info.options[{p.name!r}] in its steps"
                    )
                arguments[p.name] = getattr(self, p.name)
            if p.default is p.empty and p.name not in arguments:
                raise InputError(f"client needs {p.name!r}; set it in client_options, such as {p.name} = 0.5")
        names = [p.name for p in named]
        for name in arguments:
            if name not in names and not open_ended:
                raise unknown("option of client", name, names)
        usual = type(self)()
        for name in self.work:
            if name not in arguments and getattr(self, name) != getattr(usual, name):
                raise InputError(f"{name}: the client does not take it; leave it out, or name it in its signature")
        client = build(model, **arguments)
        if not isinstance(client, Client) or not client.phases:
            raise InputError(f"client: the builder gave a {type(client).__name__}; it must give a Client with phases")
        return client


def _trial(program: Program, setting: Setting) -> tuple[Any, Upload]:
    """What a client keeps at first, and its upload after one step of each phase on copies of one row."""
    client = program.client
    first = program.initial[program.prediction.part].mean

    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=first.dtype, device=first.device)

    whole = torch.tensor(1, device=first.device)
    options = {name: tensor(v) for name, v in program.options(0).items()}
    batches = tuple(whole for _ in client.phases)
    info = Info(program.initial, options, whole * 0, whole * client.phases[0].batch, batches, program.known)
    try:
        own = client.first(program.initial)
        state = client.start(own, info)
        for phase in client.phases:
            if phase.begin is not None:
                state = phase.begin(state, info)
            if setting.y is not None:
                x, y = (t[:1].expand(phase.batch, *t.shape[1:]) for t in (setting.x, setting.y))
                b = Batch(x, y, None, whole * 0)
                state = phase.step(state, b if phase.batches == 1 else (b,) * phase.batches, Tape(), info)
        upload = client.finish(state, info)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"client: it failed on a first batch ({one_line(error)}); mend it there") from error
    if not isinstance(upload, Upload):
        raise InputError(f"client: finish gave a {type(upload).__name__}; it must give an Upload(parts, own, metrics)")
    return own, upload


def _check_upload(trial: tuple[Any, Upload], program: Program) -> None:
    """Refuse an upload that the method's rules can't pool, and a state that does not come back as it was."""
    own, upload = trial
    for part, wanted in program.pooling.uploaded(program.initial).items():
        if part not in program.pooling.rules:
            continue
        q = upload.parts.get(part)
        kind = f"a {type(wanted).__name__} over {wanted.mean.shape[-1]} weights"
        if q is None:
            raise InputError(f"client: its upload has no part {part!r}; the method pools {kind}")
        if type(q) is not type(wanted) or q.mean.shape != wanted.mean.shape:
            sent = f"a {type(q).__name__} over {q.mean.shape[-1]} weights"
            raise InputError(f"client: it uploads {sent} as part {part!r}; the method pools {kind}")
    if tree_structure(own) != tree_structure(upload.own):
        raise InputError("client: what it keeps (own) must have the same names as what `first` gives a new client")
