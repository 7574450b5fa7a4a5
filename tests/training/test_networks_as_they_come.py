"""Networks that users bring: what PyTorch trains is trained, alike in every engine, or refused in one line."""

import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.engine.workers import threads
from fedbayes.errors import InputError
from fedbayes.training import published
from fedbayes.training.tested import predict_with

SHAPE, WORDS = (8,), 20
ENGINES = {"loop": {"engine": "loop"}, "stacked": {"engine": "stacked", "compile": "off"}, "auto": {}}


def sites(shape: tuple[int, ...] = SHAPE, rows: int = 21, words: int = 0) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)

    def inputs() -> Tensor:
        if words:
            return torch.randint(1, words, (rows, *shape), generator=random)
        return torch.randn(rows, *shape, generator=random)

    pairs = [(inputs(), torch.randint(3, (rows,), generator=random)) for _ in range(3)]
    return fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=3)


def trained(network: Callable[[], nn.Module], clients: fb.data.Clients, **options) -> fb.Run:
    torch.manual_seed(0)
    method = options.pop("method", None) or fb.methods.fedavg(lr=0.1, epochs=1, batch=8)
    return fb.fit(network(), clients, **{"method": method, "rounds": 2, "seed": 0, **options})


class LeNet(nn.Module):
    """The tutorial's: `view` behind convolutions needs the usual layout."""

    def __init__(self, channels: int, *, listed: bool = False) -> None:
        super().__init__()
        layers = nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
        self.features = nn.Sequential(*layers) if listed else nn.ModuleList(layers)
        self.head = nn.Linear(8 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.features, nn.Sequential):
            x = self.features(x)
        else:
            for layer in self.features:
                x = layer(x)
        return self.head(x.view(x.size(0), -1))


class Keeping(nn.Module):
    """It keeps what it saw last on itself, as networks do whose attention is looked at."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.head, self.last = first, nn.Linear(width, 3), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x).relu()
        return self.head(self.last.flatten(2).mean(2) if self.last.dim() > 2 else self.last)


class Decoder(nn.Module):
    """Texts padded on the left under a causal mask: what stands first may attend to nothing."""

    def __init__(self, rate: float, *, added: bool = False) -> None:
        super().__init__()
        self.words, self.three, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.rate, self.added = rate, added

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.ones(7, 7, dtype=torch.bool).tril() & (torch.arange(7) > 1) & (x > 0)[:, None]
        mask = torch.where(seen, 0.0, -torch.inf) if self.added else seen
        query, key, value = self.three(self.words(x))[:, None].chunk(3, -1)
        rate = self.rate if self.training else 0.0
        return self.head(F.scaled_dot_product_attention(query, key, value, mask[:, None], rate)[:, 0].mean(1))


class Buffered(nn.Module):
    """A constant that can't be averaged, added where it adds nothing."""

    def __init__(self, constant: Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("constant", constant, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        constant = self.constant.real if self.constant.is_complex() else self.constant.exp()
        return self.head(self.first(x).relu() + constant)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


class Averaging(nn.Module):
    """It follows the mean of what it sees, in a buffer that it assigns or writes in place."""

    def __init__(self, *, assigns: bool, first: Callable[[], nn.Module] = lambda: nn.Linear(8, 6)) -> None:
        super().__init__()
        self.first, self.head, self.assigns = first(), nn.Linear(6, 3), assigns
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if self.training:
            now = 0.9 * self.seen + 0.1 * (h.mean(0) + 1)
            if self.assigns:
                self.seen = now
            else:
                self.seen.copy_(now.detach())
        return self.head(h - self.seen.detach())


def parametrised() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.head(x)


def pruned() -> nn.Module:
    network = mlp()
    nn.utils.prune.l1_unstructured(network[0], "weight", amount=0.3)
    nn.utils.prune.remove(network[0], "weight")  # which registers the weight anew, after the bias
    return network


def beside_a_buffer() -> nn.Module:
    network = mlp()
    network.register_buffer("prior", torch.ones(3))
    return network


def patched() -> nn.Module:
    network = mlp()
    network[1].forward = types.MethodType(lambda self, x: x.tanh() + 1, network[1])
    return network


def used(network: nn.Module, x: Tensor) -> nn.Module:
    """A network that the user has called, with its graph."""
    network(x).sum().backward()
    return network


def weight_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))


