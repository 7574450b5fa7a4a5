"""A run on a SuperLink until it is finished: started by `flwr run`, and started again when Flower has failed it.

Flower fails a run whose server died or stood still for a minute; started again into the same folder, the run goes on
from the last round that was closed. `flwr run` itself ends with status 0 whatever becomes of the run.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, printable
from fedbayes.runs.journal import LINES

DONE, UNREACHABLE, FAILED, STOPPED = 0, 69, 70, 75
COMPLETED, HALTED = "finished:completed", "finished:stopped"
SECONDS = 120.0  # in which a command of Flower's must answer

Call = Callable[[Sequence[str]], str]


class Unanswered(Exception):
    """A command of Flower's failed, or said nothing in time; the message is its last line."""


def flwr(arguments: Sequence[str]) -> str:
    """What a command of Flower's prints."""
    try:
        done = subprocess.run(["flwr", *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError as error:
        raise InputError('flwr is not installed here: pip install "fedbayes[flower]"') from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"flwr {arguments[0]} said nothing for {SECONDS:g} s") from error
    if done.returncode:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise Unanswered(printable(lines[-1])[:200] if lines else f"flwr {arguments[0]} failed")
    return done.stdout


@dataclass(frozen=True)
class Plan:
    """What is trained, and how failures are borne."""

    app: Path
    superlink: str
    output: str  # the run folder, from where the SuperLink was started
    settings: str = ""
    folder: Path | None = None  # the same folder from here, where it can be seen
    failures: int = 5  # in a row, without a round between them, after which it ends
    patience: float = 900.0  # seconds in which the SuperLink must answer
    pause: float = 5.0  # seconds between two looks


class Driver:
    """One run, driven to its end."""

    def __init__(self, plan: Plan, say: Callable[[str], None], call: Call = flwr) -> None:
        self.plan, self.say, self.call = plan, say, call

    def drive(self) -> int:
        """Train to the end; 0 where the run is complete, 69 no SuperLink, 70 it failed again and again, 75 stopped."""
        failures, rounds = 0, self._rounds()
        while True:
            try:
                key = self._begin()
                self.say(f"run {key} was started into {self.plan.output}")
                status = self._end_of(key)
            except Unanswered as error:
                self.say(f"the SuperLink did not answer for {self.plan.patience:g} s: {error}")
                return UNREACHABLE
            if status == COMPLETED:
                self.say(f"run {key} is complete")
                return DONE
            if status == HALTED:
                self.say(f"run {key} was stopped by an operator; start it again to go on")
                return STOPPED
            now = self._rounds()
            failures, rounds = (1 if now > rounds else failures + 1), now
            why = f"run {key} is {status} after {now} rounds: {self._why(key)}"
            if failures >= self.plan.failures:
                self.say(f"{why}; {failures} failures without a round between them are enough")
                return FAILED
            pause = min(60.0, self.plan.pause * 2 ** (failures - 1))
            self.say(f"{why}; it is started again in {pause:g} s")
            time.sleep(pause)

    def _begin(self) -> str:
        """The key of a new run."""
        plan = self.plan
        command = ["run", str(plan.app), plan.superlink, "--format", "json"]
        command += ["-c", f"output={json.dumps(plan.output)}"]
        command += ["-c", f"set={json.dumps(plan.settings)}"] if plan.settings else []
        return str(self._patiently(command)["run-id"])

    def _end_of(self, key: str) -> str:
        """How a run ended."""
        while True:
            listed = self._patiently(["list", self.plan.superlink, "--run-id", key, "--format", "json"])
            status = next((str(r["status"]) for r in listed["runs"] if str(r["run-id"]) == key), "not known")
            if status.startswith("finished") or status == "not known":  # a SuperLink without its database forgets
                return status
            time.sleep(self.plan.pause)

    def _why(self, key: str) -> str:
        """The line by which the server said why it ended, where there is one."""
        try:
            lines = self.call(["log", key, self.plan.superlink, "--show"]).splitlines()
        except Unanswered:
            lines = []
        said = [printable(line.removeprefix("error: ")) for line in lines if line.startswith("error: ")]
        return said[-1][:500] if said else f"`flwr log {key} {self.plan.superlink} --show` says more"

    def _patiently(self, command: Sequence[str]) -> Any:
        """What a command prints as JSON; asked again while the SuperLink does not answer."""
        end = time.monotonic() + self.plan.patience
        while True:
            try:
                printed = self.call(command)
                answer = json.loads(printed[printed.index("{") :])
                if answer.get("success", True):
                    return answer
                raise Unanswered(printable(str(answer.get("error-message", answer)))[:200])
            except (Unanswered, ValueError) as error:
                if time.monotonic() >= end:
                    raise Unanswered(str(error)) from error
                time.sleep(self.plan.pause)

    def _rounds(self) -> int:
        """Rounds in the journals of the run's folder, by which a failure after progress is told from one without."""
        folder = self.plan.folder
        if folder is None or not folder.is_dir():
            return 0
        return sum(path.read_bytes().count(b"\n") for path in [*folder.glob(LINES), *folder.glob(f"*/{LINES}")])
