"""The papers' networks: their first weights."""

import pytest

from fedbayes.errors import InputError
from fedbayes.networks.papers import network_named


@pytest.mark.parametrize(
    ("name", "shape", "bounds"),
    [
        ("mlp", (1, 28, 28), [0.25, 0.15, 0.10]),
        ("cnn", (3, 32, 32), [0.20, 0.18, 0.15, 0.12, 0.10]),
        ("text_cnn", (32,), [0.50, 0.30, 0.30, 0.30, 0.10]),
    ],
)
def test_the_authors_start_is_uniform_within_their_bounds(name, shape, bounds):
    network = network_named(name, shape, 10, start="feduab")
    weights = [p for n, p in network.named_parameters() if not n.endswith("bias")]
    assert len(weights) == len(bounds)
    for weight, bound in zip(weights, bounds, strict=True):
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.9 * bound
        assert abs(float(weight.detach().var()) / (bound**2 / 3) - 1) < 0.25
    assert all((p == 0.01).all() for n, p in network.named_parameters() if n.endswith("bias"))
    with pytest.raises(InputError, match="start"):
        network_named(name, shape, 10, start="xavier")
