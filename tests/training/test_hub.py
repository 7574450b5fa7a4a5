"""Models on the Hub: what is pushed predicts the same when it is loaded, the card has the scores, and nothing foreign
is trusted. Against a stand-in of the package, and the package itself against a server on this machine."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hub_server import serving
from safetensors.torch import save_file
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.model.likelihood import custom
from fedbayes.training import published
from fedbayes.training.hub import place_of

FILES = {"posterior.safetensors", "fedbayes.json", "README.md"}


class Shelf:
    """What the library uses of huggingface_hub, over a folder."""

    def __init__(self, home: Path) -> None:
        self.home, self.made = home, {}

    def create_repo(self, repo, *, repo_type, private, exist_ok):
        self.made[repo] = private
        (self.home / repo).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, *, repo_id, folder_path, revision, commit_message):
        for path in Path(folder_path).iterdir():
            (self.home / repo_id / path.name).write_bytes(path.read_bytes())

    def model_info(self, repo, *, revision, files_metadata):
        files = [SimpleNamespace(rfilename=p.name, size=p.stat().st_size) for p in (self.home / repo).iterdir()]
        return SimpleNamespace(sha="a" * 40, siblings=files)

    def download(self, repo, name, *, revision):
        return str(self.home / repo / name)


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    shelf = Shelf(tmp_path / "hub")
    module = ModuleType("huggingface_hub")
    module.HfApi, module.hf_hub_download = lambda: shelf, shelf.download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return shelf


@pytest.fixture(scope="module")
def digits() -> fb.Run:
    clients = fb.data.load("digits").split(fb.partition.iid(volume=40), clients=3, seed=0)
    return fb.fit("linear", clients, method=fb.methods.feduab(epochs=1, draws=3), rounds=2)


def sites(kind: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    x = random.normal(3, 2, (2, 40, 4)).astype(np.float32)
    y = (x.sum(-1) > 12).astype(np.int64) if kind == "classes" else x.sum(-1, keepdims=True) * 10
    return {"north": (x[0], y[0]), "south": (x[1], y[1])}


def test_a_pushed_run_is_loaded_by_its_name_and_predicts_the_same(digits, shelf):
    assert digits.push("me/digits", network="linear") == "hf://me/digits"
    assert shelf.made == {"me/digits": True}  # private
    again = fb.load("hf://me/digits")
    x = digits.task.clients.data.test_x[:20]
    for part in ("probs", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(again.predict(x), part), getattr(digits.predict(x), part))
    torch.testing.assert_close(again.posterior.scale, digits.posterior.scale)
    assert {p.name for p in (shelf.home / "me/digits").iterdir()} == {
        "posterior.safetensors",
        "fedbayes.json",
        "README.md",
    }
    with pytest.raises(InputError, match="loaded without its data"):
        again.scores()
    with pytest.raises(InputError):
        again.personal(0)


def test_the_card_has_the_scores_of_the_run(digits, shelf):
    digits.push("me/digits", network="linear")
    card = (shelf.home / "me/digits/README.md").read_text(encoding="utf-8")
    scores = digits.scores()
    for name in ("accuracy", "nll", "brier", "ece"):
        assert f"| {scores[name]:.3f} ±" in card
    head = card.split("---\n")[1]
    index = json.loads(next(line for line in head.splitlines() if line.startswith("model-index")).partition(": ")[2])
    assert index[0]["results"][0]["metrics"][0] == {"type": "accuracy", "value": round(scores["accuracy"], 6)}
    assert 'fb.load("hf://me/digits")' in card


@pytest.mark.parametrize("kind", ["classes", "real"])
def test_a_network_of_ones_own_is_given_again_and_units_come_back(kind, shelf):
    held = sites(kind)
    clients = fb.data.from_clients(held, test=held, standardise=True)
    torch.manual_seed(0)
    outputs = 2 if kind == "classes" else 1
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))
    network[0].requires_grad_(False)  # a frozen body goes along
    run = fb.fit(network, clients, method=fb.methods.fedvi(epochs=1, test_draws=3), rounds=2)
    run.push("me/own")
    x = held["north"][0]
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))
    again = fb.load("hf://me/own", network=other)
    torch.testing.assert_close(again.predict(x).mean, run.predict(x).mean)
    torch.testing.assert_close(again.predict(x).epistemic, run.predict(x).epistemic)
    assert "| north | 40 |" in (shelf.home / "me/own/README.md").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="no code is kept"):
        fb.load("hf://me/own")
    with pytest.raises(InputError, match="network: "):
        fb.load("hf://me/own", network=nn.Linear(4, outputs))
    warm = fb.fit(network, clients, method=fb.methods.fedvi(epochs=1), rounds=0, init=again)
    torch.testing.assert_close(warm.posterior.mean, run.posterior.mean)


def test_tables_are_coded_by_who_loads_the_model(shelf):
    random = np.random.default_rng(0)
    tables = {
        site: {"age": random.normal(60, 9, 30), "sex": random.choice(["f", "m"], 30), "ill": random.integers(0, 2, 30)}
        for site in ("a", "b")
    }
    run = fb.fit("linear", fb.data.from_tables(tables, target="ill", kind="classes"), rounds=1)
    run.push("me/table", network="linear")
    row = {"age": [50.0, 70.0], "sex": ["f", "m"]}
    torch.testing.assert_close(fb.load("hf://me/table").predict(row).probs, run.predict(row).probs)


def damage(home: Path, how: str) -> None:
    about = json.loads((home / "fedbayes.json").read_text(encoding="utf-8"))
    match how:
        case "no json":
            (home / "fedbayes.json").write_text("{", encoding="utf-8")
        case "cut short":
            content = (home / "posterior.safetensors").read_bytes()
            (home / "posterior.safetensors").write_bytes(content[: len(content) // 2])
        case "pickle":
            torch.save({"model": torch.zeros(3)}, home / "posterior.safetensors")
        case "not finite":
            q = fb.Gaussian(torch.full((650,), float("nan")), torch.ones(650))
            published.values.save(home / "posterior.safetensors", {"model": q})
        case "foreign":
            save_file({"weight": torch.zeros(3)}, home / "posterior.safetensors")
        case "code":
            about["network"] = "os:system"
        case "huge":
            about["data"]["shape"] = [1 << 40]
        case "format":
            about["format"] = 99
        case "kind":
            about["data"]["prepare"] = {"kind": "eval"}
    if how in ("code", "huge", "format", "kind"):
        (home / "fedbayes.json").write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.parametrize(
    "how", ["no json", "cut short", "pickle", "not finite", "foreign", "code", "huge", "format", "kind"]
)
def test_what_is_damaged_or_foreign_is_refused_in_one_line(how, digits, shelf):
    digits.push("me/digits", network="linear")
    damage(shelf.home / "me/digits", how)
    with pytest.raises(InputError) as refusal:
        fb.load("hf://me/digits")
    assert "\n" not in str(refusal.value)


def test_files_that_are_missing_or_too_large_are_not_fetched(digits, shelf, monkeypatch):
    digits.push("me/digits", network="linear")
    monkeypatch.setattr(published, "LONGEST", 10)
    with pytest.raises(InputError, match="the most is 10 bytes"):
        fb.load("hf://me/digits")
    (shelf.home / "me/digits/fedbayes.json").unlink()
    with pytest.raises(InputError, match="has no fedbayes"):
        fb.load("hf://me/digits")


@pytest.mark.parametrize("place", ["digits", "a/b/c", "../a/b", "me/..", "me/a b", "me/a@"])
def test_a_place_is_owner_and_name(place):
    with pytest.raises(InputError, match="owner/name"):
        place_of(place)


@pytest.mark.parametrize(("status", "mend"), [(None, "within reach"), (401, "hf auth login"), (403, "may the token")])
def test_what_the_hub_refuses_is_told_with_a_mend(status, mend, shelf, digits, monkeypatch):
    class Refused(Exception):
        response = status and SimpleNamespace(status_code=status)

    def refuse(*_, **__):
        raise Refused("no")

    monkeypatch.setattr(shelf, "create_repo", refuse)
    monkeypatch.setattr(shelf, "model_info", refuse, raising=False)
    for call in (lambda: digits.push("me/digits"), lambda: fb.load("hf://me/digits")):
        with pytest.raises(InputError, match=f"hf://me/digits could not be .*{mend}"):
            call()


def test_a_loaded_model_says_what_it_is_and_what_it_lacks(shelf, digits):
    digits.push("me/digits")
    with pytest.raises(InputError, match="hf://me/digits: give the network that was trained"):
        fb.load("hf://me/digits")
    model = fb.load("hf://me/digits", network=digits.module())
    assert f"{len(digits.journal)} rounds; loaded without its data" in repr(model)
    with pytest.raises(InputError, match="loaded without its data"):
        model.scores()


def test_a_place_may_have_a_revision():
    assert place_of("hf://me/digits@v1.2") == ("me/digits", "v1.2")


def test_a_likelihood_of_ones_own_is_not_pushed_as_another(shelf):
    own = custom(lambda output, y: -(output - y).abs().sum(-1))
    run = fb.fit("linear", fb.data.from_clients(sites("real")), likelihood=own, method="fedavg", rounds=1)
    with pytest.raises(InputError, match="a likelihood or preparation of your own"):
        run.push("me/own", network="linear")
    assert not shelf.made


def test_the_code_of_the_page_runs(shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/hub.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(re.sub(r"\brounds=\d+", "rounds=2", code), names)
    assert "me/digits" in shelf.made
    assert capsys.readouterr().out


PROGRAM = """
import sys, torch, fedbayes as fb
clients = fb.data.load("digits").split(fb.partition.iid(volume=40), clients=3, seed=0)
run = fb.fit("linear", clients, method=fb.methods.feduab(epochs=1, draws=3), rounds=1)
run.push("me/digits", network="linear", message="first")
again = fb.load("hf://me/digits")
x = clients.data.test_x[:20]
torch.testing.assert_close(again.predict(x).probs, run.predict(x).probs)
try:
    fb.load("hf://me/none")
except fb.load.__globals__["InputError"] as error:
    print("refused:", error)
"""


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_huggingface_hub_itself_against_a_server_on_this_machine(tmp_path):
    with serving() as hub:
        surroundings = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_stand_in"}
        surroundings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "refused: hf://me/none could not be found" in done.stdout
        assert {*hub.repos["me/digits"]} == FILES
        assert hub.private["me/digits"]
