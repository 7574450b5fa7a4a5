"""The app's scripts, with stand-ins for Flower's commands: who runs what, and what ends with what."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbayes.flower.start import init

COMMANDS = ("flower-superlink", "flower-supernode", "flower-superexec", "fedbayes", "flwr")
STAND_IN = """#!/bin/sh
name=$(basename "$0")
case "$name $2" in
  flwr*) exit 0 ;;
  "fedbayes watch") # a watchdog that lets its program run as it is
    shift 2
    while case $1 in --*) true ;; *) false ;; esac; do shift 2; done
    exec "$@" ;;
esac
echo "$(id -un) $*" > "$NOTES/$name"
echo $$ > "$NOTES/$name.pid"
while [ ! -f "$NOTES/$name.end" ]; do sleep 0.1; done
exit "$(cat "$NOTES/$name.end")"
"""

pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl and ssh-keygen make the keys"
)


class Scripts:
    """An app with keys, and a folder in which the stand-ins note who called them and how."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.app, self.notes, self.bin = folder / "demo", folder / "notes", folder / "bin"
        shutil.copytree(made, self.app)
        self.notes.mkdir()
        self.bin.mkdir()
        for name in COMMANDS:
            (self.bin / name).write_text(STAND_IN)
            (self.bin / name).chmod(0o755)
        self.running: list[subprocess.Popen[str]] = []

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("ONE_USER", "KEY_USER", "APP_USER")}
        return {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "NOTES": str(self.notes), **more}

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["sh", *words], cwd=self.app, env=self.environment(**more), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.running.append(process)
        return process

    def pid(self, name: str) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if text := (file := self.notes / f"{name}.pid").exists() and file.read_text().strip():
                return int(text)
            time.sleep(0.05)
        raise TimeoutError(f"{name} was not started")

    def gone(self, pid: int) -> bool:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app with the keys of one node."""
    folder = tmp_path_factory.mktemp("made") / "demo"
    init(folder)
    subprocess.run(["sh", "secure.sh", "1"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def scripts(tmp_path: Path, made: Path) -> Iterator[Scripts]:
    here = Scripts(tmp_path, made)
    yield here
    for process in here.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


SERVER = ("flower-superlink", "flower-superexec", "fedbayes")
NODE = ("flower-supernode", "flower-superexec")


@pytest.mark.parametrize("first", SERVER)
def test_a_server_of_which_one_part_ends_ends_whole_with_its_exit_code(scripts: Scripts, first: str) -> None:
    server = scripts.start("superlink.sh", ONE_USER="yes")
    pids = {name: scripts.pid(name) for name in SERVER}
    (scripts.notes / f"{first}.end").write_text("7")
    assert server.wait(30) == 7
    assert all(scripts.gone(pid) for pid in pids.values())


@pytest.mark.parametrize(("script", "parts"), [(("superlink.sh",), SERVER), (("supernode.sh", "0"), NODE)], ids=str)
def test_a_script_that_is_told_to_end_leaves_nothing_behind(
    scripts: Scripts, script: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    process = scripts.start(*script, ONE_USER="yes")
    pids = [scripts.pid(name) for name in parts]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert all(map(scripts.gone, pids))


def test_the_superlink_is_for_this_machine_and_the_gate_for_all(scripts: Scripts) -> None:
    scripts.start("superlink.sh", "8443", ONE_USER="yes")
    for name in SERVER:
        scripts.pid(name)
    called = {name: (scripts.notes / name).read_text() for name in SERVER}
    assert "--host 127.0.0.1 --port 8444" in called["flower-superlink"]
    assert "--isolation process" in called["flower-superlink"]
    assert "--runtime-api-address 127.0.0.1:8444" in called["flower-superexec"]
    assert "flower gate --port 8443 --superlink 127.0.0.1:8444" in called["fedbayes"]
    assert not any("0.0.0.0" in words for words in called.values())


def test_a_node_that_is_not_turned_away_at_once_ends_with_its_own_exit_code(scripts: Scripts) -> None:
    node = scripts.start("supernode.sh", "0", ONE_USER="yes")
    executor = scripts.pid("flower-superexec")
    scripts.pid("flower-supernode")
    (scripts.notes / "flower-supernode.end").write_text("0")
    assert node.wait(30) == 0
    assert scripts.gone(executor)


@pytest.mark.parametrize("script", [("superlink.sh",), ("supernode.sh", "0")], ids=str)
def test_without_two_users_nothing_starts_unless_one_is_asked_for(scripts: Scripts, script: tuple[str, ...]) -> None:
    """As root without the users that apps and keys need; as another user, who can't become them."""
    more = {"KEY_USER": "no-such-user"} if os.getuid() == 0 else {}
    process = scripts.start(*script, **more)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert len(said.strip().splitlines()) == 1
    assert ("useradd --system no-such-user" if more else "ONE_USER=yes") in said
    assert list(scripts.notes.iterdir()) == []


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can start other users' processes"
)
@pytest.mark.parametrize(
    ("users", "reason"),
    [(("daemon", "daemon"), "must be two users"), (("root", "nobody"), "root"), (("daemon", "root"), "root")],
    ids=str,
)
def test_users_that_keep_nothing_apart_are_refused(scripts: Scripts, users: tuple[str, str], reason: str) -> None:
    process = scripts.start("supernode.sh", "0", KEY_USER=users[0], APP_USER=users[1])
    _, said = process.communicate(timeout=30)
    assert (process.returncode, len(said.strip().splitlines())) == (2, 1)
    assert reason in said


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can start other users' processes"
)
def test_root_starts_each_part_as_its_own_user_who_ends_with_the_script(scripts: Scripts) -> None:
    for folder in (scripts.app, *scripts.app.parents):
        if folder.stat().st_uid == 0 and folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)
    scripts.notes.chmod(0o777)
    process = scripts.start("supernode.sh", "0", KEY_USER="daemon", APP_USER="nobody")
    pids = {name: scripts.pid(name) for name in NODE}
    assert (scripts.notes / "flower-supernode").read_text().split()[0] == "daemon"
    assert (scripts.notes / "flower-superexec").read_text().split()[0] == "nobody"
    key = scripts.app / "keys/node-0"
    assert (key.stat().st_mode & 0o777, key.owner()) == (0o600, "daemon")
    process.kill()  # a script that can't clean up after itself
    assert all(map(scripts.gone, pids.values()))
