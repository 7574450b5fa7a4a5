"""A Flower program in this process, which ends when a part of it has: Flower's SuperNode would live on, deaf.

A SuperNode whose heartbeat or main loop has failed (its SuperLink stood still, or began anew) keeps its other threads:
it runs, and takes part in nothing. Here whatever fails ends the process, with a status that says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib.metadata import entry_points

from fedbayes.errors import one_line

FAILED = 70  # the exit status of a program of which a part has failed
GRACE = 15.0  # seconds to say good-bye to the SuperLink, so that a successor is not turned away


def attend(program: str, arguments: list[str]) -> int:
    """Run a console program to its end; its exit status."""
    failures: list[str] = []

    def fail(what: threading.ExceptHookArgs) -> None:
        name = what.thread.name if what.thread else "a thread"
        failures.append(f"{name} has failed: {one_line(what.exc_value) if what.exc_value else what.exc_type.__name__}")
        print(f"{program}: {failures[-1]}", file=sys.stderr, flush=True)
        _end_soon()

    threading.excepthook = fail
    sys.argv = [program, *arguments]
    (entry,) = entry_points(group="console_scripts", name=program)
    try:
        status = entry.load()()
    except SystemExit as end:
        status = end.code
    else:
        if program == "flower-supernode" and not failures:  # which never returns but after an error
            failures.append("its main loop has ended")
    return FAILED if failures else status if isinstance(status, int) else int(status is not None)


def _end_soon() -> None:
    """Ask this process to end as an operator would, and see to it."""

    def insist() -> None:
        time.sleep(GRACE)
        os._exit(FAILED)

    threading.Thread(target=insist, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    ended = attend(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # threads that Flower leaves behind do not keep the process
