"""pFedPF's networks: their published sizes, their heads, and that they train in both engines."""

import pytest
import torch

import fedbayes as fb
from fedbayes.model.classifier import group_of
from fedbayes.model.likelihood import categorical
from fedbayes.model.model import Model
from fedbayes.networks.papers import network_named

SIZES = {
    # LeCun et al. (1998) with full connections; counted by hand: 156 + 2416 + 48120 + 10164 + 850.
    "lenet": ((1, 28, 28), {}, 61_706),
    # Zagoruyko & Komodakis (2016), table 5: WRN-40-2 has 2.2 M, WRN-16-1 .2 M.
    "wide_resnet": ((3, 32, 32), {}, 2_243_546),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_network_has_its_published_size_and_a_head_that_a_pattern_finds(name):
    shape, options, size = SIZES[name]
    network = network_named(name, shape, 10, **options).eval()
    assert sum(p.numel() for p in network.parameters()) == size
    x = torch.rand(2, *shape)
    assert network(x).shape == (2, 10)
    model = Model.of(network, categorical())
    group = group_of(model, network, ("head.*",), x)
    assert group.linear
    vectors = model.initial()
    torch.testing.assert_close(group.output(group.of(vectors), group.look(vectors, x), vectors), network(x))


def test_depth_and_shape_are_checked():
    for options in ({"depth": 20}, {"depth": 4}):
        with pytest.raises(ValueError, match="6n"):
            network_named("wide_resnet", (3, 32, 32), 10, **options)
    with pytest.raises(ValueError, match="12 x 12"):
        network_named("lenet", (1, 8, 8), 10)
    assert network_named("wide_resnet", (1, 8, 8), 3, depth=10, width=1, dropout=0.3)(torch.rand(2, 1, 8, 8)).shape == (
        2,
        3,
    )


@pytest.mark.parametrize(("name", "options"), [("lenet", {}), ("wide_resnet", {"depth": 10, "width": 1})])
def test_stacked_and_loop_train_them_alike(name, options):
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(n, 1, 12, 12, generator=g).double(), torch.randint(3, (n,), generator=g)) for n in (4, 6)]
    clients = fb.data.from_clients(pairs, pairs[0], classes=3)
    network = network_named(name, (1, 12, 12), 3, seed=1, **options).double()
    method = fb.methods.fedavg(batch=4, epochs=1)
    loop, stacked = (fb.fit(network, clients, method=method, rounds=1, engine=engine) for engine in ("loop", "stacked"))
    assert "notes" not in stacked.journal[0]
    torch.testing.assert_close(loop.posterior.mean, stacked.posterior.mean, rtol=1e-8, atol=1e-9)
