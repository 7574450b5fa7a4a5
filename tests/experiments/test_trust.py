"""Whose code an experiment may name: on every command, nothing of a stranger's choice is run."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbayes.cli import main
from fedbayes.errors import InputError
from fedbayes.experiments import toml, trust
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.own_code import imported
from fedbayes.runs.folder import run

MARK = "the code has run"
FORBIDDEN = (
    "os:system", "posix:system", "subprocess:run", "builtins:exec", "sys:exit", "importlib:import_module",
    "runpy:run_path", "os.path:join", "shutil:rmtree", "pickle:load", "ctypes:CDLL",
)  # fmt: skip
UNASKED = ("torch.hub:load", "torch:load", "numpy:load", "sklearn.utils:shuffle", "joblib:load", "pip._internal:main")
ROUNDABOUT = (
    "friend:os.system", "friend:system", "friend:torch.hub.load", "friend:rows.__globals__", "friend:rows.__class__",
    "friend:Rows.__init__.__globals__", "friend:Rows.__subclasses__",
)  # fmt: skip
OURS = ("fedbayes.files:write_text", "fedbayes.flower.start:init", "fedbayes.cli:main", "fedbayes:load")


@pytest.fixture(autouse=True)
def _nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "")


@pytest.fixture
def friend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own, which has others' functions among its names."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/friend.py").write_text(
        "import os\nfrom os import system\n\nimport torch\n\n\ndef rows():\n    return 1\n\n\nclass Rows:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    monkeypatch.delitem(sys.modules, "friend", raising=False)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: `shop_of_nets` for all, `shop_for_us` for fedbayes; an import leaves a mark."""
    folder = tmp_path / "site-packages"
    for name, needs in (("shop_of_nets", ""), ("shop_for_us", "Requires-Dist: fedbayes>=0.2\n")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"from pathlib import Path\nPath({str(tmp_path / name)!r}).write_text({MARK!r})\n"
            "from torch import nn\n\n\ndef net(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
        )
        about = folder / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        (about / "top_level.txt").write_text(f"{name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    trust._made_for_us.cache_clear()
    return tmp_path


@pytest.mark.parametrize("path", [*FORBIDDEN, *UNASKED, *ROUNDABOUT, *OURS])
@pytest.mark.usefixtures("friend")
def test_what_a_stranger_would_name_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"name code of your own|--trust|name of Python's own|name a function"):
        imported(path, "data")


@pytest.mark.parametrize("path", [*FORBIDDEN, "friend:os.system", "friend:system"])
@pytest.mark.usefixtures("friend")
def test_pythons_own_functions_are_no_data_whoever_is_trusted(path: str) -> None:
    trust.trust(path.partition(":")[0].partition(".")[0], "os", "posix")
    with pytest.raises(InputError, match="part of Python"):
        imported(path, "data")


@pytest.mark.parametrize("path", ["friend:rows", "friend:Rows", "friend:torch", "fedbayes.federation.pool:pool"])
@pytest.mark.usefixtures("friend")
def test_the_users_own_code_needs_no_word(path: str) -> None:
    imported(path, "data")


def test_an_installed_package_is_run_when_it_asks_for_fedbayes_or_is_named(shop: Path) -> None:
    with pytest.raises(InputError, match="say --trust shop_of_nets"):
        imported("shop_of_nets:net", "network")
    assert not (shop / "shop_of_nets").exists()  # not even imported
    assert imported("shop_for_us:net", "network")((2,), 3).out_features == 3
    trust.trust("shop_of_nets")
    assert imported("shop_of_nets:net", "network")((2,), 3).out_features == 3
    assert (shop / "shop_of_nets").read_text() == MARK


@pytest.mark.parametrize("files", [("rounds.jsonl",), ("config.toml", "report.html", "fedavg/rounds.jsonl")], ids=str)
def test_code_in_a_run_folder_is_not_run(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text(f"raise RuntimeError({MARK!r})\n")
    (tmp_path / "fedavg").mkdir()
    for name in files:
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="lies in the run folder"):
        imported("planted:rows", "data")


def test_a_project_beside_its_runs_is_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment may be called config.toml, and the run lie right beside the code."""
    (tmp_path / "beside_runs.py").write_text("def rows():\n    return 1\n")
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "first").mkdir()
    (tmp_path / "first/rounds.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    assert imported("beside_runs:rows", "data")() == 1


@pytest.mark.parametrize("name", ["a,b", "", "torch.hub", "os:system", "-"])
def test_only_names_of_packages_can_be_trusted(name: str) -> None:
    with pytest.raises(InputError, match="the name of a package"):
        trust.trust(name)


def answered(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a command, and what it says on the error stream."""
    monkeypatch.setattr(sys, "argv", ["fedbayes", *words])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err


# Each command that reads an experiment or a run folder, and what stands after the folder or file.
COMMANDS = {
    "run": lambda file, folder, rows: ["run", str(file), "--output", str(folder) + "-new"],
    "sweep": lambda file, folder, rows: ["sweep", str(file), "--over", "seed=0..1", "--output", str(folder) + "-many"],
    "resume": lambda file, folder, rows: ["resume", str(folder)],
    "predict": lambda file, folder, rows: ["predict", str(folder), "--input", str(rows)],
    "evaluate": lambda file, folder, rows: ["evaluate", str(folder), "--repeats", "2"],
    "export": lambda file, folder, rows: ["export", str(folder), "--output", str(folder) + "-out"],
    "report": lambda file, folder, rows: ["report", str(folder), "--no-figures"],
}


@pytest.fixture
def trained(tiny: Experiment, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    run(replace(tiny, method="fedavg", rounds=1), folder)
    return folder


def prepared(folder: Path, **changed: object) -> tuple[Path, Path, Path]:
    """The run folder with another config, the same experiment as a file, and rows to predict."""
    table = {**tomllib.loads((folder / "config.toml").read_text()), **changed}
    (folder / "config.toml").write_text(toml.dumps(table))
    file, rows = folder.with_suffix(".toml"), folder.with_suffix(".npy")
    file.write_text(toml.dumps(table))
    np.save(rows, np.zeros((3, 2), np.float32))
    return file, folder, rows


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_folder_that_names_os_system_runs_nothing(
    command: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    words = COMMANDS[command](*prepared(trained, data="os:system", data_options={"command": f"touch {mark}"}))
    for more in ([], ["--trust", "os"]):
        if command == "report":  # it reads records alone, and imports nothing
            code, _ = answered(words, monkeypatch, capsys)
            assert code == 0
        else:
            code, said = answered([*words, *more], monkeypatch, capsys)
            assert code == 2
            assert said.startswith("error: data 'os' is a part of Python")
            assert said.count("\n") == 1
        assert not mark.exists()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "report"])
def test_an_installed_package_needs_trust_on_each_command(
    command: str, trained: Path, shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = COMMANDS[command](*prepared(trained, network="shop_of_nets:net"))
    code, said = answered(words, monkeypatch, capsys)
    assert code == 2
    assert said.startswith("error: network 'shop_of_nets'")
    assert "--trust shop_of_nets" in said
    assert said.count("\n") == 1
    assert not (shop / "shop_of_nets").exists()
    _, said = answered([*words, "--trust", "shop_of_nets"], monkeypatch, capsys)
    assert "--trust" not in said
    assert (shop / "shop_of_nets").read_text() == MARK
