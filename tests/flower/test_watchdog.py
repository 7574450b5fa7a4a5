"""The watchdog: what ends is started again, what hangs is ended, a wrong clock is named."""

import http.server
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from fedbayes.flower.watchdog import CLOCK, FAILED, STOPPED, TURNED_AWAY, UNREACHABLE, Server, Watch, Watchdog

QUICK = Watch(patience=0.5, steady=60, every=0.1, strikes=3, pauses=(0.05,))


def program(folder: Path, text: str) -> list[str]:
    (folder / "program.py").write_text("import os, signal, sys, time\nfrom pathlib import Path\n" + text)
    return [sys.executable, str(folder / "program.py")]


class Clock(http.server.BaseHTTPRequestHandler):
    """Answers /health with a date that may be wrong."""

    ahead = 0.0

    def do_GET(self) -> None:
        self.send_response_only(200 if self.path == "/health" else 404)
        self.send_header("Date", formatdate(time.time() - self.ahead, usegmt=True))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Server]:
    """A server with a certificate of its own."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "crt.pem"),
        ],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Clock)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "crt.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Clock.ahead = 0.0
    yield Server(f"127.0.0.1:{server.server_port}", tmp_path / "crt.pem")
    server.shutdown()


def test_a_program_that_ends_is_started_again_whatever_its_status(tmp_path: Path) -> None:
    text = "n = len(list(Path().glob('ran*')))\nPath(f'ran{n}').touch()\nsys.exit(n % 2)\n"
    said: list[str] = []
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert Watchdog(program(tmp_path, text), QUICK, said.append).run() == FAILED
    finally:
        os.chdir(before)
    assert len(list(tmp_path.glob("ran*"))) >= 2
    assert "started again in 0.05 s" in said[0]
    assert "has failed for" in said[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_stops_with_its_program(tmp_path: Path, number: int) -> None:
    """By the command line, as a service manager would; a stopped program hears it too."""
    inner = program(tmp_path, "Path('pid').write_text(str(os.getpid()))\nprint('up', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "fedbayes", "flower", "watch", "--log", "a/b.log", *inner]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    child = int((tmp_path / "pid").read_text())
    os.kill(child, signal.SIGSTOP)
    process.send_signal(number)
    assert process.wait(timeout=20) == STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert (tmp_path / "a/b.log").read_text().splitlines() == [
        "up",
        f"watchdog: {Path(sys.executable).name} was told to stop",
    ]


def test_a_program_that_no_longer_answers_is_ended_and_started_again(tmp_path: Path) -> None:
    """It answers, then hangs: the health of the first makes it known, its silence ends it."""
    mark = tmp_path / "mark"
    text = f"Path({str(mark)!r}).open('a').write('x')\ntime.sleep(60)\n"
    answers = iter([1.0, 1.0])

    class Dying(Server):
        def date(self, path: str = "/health", *, fine: bool = False) -> float | None:
            return next(answers, None)

    watch = Watch(health=Dying("", tmp_path), patience=0.0, every=0.3, strikes=2, pauses=(0.01,))
    said: list[str] = []
    assert Watchdog(program(tmp_path, text), watch, said.append).run() == FAILED
    assert "did not answer and was ended" in said[-1]
    assert mark.read_text() == "x"


def test_the_reason_is_the_clock_the_superlink_or_the_key(tmp_path: Path, link: Server) -> None:
    dog = Watchdog(["true"], Watch(superlink=link))
    assert dog.reason(0) == (TURNED_AWAY, "the SuperLink turned it away: its key is not registered, or was revoked")
    dog.lines.extend(["\x1b[91mERROR \x1b[0m: something broke", "INFO: Finished server process [4010]"])
    assert dog.reason(1) == (FAILED, "the last that it said was 'ERROR : something broke'")
    dog.lines.append("[code: 2004] Failed to activate SuperNode.")
    assert dog.reason(1)[0] == TURNED_AWAY
    Clock.ahead = 20.0
    code, why = dog.reason(0)
    assert code == CLOCK
    assert "20 s ahead of the SuperLink's, and Flower allows 5; set the clock" in why or "21 s ahead" in why
    Clock.ahead = -20.0
    assert dog.reason(1)[0] == TURNED_AWAY  # Flower bears a clock that is behind by up to five minutes
    Clock.ahead = -400.0
    assert dog.reason(1)[0] == CLOCK
    gone = Watchdog(["true"], Watch(superlink=Server("127.0.0.1:1", link.authority)))
    assert gone.reason(1) == (UNREACHABLE, "the SuperLink at 127.0.0.1:1 does not answer")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process when its parent is gone")
def test_a_program_ends_with_its_watchdog_however_that_went(tmp_path: Path) -> None:
    inner = program(tmp_path, "Path('pid').write_text(str(os.getpid()))\nprint('up', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "fedbayes", "flower", "watch", *inner]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    child = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and Path(f"/proc/{child}").exists():
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1]:
            break
        time.sleep(0.1)
    assert time.monotonic() < end


def test_wrong_arguments_are_not_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    assert Watchdog(program(tmp_path, "sys.exit(2)"), QUICK, said.append).run() == 2
    assert said == [f"{Path(sys.executable).name} does not start with these arguments"]


def test_health_is_a_page_that_answers(link: Server, tmp_path: Path) -> None:
    assert link.date(fine=True) is not None
    assert link.date("/other", fine=True) is None
    assert abs((link.date("/other") or 0) - time.time()) < 3


DEAF = """
import threading, time
class FakeEntry:
    def load(self): return main
def heartbeat():
    time.sleep(0.2)
    raise RuntimeError("The SuperLink does not recognize this SuperNode.")
def main():
    threading.Thread(target=heartbeat, name="heartbeat", daemon=True).start()
    threading.Thread(target=time.sleep, args=(60,)).start()  # the runtime's server, which never ends
    {main}
import fedbayes.flower.attended as attended
attended.entry_points = lambda **_: [FakeEntry()]
import os
status = attended.attend("flower-supernode", [])
os._exit(status)
"""


@pytest.mark.parametrize("main", ["time.sleep(60)", "return", "raise SystemExit(0)"])
def test_a_node_of_which_a_part_has_failed_ends(tmp_path: Path, main: str) -> None:
    """Its heartbeat fails, or its main loop returns: other threads do not keep it."""
    done = subprocess.run(
        [sys.executable, "-c", DEAF.format(main=main)], capture_output=True, text=True, timeout=30, check=False
    )
    if main == "time.sleep(60)":
        assert "heartbeat has failed: RuntimeError: The SuperLink does not recognize" in done.stderr
        assert done.returncode in (FAILED, -signal.SIGTERM)  # Flower hears the signal; this stand-in does not
    else:
        assert done.returncode == (FAILED if main == "return" else 0)


def test_a_program_without_a_name_or_an_authority_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedbayes", "flower", "watch"]
    for arguments, word in (
        (["--health", "a:1", "true"], "--authority"),
        (["--superlink", "a", "--authority", "x", "true"], "host:port"),
        (["no-such-program"], "is it installed here"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert word in done.stderr
