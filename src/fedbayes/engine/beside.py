"""Compiling beside a run, in a process of its own: it leaves the program where the run then finds it, on disk.

A thread would not do, for the compiler holds Python's lock. What is sent is what compiling depends on and nothing of
the user's own code: operations by name, constants, shapes and settings. On a GPU it allocates none of the shapes.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fedbayes.engine.compiler import kernels
from fedbayes.engine.kept import INDUCTOR, keep_programs


class Waiting:
    """A process that loads the compiler while there is nothing to compile yet; `helpers`: that make kernels for it."""

    def __init__(self, helpers: int | None = None) -> None:
        keep_programs()
        words = [sys.executable, "-c", f"from {__name__} import serve; serve({os.getpid()})"]
        # Its packages are found where ours are. A session of its own: Ctrl-C is for the run, which then ends it.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if helpers is not None:
            env["TORCHINDUCTOR_COMPILE_THREADS"] = str(helpers)
        # No pipe: the compiler's own helpers would hold it open.
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            env=env,
            start_new_session=True,
        )

    def end(self) -> None:
        """Stop it: there was nothing for it."""
        self.process.kill()
        self.process.communicate()


class Beside:
    """A process that compiles and keeps the parts of a step, graphs and shapes. It ends with this one, or when told.

    There is none where a run before has kept them already, by a mark on disk. `begin` gives the process.
    """

    def __init__(
        self,
        parts: Sequence[tuple[GraphModule, Any]],
        options: dict[str, Any],
        begin: Callable[[], Waiting] = Waiting,
    ) -> None:
        keep_programs()
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: str | None = None
        try:
            letter = written(parts, options)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._unsent = f"the step can't be sent to another process: {error}"
            return
        self._mark = Path(os.environ[INDUCTOR]) / f"beside-{_digest(letter)}"
        if self._mark.exists():
            return
        try:
            begun = begin()
        except OSError as error:
            self._unsent = f"no process can be begun: {error.strerror}"
            return
        self._process, self._said = begun.process, begun.said
        # Waits until it begins to read, and until it ends.
        self._waiting = threading.Thread(target=self._process.communicate, args=(letter,), daemon=True)
        self._waiting.start()

    def wait(self) -> None:
        """Until it is done."""
        if self._process is not None:
            self._waiting.join()

    @property
    def done(self) -> bool:
        return self._process is None or not self._waiting.is_alive()

    @property
    def fault(self) -> str | None:
        """Why nothing was compiled; None where it was."""
        if self._process is None or self._process.returncode == 0:
            return self._unsent
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the compiler's process ended with code {self._process.returncode}"

    def mark(self) -> None:
        """What was kept has been found: the next run need not ask for it."""
        self._mark.touch()

    def end(self) -> None:
        """Stop compiling. What it has written is whole: files are renamed when they are complete."""
        if self._process is not None:
            self._process.kill()
            self._waiting.join()


def serve(parent: int) -> None:
    """Compile what comes in by standard input; the last line of standard error says what went wrong."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import torch._inductor.compile_fx  # what takes longest to load, before there is anything to read

    from fedbayes.engine.compiler import begin_helpers
    from fedbayes.model import stacked_convolution  # noqa: F401  its operations

    begin_helpers("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parts, options = read(sys.stdin.buffer)
        for part in parts:
            kernels(*part, options)
    except Exception as error:
        from fedbayes.engine.together import first_words

        print(f"\n{first_words(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # without waiting for the compiler's own helpers


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _Writer(pickle.Pickler):
    """Operations and nodes of a graph by their names."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Node):
            return "node", value.name
        if isinstance(value, OpOverload):
            return "operation", *value._schema.name.split("::"), value._overloadname
        return None


class _Reader(pickle.Unpickler):
    def persistent_load(self, written: Any) -> Any:
        kind, *names = written
        if kind == "node":
            return _Name(names[0])
        space, name, overload = names
        return getattr(getattr(getattr(torch.ops, space), name), overload)


@dataclass(frozen=True)
class _Name:
    """A node, in its place."""

    name: str


def written(parts: Sequence[tuple[GraphModule, Any]], options: dict[str, Any]) -> bytes:
    """Graphs and shapes, how they are compiled, and the settings of this process, for another one."""
    file = io.BytesIO()
    rows = [(_rows(graph), _constants(graph), shapes) for graph, shapes in parts]
    _Writer(file).dump((rows, options, _settings()))
    return file.getvalue()


def _digest(letter: bytes) -> str:
    """What a program is marked by: all that it is made of, PyTorch, and the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return hashlib.blake2b(letter + f"{torch.__version__} {gpu}".encode(), digest_size=16).hexdigest()


def read(file: IO[bytes]) -> tuple[list[tuple[GraphModule, Any]], dict[str, Any]]:
    """What was written, with its settings in force."""
    parts, options, settings = _Reader(file).load()
    _set(settings)
    return [(GraphModule(constants, _graph(rows)), shapes) for rows, constants, shapes in parts], options


def _rows(module: GraphModule) -> list[tuple[Any, ...]]:
    return [(node.op, node.name, node.target, node.args, node.kwargs) for node in module.graph.nodes]


def _graph(rows: list[tuple[Any, ...]]) -> Graph:
    graph = Graph()
    nodes: dict[str, Node] = {}
    for op, name, target, args, kwargs in rows:
        given = map_aggregate((args, kwargs), lambda a: nodes[a.name] if isinstance(a, Node | _Name) else a)
        nodes[name] = graph.create_node(op, target, *given, name=name)
    return graph


def _constants(module: GraphModule) -> dict[str, Any]:
    return {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}


def plain(module: GraphModule) -> GraphModule:
    """The module as it is on the other side: its operations and constants alone, by which programs are kept."""
    return GraphModule(_constants(module), _graph(_rows(module)))


def _settings() -> tuple[Any, ...]:
    from torch._inductor import config

    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        config.save_config_portable(),
    )


def _set(settings: tuple[Any, ...]) -> None:
    from torch._inductor import config

    precision, tf32, mkldnn, threads, deterministic, warn, values = settings
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.mkldnn.enabled = mkldnn
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn)
    config.load_config(values)
