"""Who can run code where: a stranger with the authority's certificate, an operator, and the code he starts."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from machines import Machines, until

pytestmark = pytest.mark.flower

KEY_USER, APP_USER = "daemon", "nobody"

ABOUT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "evil"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["evil"]
[tool.flwr.app]
publisher = "me"
fab-include = ["evil/**/*.py"]
[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:client"
[tool.flwr.app.config]
"""

# It tries to read every key on the machines that it comes to, and tells the server, who writes it down.
EVIL = '''
import json
import os
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


def reach(*paths):
    """What of these files can be read, and who reads."""
    readable = []
    for path in paths:
        try:
            Path(path).read_bytes()
            readable.append(Path(path).name)
        except OSError:
            pass
    return json.dumps({"user": os.getuid(), "readable": readable})


@server.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    here = reach("keys/server.key", "keys/ca.key", "keys/ca.crt", "state/link/superlink.db")
    question = Message(RecordDict({"ask": ConfigRecord({"word": "keys"})}), nodes[0], "query")
    (reply,) = grid.send_and_receive([question])
    Path("runs/evil.json.part").write_text(json.dumps({"server": here, "node": reply.content["told"]["told"]}))
    Path("runs/evil.json.part").rename("runs/evil.json")


@client.query()
def query(message, context):
    keys = Path(context.node_config["state"]).parent.parent / "keys"
    told = reach(keys / "node-0", keys / "node-0.key", keys / "ca.key", keys / "ca.crt")
    return Message(RecordDict({"told": ConfigRecord({"told": told})}), reply_to=message)
'''


def can_run(user: str) -> bool:
    """Whether this Python, and Flower, can be run as another user."""
    if os.getuid() or not shutil.which("setpriv"):
        return False
    switch = ["setpriv", f"--reuid={user}", "--clear-groups", "--no-new-privs", "sh", "-c"]
    done = subprocess.run([*switch, f"cd / && {sys.executable} -c 'import fedbayes, flwr'"], capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module", params=["one user", "two users"])
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    """A server and a node; by two users where root runs the tests, so that keys and code can be kept apart."""
    users = (KEY_USER, APP_USER) if request.param == "two users" else None
    if users and not all(map(can_run, users)):
        pytest.skip(f"needs root, setpriv, and a Python that {KEY_USER} and {APP_USER} can run")
    folder = Path(tempfile.mkdtemp(prefix="fedbayes-"))  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    federation = Machines(folder / "fed", nodes=1, users=users)
    try:
        federation.superlink()
        federation.node(0)
        yield federation
    finally:
        federation.stop()
        shutil.rmtree(folder)


@pytest.fixture
def stranger(machines: Machines, tmp_path: Path) -> Path:
    """The folder of somebody who has the authority's certificate, a key of his own, and an app."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "pyproject.toml").write_text(ABOUT)
    (tmp_path / "evil/__init__.py").write_text("")
    (tmp_path / "evil/app.py").write_text(EVIL)
    shutil.copy(machines.folder / "keys/ca.crt", tmp_path)
    key = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(tmp_path / "mine")]
    subprocess.run(key, check=True)
    return tmp_path


def flwr(machines: Machines, folder: Path, port: int, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Flower's own command, from the stranger's folder, to a port of the server."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "it"\n[superlink.it]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.crt"}"\n'
    )
    environment = {**machines.environment, "FLWR_HOME": str(home)}
    command = [shutil.which("flwr", path=machines.path) or "flwr", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=300)


def nodes(machines: Machines) -> list[Any]:
    listed = machines.call("flwr", "supernode", "list", machines.folder.name, "--format", "json")
    return list(json.loads(listed)["nodes"])


def runs(machines: Machines) -> list[Any]:
    return list(json.loads(machines.call("flwr", "list", machines.folder.name, "--format", "json"))["runs"])


ATTACKS = (("supernode", "list", "it"), ("supernode", "register", "mine.pub", "it"), ("list", "it"), ("run", ".", "it"))


def test_a_stranger_gets_nothing_on_the_public_port(machines: Machines, stranger: Path) -> None:
    for words in ATTACKS:
        done = flwr(machines, stranger, machines.port, *words)
        assert done.returncode != 0, (words, done.stdout)
        assert b"404" in done.stderr + done.stdout, (words, done.stderr.decode())
    assert (len(nodes(machines)), len(runs(machines))) == (1, 0)


def test_the_control_port_listens_on_this_machine_alone(machines: Machines) -> None:
    """Of all listening sockets, as the kernel lists them."""
    listening = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        place, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = place.split(":")
            listening.setdefault(int(port, 16), set()).add(address)
    assert listening[machines.control] == {"0100007F"}
    assert listening[machines.port] == {"00000000"}


def test_an_operator_on_the_server_can_run_code_on_every_node_but_it_reads_no_keys(
    machines: Machines, stranger: Path
) -> None:
    """The same three commands on the control port: that they work there is why strangers must not reach it."""
    before = len(nodes(machines))
    assert flwr(machines, stranger, machines.control, *ATTACKS[0]).returncode == 0
    assert flwr(machines, stranger, machines.control, *ATTACKS[1]).returncode == 0
    assert len(nodes(machines)) == before + 1
    assert flwr(machines, stranger, machines.control, "run", ".", "it").returncode == 0
    file = machines.folder / "runs/evil.json"
    until("the app has come to the server and the node", file.exists)
    told = {place: json.loads(text) for place, text in json.loads(file.read_text()).items()}
    if "ONE_USER" in machines.environment:  # what the scripts warn of
        assert {"node-0", "node-0.key"} <= set(told["node"]["readable"])
        return
    import pwd

    assert {place: seen["user"] for place, seen in told.items()} == dict.fromkeys(told, pwd.getpwnam(APP_USER).pw_uid)
    assert told["server"]["readable"] == told["node"]["readable"] == ["ca.crt"]
