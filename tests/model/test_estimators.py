"""Estimators over an unmodified module: analytic moments and gradients, and which weights they take over."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedbayes.model.estimators import ESTIMATORS, forward, plan
from fedbayes.model.likelihood import categorical, normal
from fedbayes.model.model import Model
from fedbayes.networks.papers import network_named
from fedbayes.noise import Tape

LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), (4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (3, 2, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 2, groups=2), (2, 2, 3, 4)),
    "conv2d same": (lambda: nn.Conv2d(1, 2, 3, padding="same"), (2, 1, 3, 3)),
}
APPLY = {nn.Linear: F.linear, nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}


def _model(module: nn.Module, **options) -> Model:
    return Model.of(module.double(), normal(), prepare=lambda x: x, **options)


def _q(model: Model, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    size = model.layouts["model"].size
    mean = torch.randn(size, generator=g, dtype=torch.float64)
    return mean, 0.1 + 0.4 * torch.rand(size, generator=g, dtype=torch.float64)


def _draws(model, estimator, mean, scale, x, count, seed=1):
    made = plan(model, "model", x, estimator)
    noise = torch.randn(count, made.normals, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out = vmap(lambda z: forward(model, "model", mean, scale, {}, x, Tape(z), None, made)[0])(noise)
    return out, made


def _analytic(layer, layout, mean, scale, x):
    """Mean and variance of the output of one linear map with independent normal weights and biases."""
    names = () if isinstance(layer, nn.Linear) else ("stride", "padding", "groups")
    options = {n: getattr(layer, n) for n in names}
    apply, m, v = APPLY[type(layer)], layout.split(mean), layout.split(scale**2)
    return apply(x, m["weight"], m.get("bias"), **options), apply(x**2, v["weight"], v.get("bias"), **options)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_have_the_analytic_mean_and_variance(name, estimator):
    make, shape = LAYERS[name]
    layer = make()
    model = _model(layer)
    mean, scale = _q(model)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    count = 20_000
    out, _ = _draws(model, estimator, mean, scale, x, count)
    want, variance = _analytic(layer, model.layouts["model"], mean, scale, x)
    assert ((out.mean(0) - want).abs() < 5 * (variance / count).sqrt()).all()
    # Flipout's output is a product of signs and normals: still normal for one map, so var(s^2) = 2 v^2 / n.
    assert ((out.var(0) / variance - 1).abs() < 5 * (2 / count) ** 0.5).all()


def test_rows_share_their_noise_under_weight_sampling_only():
    model = _model(nn.Linear(3, 1, bias=False))
    mean, scale = _q(model)
    x = torch.ones(2, 3, dtype=torch.float64)
    shared, apart = (
        torch.corrcoef(_draws(model, name, mean, scale, x, 4000)[0][:, :, 0].T)[0, 1] for name in ("weight", "local")
    )
    assert shared > 0.999
    assert apart.abs() < 0.1
    flipped = _draws(model, "flipout", mean, scale, x, 4000)[0][:, :, 0]
    assert torch.corrcoef(flipped.T)[0, 1].abs() < 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_of_the_expected_loss_match_the_closed_form(estimator):
    # E |x w + b - y|^2 / n = |x m + c - y|^2 / n + mean over rows of x^2 s^2 + s_b^2.
    model = _model(nn.Linear(3, 2))
    layout = model.layouts["model"]
    mean, scale = _q(model)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(6, 3, generator=g, dtype=torch.float64)
    y = torch.randn(6, 2, generator=g, dtype=torch.float64)
    made = plan(model, "model", x, estimator)
    count = 20_000
    noise = torch.randn(count, made.normals, generator=g, dtype=torch.float64)

    def loss(q, z):
        return (forward(model, "model", *q, {}, x, Tape(z), None, made)[0] - y).square().sum(-1).mean()

    slopes = vmap(grad(loss), in_dims=(None, 0))((mean, scale), noise)

    def exact(q):
        m, v = layout.split(q[0]), layout.split(q[1] ** 2)
        bias = (F.linear(x, m["weight"], m["bias"]) - y).square()
        return (bias + F.linear(x**2, v["weight"], v["bias"])).sum(-1).mean()

    for got, want in zip(slopes, grad(exact)((mean, scale)), strict=True):
        error = got.std(0) / count**0.5
        assert ((got.mean(0) - want).abs() < 5 * error).all()


class Odd(nn.Module):
    """A user's network with every kind of weight use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.plain = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.conv = nn.Conv1d(4, 4, 1)
        self.penalised = nn.Linear(7, 2)

    def forward(self, x):
        h = self.embedding(x)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = self.again(self.again(self.plain(h)))
        h = self.conv(h.transpose(1, 2)).amax(-1)
        return self.penalised(self.tied(h)) + self.penalised.weight.sum()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_only_weights_that_meet_one_linear_map_are_taken_over(estimator):
    model = Model.of(Odd(), categorical())
    made = plan(model, "model", torch.zeros(5, 3, dtype=torch.int64), estimator)
    assert made.taken == {"plain.weight", "plain.bias", "conv.weight", "conv.bias"}


