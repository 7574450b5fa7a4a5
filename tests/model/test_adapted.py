"""Layers with adapters: what they compute, what is frozen, and the network that is left when they are merged."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.model.adapted import adapt, merge
from fedbayes.model.adapters import Adapters
from fedbayes.model.likelihood import LIKELIHOODS
from fedbayes.model.model import Model


class Conv1D(nn.Module):
    """GPT-2's linear map, as transformers writes it: the weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Attending(nn.Module):
    """Attention as its users call it: of a sequence to itself or to another, with masks of every kind."""

    def __init__(self, how: str, batch_first: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.how, self.attention = how, nn.MultiheadAttention(6, 2, batch_first=batch_first, bias=bias)
        nn.init.normal_(self.attention.out_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        first, length = x.shape[0] if self.attention.batch_first else x.shape[1], x.shape[int(x.dim() > 2)]
        if not self.attention.batch_first:
            length = x.shape[0]
        padding = (torch.arange(length) == length - 1).expand(first, length)
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        calls = {
            "self": lambda: self.attention(x, x, x, need_weights=False),
            "weights": lambda: self.attention(x, x, x),
            "heads": lambda: self.attention(x, x, x, average_attn_weights=False),
            "other": lambda: self.attention(x, x.flip(0), x.flip(0) + 1, need_weights=False),
            "padding": lambda: self.attention(x, x, x, key_padding_mask=padding),
            "causal": lambda: self.attention(x, x, x, attn_mask=causal, is_causal=True, need_weights=False),
            "added": lambda: self.attention(x, x, x, attn_mask=causal * -0.5, key_padding_mask=padding * -1.0),
            "per head": lambda: self.attention(x, x, x, attn_mask=causal.expand(2 * first, length, length)),
            "one row": lambda: self.attention(x[0], x[0], x[0]),
        }
        out, weights = calls[self.how]()
        return out.flatten() if weights is None else torch.cat([out.flatten(), weights.flatten()])


class Encoder(nn.Module):
    """PyTorch's encoder, which has a fast path that reads weights instead of calling layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(12).reshape(3, 4) % 5
CASES = {
    "linear": (lambda: nn.Linear(6, 5), X),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), X),
    "transposed": (lambda: Conv1D(5, 6), X),
    "convolution": (lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1, dilation=2), IMAGES),
    "reflecting": (lambda: nn.Conv2d(3, 5, (3, 2), padding=1, padding_mode="reflect"), IMAGES),
    "same": (lambda: nn.Conv2d(3, 5, 3, padding="same"), IMAGES),
    "convolution of sequences": (lambda: nn.Conv1d(4, 5, 3), X),
    "convolution of volumes": (lambda: nn.Conv3d(1, 2, 2), X[:, None, None].expand(3, 1, 2, 4, 6)),
    "embedding": (lambda: nn.Embedding(5, 6), TOKENS),
    "embedding with padding": (lambda: nn.Embedding(5, 6, padding_idx=0), TOKENS),
    **{f"attention, {how}": ((lambda how=how: Attending(how)), X) for how in
       ("self", "weights", "heads", "other", "padding", "causal", "added", "per head", "one row")},
    "attention, batch second": (lambda: Attending("padding", batch_first=False), X.transpose(0, 1)),
    "attention without bias": (lambda: Attending("other", bias=False), X),
    "encoder": (Encoder, X),
}  # fmt: skip


def adapted(network: nn.Module, **table: object) -> nn.Module:
    """A copy with adapters whose B are random."""
    network = adapt(copy.deepcopy(network), Adapters(**{"rank": 2, "full": (), **table}))
    random = torch.Generator().manual_seed(1)
    for name, weight in network.named_parameters():
        if name.endswith("lora_B"):
            weight.data = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
    return network


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_compute_the_same(case: str) -> None:
    torch.manual_seed(0)
    build, x = CASES[case]
    plain = build().eval()
    network = adapted(plain).eval()
    with torch.no_grad():
        out = network(x)
        merged = merge(copy.deepcopy(network))
        torch.testing.assert_close(merged(x), out, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plain(x), out), "the adapters changed nothing"
    torch.testing.assert_close(network(x).detach(), out)  # with gradients on, as PyTorch's fast paths are off then
    assert [type(layer) for layer in merged.modules()] == [type(layer) for layer in plain.modules()]
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert not any(layer._forward_hooks for layer in merged.modules())


def test_before_training_the_network_is_what_it_was() -> None:
    for build, x in CASES.values():
        plain = build().eval()
        network = adapt(copy.deepcopy(plain), Adapters(full=()))
        torch.testing.assert_close(network(x), plain(x), rtol=1e-4, atol=1e-5)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.dense, self.head = nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("mask", torch.ones(1, 4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dense(self.norm(self.embed(x))) * self.mask)


def test_what_is_trained_and_what_stands_still() -> None:
    network = adapt(Body(), Adapters(pattern="dense", rank=3, full=("head.bias",)))
    model = Model.of(network, LIKELIHOODS["classes"]())
    assert {part: layout.names for part, layout in model.layouts.items()} == {"model": ("dense.lora_B", "head.bias")}
    assert {*model.frozen["frozen"]} == {
        *("embed.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("norm.num_batches_tracked", "mask", "dense.weight", "dense.bias", "dense.lora_A"),
    }
    # One body: the model's copies share its weights.
    for name, weight in model.module.named_parameters():
        assert (weight is network.get_parameter(name)) is (name not in ("dense.lora_B", "head.bias")), name
    before = network.norm.running_mean.clone()
    network.train()(torch.arange(5))
    assert torch.equal(before, network.norm.running_mean)


def test_statistics_move_where_their_layer_is_trained() -> None:
    model = Model.of(adapt(Body(), Adapters(pattern="dense", full=("norm.*",))), LIKELIHOODS["classes"]())
    assert model.layouts["buffers"].names == ("norm.running_mean", "norm.running_var")
    assert model.layouts["counters"].names == ("norm.num_batches_tracked",)


def test_merging_a_tied_weight_leaves_the_other_as_it_was() -> None:
    plain = Body().eval()
    merged = merge(adapted(plain, pattern="embed").eval())
    assert torch.equal(merged.head.weight, plain.head.weight)
    assert not torch.equal(merged.embed.weight, plain.head.weight)
    assert torch.equal(merged.mask, plain.mask)
    assert type(merged.norm) is nn.BatchNorm1d
    assert {*dict(merged.named_buffers())} == {*dict(plain.named_buffers())}


def test_a_is_drawn_by_its_address() -> None:
    one, two, other = (adapt(nn.Sequential(nn.Linear(400, 3)), Adapters(seed=s, full=(), rank=50)) for s in (1, 1, 2))
    assert torch.equal(one[0].lora_A, two[0].lora_A)
    assert not torch.equal(one[0].lora_A, other[0].lora_A)
    assert one[0].lora_A.std() == pytest.approx(50**-0.5, rel=0.02)
    assert not one[0].lora_A.requires_grad
    assert adapt(nn.Linear(4, 3), Adapters(full=(), both=True)).lora_A.requires_grad


@pytest.mark.parametrize("layer", [nn.Linear(300, 2), nn.Conv2d(30, 2, 3), nn.Embedding(300, 2)], ids=str)
def test_a_step_in_b_is_on_average_one_in_the_weights(layer: nn.Module) -> None:
    """dW = G A^T A for a gradient G by W: as long along G as G itself, where A^T A is I on average."""
    network = adapt(nn.Sequential(layer, nn.Linear(2, 2)), Adapters(pattern="0", rank=8))
    a = network[0].lora_A.detach().flatten(1)
    slope = torch.randn(400, a.shape[1], generator=torch.Generator().manual_seed(0))
    along = ((slope @ a.T @ a) * slope).sum() / slope.square().sum()
    torch.testing.assert_close(along, torch.tensor(1.0), atol=0.1, rtol=0)


def test_a_rank_is_at_most_the_inputs() -> None:
    network = adapt(nn.Sequential(nn.Linear(3, 5), nn.Conv2d(1, 2, 2)), Adapters(full=(), rank=10**9))
    assert network[0].lora_A.shape == (3, 3)
    assert network[1].lora_B.shape == (2, 4, 1, 1)


class Turned(nn.Linear):
    """A layer whose map is not W x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-x)


def test_a_layer_with_a_forward_of_its_own_is_left_as_it_is() -> None:
    network = adapt(nn.Sequential(Turned(3, 5), nn.Linear(5, 2)), Adapters(full=("1.bias",)))
    assert not hasattr(network[0], "lora_B")
    assert hasattr(network[1], "lora_B")


def test_rank_zero_trains_the_last_layer_alone() -> None:
    network = adapt(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), Adapters(rank=0))
    assert [n for n, p in network.named_parameters() if p.requires_grad] == ["1.weight", "1.bias"]


