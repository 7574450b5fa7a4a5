"""BatchNorm's statistics taken again of the pooled network."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError


@pytest.fixture
def clients():
    return fb.data.load("digits").split(fb.partition.iid(), clients=4, seed=0)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def trained(clients, passes, *, engine="stacked", **options):
    """One round of whole-batch steps."""
    rows = int(clients.sizes.max())
    method = fb.methods.fedavg(lr=0.5, epochs=5, batch=rows, norm_passes=passes, **options)
    return fb.fit(network(), clients, method=method, rounds=1, engine=engine, compile="off", seed=0)


def statistics(run):
    at = run.progress.state.broadcast["buffers"]
    return at.layout.split(at.mean)


def test_they_are_those_of_the_pooled_network(clients):
    run = trained(clients, 100)
    pooled = run.posterior.layout.split(run.posterior.mean)
    data, means, variances = clients.data, [], []
    for k in range(len(clients)):
        x = run.task.program.model.prepare(data.x[clients.train_rows(k)]).flatten(1)
        z = x @ pooled["1.weight"].T + pooled["1.bias"]
        means.append(z.mean(0)), variances.append(z.var(0))
    share = clients.sizes.float() / clients.sizes.sum()
    found = statistics(run)
    # What is left of the clients' own after 100 steps is 0.9^100.
    torch.testing.assert_close(found["2.running_mean"], share @ torch.stack(means), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found["2.running_var"], share @ torch.stack(variances), atol=1e-3, rtol=1e-3)
    averaged = statistics(trained(clients, 0))
    assert (averaged["2.running_mean"] - found["2.running_mean"]).abs().max() > 0.05


def test_weights_are_not_touched(clients):
    torch.testing.assert_close(trained(clients, 3).posterior.mean, trained(clients, 0).posterior.mean, rtol=0, atol=0)


class Watched(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        Watched.backwards += 1
        return slope


class Watch(nn.Module):
    def forward(self, x):
        return Watched.apply(x)


def test_they_cost_no_backward_pass(clients):
    counts = []
    for passes in (0, 3):
        method = fb.methods.fedavg(lr=0.1, epochs=2, batch=100, norm_passes=passes)
        Watched.backwards = 0
        fb.fit(nn.Sequential(*network(), Watch()), clients, method=method, rounds=1, engine="loop", compile="off")
        counts.append(Watched.backwards)
    assert counts[0] == counts[1] >= 2 * len(clients)


def test_compiled_they_are_the_same(clients, monkeypatch):
    """Traced as compilation does it, and run as it is: what the compiler makes of a step is tested with the engines."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)
    a, b = (
        fb.fit(network(), clients, method=fb.methods.fedavg(lr=0.1, batch=20, norm_passes=2), rounds=2, compile=how)
        for how in ("off", "on")
    )
    again = next(bound for bound in b.task.engine._bounds.values() if bound.purpose == "statistics")
    assert again.steps.mode == "compiled"
    torch.testing.assert_close(statistics(a), statistics(b), rtol=1e-4, atol=1e-5)


def test_engines_agree(clients):
    a, b = (statistics(trained(clients, 2, engine=engine)) for engine in ("loop", "stacked"))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_rule_and_weighting(clients):
    """A weighting that compares uploads, a server's optimiser and a normal: only the statistics are taken again."""
    options = {"lr": 0.05, "epochs": 1, "batch": 20, "rule": "dwc", "weighting": "discrepancy", "server": "adam"}
    runs = [
        fb.fit(network(), clients, method=fb.methods.fedvi(**options, norm_passes=n), rounds=2, compile="off")
        for n in (0, 5)
    ]
    torch.testing.assert_close(runs[0].posterior.mean, runs[1].posterior.mean, rtol=0, atol=0)
    assert not torch.equal(statistics(runs[0])["2.running_mean"], statistics(runs[1])["2.running_mean"])


def test_what_is_sent_is_counted(clients):
    without, again = (trained(clients, n).journal[0] for n in (0, 1))
    assert again["bytes_down"] == 2 * without["bytes_down"]
    assert again["bytes_up"] == without["bytes_up"] + len(clients) * (8 + 8) * 4 + len(clients) * 8  # and a counter


def test_a_network_without_any(clients):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(InputError, match="norm_passes: the network shares no statistics"):
        fb.fit(plain, clients, method=fb.methods.fedavg(norm_passes=1), rounds=1)
    with pytest.raises(InputError, match="norm_passes must be a whole number of passes"):
        fb.methods.fedavg(norm_passes=-1)