def test_weight_sampling_takes_nothing_over_and_reads_one_normal_a_weight():
    model = Model.of(Odd(), categorical())
    made = plan(model, "model", torch.zeros(5, 3, dtype=torch.int64), "weight")
    assert made.taken == frozenset()
    assert made.normals == model.layouts["model"].size


def test_local_reads_one_normal_an_output_and_none_for_the_weights_it_takes():
    model = _model(nn.Sequential(nn.Linear(30, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert plan(model, "model", torch.zeros(4, 30).double(), "local").normals == 4 * (5 + 2)
    # Flipout: a perturbation of each weight and bias, and signs for each input and output.
    want = (30 * 5 + 5 + 4 * 30 + 4 * 5) + (5 * 2 + 2 + 4 * 5 + 4 * 2)
    assert plan(model, "model", torch.zeros(4, 30).double(), "flipout").normals == want


def test_dropout_is_counted_with_the_normals():
    model = _model(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2)))
    assert plan(model, "model", torch.zeros(4, 6).double(), "local").normals == 4 * 5 + 4 * 5 + 4 * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_fallback_of_odd_weights_has_finite_gradients_under_vmap_and_grad(estimator):
    model = Model.of(Odd(), categorical())
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    made = plan(model, "model", x, estimator)
    mean = model.initial()["model"]
    stacked = torch.stack([mean, mean + 0.1])
    noise = torch.randn(2, made.normals, generator=torch.Generator().manual_seed(0))

    def loss(m, s, z):
        return forward(model, "model", m, s, {}, x, Tape(z), None, made)[0].square().mean()

    slope = vmap(grad(loss, argnums=(0, 1)))(stacked, torch.full_like(stacked, 0.1), noise)
    for k in range(2):
        alone = grad(loss, argnums=(0, 1))(stacked[k], torch.full_like(mean, 0.1), noise[k])
        for got, want in zip(slope, alone, strict=True):
            torch.testing.assert_close(got[k], want, rtol=1e-4, atol=1e-5)
            assert torch.isfinite(want).all()
            assert all(t.abs().sum() > 0 for t in model.layouts["model"].split(want).values())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


@pytest.mark.parametrize(
    ("net", "x", "stacks"),
    [
        (nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Flatten()), (5, 3, 6), True),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 3, 4), True),
        (Recurrent(), (5, 6, 3), False),
    ],
    ids=["BatchNorm", "transformer", "GRU"],
)
def test_a_plan_says_whether_several_draws_can_be_taken_at_once(net, x, stacks):
    model = Model.of(net, categorical())
    before = {n: t.clone() for n, t in net.state_dict().items()}
    assert plan(model, "model", torch.randn(x), "local").stacks == stacks
    assert all(torch.equal(t, before[n]) for n, t in model.module.state_dict().items())


