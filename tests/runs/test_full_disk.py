"""A disk that is full: one line of advice, and nothing is lost."""

import errno
import os
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from run_content import content, same

from fedbayes.errors import disk_advice
from fedbayes.experiments.experiment import to_toml
from fedbayes.files import write_atomically
from fedbayes.runs.folder import resume, run


def test_a_run_on_a_full_disk_says_so_and_goes_on_later(tiny, tmp_path: Path) -> None:
    """No file may grow beyond a size: the journal meets it after some rounds, or the first checkpoint does."""
    x = replace(tiny, rounds=20)
    run(x, tmp_path / "whole")
    journal = (tmp_path / "whole" / "rounds.jsonl").stat().st_size
    checkpoints = max(path.stat().st_size for path in (tmp_path / "whole" / "checkpoints").iterdir())
    own = max(path.stat().st_size for path in (tmp_path / "whole" / "own").iterdir())
    largest = max(checkpoints, own)
    assert largest < journal - 200
    (tmp_path / "x.toml").write_text(to_toml(x))
    for full, limit in (("journal", (journal + largest) // 2), ("checkpoint", largest - 100)):
        done = subprocess.run(
            [sys.executable, "-m", "fedbayes", "run", str(tmp_path / "x.toml"), "--output", str(tmp_path / full)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"error: the disk is full at {tmp_path / full}")
        assert last.endswith("free some space; nothing is lost, and `fedbayes resume` goes on from the last checkpoint")
        resume(tmp_path / full)
        assert same(content(tmp_path / full), content(tmp_path / "whole"))


def test_a_file_that_could_not_be_written_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "before")

    def pieces():
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "a", pieces())
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert disk_advice(caught.value).startswith(f"the disk is full at {tmp_path / 'a'} (No space left on device)")
    assert disk_advice(PermissionError(errno.EACCES, "no")).startswith("[Errno 13] no; what was written before is kept")
