"""The app that `fedbayes flower init` writes: it is whole, its experiment trains, and it needs no Flower to be made."""

import configparser
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import read
from fedbayes.flower import driver, watchdog
from fedbayes.flower.settings import settings_of
from fedbayes.flower.start import init
from fedbayes.runs.folder import run


def test_the_command_writes_an_app_of_the_folders_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flower", "init", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    about = tomllib.loads((tmp_path / "demo/pyproject.toml").read_text())
    assert about["tool"]["flwr"]["app"]["components"]["serverapp"] == "demo.app:server"
    assert about["project"]["name"] == "demo"
    for path in (tmp_path / "demo").rglob("*"):
        assert path.is_dir() or "NAME" not in path.read_text(), path


@pytest.mark.parametrize("name", ["Demo", "my-app", "1st", "a b"])
def test_a_name_that_is_no_package_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="small letters"):
        init(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        init(tmp_path / "demo")
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["mine.txt"]


def test_the_experiment_trains_here_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo_here"
    init(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    x = read(folder / "experiment.toml")
    assert settings_of(x.flower, x.clients).min_clients == 2
    made = run(replace(x, rounds=2), tmp_path / "run")["feduab"]
    assert len(made.task.clients) == 3
    assert made.journal[-1]["test"]["count"] > 300


@pytest.mark.parametrize("script", ["secure.sh", "users.sh", "superlink.sh", "supernode.sh", "rekey.sh"])
def test_scripts_are_plain_shell(tmp_path: Path, script: str) -> None:
    init(tmp_path / "demo")
    subprocess.run(["sh", "-n", script], cwd=tmp_path / "demo", check=True)


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl and ssh-keygen make the keys"
)
def test_keys_are_made_once_and_never_lost(tmp_path: Path) -> None:
    init(tmp_path / "demo")
    made = []
    for nodes in ("1", "2"):
        subprocess.run(["sh", "secure.sh", nodes], cwd=tmp_path / "demo", check=True, capture_output=True)
        keys = tmp_path / "demo" / "keys"
        made.append({p.name: p.read_bytes() for p in keys.iterdir() if p.name != "ca.srl"})
    assert made[0].items() <= made[1].items()
    assert set(made[1]) - set(made[0]) == {"node-1", "node-1.pub", "node-1.crt", "node-1.key"}
    config = tomllib.loads((tmp_path / "demo/.flwr/config.toml").read_text())
    assert config["superlink"]["demo"]["address"] == "127.0.0.1:9444"


def test_a_machine_without_the_tools_is_told_which_one_to_install(tmp_path: Path) -> None:
    init(tmp_path / "demo")
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "")
    done = subprocess.run(
        [tmp_path / "bin" / "sh", "secure.sh", "1"],
        cwd=tmp_path / "demo", env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == "secure.sh needs openssl, which is not installed here"
    assert not (tmp_path / "demo" / "keys").exists()


UNITS = ["demo-server.service", "demo-node@.service", "demo-run.service"]


@pytest.mark.parametrize("unit", UNITS)
def test_units_name_what_is_there_and_statuses_that_are_given(tmp_path: Path, unit: str) -> None:
    """Every status that a unit does not start again after is one that a person must mend."""
    init(tmp_path / "demo")
    sections = configparser.RawConfigParser(strict=True)
    sections.optionxform = str  # type: ignore[assignment,method-assign]
    sections.read(tmp_path / "demo" / "systemd" / unit)
    service = sections["Service"]
    for word in shlex.split(service["ExecStart"]):
        assert not word.endswith(".sh") or (tmp_path / "demo" / word).is_file()
    known = {2, watchdog.TURNED_AWAY, driver.FAILED, driver.STOPPED}
    assert set(map(int, service["RestartPreventExitStatus"].split())) <= known
    assert service["Restart"] == "on-failure"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze checks units")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    init(tmp_path / "demo")
    home = tmp_path / "demo" / "systemd"
    for unit in UNITS:
        text = (home / unit).read_text().replace("/srv/demo/.venv/bin/fedbayes", "/bin/true")
        (home / unit).write_text(text.replace("/srv/demo", str(tmp_path / "demo")))
    names = [str(home / unit.replace("@.", "@0.")) for unit in UNITS]
    shutil.copy(home / "demo-node@.service", home / "demo-node@0.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *names],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "demo-" in line] == []


def test_the_compose_file_starts_the_scripts_that_are_there(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the compose file")
    init(tmp_path / "demo")
    services = yaml.safe_load((tmp_path / "demo" / "compose.yaml").read_text())["services"]
    assert {"server", "run", "node-0", "node-1", "node-2"} == set(services)
    for service in services.values():
        words = shlex.split(service["command"])
        assert words[0] == "fedbayes" or (tmp_path / "demo" / words[1]).is_file()
        assert service["restart"] == "on-failure"
        assert service["logging"]["options"]["max-size"] == "10m"
    for k in range(3):  # what a node can read is its own
        sources = [volume.split(":")[0] for volume in services[f"node-{k}"]["volumes"]]
        own = {f"./keys/node-{k}", f"./keys/node-{k}.key", f"./keys/node-{k}.crt"}
        assert {*sources} == {"./keys/ca.crt", f"node-{k}-state", *own}
    assert (tmp_path / "demo" / "Dockerfile").is_file()
    assert "keys" in (tmp_path / "demo" / ".dockerignore").read_text().split()  # no key in an image
    assert {"/keys/", "/state/"} < {*(tmp_path / "demo" / ".gitignore").read_text().split()}  # nor in what travels


def test_a_key_that_is_not_registered_cant_be_taken_away(tmp_path: Path) -> None:
    init(tmp_path / "demo")
    for arguments, word in (
        (["revoke", "0"], "has no registered key"),
        (["lose", "0"], "usage"),
        (["renew", "x"], "K is"),
    ):
        done = subprocess.run(
            ["sh", "rekey.sh", *arguments], cwd=tmp_path / "demo", capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert word in done.stderr