NETWORKS = {
    "view, 1 channel": (lambda: LeNet(1), lambda: sites((1, 10, 10))),
    "view, 3 channels": (lambda: LeNet(3), lambda: sites((3, 10, 10))),
    "view, 6 channels": (lambda: LeNet(6), lambda: sites((6, 10, 10))),
    "view behind a Sequential": (lambda: LeNet(3, listed=True), lambda: sites((3, 10, 10))),
    "keeps an activation": (lambda: Keeping(nn.Linear(8, 700), 700), sites),
    "keeps an activation of the user's": (lambda: used(Keeping(nn.Linear(8, 6), 6), torch.ones(2, 8)), sites),
    "weight norm of old": (weight_normed, sites),
    "attends to nothing": (lambda: Decoder(0.0), lambda: sites((7,), words=WORDS)),
    "attends to nothing, by a sum": (lambda: Decoder(0.0, added=True), lambda: sites((7,), words=WORDS)),
    "attends to nothing, dropout": (lambda: Decoder(0.1), lambda: sites((7,), words=WORDS)),
    "buffer of -inf": (lambda: Buffered(torch.tensor([0.0, -torch.inf, 0, 0, 0, 0])), sites),
    "complex buffer": (lambda: Buffered(torch.polar(torch.ones(6), torch.arange(6.0)), persistent=False), sites),
    "writes into rows": (Shifting, sites),
    "begins in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)), sites),
    "begins in place, images": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(256, 3)),
        lambda: sites((3, 10, 10)),
    ),
    "pruned": (pruned, sites),
    "a buffer beside layers": (beside_a_buffer, sites),
    "a forward of its own": (patched, sites),
    "keeps maps": (lambda: Keeping(nn.Conv2d(3, 4, 3), 4), lambda: sites((3, 40, 40))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_pytorch_trains_is_trained_alike_by_every_engine(name: str) -> None:
    network, clients = NETWORKS[name][0], NETWORKS[name][1]()
    x, before = clients.data.test_x, clients.data.x.clone()
    with threads(2):
        runs = {engine: trained(network, clients, **options) for engine, options in ENGINES.items()}
    assert torch.equal(clients.data.x, before)
    for run in runs.values():
        assert not any(record["left_out"] for record in run.journal)
        for part, q in runs["loop"].broadcast.items():
            torch.testing.assert_close(run.broadcast[part].mean, q.mean, rtol=1e-4, atol=1e-5)
    probs = runs["auto"].module()(x.clone()).softmax(-1)
    torch.testing.assert_close(runs["auto"].predict(x).probs, probs, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_pytorch_trains_has_a_posterior(name: str) -> None:
    run = trained(*(make() if i else make for i, make in enumerate(NETWORKS[name])), method="feduab", rounds=1)
    assert all(q.mean.isfinite().all() for part, q in run.broadcast.items() if part != "counters")
    assert run.module(draw=0)(run.task.clients.data.test_x).isfinite().all()


@pytest.mark.parametrize("channels", [1, 3, 6])
@pytest.mark.parametrize("listed", [False, True])
def test_a_view_behind_convolutions_is_one_without_onednn_too(channels: int, listed: bool) -> None:
    """As on ARM, where convolutions of few channels are done our way."""
    with torch.backends.mkldnn.flags(enabled=False):
        run = trained(lambda: LeNet(channels, listed=listed), sites((channels, 10, 10)), method="feduab", rounds=1)
    assert not run.task.program.model.channels_last
    assert run.predict(run.task.clients.data.test_x).probs.isfinite().all()


def test_the_layout_is_left_as_it_is_only_where_it_must_be() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 3))
    assert trained(lambda: flat, sites((3, 10, 10)), rounds=0).task.program.model.channels_last


class Body(nn.Module):
    """A body with BatchNorm, of statistics that nobody's rows have, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.body[1].running_mean += 5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def frozen_body() -> nn.Module:
    network = Body()
    network.body.requires_grad_(False)
    return network


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
@pytest.mark.parametrize("how", ["by pattern", "by requires_grad"])
def test_batch_norm_of_a_frozen_body_keeps_its_statistics(how: str, method: str, tmp_path: Path) -> None:
    make, options = (Body, {"frozen": ("body.*",)}) if how == "by pattern" else (frozen_body, {})
    runs = [trained(make, sites(), method=method, **options, **engine) for engine in ENGINES.values()]
    for run in runs:
        assert {*run.broadcast} == {"model"}
        torch.testing.assert_close(run.broadcast["model"].mean, runs[0].broadcast["model"].mean, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    network, module, x = make(), runs[0].module(), runs[0].task.clients.data.test_x
    assert type(module.body[1]) is nn.BatchNorm1d
    for name, buffer in network.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    if method == "fedavg":
        torch.testing.assert_close(runs[0].predict(x).probs, module(x).softmax(-1).double(), check_dtype=False)
    published.write(runs[0], tmp_path, "a model")
    task, progress = published.read(tmp_path, make())
    assert task.program.model.layouts == runs[0].task.program.model.layouts
    ours, theirs = (
        predict_with(task, parts, x).mean
        for task, parts in ((task, progress.state.broadcast), (runs[0].task, runs[0].parts))
    )
    torch.testing.assert_close(ours, theirs)


def test_batch_norm_without_weights_of_its_own_is_not_frozen() -> None:
    network = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))
    assert "buffers" in trained(lambda: network, sites(), frozen=("0.*",), rounds=1).broadcast


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", [lambda: nn.Linear(8, 6), parametrised], ids=["plain", "parametrised"])
def test_a_buffer_moves_whether_it_is_assigned_or_written(first: Callable[[], nn.Module], engine: str) -> None:
    def moved(assigns: bool) -> Tensor:
        run = trained(lambda: Averaging(assigns=assigns, first=first), sites(rows=24), **ENGINES[engine])
        return run.broadcast["buffers"].mean

    assert moved(True).min() > 0.1
    torch.testing.assert_close(moved(True), moved(False))


class Clamping(nn.Module):
    """It holds its weights in bounds as many a tutorial does."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-10, 10)
        return super().forward(x)


