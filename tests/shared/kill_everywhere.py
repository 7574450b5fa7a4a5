"""Run an experiment again and again, killed at its steps on disk in turn (each, or every n-th), and resumed.

It prints the outcomes in JSON. A program of its own, since a killed process takes everything with it; it forks, so
that torch is loaded once.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from run_content import content, same

from fedbayes.experiments.experiment import read
from fedbayes.runs.folder import resume, run

CALLS = ("fsync", "replace", "unlink")


def die_at(number: int) -> None:
    """Die by SIGKILL at the n-th call that touches the disk; a file that is being written loses its last bytes."""
    seen = [0]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments, **options):
            seen[0] += 1
            if seen[0] == number:
                if name == "fsync":
                    handle = arguments[0]
                    os.ftruncate(handle, max(0, os.fstat(handle).st_size - 7))
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def in_child(work) -> int:
    """The signal or exit code of a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(config: str, home: str, every: str = "1") -> None:
    experiment, whole, cut = read(config), Path(home) / "whole", Path(home) / "cut"
    run(experiment, whole)  # here, not in a child: what is loaded late is then loaded once
    expected = content(whole)
    outcomes = []
    for number in range(1, 1000, int(every)):

        def killed(number=number):
            die_at(number)
            run(experiment, cut)

        code = in_child(killed)
        if code == 0:  # it has fewer steps on disk than that: every moment has been tried
            break
        begun = (cut / "config.toml").is_file()
        again = in_child(lambda begun=begun: resume(cut) if begun else run(experiment, cut))
        equal = again == 0 and same(content(cut), expected)
        hidden = [p.name for p in cut.rglob(".*.*")]
        outcomes.append({"moment": number, "code": code, "again": again, "equal": equal, "left": hidden})
        shutil.rmtree(cut)
    print(json.dumps(outcomes))


main(*sys.argv[1:])
