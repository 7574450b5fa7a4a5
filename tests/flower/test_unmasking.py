"""The server's note of the sum for whose shares it has asked: it outlives the server."""

from pathlib import Path

import pytest

from fedbayes.errors import InputError
from fedbayes.flower.unmasking import FILE, Unmasking


def test_a_round_is_noted_for_whoever_opens_the_folder_again(tmp_path: Path) -> None:
    here = Unmasking(tmp_path)
    assert not here.begun(0)
    for number in (0, 3):
        here.begin(number)
        for unmasking in (here, Unmasking(tmp_path)):
            assert unmasking.begun(number)
            assert not unmasking.begun(number + 1)


def test_in_memory_it_is_noted_too() -> None:
    here = Unmasking()
    here.begin(2)
    assert here.begun(2)
    assert not here.begun(1)


@pytest.mark.parametrize("text", ["", "{}", "[", "3", '{"round": "x"}'])
def test_a_note_that_can_t_be_read_is_not_taken_for_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError, match=FILE):
        Unmasking(tmp_path).begun(0)
