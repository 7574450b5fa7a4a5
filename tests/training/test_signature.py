"""What an editor and `help` show of the ways in: real arguments, and a line for those that belong elsewhere."""

import inspect

import pytest
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.training.prepare import prepare


def test_fit_shows_its_arguments():
    shown, checked = (inspect.signature(f).parameters for f in (fb.fit, prepare))
    assert list(shown.values()) == list(checked.values())
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in shown.values())
    for name in shown:
        assert f"`{name}`" in fb.fit.__doc__ or name == "network"


CLIENTS = [([[0.0], [1.0]], [0, 1])]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0.1}, r"lr is an option of the method: give it there, method=fedbayes\.methods\.feduab\(lr=\.\.\.\)"),
        ({"lr": 0.1, "method": "fedavg"}, r"method=fedbayes\.methods\.fedavg\(lr"),
        ({"server_lr": 0.1, "method": fb.methods.fedavg()}, r"methods\.fedavg\(server_lr"),
        ({"round": 3}, "unknown argument 'round': did you mean 'rounds'"),
    ],
)
def test_arguments_that_belong_elsewhere_are_sent_there(options, says):
    for way in (fb.fit, prepare):
        with pytest.raises(InputError, match=says):
            way(nn.Linear(1, 2), CLIENTS, **options)
