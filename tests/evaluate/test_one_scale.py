"""One scale for all adapters: the width of the lowest NLL, which is known for a linear network."""

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.evaluate.one_scale import one_scale
from fedbayes.model.likelihood import normal


def trained(**options):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=random)
    y = x[:, :1] + 0.1 * torch.randn(400, 1, generator=random)
    # Noise that grows with x, as a width of the weights would have it.
    y += (x @ torch.randn(6, 1, generator=random)) * 0.4 * torch.randn(400, 1, generator=random)
    clients = fb.data.from_clients([(x[k::2], y[k::2]) for k in range(2)], kind="real", classes=1)
    network = nn.Linear(6, 1, bias=False)
    method = fb.methods.fedavg(lr=0.01, epochs=5)
    given = {"likelihood": normal(0.1), "adapters": {"rank": 3, "full": ()}, **options}
    return fb.fit(network, clients, method=method, rounds=4, **given)


def test_it_finds_the_width_of_the_lowest_nll():
    run = trained(validation=0.5)
    widths = tuple(float(w) for w in np.geomspace(0.03, 3, 9))
    found = one_scale(run, draws=400, widths=widths)
    rows = run.task.validation
    x, y = (t[rows].double() for t in (run.task.clients.data.x, run.task.clients.data.y))
    a = run.task.program.model.frozen["frozen"]["lora_A"].double()
    error = (y - x @ run.module().weight.detach().double().T)[:, 0]

    def exact(width):
        variance = 0.1**2 + width**2 * (x @ a.T).square().sum(-1)
        return float((0.5 * error**2 / variance + 0.5 * (2 * torch.pi * variance).log()).mean())

    assert found.width == min(widths, key=exact)
    assert found.tried[found.width] == pytest.approx(exact(found.width), rel=0.05)
    q = found.run.posterior
    assert isinstance(q, fb.Gaussian)
    assert q.scale.unique().tolist() == pytest.approx([found.width])
    assert found.run.predict(x[:3].float()).epistemic.min() > 0


def test_it_needs_rows_to_choose_by():
    with pytest.raises(InputError, match=r"no rows are held out .*; train with validation=0.1"):
        one_scale(trained())
    with pytest.raises(InputError, match=r"no weight matches head"):
        one_scale(trained(validation=0.1), patterns=("head",))
