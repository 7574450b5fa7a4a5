"""Run the command line on damaged files inside watched processes, and judge what came back.

A case is fine when it ends with exit code 0, or with exit code 2 and exactly one line that begins with `error:`.
"""

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 120  # after which a case hangs, on a machine however busy
TICK = 2.0  # seconds between two looks at the clock
SPARE = 3 << 30  # bytes that a case may take beside what the process has
FRESH = multiprocessing.get_context("spawn")  # no fork: the tests around it may hold a GPU
FINE = ("done", "refused", "stopped")


class Verdict(NamedTuple):
    """What became of a case: one of FINE, or a failure; and the words that tell it from others."""

    kind: str
    about: str = ""

    @property
    def fine(self) -> bool:
        return self.kind in FINE


Case = Callable[[int, Path], Verdict]


class Reply(NamedTuple):
    """What a command gave: exit code, both streams, and the traceback where one got out."""

    code: int
    out: str
    err: str
    trace: str = ""


def command(*arguments: object, patience: float = SECONDS, enough: Callable[[], bool] = lambda: False) -> Reply:
    """The command line in this process; after `patience` seconds, or when it is `enough`, interrupted as by Ctrl-C."""
    import typer.main

    import fedbayes.cli

    if not hasattr(fedbayes.cli.app, "main"):  # the commands are put together once, not at each call
        fedbayes.cli.app = typer.main.get_command(fedbayes.cli.app)
    out, err, trace, code = io.StringIO(), io.StringIO(), "", 0
    end = time.monotonic() + patience

    def interrupt(number: int, frame: Any) -> None:
        if time.monotonic() > end or enough():
            raise KeyboardInterrupt

    before = sys.argv, signal.signal(signal.SIGALRM, interrupt)
    sys.argv = ["fedbayes", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
            fedbayes.cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        code, trace = 1, where(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.argv = before[0]
        signal.signal(signal.SIGALRM, before[1])
    return Reply(code, out.getvalue(), err.getvalue(), trace)


def called(work: Callable[[], Any]) -> tuple[Any, Verdict | None]:
    """What a function of the library gives, or the verdict on its error: an InputError is refused in one line."""
    from fedbayes.errors import InputError, printable

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(), None
    except InputError as error:
        return None, _one_line(f"error: {printable(str(error))}")
    except BaseException as error:
        return None, Verdict("traceback", where(error))


def judge(reply: Reply) -> Verdict:
    """The verdict on a command by its exit code and its words."""
    if "KeyboardInterrupt" in reply.trace:
        return Verdict("hang", reply.trace)
    if reply.trace:
        return Verdict("traceback", reply.trace)
    if reply.code == 0:
        return Verdict("done")
    if reply.code == 130:
        return Verdict("stopped")
    if reply.code != 2:
        return Verdict("code", f"{reply.code}: {reply.err.strip()[-300:]}")
    return _one_line(reply.err)


def _one_line(text: str) -> Verdict:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("warning: ")]
    if len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) < 20:
        return Verdict("lines", text.strip()[:300])
    if len(lines[0]) > 2000 or not lines[0].isprintable():
        return Verdict("lines", f"{len(lines[0])} characters: {lines[0][:200]!r}")
    return Verdict("refused", lines[0])


def where(error: BaseException) -> str:
    """An error with the last places of ours in its traceback: the same for each case of one fault."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fedbayes" in f.filename]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__} at {' < '.join(reversed(places))}: {str(error)[:160]!r}"


def limit_memory() -> None:
    """Let the process take so many bytes more, so that a declared size of TiB is met as an error."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _work(case: Case, post: Any, place: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _begin(place)
    limit_memory()
    post.send(None)
    while (seed := post.recv()) is not None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            verdict = case(seed, folder)
        except BaseException as error:
            verdict = Verdict("fuzzer", where(error))
        finally:
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)
        post.send((seed, verdict))


class Worker:
    """A process that takes seeds one after the other; one that hangs is killed and started anew."""

    def __init__(self, case: Case, place: str) -> None:
        self.case, self.place = case, place
        self._start()

    def _start(self) -> None:
        self.post, theirs = multiprocessing.Pipe()
        self.process = FRESH.Process(target=_work, args=(self.case, theirs, self.place), daemon=True)
        self.process.start()
        theirs.close()
        self.seed: int | None = None
        self.begun = False

    def give(self, seed: int) -> None:
        if not self.begun:  # its imports are no part of a case
            self.post.recv()
            self.begun = True
        self.seed, self.since = seed, time.monotonic()
        self.post.send(seed)

    def take(self) -> tuple[int, Verdict]:
        """What came back; call when there is something to read."""
        try:
            answer: tuple[int, Verdict] = self.post.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self._anew(Verdict("died", f"exit code {self.process.exitcode}"))
        self.seed = None
        return answer

    def late(self) -> tuple[int, Verdict] | None:
        """The verdict on a case that takes too long."""
        if self.seed is None or time.monotonic() - self.since < SECONDS:
            return None
        self.process.kill()
        self.process.join()
        return self._anew(Verdict("hang", f"killed after {SECONDS} s"))

    def _anew(self, verdict: Verdict) -> tuple[int, Verdict]:
        seed = self.seed
        assert seed is not None
        self.post.close()
        self._start()
        return seed, verdict

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.post.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def prepared(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that all cases share, made by the first who asks."""
    place = Path(tempfile.gettempdir()) / name
    if not place.exists():
        work = Path(tempfile.mkdtemp(prefix="fuzz-"))
        make(work)
        with contextlib.suppress(OSError):  # another was faster
            work.rename(place)
    return place


def verdicts(
    case: Case, seeds: Iterable[int], workers: int = 1, prepare: Callable[[], object] | None = None
) -> Iterator[tuple[int, Verdict]]:
    """Each seed's verdict, as they come; `prepare` makes what all cases share, before the clock runs."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        if prepare is not None:
            first = FRESH.Process(target=_prepare, args=(prepare, place))
            first.start()
            first.join()
            assert first.exitcode == 0, "the cases can't be prepared"
        yield from _verdicts(case, seeds, [Worker(case, place) for _ in range(workers)])


def _begin(place: str) -> None:
    """On the CPU, with what torch imports late: an interrupt there would leave half a module behind."""
    tempfile.tempdir = place
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.empty(2, device="meta").normal_()
    __import__("sympy.printing")


def _prepare(prepare: Callable[[], object], place: str) -> None:
    _begin(place)
    prepare()


def _verdicts(case: Case, seeds: Iterable[int], pool: list[Worker]) -> Iterator[tuple[int, Verdict]]:
    waiting = iter(seeds)
    try:
        while True:
            for worker in pool:
                if worker.seed is None and (seed := next(waiting, None)) is not None:
                    worker.give(seed)
            busy = {worker.post: worker for worker in pool if worker.seed is not None}
            if not busy:
                return
            for post in wait(list(busy), timeout=1):
                yield busy[post].take()  # type: ignore[index]
            for worker in pool:
                if late := worker.late():
                    yield late
    finally:
        for worker in pool:
            worker.end()