def test_the_scale_zero_limit_is_the_network_itself():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    model = _model(net)
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    mean = model.initial()["model"]
    for estimator in ESTIMATORS:
        out, _ = _draws(model, estimator, mean, torch.full_like(mean, 1e-12), x, 2)
        torch.testing.assert_close(out[0], net(x).detach(), rtol=1e-6, atol=1e-6)


def test_zero_inputs_keep_local_gradients_finite():
    model = _model(nn.Linear(3, 2, bias=False))
    made = plan(model, "model", torch.zeros(2, 3).double(), "local")
    mean, scale = _q(model)
    x = torch.zeros(2, 3, dtype=torch.float64)
    noise = torch.randn(made.normals, dtype=torch.float64)
    slope = grad(lambda s: forward(model, "model", mean, s, {}, x, Tape(noise), None, made)[0].sum())(scale)
    assert torch.isfinite(slope).all()


def test_points_beside_the_gaussian_part_are_used_as_they_are():
    model = _model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), parts={"points": ["1.*"], "model": ["*"]})
    x = torch.randn(5, 3, dtype=torch.float64)
    made = plan(model, "model", x, "local")
    assert made.taken == {"0.weight", "0.bias"}
    assert made.normals == 5 * 4


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [("mlp", (1, 28, 28), 42_310), ("cnn", (3, 32, 32), 52_874), ("text_cnn", (50,), 801_780)],
)
def test_the_papers_networks_have_the_papers_number_of_weights(name, shape, weights):
    net = network_named(name, shape, 10)
    assert sum(p.numel() for p in net.parameters()) == weights
    x = torch.zeros(2, *shape, dtype=torch.int64) if name == "text_cnn" else torch.zeros(2, *shape)
    assert net(x).shape == (2, 10)


def test_a_networks_weights_follow_from_its_seed_alone():
    torch.manual_seed(0)
    a = network_named("mlp", (4,), 2, seed=1)
    torch.manual_seed(1)
    b, c = network_named("mlp", (4,), 2, seed=1), network_named("mlp", (4,), 2, seed=2)
    flat = [nn.utils.parameters_to_vector(net.parameters()) for net in (a, b, c)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_unknown_networks_and_options_get_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'mlp'"):
        network_named("mpl", (4,), 2)
    with pytest.raises(ValueError, match="did you mean 'hidden'"):
        network_named("mlp", (4,), 2, hiden=3)
    with pytest.raises(ValueError, match="at least 18 x 18"):
        network_named("cnn", (1, 8, 8), 2)


@pytest.mark.parametrize("onednn", [True, False], ids=["onednn", "own convolutions"])
@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize(
    ("name", "options"), [("cnn", {}), ("lenet", {}), ("acar_cnn", {}), ("resnet", {"depth": 8, "width": 4})]
)
def test_every_convolution_is_taken_over_however_it_is_run(name, options, estimator, onednn):
    network = network_named(name, (3, 32, 32), 10, **options)
    maps = [prefix for prefix, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    mine = {n for n, _ in network.named_parameters() if n.rpartition(".")[0] in maps}
    with torch.backends.mkldnn.flags(enabled=onednn):
        assert plan(Model.of(network, categorical()), "model", torch.zeros(2, 3, 32, 32), estimator).taken == mine


def test_a_question_about_a_weight_is_no_use_of_it():
    class Asking(nn.Linear):
        def forward(self, x):
            assert self.weight.dim() == 2
            assert self.weight.is_floating_point()
            return F.linear(x.reshape(-1, self.weight.shape[1]), self.weight, self.bias)

    made = plan(_model(Asking(3, 2)), "model", torch.zeros(4, 3).double(), "local")
    assert made.taken == {"weight", "bias"}
