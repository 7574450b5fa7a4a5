"""The Python blocks of the docs, the README and the contributors' page are run in order, as they stand but shorter."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.data.fetch import here

ROOT = Path(__file__).parents[1]
BODY = "resnet20-cifar10.safetensors"  # a block that needs it is run below, on few rows
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[int, str]]:
    """Line number and code of each Python block; one with `...` stands for something else and is not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(text[: match.start()].count("\n") + 2, match[1]) for match in BLOCK.finditer(text)]
    return [(line, code) for line, code in found if "..." not in code and BODY not in code]


PAGES = {
    "docs/tutorial.md": 10,
    "docs/hospitals.md": 7,
    "docs/survival.md": 4,
    "docs/adapters.md": 2,
    "docs/following.md": 3,
    "docs/images.md": 3,
    "docs/text.md": 3,
    "docs/regression.md": 3,
    "docs/pretrained.md": 4,
    "docs/ood.md": 3,
    "docs/compare.md": 2,
    "docs/report.md": 1,
    "docs/admm.md": 1,
    "docs/asynchronous.md": 1,
    "docs/coverage.md": 1,
    "docs/personal-posteriors.md": 2,
    "docs/speed.md": 1,
    "docs/uncertainty.md": 1,
    "docs/watch.md": 1,
    "README.md": 3,
    "docs/attacks.md": 1,
    "docs/robust.md": 2,
}


@pytest.mark.parametrize(("page", "least"), PAGES.items())
def test_the_code_of_a_page_runs(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = blocks(page)
    assert len(found) >= least
    names: dict[str, object] = {"__name__": "tutorial"}
    for line, code in found:
        # Empty lines before it, so that an error names the page's own line. Two rounds run the code of twenty.
        short = re.sub(r"\brounds=\d+", "rounds=2", "\n" * (line - 1) + code)
        exec(compile(short, str(ROOT / page), "exec"), names)
    assert capsys.readouterr().out


def test_every_page_with_code_is_run():
    elsewhere = {"docs/design.md", "docs/hub.md"}  # by tests of their own
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if blocks(page)} - elsewhere == {page for page in PAGES if page.startswith("docs/")}


def test_the_method_of_the_contributors_page_trains():
    ((_, code),) = blocks("CONTRIBUTING.md")
    names: dict[str, object] = {"__name__": "contributing"}
    exec(code, names)
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=3, seed=0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    start = nn.utils.parameters_to_vector(network.parameters()).detach()
    whole, half = (
        fb.fit(network, clients, method=names["FedShrink"](shrink=shrink, epochs=1), rounds=1).posterior.mean - start
        for shrink in (1.0, 0.5)
    )
    torch.testing.assert_close(half, whole / 2, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def designed() -> dict[str, object]:
    """What the design page's examples define: a rule, a client, a stage, a method."""
    names: dict[str, object] = {"__name__": "design"}
    for line, code in blocks("docs/design.md"):
        exec(compile("\n" * (line - 1) + code, str(ROOT / "docs/design.md"), "exec"), names)
    return names


def small() -> tuple[nn.Module, fb.data.Clients]:
    torch.manual_seed(0)
    clients = fb.data.load("digits").split(fb.partition.iid(volume=40), clients=3, seed=0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(), clients


def test_the_rule_of_the_design_page_pools_scales_by_their_geometric_mean(designed):
    q = [fb.Gaussian(torch.tensor([m]).double(), torch.tensor([s]).double()) for m, s in ((0.0, 1.0), (3.0, 4.0))]
    pooled = fb.pool(designed["geometric"], q)
    torch.testing.assert_close(
        (pooled.mean, pooled.scale), (torch.tensor([1.5]).double(), torch.tensor([2.0]).double())
    )
    network, clients = small()
    loop, stacked = (
        fb.fit(network, clients, method=fb.methods.fedvi(rule=designed["geometric"], epochs=1), rounds=2, engine=engine)
        for engine in ("loop", "stacked")
    )
    torch.testing.assert_close(loop.posterior.scale, stacked.posterior.scale)


def test_the_method_of_the_design_page_follows_signs_and_averages_over_rounds(designed):
    network, clients = small()
    runs = {}
    for average in (True, False):
        method = designed["SignAverage"](lr=0.01, epochs=1, batch=40, average=average)
        loop, stacked = (
            fb.fit(network, clients, method=method, rounds=2, engine=engine) for engine in ("loop", "stacked")
        )
        torch.testing.assert_close(loop.posterior.mean, stacked.posterior.mean)
        runs[average] = loop
    start = nn.utils.parameters_to_vector(network.parameters()).detach()
    first = fb.fit(network, clients, method=method, rounds=1).posterior.mean
    steps = ((first - start) / 0.01 * 3).abs()  # one step of each of three clients of one size, in thirds of lr
    assert ((steps - steps.round()).abs() < 1e-6).all()
    assert float(steps.max()) == pytest.approx(3)
    assert [record["averaged"] for record in runs[True].journal] == [1, 2]
    assert not torch.equal(runs[True].posterior.mean, runs[False].posterior.mean)


def test_the_stage_of_the_design_page_is_taken_by_fit(designed):
    network, clients = small()
    one, two = (
        fb.fit(network, clients, method=fb.methods.fedavg(epochs=1), rounds=rounds, stages=stages).posterior.mean
        for rounds, stages in ((1, []), (1, [designed["running_average"]()]))
    )
    assert torch.equal(one, two)


@pytest.mark.data
def test_the_residual_network_of_the_adapters_page_is_fine_tuned(tmp_path, monkeypatch, capsys):
    body = here(f"weights/{BODY}")
    if body is None:
        pytest.skip("the weights of the body are not at hand")
    monkeypatch.chdir(tmp_path)
    (tmp_path / BODY).symlink_to(body)
    (code,) = [code for code in BLOCK.findall((ROOT / "docs/adapters.md").read_text(encoding="utf-8")) if BODY in code]
    for many, few in (("7000:]", "40:50]"), ("7000", "40"), ("rounds=40", "rounds=1"), ("clients=20", "clients=2")):
        assert many in code
        code = code.replace(many, few)
    code = code.replace(".test_x).entropy", ".test_x[:10]).entropy")
    code = code.replace("test_draws=20", "test_draws=1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sets are partial
        exec(code, {"fb": fb, "torch": torch, "nn": nn})
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert "photographs" in said


def test_the_table_of_the_page_on_choosing_is_the_leagues():
    subprocess.run([sys.executable, str(ROOT / "benchmarks/choosing.py"), "--check"], check=True)
