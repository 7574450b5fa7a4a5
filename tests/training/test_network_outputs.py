"""What networks give, and what is said where it does not fit the targets."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError

X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = (X[:, 0] > 0).long()


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(2, 2), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


@pytest.mark.parametrize(
    ("network", "y", "says"),
    [
        (nn.Linear(2, 1), Y, r"gives \[1\].*needs \[2\]: one for each class; a single logit is for yes or no"),
        (Wrapped(lambda out: {"a": out, "b": out}), Y, r"gives a dict; own \(classes\) needs one tensor of \[2\]"),
        (Wrapped(lambda out: (None, out)), Y, "gives a tuple; .* named logits, or the first of a tuple"),
        (nn.Linear(2, 2), Y + 1, r"needs \[3\]: its labels run from 1 to 2; number the classes from 0"),
        (Wrapped(lambda out: out[..., None].expand(*out.shape, 4)), Y, r"gives \[2, 4\].*: one row of numbers"),
    ],
)
def test_outputs_of_the_wrong_shape(network, y, says):
    with pytest.raises(InputError, match=says):
        fb.fit(network, [(X, y)], rounds=1)


def test_a_single_logit_learns_yes_and_no():
    clients = fb.data.from_clients([(X[::2], Y[::2]), (X[1::2], Y[1::2])], test=(X, Y), kind="labels")
    run = fb.fit(nn.Linear(2, 1), clients, method=fb.methods.fedavg(lr=2.0), rounds=20)
    probs = run.predict(X).probs
    assert probs.shape == (12, 1)
    assert torch.equal((probs[:, 0] > 0.5).long(), Y)
