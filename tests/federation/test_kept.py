"""What is kept beside the broadcast: as parts of a file or letter, and back."""

import torch

from fedbayes.federation.kept import Kept, apart
from fedbayes.posterior.values import Draws, Point


def test_what_is_kept_comes_back_from_named_parts() -> None:
    broadcast = {"model": Point(torch.arange(3.0)), "buffers": Point(torch.ones(2))}
    kept = Kept({"model": Draws(torch.randn(4, 3))}, (2, 0, 5, 1), torch.tensor([0.5, 1.0]), torch.tensor([0.7, 1.0]))
    parts, again = apart({**broadcast, **kept.as_parts()})
    assert parts == broadcast
    assert again.members["model"].values is kept.members["model"].values
    assert again.who == kept.who
    assert torch.equal(again.noise, kept.noise)
    assert torch.equal(again.lone_noise, kept.lone_noise)


def test_nothing_kept_adds_no_part() -> None:
    assert Kept().as_parts() == {}
    assert apart({"model": Point(torch.zeros(1))})[1] == Kept()
