"""A network and a likelihood as functions of vectors: parts, buffers, frozen weights, likelihoods."""

import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.func import grad, vmap

from fedbayes import data, fit
from fedbayes.methods import fedavg, feduab
from fedbayes.model.likelihood import bernoulli, categorical, custom, normal
from fedbayes.model.model import Model
from fedbayes.model.parts import points_by_default
from fedbayes.noise import Tape, normals


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def test_the_model_in_evaluation_mode_is_the_network():
    net = _net()
    model = Model.of(net, categorical())
    torch.testing.assert_close(model.output(model.weights(model.initial()), X), net.eval()(X).detach())


def test_the_model_in_training_mode_is_the_network_with_dropout_from_the_tape():
    net = _net()
    model = Model.of(net, categorical())
    noise = normals(24, 0)
    out, static = model.train_output(model.weights(model.initial()), X, Tape(noise), None)
    keep = torch.special.ndtr(noise.reshape(6, 4)) >= 0.5
    want = net[3](net[1].train()(net[0](X)) * keep / 0.5)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(static["buffers"], torch.cat([net[1].running_mean, net[1].running_var]))
    assert static["counters"].tolist() == [1]


def test_training_mode_leaves_the_models_own_buffers_alone():
    model = Model.of(_net(), categorical())
    before = {n: b.clone() for n, b in model.module.named_buffers()}
    model.train_output(model.weights(model.initial()), X, Tape(), None)
    assert all(torch.equal(b, before[n]) for n, b in model.module.named_buffers())


def test_weights_go_to_the_first_part_that_matches():
    model = Model.of(_net(), categorical(), parts={"head": ["3.*"], "biases": ["*.bias"], "model": ["*"]})
    names = {part: layout.names for part, layout in model.trainable.items()}
    assert names == {
        "head": ("3.weight", "3.bias"),
        "biases": ("0.bias", "1.bias"),
        "model": ("0.weight", "1.weight"),
    }
    assert model.layouts["buffers"].names == ("1.running_mean", "1.running_var")
    assert model.layouts["counters"].names == ("1.num_batches_tracked",)


def test_a_weight_in_no_part_is_refused_by_name():
    with pytest.raises(ValueError, match=r"4 weights are in no part, first '0\.weight'"):
        Model.of(_net(), categorical(), parts={"head": ["3.*"]})


def test_weights_that_the_user_froze_stay_frozen():
    net = _net()
    net[0].requires_grad_(False)
    model = Model.of(net, categorical())
    assert not any(n.startswith("0.") for n in model.layouts["model"].names)
    assert model.layouts["model"].size == 4 + 4 + 8 + 2


def test_a_network_with_a_part_called_likelihood_is_refused():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.likelihood = nn.Linear(3, 2)

        def forward(self, x):
            return self.likelihood(x)

    with pytest.raises(ValueError, match=r"likelihood\.weight.*rename"):
        Model.of(Net(), categorical())


