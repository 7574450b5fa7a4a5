"""The Python blocks of the tutorial, the README and the contributors' page are run as they stand, in order."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbayes as fb

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[int, str]]:
    """Line number and code of each Python block; one with `...` stands for something else and is not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(text[: match.start()].count("\n") + 2, match[1]) for match in BLOCK.finditer(text)]
    return [(line, code) for line, code in found if "..." not in code]


@pytest.mark.parametrize(("page", "least"), [("docs/tutorial.md", 10), ("README.md", 3)])
def test_the_code_of_a_page_runs(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = blocks(page)
    assert len(found) >= least
    names: dict[str, object] = {"__name__": "tutorial"}
    for line, code in found:
        # Empty lines before it, so that an error names the page's own line.
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), names)
    assert capsys.readouterr().out


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
