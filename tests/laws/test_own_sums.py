"""A rule that combines clients in a way of its own is combined in that way wherever clients are added."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import RULES
from fedbayes.flower.federated import check_sums
from fedbayes.training.prepare import prepare


class Largest(Rule):
    """The entrywise largest mean, which no sum gives."""

    def add(self, a, b):
        return {key: torch.maximum(a[key], b[key]) for key in a}


largest = Largest(
    encode=lambda q, w, ref: {"mean": q.mean.double(), "weight": w.double()},
    decode=lambda total, ref: fb.Gaussian(total["mean"].to(ref.mean), ref.scale, ref.layout),
    about="the largest mean",
)


def sites(sizes=(6, 9, 14)):
    g = torch.Generator().manual_seed(0)
    return fb.data.from_clients(
        [(torch.randn(n, 3, generator=g), torch.randint(2, (n,), generator=g)) for n in sizes], classes=2
    )


def test_pool_asks_the_rule():
    qs = [fb.Gaussian(torch.tensor(m), torch.ones(2)) for m in ([0.0, 3.0], [2.0, 1.0], [-1.0, 2.0])]
    assert fb.pool(largest, qs).mean.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("options", [{"engine": "loop"}, {"engine": "stacked"}, {"engine": "stacked", "at_once": 2}])
def test_every_engine_asks_the_rule(options):
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    clients = sites()
    method = fb.methods.fedvi(rule=largest, epochs=1)
    run = fb.fit(network, clients, method=method, rounds=1, **options)
    each = []
    for k in range(3):  # each client's upload, by a federation in which all others drop out of the sum
        size = len(clients.train_rows(k))
        only = Rule(
            encode=lambda q, w, ref, n=size: {"mean": torch.where(w == n, q.mean, 0.0).double()},
            decode=lambda total, ref: fb.Gaussian(total["mean"].to(ref.mean), ref.scale, ref.layout),
            about="one client's mean",
        )
        alone = fb.methods.fedvi(rule=only, weighting="size", epochs=1)
        each.append(fb.fit(network, clients, method=alone, rounds=1, engine="loop").posterior.mean)
    torch.testing.assert_close(run.posterior.mean, torch.stack(each).amax(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_the_rules_of_the_table_are_sums(name):
    assert RULES[name].adds


def test_a_secure_sum_refuses_what_is_no_sum():
    for rule in ("wc", largest):
        program = prepare(nn.Linear(3, 2), sites(), method=fb.methods.fedvi(rule=rule)).program
        if rule == "wc":
            check_sums("fedvi", program)
            continue
        with pytest.raises(InputError, match="a secure sum can only add, part 'model' is combined by a rule with an"):
            check_sums("fedvi", program)
