"""The options that the command line and the docs show are those of the records, and all of them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.cli.options import page, record_named
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import GROUPS, Pretraining
from fedbayes.flower.settings import Settings
from fedbayes.methods import METHODS
from fedbayes.options import options_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"


def test_the_page_of_the_docs_is_made_of_the_records():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `fedbayes options --markdown > docs/reference/options.md`"


def test_every_key_stands_in_one_group():
    names = [name for group in GROUPS for name in options_of(group)]
    assert sorted(names) == sorted(options_of(Experiment))


@pytest.mark.parametrize("record", [Experiment, Pretraining, Settings, *METHODS.values()], ids=lambda r: r.__name__)
def test_every_option_is_on_the_page(record):
    text = page()
    for name in options_of(record):
        assert f"| `{name}` |" in text


@pytest.mark.parametrize(
    ("name", "words"), [("experiment", "rounds = 50"), ("flower", "timeout = 600.0"), ("pvi", "damping = 0.8")]
)
def test_options_are_printed_by_name(name, words):
    made = CliRunner().invoke(app, ["options", name], catch_exceptions=False)
    assert made.exit_code == 0
    assert words in made.output


def test_a_name_without_options_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'fedavg'"):
        record_named("fedavgg")


def test_help_says_what_the_records_say():
    said = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).output
    assert "how clients are run: auto, loop, stacked, flower." in " ".join(said.split())
