"""A watchdog for Flower's long-running programs: it starts them again when they end, hang or go deaf, and says why."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from logging.handlers import RotatingFileHandler
from math import inf
from pathlib import Path

from fedbayes.errors import InputError, one_line, printable

# What a service manager sees, as of sysexits.h.
STOPPED, UNREACHABLE, FAILED, TURNED_AWAY, CLOCK = 0, 69, 70, 77, 78
MENDED = (TURNED_AWAY, CLOCK)  # by a person; a node that was cut off is turned away for a minute all the same
AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower allows a node's clock to differ from the SuperLink's
LOG_BYTES, LOG_FILES = 10 << 20, 5
LINES = 40  # of a program's last output, by which its end is explained
USAGE = 2  # the status of a program whose arguments are wrong: to start it again is no help
REFUSED = re.compile(r"Failed to activate SuperNode")
FAULT = re.compile(r"error|exception|fail|refused|denied|in use", re.IGNORECASE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class Server:
    """An HTTPS server, known by an authority's certificate."""

    address: str
    authority: Path

    def date(self, path: str = "/health", *, fine: bool = False) -> float | None:
        """The server's clock, in seconds since 1970; None where it does not answer, or, if asked for, is not fine."""
        host, _, port = self.address.rpartition(":")
        try:
            context = ssl.create_default_context(cafile=str(self.authority))
            connection = HTTPSConnection(host.strip("[]"), int(port), timeout=5, context=context)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                date = answer.getheader("date")
                return (
                    None if date is None or (fine and answer.status != 200) else parsedate_to_datetime(date).timestamp()
                )
            finally:
                connection.close()
        except (OSError, ValueError, HTTPException):
            return None


@dataclass(frozen=True)
class Watch:
    """How a program is watched: where it says that it is well, what it connects to, how long failures are borne."""

    health: Server | None = None
    superlink: Server | None = None
    patience: float = 3600.0  # seconds of failures in a row after which the watchdog ends too
    short: float = 150.0  # the same where a person must mend something: a key, a clock
    steady: float = 60.0  # seconds after which a program counts as started
    every: float = 5.0  # seconds between two looks at its health
    strikes: int = 6  # looks in a row without an answer after which it is ended
    pauses: tuple[float, ...] = (2.0, 5.0, 10.0, 15.0)  # seconds before it is started again, the last for ever
    log: Path | None = None