def test_what_the_user_froze_stays_frozen() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    network[1].bias.requires_grad_(False)
    network = adapt(network, Adapters(rank=2))
    assert [n for n, p in network.named_parameters() if p.requires_grad] == ["0.lora_B", "1.weight"]


@pytest.mark.parametrize(
    ("network", "table", "says"),
    [
        (nn.Sequential(nn.Linear(2, 2)), {"pattern": "layer*"}, r"no layer that can be adapted matches 'layer\*'"),
        (nn.Linear(2, 2), {"full": ("head.*",)}, r"full: no weight matches 'head\.\*'; there are weight, bias"),
        (nn.Conv2d(4, 4, 1, groups=2), {"full": ()}, "has 2 groups; leave it out of pattern"),
        (nn.MultiheadAttention(4, 2, kdim=3), {"full": ()}, "is not the usual one"),
        (nn.Linear(2, 2), {"rank": 0, "full": ()}, "nothing is left to train"),
        (adapt(nn.Linear(2, 2), Adapters(full=())), {"full": ()}, "has a lora_A already"),
    ],
)
def test_what_can_not_be_adapted_is_said(network: nn.Module, table: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        adapt(network, Adapters(**table))


def test_estimators_take_over_the_maps_of_b() -> None:
    from fedbayes.model.estimators import plan

    network = adapt(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(120, 2)), Adapters(rank=2))
    model = Model.of(network, LIKELIHOODS["classes"]())
    assert plan(model, "model", IMAGES, "local").taken == frozenset(model.layouts["model"].names)


def test_a_still_norm_is_batch_norm_by_its_statistics() -> None:
    norm = nn.BatchNorm2d(3)
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    network = adapt(nn.Sequential(copy.deepcopy(norm), nn.Conv2d(3, 2, 1)), Adapters(rank=0))
    torch.testing.assert_close(network.train()[0](IMAGES), norm.eval()(IMAGES))
    assert F.mse_loss(network[0](IMAGES), norm.train()(IMAGES)) > 1e-3