class Clamped(Clamping, nn.Linear):
    """A linear layer that does."""


class Renormed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Started(Buffered):
    """It starts a buffer at its first batch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.constant.copy_(torch.where(self.constant.isnan(), x.mean(), self.constant))
        return self.head(self.first(x).relu() - self.constant)


class Clamps(Clamping, nn.Conv2d):
    """A convolution that does."""


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns, self.head = nn.Parameter(torch.ones(5, dtype=torch.complex64)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.turns, n=8))


def words(**options) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4, **options), nn.Flatten(), nn.Linear(28, 3))


REFUSED = {
    "max_norm": (lambda: words(max_norm=1.0), lambda: sites((7,), words=WORDS), "changes the weight 0.weight"),
    "clamp_": (lambda: nn.Sequential(Clamped(8, 6), nn.Linear(6, 3)), sites, "changes the weight 0.weight"),
    "weight.data": (lambda: nn.Sequential(nn.Linear(8, 6), Renormed(6, 3)), sites, "changes the weight 1.weight"),
    "filters": (
        lambda: nn.Sequential(Clamps(6, 4, 3), nn.Flatten(), nn.Linear(256, 3)),
        lambda: sites((6, 10, 10)),
        "changes the weight 0.weight",
    ),
    "sparse": (lambda: words(sparse=True), lambda: sites((7,), words=WORDS), "gradient of 0.weight is sparse"),
    "complex": (Spectral, sites, "the weight turns is complex"),
    "scripted": (lambda: torch.jit.script(mlp()), sites, "it is a ScriptModule"),
    "a traced layer": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(8, 6), torch.ones(2, 8)), nn.Linear(6, 3)),
        sites,
        "its layer 0 is a ScriptModule",
    ),
    "a buffer of nan": (lambda: Started(torch.full((6,), torch.nan)), sites, "forward changes constant"),
}


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_trained_is_refused_by_its_name(name: str, method: str) -> None:
    network, clients, says = REFUSED[name]
    with pytest.raises(InputError, match=says) as caught:
        trained(network, clients(), method=method)
    assert "\n" not in str(caught.value)


class Folded(nn.Module):
    """BatchNorm over rows and times, of which either stands first."""

    def __init__(self, orders: tuple[int, ...]) -> None:
        super().__init__()
        self.orders, self.norms = orders, nn.ModuleList(nn.BatchNorm1d(6) for _ in orders)
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for order, norm in zip(self.orders, self.norms):
            turned = h.transpose(0, order)
            h = norm(turned.reshape(-1, 6)).reshape(turned.shape).transpose(0, order).relu()
        return self.head(h.mean(1))


@pytest.mark.parametrize("orders", [(1,), (1, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_padded_rows_are_not_seen_where_times_stand_before_rows(engine: str, orders: tuple[int, ...]) -> None:
    rows = 21  # of which the last batch of 8 is padded
    plain, turned = (
        trained(lambda o=o: Folded(o), sites((5, 4), rows), **ENGINES[engine]) for o in ((0,) * len(orders), orders)
    )
    for part, q in plain.broadcast.items():
        torch.testing.assert_close(turned.broadcast[part].mean, q.mean, rtol=1e-4, atol=1e-5)


class Drawing(nn.Module):
    """Dropout that reads PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.alpha_dropout(self.first(x), 0.1, self.training))


@pytest.mark.parametrize("method", ["fedavg", "feduab", "fedvi"])
def test_training_leaves_the_users_generator_where_it_was(method: str) -> None:
    network, clients = Drawing(), sites()
    before = torch.get_rng_state()
    fb.fit(network, clients, method=method, rounds=1)
    assert torch.equal(before, torch.get_rng_state())