class Watchdog:
    """One program, kept running until the watchdog is told to stop."""

    def __init__(self, command: Sequence[str], watch: Watch, say: Callable[[str], None] | None = None) -> None:
        self.command, self.watch = list(command), watch
        self.name = Path(self.command[0]).name
        self.asked = threading.Event()
        self.lines: deque[str] = deque(maxlen=LINES)
        self.child: subprocess.Popen[str] | None = None
        self.output = _log_of(watch.log)
        self.say = say or (lambda text: self._write(f"watchdog: {text}"))

    def run(self) -> int:
        """Keep the program running; the exit status when it is told to stop, or when it has failed for too long."""
        failing, pauses = None, iter(self.watch.pauses)
        while True:
            began = time.monotonic()
            status, hung = self._once()
            now = time.monotonic()
            if self.asked.is_set():
                self.say(f"{self.name} was told to stop")
                return STOPPED
            if status == USAGE:
                self.say(f"{self.name} does not start with these arguments")
                return USAGE
            if now - began >= self.watch.steady:
                failing, pauses = None, iter(self.watch.pauses)
            failing = now if failing is None else failing
            code, why = (FAILED, "it did not answer and was ended") if hung else self.reason(status)
            if now - failing >= min(self.watch.patience, self.watch.short if code in MENDED else inf):
                self.say(
                    f"{self.name} has failed for {now - failing:.0f} s, the last time because {why}; exit status {code}"
                )
                return code
            pause = next(pauses, self.watch.pauses[-1])
            self.say(f"{self.name} ended with status {status}: {why}; it is started again in {pause:g} s")
            if self.asked.wait(pause):
                return STOPPED

    def stop(self, *_: object) -> None:
        """Let the program end, and the watchdog with it."""
        self.asked.set()
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)  # one that is stopped does not hear
            self.child.terminate()

    def reason(self, status: int) -> tuple[int, str]:
        """Why the program ended, as an exit status and in words."""
        link = self.watch.superlink
        if link is not None:
            there = link.date()
            if there is None:
                return UNREACHABLE, f"the SuperLink at {link.address} does not answer"
            ahead = time.time() - there
            if not -BEHIND < ahead < AHEAD:
                word = "ahead of" if ahead > 0 else "behind"
                return CLOCK, (
                    f"this machine's clock is {abs(ahead):.0f} s {word} the SuperLink's, and Flower allows "
                    f"{AHEAD if ahead > 0 else BEHIND:.0f}; set the clock (timedatectl set-ntp true)"
                )
            if not status:  # as Flower ends where a SuperLink does not know the node's key
                return TURNED_AWAY, "the SuperLink turned it away: its key is not registered, or was revoked"
            if any(map(REFUSED.search, self.lines)):
                return TURNED_AWAY, "the SuperLink turned it away: a node with its key was online until a minute ago"
        said = [printable(COLOUR.sub("", line)) for line in reversed(self.lines) if line.strip()]
        last = next(filter(FAULT.search, said), said[0] if said else "nothing")
        return FAILED, f"the last that it said was {last[:200]!r}"

    def _once(self) -> tuple[int, bool]:
        """The program from its start to its end: its status, and whether it hung."""
        self.lines.clear()
        self.child = child = subprocess.Popen(
            _inside(self.command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_ends_with_us if PRCTL else None,
        )
        reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        reader.start()
        if self.asked.is_set():  # told to stop while it was being started
            self.stop()
        hung = self._wait(child)
        reader.join(timeout=2)
        return child.returncode, hung

    def _wait(self, child: subprocess.Popen[str]) -> bool:
        """Until the program has ended; True where it had to be ended since it no longer answered."""
        well, strikes, health = False, 0, self.watch.health
        while True:
            try:
                child.wait(self.watch.every)
                return False
            except subprocess.TimeoutExpired:
                if health is None or self.asked.is_set():
                    continue
            fine = health.date(fine=True) is not None
            well, strikes = well or fine, 0 if fine else strikes + 1
            if well and strikes >= self.watch.strikes:
                child.kill()
                child.wait()
                return True

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.lines.append(line.rstrip("\n"))
            self._write(line.rstrip("\n"))

    def _write(self, line: str) -> None:
        self.output.info(line)


def watched(command: Sequence[str], watch: Watch) -> int:
    """Keep a program running until this process is told to stop; the exit status."""
    if not command:
        raise InputError("give the program to watch: fedbayes flower watch flower-supernode ...")
    dog = Watchdog(command, watch)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, dog.stop)
    try:
        return dog.run()
    except FileNotFoundError as error:
        raise InputError(f"{command[0]} can't be started ({one_line(error)}); is it installed here?") from error


def _inside(command: Sequence[str]) -> list[str]:
    """A SuperNode is attended from inside, where its threads can be seen; others are run as they are."""
    if Path(command[0]).name == "flower-supernode":
        return [sys.executable, "-m", "fedbayes.flower.attended", "flower-supernode", *command[1:]]
    return list(command)


def _ends_with_us() -> None:
    """Have the kernel tell a new process when the watchdog is gone, however it went."""
    assert PRCTL is not None
    PRCTL(1, signal.SIGTERM)


def _log_of(path: Path | None) -> logging.Logger:
    """Where a program's output goes: to the terminal, and to a file that is begun anew when it is full."""
    logging.raiseExceptions = False  # a full disk stops the log, not the program
    log = logging.Logger(f"watchdog-{os.getpid()}")
    log.addHandler(logging.StreamHandler(sys.stdout))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        log.addHandler(RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8"))
    return log
