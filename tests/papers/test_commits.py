"""Every figure can be traced to code: a commit beside it is in the history, or `commits.json` says what it was."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
RESULTS = HOME / "docs/results"
STAMP = re.compile(r'"commit": ?"([0-9a-f]{7,40})')


def stamps() -> dict[str, list[str]]:
    """Each commit that figures name -> the files that name it."""
    found: dict[str, list[str]] = {}
    for file in sorted(RESULTS.rglob("*.json")):
        for commit in set(STAMP.findall(file.read_text(encoding="utf-8"))):
            found.setdefault(commit, []).append(file.name)
    return found


def history() -> set[str]:
    """Of this checkout, as seven digits each; empty where it has none."""
    asked = ["git", "-C", str(HOME), "log", "--format=%H", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    whole = subprocess.run([*asked[:3], "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    return {line[:7] for line in found.stdout.split()} if whole.stdout.strip() == "false" else set()


def test_a_commit_is_in_the_history_or_has_a_word_beside_it():
    told, known, named = json.loads((RESULTS / "commits.json").read_text(encoding="utf-8")), history(), stamps()
    if not known:
        pytest.skip("no whole history here")
    assert len(named) > 50
    assert {c: files[:3] for c, files in named.items() if c[:7] not in known and c not in told["commits"]} == {}
    assert {c for c in told["commits"] if c in known or c not in named} == set()
    for commit, note in told["commits"].items():
        assert note["landed"] is None or note["landed"] in known, commit
        assert note["what"], commit
