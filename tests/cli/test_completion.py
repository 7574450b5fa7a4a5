"""Completion in the shell: the script that a shell reads, and what it then offers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/installing.md"


def completed(**environment: str) -> str:
    command = [sys.executable, "-m", "fedbayes"]
    answer = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_of_the_page_prints_a_script_of_the_shell(shell):
    variable, source = re.search(r"\$\((\w+)=(\w+)_bash fedbayes\)", PAGE.read_text(encoding="utf-8")).groups()
    assert "fedbayes" in completed(**{variable: f"{source}_{shell}"})


def test_commands_and_options_are_offered():
    words = {"_FEDBAYES_COMPLETE": "complete_bash"}
    assert completed(**words, COMP_WORDS="fedbayes re", COMP_CWORD="1").split() == ["resume", "report"]
    assert "--ood" in completed(**words, COMP_WORDS="fedbayes evaluate --", COMP_CWORD="2").split()