class Buffered(nn.Module):
    """Buffers of several kinds: a bool mask, whole-number positions, a float64 table, BatchNorm's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        assert self.mask.dtype == torch.bool
        assert self.positions.dtype == torch.int64
        assert self.table.dtype == torch.float64
        assert self.norm.running_mean.dtype == torch.float32
        h = x + self.embedding(self.positions) + self.table.float()[:, None]
        h = self.attention(h, h, h, attn_mask=~self.mask, need_weights=False)[0].mean(1)
        return self.head(self.norm(h))


@pytest.mark.parametrize("method", [fedavg(epochs=1), feduab(epochs=1, draws=2)], ids=lambda m: m.name)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_buffers_keep_their_types_and_constants_keep_their_values(method, engine):
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(9, 5, 4, generator=g), torch.randint(2, (9,), generator=g)) for _ in range(3)]
    torch.manual_seed(0)
    net = Buffered()
    run = fit(net, data.from_clients(pairs, pairs[0]), method=method, rounds=2, engine=engine)
    assert not any(r["left_out"] for r in run.journal)
    model = run.task.program.model
    weights = model.weights({part: run.parts[part].mean for part in ("buffers", "counters")})
    for name in ("mask", "positions", "table"):
        assert torch.equal(weights[name], getattr(net, name))
    assert not torch.equal(weights["norm.running_mean"], net.norm.running_mean)
    assert weights["norm.num_batches_tracked"].item() == 2


def test_points_by_default_are_batch_norms_weights_and_the_likelihoods_own():
    assert points_by_default(_net(), normal(learn=True)) == ["1.weight", "1.bias", "likelihood.log_scale"]
    assert points_by_default(nn.Linear(3, 2), categorical()) == []


def test_the_nll_is_the_mean_over_live_rows_whatever_padding_holds():
    model = Model.of(nn.Linear(3, 2), categorical())
    out, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    mask = torch.tensor([True, True, False, True])
    want = nn.functional.cross_entropy(out[mask], y[mask])
    out[2] = torch.tensor([math.nan, math.inf])
    torch.testing.assert_close(model.nll(out, y, mask, {}), want)
    assert float(model.nll(out, y, torch.zeros(4, dtype=torch.bool), {})) == 0


@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_the_nll_of_classes_is_the_same_alone_masked_and_stacked(shape):
    model, random = Model.of(nn.Linear(3, 2), categorical()), torch.Generator().manual_seed(3)
    out, y = torch.randn(*shape, 6, generator=random).double(), torch.randint(6, shape, generator=random)
    all_live = torch.ones(4, dtype=torch.bool) if len(shape) == 1 else None

    def slope(nll):
        leaf = out.clone().requires_grad_()
        return torch.autograd.grad(nll(leaf), leaf)[0]

    def alone(o):
        return model.nll(o, y, None, {})

    torch.testing.assert_close(alone(out), -D.Categorical(logits=out).log_prob(y).mean())
    torch.testing.assert_close(slope(alone), slope(lambda o: -D.Categorical(logits=o).log_prob(y).mean()))
    torch.testing.assert_close(vmap(grad(alone))(out[None])[0], slope(alone))
    torch.testing.assert_close(model.nll(out, y, all_live, {}), alone(out))


@pytest.mark.parametrize(
    ("likelihood", "target", "oracle"),
    [
        (categorical(), torch.tensor([0, 2, 1]), lambda out: D.Categorical(logits=out)),
        (bernoulli(), torch.tensor([[0, 1, 1]] * 3), lambda out: D.Independent(D.Bernoulli(logits=out), 1)),
        (normal(0.3), torch.randn(3, 3), lambda out: D.Independent(D.Normal(out, 0.3), 1)),
    ],
    ids=["categorical", "bernoulli", "normal"],
)
def test_likelihoods_equal_torch_distributions(likelihood, target, oracle):
    out = torch.randn(3, 3)
    truth = oracle(out)
    value = target.float() if likelihood.kind == "labels" else target
    torch.testing.assert_close(likelihood.log_prob(out, target, {}), truth.log_prob(value))
    mean, variance = likelihood.moments(out, {})
    if likelihood.kind == "classes":
        torch.testing.assert_close(mean, truth.probs)
        torch.testing.assert_close(variance, truth.probs * (1 - truth.probs))
    else:
        torch.testing.assert_close(mean, truth.mean)
        torch.testing.assert_close(variance, truth.variance)


def test_a_learned_normal_reads_its_scale_from_the_weights():
    likelihood = normal(2.0, learn=True)
    own = {"likelihood.log_scale": torch.tensor(0.5).log()}
    out, y = torch.randn(3, 2), torch.randn(3, 2)
    want = D.Independent(D.Normal(out, 0.5), 1).log_prob(y)
    torch.testing.assert_close(likelihood.log_prob(out, y, own), want)
    assert float(likelihood.parameters["log_scale"].exp()) == pytest.approx(2.0)


def test_a_custom_likelihood_has_no_aleatoric_part():
    likelihood = custom(lambda out, y: -(out - y).abs().sum(-1))
    mean, variance = likelihood.moments(X, {})
    assert torch.equal(mean, X)
    assert (variance == 0).all()


def test_tied_weights_stay_tied_in_training():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    net = Tied()
    model = Model.of(net, categorical())
    assert model.layouts["model"].names == ("a.weight", "a.bias", "b.bias")
    vector = torch.randn(15)
    weight, first, second = vector[:9].reshape(3, 3), vector[9:12], vector[12:]
    want = torch.tanh(X @ weight.T + first) @ weight.T + second
    torch.testing.assert_close(model.output(model.weights({"model": vector}), X), want)


def test_training_sees_augmented_inputs_and_prediction_does_not():
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            seen.append(x.detach().clone())
            return x.flatten(1)[:, :2] * self.scale

    model = Model.of(Watching(), categorical(), augment=lambda x, normals: x + normals.sum(-1)[:, None, None, None])
    weights, x = model.weights(model.initial()), torch.randint(256, (4, 1, 2, 2), dtype=torch.uint8)
    tape = Tape(torch.arange(12.0) / 7)  # normals, whatever inputs are stored as
    model.train_output(weights, x, tape, None)
    model.output(weights, x)
    shift = (torch.arange(12.0) / 7).reshape(4, 3).sum(-1)[:, None, None, None]
    torch.testing.assert_close(seen[0], x + shift)
    torch.testing.assert_close(seen[1], x / 255)


def test_a_learned_noise_is_where_the_network_is() -> None:
    model = Model.of(nn.Linear(3, 1, device="meta"), normal(0.5, learn=True))
    assert model.layouts["model"].size == 5
    assert model.initial()["model"].device.type == "meta"
