"""What differs between systems: locks without fcntl, text that is UTF-8 everywhere, narrow and colourless consoles."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedbayes
from fedbayes.runs import locks

HOME = Path(fedbayes.__file__).parent
OTHER = """
import sys, time
from pathlib import Path
from fedbayes.runs import locks
if sys.argv[3] == "files":
    locks.fcntl = None
with locks.lock(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    time.sleep(30)
"""


@pytest.fixture(params=["system", "files"])
def way(request, monkeypatch):
    if request.param == "files":
        monkeypatch.setattr(locks, "fcntl", None)
    return request.param


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [("alone", False, False), ("alone", True, False), ("shared", False, False), ("shared", True, True)],
)
def test_a_lock_of_another_process(way, theirs, ours, fits, tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path), theirs, way], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        if fits:
            with locks.lock(path, shared=ours):
                pass
        else:
            with pytest.raises(locks.Held), locks.lock(path, shared=ours):
                pass
        if theirs == "alone":
            assert locks.is_held(path)
        other.kill()  # the lock goes with the process, however it ends
        other.wait()
        for _ in range(50):
            if not locks.is_held(path):
                break
            time.sleep(0.05)
        with locks.lock(path, shared=ours):
            assert ours or locks.is_held(path)
    assert not locks.is_held(tmp_path / "none")


def opened_without_encoding(path: Path) -> list[int]:
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if name in ("read_text", "write_text") or (name == "open" and any(m in ("r", "w", "a", "x") for m in modes)):
            lines.append(node.lineno)
    return lines


def test_text_is_read_and_written_as_utf_8_on_every_system():
    found = {str(p.relative_to(HOME)): lines for p in HOME.rglob("*.py") if (lines := opened_without_encoding(p))}
    assert not found


CONSOLES = {
    "import": ["-c", "import fedbayes; print(fedbayes.__version__)"],
    "help": ["-m", "fedbayes", "--help"],
    "quickstart": ["-m", "fedbayes", "run", "quickstart", "--set", "rounds=2", "--set", "clients=12"],
}


@pytest.mark.parametrize("what", CONSOLES)
def test_a_pipe_of_60_columns_in_cp1252_without_colour_and_with_a_home_that_can_not_be_written(what, tmp_path):
    home = tmp_path / "home"
    home.touch()  # a file: nobody can make folders in it, not even root
    surroundings = {**os.environ, "NO_COLOR": "1", "COLUMNS": "60", "HOME": str(home), "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([sys.executable, *CONSOLES[what]], env=surroundings, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode("cp1252")
    assert b"Traceback" not in done.stderr
    shown = done.stdout.decode("cp1252")
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 60
    if what == "quickstart":
        assert "accuracy" in shown
        page = (tmp_path / "runs/quickstart/report.html").read_text(encoding="utf-8")
        assert "accuracy ↑" in page  # files are UTF-8 whatever the console can print


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_of_60_columns_in_cp1252_has_a_bar_and_no_colour(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "NO_COLOR": "1", "COLUMNS": "60", "PYTHONIOENCODING": "cp1252", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, *CONSOLES["quickstart"]], env=surroundings, cwd=tmp_path, stdout=theirs, stderr=theirs
    ) as done:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    assert done.returncode == 0, shown.decode("cp1252")
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode("cp1252")
    assert "2/2" in text  # the bar's last state
    assert not re.search(rb"\x1b\[(3|4|9|10)[0-9](;|m)", shown)  # no colour
